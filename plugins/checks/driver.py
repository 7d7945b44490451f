"""The driver's check of a run: ours, then verl's, then the header, all before Ray starts."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import errors
from verl_turnkey.plugins.checks.files import tasks
from verl_turnkey.plugins.cpu import machine
from verl_turnkey.plugins.seeing.segments import new_segment
from verl_turnkey.plugins.stopping.driver import guard_run

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


_HERE = str(Path(__file__).parent)


class Refused(ConfigError, CompactHydraException):
    """A configuration that was refused; Hydra prints the message alone, and all with ``HYDRA_FULL_ERROR=1``."""


def _unexpected(error: Exception) -> str:
    """A sentence about a value that a check cannot compute with, with the line that tried to."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_HERE)] or [*frames]
    file, line = Path(ours[-1].filename).name, ours[-1].lineno
    return (
        f"a check cannot read the configuration: {type(error).__name__}: {error} (checks/{file}, line {line}: "
        f"{ours[-1].line}). A key there has a value of another type than verl expects, such as null or a text in the "
        "place of a number; HYDRA_FULL_ERROR=1 shows all of the error"
    )


def validate(config: Any, use_reference_policy: bool, use_critic: bool, verls: Callable[..., None]) -> None:
    """In place of ``verl.utils.config.validate_config``, which is ``verls``.

    Raises:
        Refused: a check of this package failed; the cause is the error itself.
    """
    from verl_turnkey.plugins.checks.header import header
    from verl_turnkey.plugins.checks.replaced import replaced
    from verl_turnkey.plugins.checks.validate import check

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=UserWarning)
            machine.settle(config)
            lost = replaced(config, sys.argv[1:])
            check(config, use_critic=use_critic)
    except EXPECTED as error:
        raise Refused(str(error)) from error
    except (TypeError, ValueError, AttributeError, LookupError, OmegaConfBaseException) as error:
        raise Refused(_unexpected(error)) from error
    said = [f"replaced: {text}" for text in lost]
    for warning in caught:
        if warning.filename.startswith(_HERE):
            said.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    verls(config, use_reference_policy, use_critic)
    if OmegaConf.select(config, "turnkey.log.trajectories"):
        with open_dict(config):  # one name for all processes
            config.turnkey.log.segment = new_segment()
            config.turnkey.log.validation_tasks = tasks(config, "val_files")
    if str(OmegaConf.select(config, "trainer.v1.trainer_mode")).startswith("turnkey_"):
        guard_run()
    if lines := header(config, said):
        print("\n".join(lines), flush=True)
