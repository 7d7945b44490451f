"""Stage two of the plugin: the callbacks that put us into verl, once its modules appear; none raises into verl."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS, TRAINERS, claim, guarded

LOOP_CLASSES = (
    "verl_turnkey.plugins.gateway.loop.PolicyUserLoop",
    "verl_turnkey.plugins.gateway.loop.UserAgentLoop",
)


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
