"""All findings at once, each with the id by which it can be ignored."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks import findings
from verl_turnkey.plugins.checks.findings import Refusal, RuleWarning, collecting, refuse, rules, warn
from verl_turnkey.plugins.config import resolve

CHECKS = Path(findings.__file__).parent


def config(*ignored: str) -> DictConfig:
    return OmegaConf.create({"turnkey": {"ignore": list(ignored)}})


def first(value: int) -> int:
    if value < 0:
        refuse("no-tasks", f"value={value}: expected 0 or more")
    return value


def second(value: int) -> None:
    if value < 0:
        refuse("mini-batches-episodes", f"other={value}: expected 0 or more")


def broken() -> None:
    raise TypeError("of what was refused before")


def run(*checks: tuple[Any, ...]) -> list[Any]:
    """What the checks, each with its arguments, return."""
    with collecting(config()) as collected:
        return [collected.run(*check) for check in checks]


def test_one_refusal_is_raised_as_it_is() -> None:
    assert run((first, 3)) == [3]
    with pytest.raises(Refusal, match="value=-1") as caught:
        run((first, 3), (first, -1))
    assert caught.value.id == "no-tasks"


def test_all_refusals_are_in_one_error_with_their_ids() -> None:
    with pytest.raises(ConfigError) as caught:
        run((first, -1), (broken,), (second, -2))  # the second may only follow from what was refused
    assert str(caught.value).splitlines() == [
        "2 errors in this launch line:",
        "1. value=-1: expected 0 or more [no-tasks]",
        "2. other=-2: expected 0 or more [mini-batches-episodes]",
    ]


def test_an_ignored_refusal_is_a_warning_and_the_check_goes_on() -> None:
    with pytest.warns(RuleWarning, match="ignored: value=-1"), collecting(config("no-tasks")) as found:
        assert found.run(first, -1) == -1


def test_an_ignored_warning_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with collecting(config("verl-version")):
            warn("verl-version", "untested")
    with pytest.warns(RuleWarning, match="untested"), collecting(config()):
        warn("verl-version", "untested")


def test_a_check_that_cannot_go_on_after_what_was_ignored_says_so() -> None:
    with warnings.catch_warnings(record=True) as caught, collecting(config("no-tasks")) as found:
        warnings.simplefilter("always")
        found.run(first, -1)
        found.run(broken)
    assert [warning.message.id for warning in caught] == ["no-tasks", "check-incomplete"]


@pytest.mark.parametrize("ignored", [(), ("no-tasks",)])
def test_an_error_of_a_check_itself_is_not_hidden(ignored: tuple[str, ...]) -> None:
    with pytest.raises(TypeError), collecting(config(*ignored)) as found:
        found.run(broken)


@pytest.mark.parametrize("ignored", ["data-file-empty", "critic-model-defaulted"])
def test_what_cannot_be_ignored_says_so(ignored: str) -> None:
    with pytest.raises(ConfigError, match="cannot be ignored"), collecting(config(ignored)):
        pass


@pytest.mark.parametrize(("ignored", "suggestion"), [("no-task", "no-tasks"), ("nonsense", "turnkey check --rules")])
def test_an_unknown_id_is_refused(ignored: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=suggestion), collecting(config(ignored)):
        pass


def test_without_a_collection_a_refusal_is_raised_at_once() -> None:
    with pytest.raises(Refusal):
        first(-1)


def test_every_refusal_and_warning_of_the_checks_has_an_id_of_its_own() -> None:
    ids = Counter[str]()
    for path in [*CHECKS.glob("*.py"), Path(resolve.__file__)]:
        if path.name == "findings.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                assert ast.unparse(node.exc.func) != "ConfigError", f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                assert function != "warnings.warn", f"{path}:{node.lineno}"
                if function in ("refuse", "Refusal", "warn", "Change"):
                    ids[ast.literal_eval(node.args[0])] += 1
    assert max(ids.values()) == 1
    assert {*ids, "check-incomplete"} == rules().keys()
    assert {*rules().values()} == {"error", "warning", "fatal", "notice"}


def test_the_default_ignores_nothing() -> None:
    assert findings._ignored(OmegaConf.create({})) == frozenset()


WRITES = {"open_dict", "read_write", "OmegaConf.update", "OmegaConf.set_struct", "OmegaConf.set_readonly"}


def test_no_check_writes_to_the_configuration() -> None:
    """``config/resolve.py`` does; the launch lines of the contract tests run on a read-only configuration."""
    for path in CHECKS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in WRITES, f"{path}:{node.lineno}"
            for target in node.targets if isinstance(node, ast.Assign) else []:
                assert not ast.unparse(target).startswith("config."), f"{path}:{node.lineno}"
