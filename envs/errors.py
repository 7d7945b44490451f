"""Errors of environments; each message says how to fix the problem."""

from __future__ import annotations


class UnknownEnvironmentError(LookupError):
    """No environment (or level) of that name is registered."""


class MissingPackageError(ImportError):
    """The environment is known, the package that it needs is not installed."""


class EnvironmentKwargsError(TypeError):
    """The environment does not take these keyword arguments, or not these values."""


class ModuleImportError(ImportError):
    """A module of the user's that registers environments cannot be imported."""


class PromptTooLongError(ValueError):
    """Task and current observation alone exceed the prompt budget."""


class TaskFormatError(ValueError):
    """A task cannot be read from, or written to, a data file."""


class EpisodeOverError(RuntimeError):
    """``step`` was called after the episode had ended."""


class ToolError(RuntimeError):
    """A tool refuses what the model asked of it; the text becomes the result of the call."""


class EnvironmentFailure(RuntimeError):
    """An episode broke down; the episode is over, its host goes on.

    ``kind`` is one of ``make`` (unknown id, missing package or wrong arguments), ``reset``, ``step``, ``reward``,
    ``timeout``, ``process`` (its process died), ``closed``, ``clone``, ``images``, ``tools``, ``user`` (the simulated
    user did not answer), ``opponent`` (likewise, or it has no legal action), ``host`` (the host is gone) and
    ``restarts`` (the host has lost too many processes to begin another episode; ``HostPool`` then begins it elsewhere
    or later). Plain strings only, so that it crosses process borders whatever the environment raised.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"environment failure ({self.kind}): {self.message}"


class SandboxError(ValueError):
    """The sandbox that was chosen for agents cannot be used on this machine."""


class RewardError(RuntimeError):
    """A reward of this episode cannot be computed; the message names the component and what is missing.

    A wrong configuration is a ``ConfigError`` instead.
    """

    component: str | None = None
    """the label of the component that fails alone; None: their sum is too large, or a column is there already"""


class JudgeError(RewardError):
    """A judge gave no score: the message has the URL, the status and the beginning of what came back."""
