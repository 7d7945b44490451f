"""Findings of the checks on a launch line, reported together, each with an id by which it can be ignored.

A rule is a call of :func:`refuse` or :func:`warn` with its id. ``turnkey.ignore=[id]`` turns a refusal into a warning
and silences a warning, so that a rule which a newer verl made wrong locks nobody out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import ConfigErrors, raise_all
from verl_turnkey.envs import errors
from verl_turnkey.plugins.config.command_line import IN_LINE
from verl_turnkey.plugins.config.recipe_files import rule_words

# These cannot be ignored, nor can errors about values below `turnkey`.
ID_BY_ERROR: dict[type[Exception], str] = {
    errors.UnknownEnvironmentError: "environment-unknown",
    errors.MissingPackageError: "environment-package",
    errors.EnvironmentKwargsError: "environment-arguments",
    errors.ModuleImportError: "module-import",
    errors.PromptTooLongError: "prompt-too-long",
    errors.TaskFormatError: "task-format",
}
# Errors in the user's input: the messages say what to change and are shown without a traceback.
EXPECTED = (ConfigError, *ID_BY_ERROR)
_OF_VALUE = re.compile(r"(turnkey\.[\w.\[\]]+): (?:(expected |missing)|unknown key|\w+ has no such parameter)")
_ROW = re.compile(r", row \d+:")
Returned = TypeVar("Returned")


class Refusal(ConfigError):
    """A refusal by the rule ``id``."""

    def __init__(self, id: str, message: str) -> None:
        super().__init__(message)
        self.id = id


class RuleWarning(UserWarning):
    """A warning by the rule ``id``; ``values``: of the fields in its words, empty where it has other words."""

    def __init__(self, id: str, message: str, values: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.id, self.values = id, values or {}


class _Again(Exception):
    """A further row of a file that breaks the same rule: one is shown, and no check reads the rest."""


class Findings:
    """The refusals of one launch line. A check goes on after each, as it does where the rule is ignored."""

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        self.ignored = ignored
        self.errors: list[Exception] = []
        self.overruled = False
        """whether a refusal has been ignored, after which a later check may fail"""

    def run(self, check: Callable[..., Returned], *args: Any, **kwargs: Any) -> Returned | None:
        """The result of ``check``, or None after an error that it raised, which is collected.

        Raises:
            Exception: an unexpected error, unless something has been refused, which may be its cause.
        """
        try:
            return check(*args, **kwargs)
        except Exception as error:
            self.take(error, check.__name__)
        return None

    def take(self, error: Exception, name: str) -> None:
        """Collect what the check ``name`` raised; after a refusal, its consequences are left out."""
        if isinstance(error, EXPECTED):
            self.errors += error.errors if isinstance(error, ConfigErrors) else [error]
        elif not self.errors and not self.overruled:
            raise error
        elif not self.errors:
            warn("check-incomplete", name=name, error=error)

    def raise_errors(self) -> None:
        """Raise a single error as it is, and several as one error that lists their messages.

        Raises:
            ConfigError: there was at least one refusal.
        """
        unique = list({str(error): error for error in self.errors}.values())
        raise_all(unique if len(unique) == 1 else [ConfigError(described(error)) for error in unique], IN_LINE)


_findings: ContextVar[Findings | None] = ContextVar("findings", default=None)


@contextmanager
def collecting(config: DictConfig) -> Iterator[Findings]:
    """Collect the refusals of the checks inside; raises them at the end of the outermost block.

    Raises:
        ConfigError: something was refused.
    """
    if outer := _findings.get():
        yield outer
        return
    findings = Findings(ignored(config))
    token = _findings.set(findings)
    try:
        yield findings
    except Exception as error:  # of a check outside of run(), after which none can go on
        findings.take(error, "a check")
    finally:
        _findings.reset(token)
    findings.raise_errors()


def refuse(id: str, /, **values: object) -> None:
    """Refuse the launch line by the rule ``id``; returns where refusals are collected, or that rule is ignored.

    ``values``: of the fields in the rule's words.
    """
    refuse_with(id, rule_words(id, **values))


def refuse_with(id: str, message: str) -> None:
    """:func:`refuse` by a rule about the values of a key, whose message is not among the words of rules."""
    findings, refusal = _findings.get(), Refusal(id, message)
    if findings is None:
        raise refusal
    if id not in findings.ignored:
        file, *row = _ROW.split(message)
        if row and any(_ROW.split(str(other))[0] == file and id_of(other) == id for other in findings.errors):
            raise _Again
        findings.errors.append(refusal)
        return
    findings.overruled = True
    warnings.warn(RuleWarning(id, f"ignored: {message}"), stacklevel=3)


def refusal(id: str, /, **values: object) -> Refusal:
    """The error of a rule that nobody can ignore, for a check that cannot go on; ``values`` as in :func:`refuse`."""
    return Refusal(id, rule_words(id, **values))


def warn(id: str, /, **values: object) -> None:
    """Warn by the rule ``id``, unless it is ignored; ``values`` as in :func:`refuse`."""
    findings = _findings.get()
    if findings is None or id not in findings.ignored:
        warnings.warn(RuleWarning(id, rule_words(id, **values), values), stacklevel=2)


def grouped(caught: Iterable[RuleWarning]) -> list[str]:
    """A text for each rule: its words, with all values of the one field in which its warnings differ."""
    by_rule: dict[str, dict[str, RuleWarning]] = {}
    for warning in caught:
        by_rule.setdefault(warning.id, {})[str(warning)] = warning
    texts = []
    for id, of_rule in by_rule.items():
        first, *rest = of_rule.values()
        differ = [name for name in first.values if any(other.values.get(name) != first.values[name] for other in rest)]
        text = "; ".join(of_rule)
        if len(differ) == 1 and all(other.values.keys() == first.values.keys() for other in rest):
            every = ", ".join(dict.fromkeys(str(warning.values[differ[0]]) for warning in of_rule.values()))
            text = rule_words(id, **{**first.values, differ[0]: every})
        texts.append(f"{text} [{id}]")
    return texts


def described(error: Exception | Warning) -> str:
    """The message, with the id of its rule."""
    id = id_of(error)
    return f"{error} [{id}]" if id else str(error)


def id_of(error: Exception | Warning) -> str | None:
    """The id of the rule that raised ``error``; for a value below ``turnkey``, the id of its key."""
    if isinstance(error, Refusal | RuleWarning):
        return error.id
    if isinstance(error, ConfigError) and (of_value := _OF_VALUE.match(str(error))):
        return f"range:{of_value[1]}" if of_value[2] else "unknown-turnkey-key"
    return next((id for kind, id in ID_BY_ERROR.items() if isinstance(error, kind)), None)


def ignored(config: DictConfig) -> frozenset[str]:
    """The ids in ``turnkey.ignore``."""
    node = config.get("turnkey")
    ids = node.get("ignore") if isinstance(node, DictConfig) else None
    return frozenset(map(str, ids)) if isinstance(ids, ListConfig) else frozenset()  # another type is refused elsewhere
