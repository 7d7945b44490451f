"""Where agents act: text environments in gymnasium's contract, the hosts that run them, prompts and action parsing.

Importing this room puts our environment ids into gymnasium's registry and imports no third-party environment.
"""

from verl_turnkey.envs.base import StepResult, TextEnv
from verl_turnkey.envs.errors import (
    EnvironmentFailure,
    EnvironmentKwargsError,
    EpisodeOverError,
    MissingPackageError,
    ModuleImportError,
    PromptTooLongError,
    TaskFormatError,
    ToolError,
    UnknownEnvironmentError,
)
from verl_turnkey.envs.registry import make, register_adapters
from verl_turnkey.envs.tools import ToolEnv, tool

__all__ = [
    "EnvironmentFailure",
    "EnvironmentKwargsError",
    "EpisodeOverError",
    "MissingPackageError",
    "ModuleImportError",
    "PromptTooLongError",
    "StepResult",
    "TaskFormatError",
    "TextEnv",
    "ToolEnv",
    "ToolError",
    "UnknownEnvironmentError",
    "make",
    "tool",
]

register_adapters()
