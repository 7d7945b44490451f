"""What checks find on a launch line: all of it at once, each finding with an id by which it can be ignored.

A rule is a call of :func:`refuse` or :func:`warn` with its id. ``turnkey.ignore=[id]`` turns a refusal into a warning
and silences a warning, so that a rule which a newer verl made false locks nobody out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs import errors
from verl_turnkey.plugins.config import resolve

# Errors in the user's input: their messages say what to change, and are shown without a traceback.
EXPECTED = (
    ConfigError,
    errors.UnknownEnvironmentError,
    errors.MissingPackageError,
    errors.EnvironmentKwargsError,
    errors.ModuleImportError,
    errors.PromptTooLongError,
    errors.TaskFormatError,
)
IGNORE = "turnkey.ignore"
Returned = TypeVar("Returned")


class Refusal(ConfigError):
    """A refusal by the rule ``id``."""

    def __init__(self, id: str, message: str) -> None:
        super().__init__(message)
        self.id = id


class RuleWarning(UserWarning):
    """A warning by the rule ``id``."""

    def __init__(self, id: str, message: str) -> None:
        super().__init__(message)
        self.id = id


class Findings:
    """The refusals of one launch line. Each check ends at its first one, the next check still runs."""

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        self.ignored = ignored
        self.errors: list[Exception] = []
        self.overruled = False
        """whether a refusal has been ignored, after which a check may stumble"""

    def run(self, check: Callable[..., Returned], *args: Any, **kwargs: Any) -> Returned | None:
        """What ``check`` returns, or None after a refusal, which is kept.

        Raises:
            Exception: an unexpected error, unless something has been refused: then it may only follow from that.
        """
        try:
            return check(*args, **kwargs)
        except EXPECTED as error:
            self.errors.append(error)
        except Exception as error:
            if not self.errors and not self.overruled:
                raise
            if not self.errors:
                warn("check-incomplete", f"{check.__name__} stopped after what {IGNORE} let pass: {error!r}")
        return None

    def raise_errors(self) -> None:
        """Raise a single error as it is, and several as one error that lists their messages.

        Raises:
            ConfigError: there was at least one refusal.
        """
        unique = list({str(error): error for error in self.errors}.values())
        if len(unique) == 1:
            raise unique[0]
        if unique:
            lines = [f"{number}. {described(error)}" for number, error in enumerate(unique, 1)]
            raise ConfigError("\n".join([f"{len(unique)} errors in this launch line:", *lines]))


_findings: ContextVar[Findings | None] = ContextVar("findings", default=None)


@contextmanager
def collecting(config: DictConfig) -> Iterator[Findings]:
    """Collect the refusals of the checks inside; raises them at the end of the outermost block.

    Raises:
        ConfigError: something was refused, or ``turnkey.ignore`` names no rule.
    """
    if outer := _findings.get():
        yield outer
        return
    findings = Findings(_ignored(config))
    token = _findings.set(findings)
    try:
        yield findings
    except EXPECTED as error:  # of a check outside of run(), after which none can go on
        findings.errors.append(error)
    finally:
        _findings.reset(token)
    findings.raise_errors()


def refuse(id: str, message: str) -> None:
    """Refuse the launch line by the rule ``id``; returns where that rule is ignored.

    Raises:
        Refusal: the message says what was expected, what came, and the key to change.
    """
    findings = _findings.get()
    if findings is None or id not in findings.ignored:
        raise Refusal(id, message)
    findings.overruled = True
    warnings.warn(RuleWarning(id, f"ignored: {message}"), stacklevel=2)


def warn(id: str, message: str) -> None:
    """Warn by the rule ``id``, unless it is ignored."""
    findings = _findings.get()
    if findings is None or id not in findings.ignored:
        warnings.warn(RuleWarning(id, message), stacklevel=2)


def described(error: Exception | Warning) -> str:
    """The message, with the id of its rule."""
    id = getattr(error, "id", None)
    return f"{error} [{id}]" if id else str(error)


@cache
def rules() -> dict[str, str]:
    """Every rule's id -> level, read from the source of the checks; in alphabetical order.

    ``error`` and ``warning`` can be ignored. ``fatal`` cannot: the check has nothing to go on with; nor can ``notice``,
    which reports a change of the configuration.
    """
    levels = {"refuse": "error", "Refusal": "fatal", "warn": "warning", "Change": "notice"}
    sources = [*Path(__file__).parent.glob("*.py"), Path(resolve.__file__)]
    level_by_id = {
        id: levels[call]
        for path in sources
        for call, id in re.findall(
            r'\b(refuse|Refusal|warn|Change)\(\s*"([a-z0-9-]+)"', path.read_text(encoding="utf-8")
        )
    }
    return dict(sorted(level_by_id.items()))


def _ignored(config: DictConfig) -> frozenset[str]:
    node = config.get("turnkey")
    ids = node.get("ignore") if isinstance(node, DictConfig) else None
    if not isinstance(ids, ListConfig):  # absent, or refused as of another type
        return frozenset()
    for id in ids:
        if not isinstance(id, str) or id not in rules():
            raise ConfigError(
                f"{IGNORE}: there is no rule {id!r}{did_you_mean(str(id), rules()) or '.'} "
                "`turnkey check --rules` lists them"
            )
        if rules()[id] in ("fatal", "notice"):
            raise ConfigError(f"{IGNORE}: the rule {id!r} cannot be ignored ({rules()[id]})")
    return frozenset(ids)
