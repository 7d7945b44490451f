"""Each rule on a line that trips it and on one that does not, composed in memory and on a read-only configuration."""

from __future__ import annotations

import pickle
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from launch_lines import TABLE, filled, write_files
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks import validate
from verl_turnkey.plugins.checks.driver import resolve_and_check
from verl_turnkey.plugins.checks.findings import EXPECTED, RuleWarning, collecting, id_of
from verl_turnkey.plugins.checks.rules import RANGE, rules
from verl_turnkey.plugins.checks.values import RANGES, Range, check_ranges
from verl_turnkey.plugins.config.recipe_files import rule_texts

LINES = {id: texts for id, texts in rule_texts().items() if "trips" in texts}
"""id -> ``trips``, ``trips_too`` (of another key) and ``passes``, what follows ``BASE``; no ``passes``: plain recipe"""
PLAIN = "+turnkey=gigpo"
SWITCHES = ("+turnkey", "++turnkey", "turnkey/")
# Rules that no launch line alone trips, and what they need.
WITHOUT_A_LINE = TABLE["without_a_line"]

Ids = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def ids(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ids]:
    """``ids(line)``: those of the rules that ``BASE`` and the line trip; the environment is played if the line says."""
    files = write_files(tmp_path_factory.mktemp("rules"), model_dir)
    parser, composed, known, check, load = OverridesParser.create(), {}, {}, validate.check, OmegaConf.load
    parsed: dict[str, Any] = {}

    def load_once(file: Any) -> Any:
        """Each file of a group once for all compositions, of which parsing takes most of the time."""
        name = str(getattr(file, "name", file))
        if name not in parsed:
            parsed[name] = load(file)
        return deepcopy(parsed[name])

    def frozen(config: DictConfig, *, use_critic: bool) -> None:
        OmegaConf.set_readonly(config, True)
        check(config, use_critic=use_critic)

    def composed_line(words: list[str]) -> DictConfig:
        groups = tuple(word for word in words if word.startswith(SWITCHES) and "." not in word.split("=")[0])
        if groups not in composed:
            composed[groups] = pickle.dumps(compose("ppo_trainer", overrides=[*groups]))
        config = pickle.loads(composed[groups])  # faster than a deep copy
        if groups:
            OmegaConf.update(config, "turnkey.env.probe", False)
        ConfigLoaderImpl._apply_overrides_to_config(
            parser.parse_overrides([word for word in words if word not in groups]), config
        )
        return config

    def tripped(line: str) -> set[str]:
        if line not in known:
            sys.argv = ["main_ppo", *shlex.split(filled(line, files))]
            known[line] = ids_of(composed_line(sys.argv[1:]))
        return known[line]

    argv, validate.check, OmegaConf.load = sys.argv, frozen, load_once
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            yield tripped
    finally:
        sys.argv, validate.check, OmegaConf.load = argv, check, load


def ids_of(config: DictConfig) -> set[str]:
    changes = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(*EXPECTED), collecting(config) as findings:
            changes = resolve_and_check(config, use_critic=need_critic(config))
    warned = [warning.message for warning in caught if isinstance(warning.message, RuleWarning)]
    return {str(id_of(error)) for error in (*findings.errors, *warned)} | {change.id for change in changes}


def test_every_rule_has_a_line_or_a_reason():
    of_values = {id for id in rules() if id.startswith(RANGE)}
    assert LINES.keys() | WITHOUT_A_LINE.keys() == rules().keys() - of_values
    assert not LINES.keys() & WITHOUT_A_LINE.keys()


@pytest.mark.parametrize("id", sorted(LINES))
def test_a_line_trips_the_rule_and_another_does_not(ids: Ids, id: str):
    line = LINES[id]
    assert id in ids(line["trips"])
    assert id in ids(line.get("trips_too", line["trips"]))
    assert id not in ids(line.get("passes", PLAIN))


@pytest.mark.parametrize("id", ["heads-lora", "lora-critic", "prm-head-lora"])
def test_a_scorer_that_an_adapter_does_not_train_is_refused_for_the_adapter(ids: Ids, id: str):
    words = shlex.split(LINES[id]["trips"])
    assert id not in ids(shlex.join(word for word in words if "lora_rank" not in word))


# A line without a switch has no node turnkey, and turnkey.ignore would make it another line.
IGNORED = sorted(id for id, line in LINES.items() if rules()[id].level == "error" and "+turnkey=" in line["trips"])


@pytest.mark.parametrize("id", IGNORED)
def test_the_checks_go_on_after_a_refusal_that_is_ignored(ids: Ids, id: str):
    assert id in ids(f"{LINES[id]['trips']} turnkey.ignore=[{id}]")


@pytest.mark.parametrize("row", RANGES, ids=lambda row: row.key)
def test_a_value_out_of_the_range_trips_and_one_within_does_not(row: Range):
    bad = row.low if row.above else row.low - 1
    good = row.low if not row.above else row.low + 1 if row.high > row.low + 1 else row.high
    for value, refused in ((bad, True), (good, False), ("many", True)):
        config = OmegaConf.create({})
        OmegaConf.update(config, row.key, value, force_add=True)
        if row.read_with:
            OmegaConf.update(config, row.read_with, 1, force_add=True)
        with warnings.catch_warnings(), suppress(ConfigError), collecting(config) as findings:
            findings.run(check_ranges, config, use_critic=True)
        assert {id_of(error) for error in findings.errors} == ({f"{RANGE}{row.key}"} if refused else set())


def test_the_plain_recipe_trips_nothing(ids: Ids):
    assert ids(PLAIN) == set()
