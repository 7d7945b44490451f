"""``turnkey check``: verl's own main program up to the start of Ray, with the arguments of a line or script.

``turnkey recipe``: what the words of a launch line set, each value with its origin.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks import memory
from verl_turnkey.plugins.checks.driver import verdict
from verl_turnkey.plugins.checks.keys import uses_us
from verl_turnkey.plugins.cli.tables import scalar
from verl_turnkey.plugins.config.command_line import check, refuse
from verl_turnkey.plugins.config.composing import TurnkeySearchPath, sentence, verls_config_dir
from verl_turnkey.plugins.config.schema import credit_params, loss_params, turnkey_config

WHOLE = "TURNKEY_CHECK_WITH_VERL"
"""variable of a process that checks with all of verl"""
# No folder and no log file of Hydra: a check leaves nothing behind.
_NO_FILES = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none")


def quick_run(arguments: Sequence[str], *, prompt: bool = False, as_json: bool = False) -> int:
    """As :func:`dry_run`, for a program of its own: without torch, unless a check needs it.

    Then the program starts again, with all of verl.
    """
    from verl_turnkey.plugins.cli import without_torch

    if WHOLE in os.environ or not without_torch.possible(arguments):
        return dry_run(arguments, prompt=prompt, as_json=as_json)
    gc.disable()  # the program is short, and looks through what it imports in vain
    without_torch.install()
    if not may_sweep(arguments):
        Hydra.get_mode = lambda *_, **__: RunMode.RUN  # else Hydra composes the line twice, first to read this
    try:
        return dry_run(arguments, prompt=prompt, as_json=as_json)
    except without_torch.NeedsVerl:
        sys.stdout.flush()
        options = ["--prompt"] * prompt + ["--json"] * as_json
        command = [sys.executable, "-m", "verl_turnkey", "check", *options, *arguments]
        os.execve(sys.executable, command, {**os.environ, WHOLE: "1"})


def may_sweep(arguments: Sequence[str]) -> bool:
    """Whether a word may make Hydra start several runs: a flag, or a key or a file of Hydra's own."""
    return any(re.match(r"-|[+~]*hydra(?!\.run\.)", word) for word in arguments)


def dry_run(arguments: Sequence[str], *, prompt: bool = False, as_json: bool = False) -> int:
    """Compose and check what ``python -m verl.trainer.main_ppo`` would with the same arguments; print the header.

    ``prompt``: print the first prompt of the first task, too. ``as_json``: print the memory of the GPUs as JSON on the
    process's stdout, which the caller has redirected for all else.

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
    if prompt and uses_us(config):
        from verl_turnkey.plugins.checks.probe import preview

        print(preview(config), flush=True)
    if as_json:
        print(json.dumps(memory.as_dict(config)), file=sys.__stdout__, flush=True)
        return 0 if uses_us(config) else 1
    return verdict(config)


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


HEADER = """\
# @package _global_
# turnkey recipe {words}
# What these words set in verl's configuration. After each value: the recipe that sets it (a file in
# recipe/config/turnkey), "default" for a parameter that no recipe sets, or "command line".
"""
#: Column at which origins begin, unless a line is longer.
COLUMN = 64

Leaves = dict[str, tuple[Any, str]]
"""Dotted key -> value, origin."""


def show(words: Sequence[str]) -> str:
    """YAML of all that ``+turnkey=<method>`` and the further ``words`` of a launch line set; a recipe by itself."""
    check(words)
    try:
        config, leaves = _composed(words)
    except HydraException as error:
        raise ConfigError(sentence(error)) from None
    leaves |= _defaults(config, leaves)
    header = HEADER.format(words=shlex.join(words).removeprefix("+turnkey=").replace("\n", "\\n"))
    return header + "".join(f"{line}\n" for line in _yaml(_tree(leaves), 0))


def _composed(words: Sequence[str]) -> tuple[DictConfig, Leaves]:
    """verl's configuration as a run composes it, and those leaves that recipes or the command line set."""
    Plugins.instance().register(TurnkeySearchPath)
    with initialize_config_dir(str(verls_config_dir()), version_base=None):
        config = compose("ppo_trainer", overrides=list(words))
        loader: Any = GlobalHydra.instance().config_loader()
        # Private, but what Hydra composes from: it knows the folders of the user's hydra.searchpath too.
        overrides, files = loader._parse_overrides_and_create_caching_repo("ppo_trainer", list(words))
        origins: dict[str, str] = {}
        for layer in loader.compute_defaults_list("ppo_trainer", list(words), RunMode.RUN).defaults:
            path = layer.config_path or ""
            if path.startswith("turnkey/"):
                tree = OmegaConf.to_container(files.load_config(path).config)
                origins |= dict.fromkeys(_flat(tree, layer.package), path.removeprefix("turnkey/"))
        for override in overrides:
            if not files.group_exists(override.key_or_group):
                origins |= dict.fromkeys(_flat(override.value(), override.key_or_group), "command line")
    composed = _flat(OmegaConf.to_container(config))
    return config, {key: (value, origins[key]) for key, value in composed.items() if key in origins}


def _defaults(config: DictConfig, leaves: Leaves) -> Leaves:
    """Parameters of the chosen estimator and loss that keep their defaults."""
    from verl_turnkey.envs.user_modules import import_modules

    turnkey = turnkey_config(config)
    import_modules(turnkey.modules)
    defaults: Leaves = {}
    for node, params in (("credit", credit_params(config, turnkey)), ("loss", loss_params(config, turnkey))):
        for entry in fields(params) if params else ():
            if f"turnkey.{node}.{entry.name}" not in leaves:
                defaults[f"turnkey.{node}.{entry.name}"] = getattr(params, entry.name), "default"
    return defaults


def _flat(tree: Any, key: str = "") -> dict[str, Any]:
    """The leaves of a configuration by dotted key; an empty node is a leaf."""
    if not (isinstance(tree, dict) and tree):
        return {key: tree}
    return {k: v for name, value in tree.items() for k, v in _flat(value, f"{key}.{name}".lstrip(".")).items()}


def _tree(leaves: Leaves) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, leaf in leaves.items():
        *nodes, name = key.split(".")
        node = tree
        for part in nodes:
            if not isinstance(node.get(part), dict):
                node[part] = {}  # also where an empty node gets defaults
            node = node[part]
        node[name] = leaf
    return tree


def _yaml(tree: dict[str, Any], indent: int) -> Iterator[str]:
    for name, node in tree.items():
        start = f"{' ' * indent}{name}:"
        if isinstance(node, dict):
            yield start
            yield from _yaml(node, indent + 2)
        else:
            value, origin = node
            yield f"{f'{start} {scalar(value)}':<{COLUMN}}  # {origin}"
