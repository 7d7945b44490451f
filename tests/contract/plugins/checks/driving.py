"""Launch lines on the way of ``main_ppo``'s driver up to the start of Ray, all in one process.

As a program it drives lines without torch: a JSON list of them on stdin, a JSON list of :func:`printed_by` on stdout.
"""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from io import StringIO

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.config import command_line
from verl_turnkey.plugins.config.composing import verls_config_dir

Driver = Callable[[str], str]


@contextmanager
def driving() -> Iterator[Driver]:
    """``driver(line)`` does what ``main_ppo`` does with a whole line; returns what it says."""
    import verl.trainer.main_ppo as main_ppo

    from verl_turnkey.plugins.checks import validate

    argv, composed, check = sys.argv, {}, validate.check

    def frozen(config: DictConfig, *, use_critic: bool) -> None:
        """The checks on a configuration that cannot be written to."""
        OmegaConf.set_readonly(config, True)
        check(config, use_critic=use_critic)
        OmegaConf.set_readonly(config, None)

    def compose_line(words: list[str]) -> DictConfig:
        """As Hydra composes: the files that the groups choose, once for all lines, and then the line's values."""
        groups = [word for word in words if word.lstrip("+").startswith("turnkey") and "." not in word.split("=")[0]]
        key = tuple(groups)
        if key not in composed:
            composed[key] = compose("ppo_trainer", overrides=groups)
        config = deepcopy(composed[key])
        values = OverridesParser.create().parse_overrides([word for word in words if word not in groups])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    def drive(line: str) -> str:
        sys.argv = ["main_ppo", *shlex.split(line)]
        printed = StringIO()
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed):
            warnings.simplefilter("always")
            command_line.check(sys.argv[1:])  # as our search path does when Hydra asks for it
            config = compose_line(sys.argv[1:])
            main_ppo.auto_set_device(config)
            main_ppo.validate_config(
                config=config,
                use_reference_policy=main_ppo.need_reference_policy(config),
                use_critic=main_ppo.need_critic(config),
            )
        return "\n".join([printed.getvalue(), *(str(warning.message) for warning in caught)])

    validate.check = frozen
    try:
        with initialize_config_dir(str(verls_config_dir()), version_base=None):
            yield drive
    finally:
        sys.argv, validate.check = argv, check


def printed_by(drive: Driver, line: str) -> str:
    """What the driver says of a line, or the message by which it refuses it."""
    try:
        return drive(line)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _without_torch() -> None:
    from verl_turnkey.plugins.cli import without_torch

    lines, texts, stdout = json.load(sys.stdin), [], sys.stdout
    assert without_torch.possible()
    without_torch.install()
    with driving() as drive:
        for line in lines:
            try:
                texts.append(printed_by(drive, line))
            except without_torch.NeedsVerl as error:
                texts.append(f"needs {error}")
    json.dump(texts, stdout)


if __name__ == "__main__":
    _without_torch()
