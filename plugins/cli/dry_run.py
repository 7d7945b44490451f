"""``turnkey check``: verl's own main program up to the point where Ray would start."""

from __future__ import annotations

import gc
import os
import re
import sys
import warnings
from collections.abc import Sequence
from functools import wraps

from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from omegaconf import DictConfig

from verl_turnkey.plugins.checks.keys import uses_us
from verl_turnkey.plugins.config.command_line import refuse
from verl_turnkey.plugins.config.composing import verls_config_dir

WHOLE = "TURNKEY_CHECK_WITH_VERL"
"""variable of a process that checks with all of verl"""
# No folder and no log file of Hydra: a check leaves nothing behind.
_NO_FILES = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none")


def quick_run(arguments: Sequence[str], *, prompt: bool = False) -> int:
    """As :func:`dry_run`, for a program of its own: without torch, unless a check needs it.

    Then the program starts again, with all of verl.
    """
    from verl_turnkey.plugins.cli import without_torch

    if WHOLE in os.environ or not without_torch.possible(arguments):
        return dry_run(arguments, prompt=prompt)
    gc.disable()  # the program is short, and looks through what it imports in vain
    without_torch.install()
    if not may_sweep(arguments):
        Hydra.get_mode = lambda *_, **__: RunMode.RUN  # else Hydra composes the line twice, first to read this
    try:
        return dry_run(arguments, prompt=prompt)
    except without_torch.NeedsVerl:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, WHOLE: "1"})


def may_sweep(arguments: Sequence[str]) -> bool:
    """Whether a word may make Hydra start several runs: a flag, or a key or a file of Hydra's own."""
    return any(re.match(r"-|[+~]*hydra(?!\.run\.)", word) for word in arguments)


def dry_run(arguments: Sequence[str], *, prompt: bool = False) -> int:
    """Compose and check what ``python -m verl.trainer.main_ppo`` would with the same arguments; print the header.

    ``prompt``: print the first prompt of the first task, too.

    Returns:
        0, or 1 when the run would be refused; the reason is on stderr.
    """
    # As in main_ppo: from here this package reads its switches when verl is imported, and Hydra its overrides.
    sys.argv = ["turnkey check", *_as_main(arguments)]
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    try:
        refuse(arguments)  # before verl is imported, which takes most of the time
        config = _until_ray()
    except SystemExit as exit:
        return 1 if exit.code not in (0, None) else 0
    if config is None:  # --help and the like
        return 0
    if not uses_us(config):
        print("stock verl: nothing of this package is asked for. Add +turnkey=<method>", flush=True)
        return 1
    if prompt:
        from verl_turnkey.plugins.checks.probe import preview

        print(preview(config), flush=True)
    print("ready: nothing was started", flush=True)
    return 0


def _as_main(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with ours behind the last override: Hydra wants them side by side, and takes the last of a key.

    Hydra reads a relative ``--config-path`` from the folder of the main program, which verl's is not here.
    """
    flags = ("--config-path", "-cp")
    words = list(arguments)
    for i, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name in flags and sign:
            words[i] = f"{name}={_from_main(value)}"
        elif word in flags and i + 1 < len(words):
            words[i + 1] = _from_main(words[i + 1])
    overrides = [i for i, word in enumerate(words) if "=" in word and not word.startswith("-")]
    end = overrides[-1] + 1 if overrides else len(words)
    return [*words[:end], *_NO_FILES, *words[end:]]


def _from_main(path: str) -> str:
    return path if "://" in path else str(verls_config_dir().parent / path)


def _until_ray() -> DictConfig | None:
    """The configuration with which verl's main program would start Ray; None when it stops before."""
    from verl.trainer import main_ppo

    started: list[DictConfig] = []
    original = main_ppo.run_ppo
    main_ppo.run_ppo = wraps(original)(lambda config, **_: started.append(config))  # wrapped: no run to guard
    # verl warns about every method without a critic; the header names the method.
    warnings.filterwarnings("ignore", message="Disabled critic")
    try:
        main_ppo.main()
    finally:
        main_ppo.run_ppo = original
    return started[0] if started else None
