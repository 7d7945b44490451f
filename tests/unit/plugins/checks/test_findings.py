"""All findings at once, each with the id by which it can be ignored."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import TaskFormatError
from verl_turnkey.plugins.checks import findings
from verl_turnkey.plugins.checks.findings import Refusal, RuleWarning, collecting, id_of, refuse, warn
from verl_turnkey.plugins.checks.rules import check_ignored, rules
from verl_turnkey.plugins.checks.values import check_ranges
from verl_turnkey.plugins.config import resolve
from verl_turnkey.plugins.config.recipe_files import rule_texts

CHECKS = Path(findings.__file__).parent


def config(*ignored: str) -> DictConfig:
    return OmegaConf.create({"turnkey": {"ignore": list(ignored)}})


def first(value: int) -> int:
    if value < 0:
        refuse("no-tasks", key=value)
    return value


def second(value: int) -> None:
    if value < 0:
        refuse("mini-batches-episodes", number=value, episodes=3)


def broken() -> None:
    raise TypeError("of what was refused before")


def run(*checks: tuple[Any, ...]) -> list[Any]:
    """What the checks, each with its arguments, return."""
    with collecting(config()) as collected:
        return [collected.run(*check) for check in checks]


def test_one_refusal_is_raised_as_it_is() -> None:
    assert run((first, 3)) == [3]
    with pytest.raises(Refusal, match=r"data\.-1 contains no tasks") as caught:
        run((first, 3), (first, -1))
    assert caught.value.id == "no-tasks"


def test_all_refusals_are_in_one_error_with_their_ids() -> None:
    with pytest.raises(ConfigError) as caught:
        run((first, -1), (broken,), (second, -2))  # the second may only follow from what was refused
    assert str(caught.value).splitlines() == [
        "2 errors in this launch line:",
        "1. data.-1 contains no tasks: write some with `turnkey tasks` [no-tasks]",
        "2. turnkey.update.mini_batches=-2 for 3 episodes of an update (data.train_batch_size x "
        "actor_rollout_ref.rollout.n): lower it to 3 [mini-batches-episodes]",
    ]


def test_an_ignored_refusal_is_a_warning_and_the_check_goes_on() -> None:
    with pytest.warns(RuleWarning, match=r"ignored: data\.-1"), collecting(config("no-tasks")) as findings:
        assert findings.run(first, -1) == -1


def test_an_ignored_warning_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with collecting(config("verl-version")):
            warn("verl-version", warning="untested")
    with pytest.warns(RuleWarning, match="untested"), collecting(config()):
        warn("verl-version", warning="untested")


def test_a_check_that_cannot_go_on_after_what_was_ignored_says_so() -> None:
    with warnings.catch_warnings(record=True) as caught, collecting(config("no-tasks")) as findings:
        warnings.simplefilter("always")
        findings.run(first, -1)
        findings.run(broken)
    assert [warning.message.id for warning in caught] == ["no-tasks", "check-incomplete"]


@pytest.mark.parametrize("ignored", [(), ("no-tasks",)])
def test_an_error_of_a_check_itself_is_not_hidden(ignored: tuple[str, ...]) -> None:
    with pytest.raises(TypeError), collecting(config(*ignored)) as findings:
        findings.run(broken)


@pytest.mark.parametrize("ignored", ["data-file-empty", "critic-model-defaulted", "range:turnkey.credit.gamma"])
def test_what_cannot_be_ignored_says_so(ignored: str) -> None:
    with pytest.raises(ConfigError, match="cannot be ignored"):
        check_ignored(config(ignored))


@pytest.mark.parametrize(
    ("ignored", "suggestion"),
    [
        ("no-task", "no-tasks"),
        ("nonsense", "turnkey check --rules"),
        ("range:algorithm.gama", "range:algorithm.gamma"),
        ("range:trainer.nothing", "turnkey check --rules"),
    ],
)
def test_an_unknown_id_is_refused(ignored: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=suggestion):
        check_ignored(config(ignored))


def test_what_can_be_ignored_is() -> None:
    line = config("no-tasks", "verl-version", "range:algorithm.gamma", "range:trainer.own")
    check_ignored(OmegaConf.merge(line, {"trainer": {"own": "text"}}))


def test_without_a_collection_a_refusal_is_raised_at_once() -> None:
    with pytest.raises(Refusal):
        first(-1)


CALLS = {"needs_our_trainer": {"mode"}, "needs_our_loop": {"loop"}, "needs_name": {"name", "choices"}}
CALLS |= {name: set[str]() for name in ["refuse", "warn", "refusal", "change", "rule_words", "needs_on", "needs_off"]}
"""functions with the id of a rule as the first argument, and the fields of its words that they fill in themselves"""


def test_each_rule_has_one_condition_which_gives_the_fields_of_its_words() -> None:
    ids = Counter[str]()
    for path in [*CHECKS.glob("*.py"), Path(resolve.__file__)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func)
            assert function not in ("warnings.warn", "ConfigError") or path.name == "findings.py"
            if function in CALLS and isinstance(node.args[0], ast.Constant):
                id = ast.literal_eval(node.args[0])
                ids[id] += 1
                fields = {field for _, field, _, _ in Formatter().parse(rule_texts()[id]["words"]) if field}
                values = {str(keyword.arg) for keyword in node.keywords} | CALLS[function]
                assert fields <= values, id
                assert values - CALLS[function] <= fields, id
    assert {*ids.values()} == {1}
    assert {*ids} == {id for id, texts in rule_texts().items() if "words" in texts}
    of_errors = {*findings.ID_BY_ERROR.values(), "unknown-turnkey-key"}
    assert {id for id, texts in rule_texts().items() if "words" not in texts} == of_errors
    assert {rule.level for rule in rules().values()} == {"error", "warning", "fatal", "notice"}


def test_a_rule_is_read_from_its_message() -> None:
    rule = rules()["bypass-without-log-probs"]
    assert rule.says.startswith("algorithm.rollout_correction.bypass_mode=true uses the rollout's log-probabilities")
    assert rule.fix == "set actor_rollout_ref.rollout.calculate_log_probs=true"
    assert rules()["allocation-filter-groups"].says.startswith("turnkey.groups.allocation=<allocation> learns from")
    assert rules()["unknown-kl-penalty"].fix == "write one that the message lists"
    assert rules()["range:algorithm.gamma"].fix == "expected a number, 0 or more, 1 at most, or null"
    assert all(rule.says for rule in rules().values())


def test_each_value_out_of_its_range_has_an_id_of_its_own() -> None:
    line = OmegaConf.create({"algorithm": {"gamma": 95, "lam": 7}, "turnkey": {"ignore": ["range:algorithm.lam"]}})
    with pytest.raises(Refusal, match=r"algorithm\.gamma=95") as caught, collecting(line), pytest.warns(match="lam=7"):
        check_ranges(line, use_critic=False)
    assert caught.value.id == "range:algorithm.gamma"


@pytest.mark.parametrize(
    ("error", "id"),
    [
        (ConfigError("turnkey.credit.gamma: expected a number in [0, 1], got 2"), "range:turnkey.credit.gamma"),
        (ConfigError("turnkey.rollout.histori: unknown key; did you mean 'history'?"), "unknown-turnkey-key"),
        (ConfigError("turnkey.credit.gama: gigpo has no such parameter"), "unknown-turnkey-key"),
        (TaskFormatError("no task"), "task-format"),
        (ConfigError("of no rule"), None),
    ],
)
def test_errors_of_others_have_ids(error: Exception, id: str | None) -> None:
    assert id_of(error) == id


def test_the_default_ignores_nothing() -> None:
    assert findings.ignored(OmegaConf.create({})) == frozenset()


WRITES = {"open_dict", "read_write", "OmegaConf.update", "OmegaConf.set_struct", "OmegaConf.set_readonly"}


def test_no_check_writes_to_the_configuration() -> None:
    """``config/resolve.py`` does; the launch lines of the contract tests run on a read-only configuration."""
    for path in CHECKS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in WRITES, f"{path}:{node.lineno}"
            for target in node.targets if isinstance(node, ast.Assign) else []:
                assert not ast.unparse(target).startswith("config."), f"{path}:{node.lineno}"
