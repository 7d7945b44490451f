"""Names of papers: what they are called here is registered, and what is called absent is not ours."""

import re

import pytest
from typer.testing import CliRunner

from verl_turnkey.advantage.paper_names import ABSENT, PAPER_NAMES, PaperName, absent, paper_name, plain
from verl_turnkey.envs.rewards import rewards
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.tables import shipped, shipped_losses, shipped_modifiers
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.rollout.strategies import strategies

REGISTERED = {
    "the modifier ": shipped_modifiers(),
    "the loss ": shipped_losses(),
    "the reward ": rewards(),
    "the rewards ": rewards(),
    "": shipped(),
}
WORDS = re.compile(r"(?P<kind>the modifier |the loss |the rewards? |)(?P<name>\w+)(?: and (?P<second>\w+))?")


@pytest.mark.parametrize("entry", PAPER_NAMES, ids=lambda entry: plain(entry.names.split(" / ")[0]))
def test_what_is_here_is_registered(entry: PaperName):
    if entry.ours.startswith("verl's "):
        return
    if entry.ours.startswith("turnkey."):
        node = TurnkeyConfig()
        for part in entry.ours.split(".")[1:]:
            node = getattr(node, part)
        return
    main, _, rest = entry.ours.partition(" with ")
    match = WORDS.fullmatch(main)
    assert match, entry.ours
    for name in filter(None, (match["name"], match["second"])):
        assert name in REGISTERED[match["kind"]], entry.ours
    if strategy := re.search(r"the strategy (\w+)", rest):
        assert strategy[1] in strategies()
    if reward := re.search(r"the reward (\w+)", rest):
        assert reward[1] in rewards()
    if loss := re.search(r"the loss (\w+)", rest):
        assert loss[1] in shipped_losses()


def test_every_method_modifier_and_loss_is_in_the_table():
    names = [entry.ours for entry in PAPER_NAMES]
    for kind, registered in (("", shipped()), ("the modifier ", shipped_modifiers()), ("the loss ", shipped_losses())):
        for name, spec in registered.items():
            if spec.paper == "this project's own":
                continue
            also_a_method = bool(kind) and name in shipped()
            assert also_a_method or any(re.match(rf"{kind}{name}\b", ours) for ours in names), name


def test_what_is_absent_is_not_ours_and_has_one_reason():
    names = [name for entry in ABSENT for name in entry.names.split(" / ")]
    assert len({plain(name) for name in names}) == len(names)
    assert [name for name in names if paper_name(name) or plain(name) in map(plain, shipped())] == []
    assert absent("hi_agent") is ABSENT[0]
    assert absent("gigpo") is None


def test_the_command_says_why():
    done = CliRunner().invoke(app, ["list", "methods", "arXiv:2510.14388"], catch_exceptions=False)
    assert done.exit_code == 0
    why = "the formula of its foresight advantage is not published"
    assert " ".join(done.output.split()) == f"arXiv:2510.14388 is not here: {why}"
