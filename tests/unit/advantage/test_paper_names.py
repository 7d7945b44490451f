"""What papers and frameworks call what is here: every source is found, and every entry leads somewhere."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from estimator_cases import table

from verl_turnkey.advantage import ConfigError, compute_credit
from verl_turnkey.advantage.paper_names import PAPER_NAMES, known_as, paper_name, plain
from verl_turnkey.plugins.cli.tables import shipped, shipped_losses, shipped_modifiers
from verl_turnkey.plugins.rollout.strategies import read_strategy, strategies

DOCS = Path(__file__).parents[3] / "docs"
REGISTERED = [*shipped().values(), *shipped_losses().values(), *shipped_modifiers().values(), *strategies().values()]
# The sources of what is registered, without those that a summary names beside the method's own.
SOURCES = sorted(
    {
        (spec.name, name)
        for spec in REGISTERED
        for source in (getattr(spec, "paper", None) or spec.source).split("; ")
        for name in re.split(r", arXiv:.*| \(\d{4}\)| / | \(", re.sub(r", and .*|^the .*|^tree advantage$", "", source))
        if name.strip(" )") and spec.name != "loo_td"  # this project's own
    }
)


def test_no_two_entries_share_a_name():
    names = Counter(plain(name) for entry in PAPER_NAMES for name in entry.names.split(" / "))
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize(("ours", "source"), SOURCES)
def test_the_paper_of_everything_registered_is_found(ours, source):
    entry = paper_name(source.strip(" )"))
    assert entry is not None, source


@pytest.mark.parametrize("name", [spec.name for spec in REGISTERED if spec.name not in shipped()])
def test_what_is_no_method_says_what_it_is(name):
    entry = paper_name(name)
    assert entry is not None or name in shipped_modifiers() or name in shipped_losses(), name


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "gtpo": "turn_norm: +turnkey=turn_norm (",
        "GTPO": "GTPO is turn_norm",
        "igpo": "strategy probe_gold: +turnkey=information_gain turnkey.rollout.strategy=probe_gold",
        "VinePPO": "turnkey.credit.alpha=0",
        "mt_grpo": "turnkey.credit.rule=mt_grpo",
        "MT-GRPO": "turnkey.credit.rule=mt_grpo",
        "arXiv:2505.11821": "turnkey.credit.rule=mt_grpo",
        "Dr. GRPO": "turnkey.credit.norm=mean",
        "dr_grpo": "turnkey.credit.norm=mean",
        "REINFORCE++": "reinforce_plus_plus",
        "portool": "is not here, the closest is tree: ",
    }.items(),
)
def test_a_name_is_found_however_it_is_written(name, words):
    assert words in known_as(name)
    assert known_as("gtpoo") == ""


@pytest.mark.parametrize("entry", PAPER_NAMES, ids=lambda entry: plain(entry.names.split(" / ")[0]))
def test_the_page_of_an_entry_exists(entry):
    page, _, anchor = entry.page.partition("#")
    headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
    assert not anchor or anchor in slugs
    assert shlex.split(entry.line)[0].startswith("+turnkey=")


def test_registries_answer_with_it():
    batch = table([1.0])
    with pytest.raises(ConfigError, match=r"unknown estimator 'gtpo'; here, gtpo is turn_norm"):
        compute_credit("gtpo", batch)
    with pytest.raises(ConfigError, match=r"unknown modifier 'concise_r'; here, concise_r is the modifier length_gate"):
        compute_credit("gigpo", batch, modify=["concise_r"])
    with pytest.raises(ConfigError, match=r"no strategy 'vineppo'; here, vineppo is progress with the strategy vine"):
        read_strategy("vineppo")
