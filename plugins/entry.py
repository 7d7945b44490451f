"""What verl loads (entry point group ``verl.plugins``): standard library only, cannot fail.

verl swallows an exception raised here, and every process that says ``import verl`` pays for what is imported here.
So stage one only leaves callbacks behind. Stage two, the functions below, runs piece by piece when verl's own modules
appear, and keeps a record of each piece; none raises into verl.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS, TRAINERS, claim, guarded

failure: str | None = None
"""Traceback of stage one, if it broke; shown by ``turnkey doctor``."""

LOOP_CLASSES = ("verl_turnkey.plugins.gateway.loop.PolicyUserLoop", "verl_turnkey.plugins.gateway.loop.UserAgentLoop")


def switches(argv: list[str]) -> list[str]:
    """Command-line overrides that ask for this package (``+turnkey=gigpo``, ``trainer_mode=turnkey_sync``, ...)."""
    named = ("trainer_mode=turnkey_", "default_agent_loop=turnkey_", "adv_estimator=turnkey/")
    return [arg for arg in argv if arg.lstrip("+~").startswith("turnkey") or any(name in arg for name in named)]


def _banner() -> None:
    overrides = switches(sys.argv[1:])
    if not overrides or os.environ.get("TURNKEY_BANNER_SHOWN"):
        return
    # Child processes that inherit the command line (spawned data loaders) stay silent.
    os.environ["TURNKEY_BANNER_SHOWN"] = "1"
    from importlib.metadata import version

    for stream in (sys.stdout, sys.stderr):  # the header names files and environments on any terminal
        getattr(stream, "reconfigure", dict)(errors="backslashreplace")
    print(f"verl-turnkey {version('verl-turnkey')} is loaded: {' '.join(overrides)}", flush=True)


def _start() -> None:
    from verl_turnkey.plugins import cpu
    from verl_turnkey.plugins.verl_api.import_hooks import when_imported

    _banner()
    if cpu.opted_in():
        cpu.activate()
    when_imported("hydra.core.plugins", register_search_path)
    when_imported("verl.utils.config", register_validation)
    when_imported("verl.trainer.ppo.core_algos", register_functions)
    when_imported("verl.trainer.ppo.ray_trainer", register_former_trainer)
    when_imported("verl.trainer.ppo.v1", register_trainers)
    when_imported("verl.experimental.agent_loop.agent_loop", register_agent_loops)
    for name in ("qwen2_vl", "glm4v"):
        when_imported(f"verl.models.transformers.{name}", unpack_tower)


def register_search_path(module: ModuleType) -> None:
    """Let Hydra find the groups ``turnkey``, ``turnkey/loss``, ``/modifier``, ``/env``, ``/preset`` and ``/device``."""

    def register() -> None:
        from verl_turnkey.plugins.config.command_line import refuse_split
        from verl_turnkey.plugins.config.composing import TurnkeySearchPath

        refuse_split()
        module.Plugins.instance().register(TurnkeySearchPath)

    guarded("config", "hydra search path", register)


def register_validation(module: ModuleType) -> None:
    """Check the configuration in the driver, before Ray starts (verl.utils.config.validate_config)."""

    def register() -> None:
        original = module.validate_config

        @functools.wraps(original)
        def validate_config(config: Any, use_reference_policy: bool, use_critic: bool) -> None:
            from verl_turnkey.plugins.checks.driver import validate

            validate(config, use_reference_policy, use_critic, original)

        module.validate_config = validate_config  # pyright: ignore[reportAttributeAccessIssue]

    guarded("config", "driver validation", register)


def register_functions(module: ModuleType) -> None:
    """Our estimators and losses."""
    from verl_turnkey.plugins import register

    register.register_estimators(module)
    register.register_losses(module)


def register_former_trainer(module: ModuleType) -> None:
    """Refuse our keys where a program's trainer derives from verl's former one, as those of many projects do."""

    def register() -> None:
        original = module.RayPPOTrainer.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            from verl_turnkey.plugins.checks.keys import refuse_former_trainer

            refuse_former_trainer(type(self), kwargs.get("config", args[0] if args else None))
            original(self, *args, **kwargs)

        module.RayPPOTrainer.__init__ = init

    guarded("trainer", "former trainer", register)


def register_trainers(module: ModuleType) -> None:
    """Ours for each of verl's three V1 trainers."""

    def register(name: str, cls: str) -> None:
        from verl_turnkey.plugins.trainer import trainer

        registry = importlib.import_module("verl.trainer.ppo.v1.trainer_base").TRAINER_REGISTRY
        claim("trainer", name, registry, getattr(trainer, cls))

    for name, cls in TRAINERS.items():
        guarded("trainer", name, functools.partial(register, name, cls))


def register_agent_loops(module: ModuleType) -> None:
    """By dotted name: the class is imported when a rollout first needs it."""

    def register(name: str, target: str) -> None:
        claim("agent_loop", name, module._agent_loop_registry, {"_target_": target})

    for name, target in zip(AGENT_LOOPS, LOOP_CLASSES, strict=True):
        guarded("agent_loop", name, functools.partial(register, name, target))


def unpack_tower(module: ModuleType) -> None:
    """Make verl's forward of Qwen2-VL, Qwen2.5-VL and GLM-4V accept pictures, and rows without any."""

    def register() -> None:
        from verl_turnkey.plugins.verl_api import internals

        internals.unpack_tower(module)

    guarded("model", module.__name__, register)


try:
    _start()
except Exception:
    failure = traceback.format_exc()
    print(f"verl-turnkey could not start; run `turnkey doctor`.\n{failure}", file=sys.stderr, flush=True)
