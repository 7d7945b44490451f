"""The driver's check of a run: ours, then verl's, then the header, all before Ray starts."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks import memory
from verl_turnkey.plugins.checks.files import tasks
from verl_turnkey.plugins.checks.findings import EXPECTED, RuleWarning, collecting, described, grouped
from verl_turnkey.plugins.checks.keys import uses_us
from verl_turnkey.plugins.checks.values import unreadable, with_origins
from verl_turnkey.plugins.config import machine, resolve
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.log.writer import new_segment

MODE = "trainer.v1.trainer_mode"
STOPS = "TURNKEY_CHECK"
"""variable with which verl's main program ends after the checks"""
STOCK_VERL = "stock verl: nothing of this package is asked for. Add +turnkey=<method>"
_HERE = str(Path(__file__).parent)


class Refused(ConfigError, CompactHydraException):
    """A configuration that was refused; Hydra prints the message alone, and all with ``HYDRA_FULL_ERROR=1``."""


@contextmanager
def _in_sentences(config: Any) -> Iterator[None]:
    """Turn every error of a check into a readable message, whatever value caused it."""
    try:
        yield
    except EXPECTED as error:
        raise Refused(with_origins(described(error), config)) from error
    except (TypeError, ValueError, AttributeError, LookupError, OmegaConfBaseException) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename.startswith(_HERE)), frames[-1])
        raise Refused(unreadable(config, error, f"checks/{Path(frame.filename).name}, line {frame.lineno}")) from error


@contextmanager
def _as_sentence(config: Any) -> Iterator[None]:
    """Name the key of a value that verl's own checks refuse: their assertions may say nothing."""
    try:
        yield
    except (AssertionError, ValueError, CompactHydraException) as error:
        if "turnkey" not in config:  # a run of verl alone
            raise
        chain: list[BaseException] = [error]
        while cause := chain[-1].__cause__:
            chain.append(cause)
        reason = str(chain[-1]) or str(traceback.extract_tb(chain[-1].__traceback__)[-1].line)
        node = re.search(r"full_key: (\S+)", " ".join(map(str, chain)))
        names = OmegaConf.select(config, node[1]) if node else {}
        keys = [f"{node[1]}.{name}" for name in names if node and re.search(rf"\b{name}\b", reason)]
        settings = ", ".join(f"{key}={OmegaConf.select(config, key)}" for key in keys) or (node[1] if node else "")
        raise Refused(f"{f'{settings}: ' if settings else ''}verl refuses this launch line: {reason}") from error


def resolve_and_check(config: Any, *, use_critic: bool) -> list[resolve.Change]:
    """Check the values, set the keys that follow from them, and check the result.

    Returns:
        The keys that were set.

    Raises:
        ConfigError: lists every error.
    """
    from verl_turnkey.envs.user_modules import import_modules
    from verl_turnkey.plugins.checks.validate import check, check_values, involved

    with collecting(config) as findings:
        check_values(config, use_critic=use_critic)
        changes = [findings.run(resolve.absolute_paths, config)]
        if involved(config):  # a stock run imports nothing of the user's packages
            import_modules(turnkey_config(config).modules)  # which may register the method
        if str(OmegaConf.select(config, MODE)).startswith("turnkey_"):
            changes += [findings.run(write, config, use_critic) for write in resolve.OF_OUR_TRAINERS]
        check(config, use_critic=use_critic)
    return [change for change in changes if change]


def validate(config: Any, use_reference_policy: bool, use_critic: bool, verls: Callable[..., None]) -> None:
    """In place of ``verl.utils.config.validate_config``, which is ``verls``.

    Raises:
        Refused: a check of this package failed; the cause is the error itself.
        SystemExit: the same in verl's main program, which prints the message alone; Hydra would add the whole line.
            ``HYDRA_FULL_ERROR=1`` shows the traceback. With :data:`STOPS` also after checks that passed.
    """
    try:
        _validate(config, use_reference_policy, use_critic, verls)
    except Refused as error:
        if not HydraConfig.initialized() or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    if os.environ.get(STOPS) and HydraConfig.initialized():
        raise SystemExit(verdict(config))


def verdict(config: Any) -> int:
    """Print what the GPUs need, and the last line of a check that passed; returns its status, 1 for stock verl."""
    for line in memory.table(config) if uses_us(config) else ():
        print(line, flush=True)
    print("ready: nothing was started" if uses_us(config) else STOCK_VERL, flush=True)
    return 0 if uses_us(config) else 1


def _validate(config: Any, use_reference_policy: bool, use_critic: bool, verls: Callable[..., None]) -> None:
    from verl_turnkey.plugins.checks.header import header
    from verl_turnkey.plugins.checks.keys import replaced

    with warnings.catch_warnings(record=True) as caught, _in_sentences(config):
        warnings.filterwarnings("always", category=UserWarning)
        machine.settle(config)
        with collecting(config) as findings:
            overridden = findings.run(replaced, config, sys.argv[1:]) or []
            changes = resolve_and_check(config, use_critic=use_critic)
    notices = [str(change) for change in changes]
    of_rules = [warning.message for warning in caught if isinstance(warning.message, RuleWarning)]
    for warning in caught:
        if not isinstance(warning.message, RuleWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    with _as_sentence(config):
        verls(config, use_reference_policy, use_critic)
    if str(OmegaConf.select(config, MODE)).startswith("turnkey_"):
        from verl_turnkey.plugins.shutdown.driver import guard_run  # imports Ray

        guard_run()
    with _in_sentences(config):
        if folder := OmegaConf.select(config, "turnkey.log.trajectories"):
            resolve.log_segment(config, new_segment(folder), tasks(config, "val_files"))
        warned = [with_origins(text, config) for text in grouped(of_rules)]
        lines = header(config, notices, [*(f"replaced: {text}" for text in overridden), *warned])
    if lines:
        print("\n".join(lines), flush=True)
