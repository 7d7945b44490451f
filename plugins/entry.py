"""What verl loads (entry point group ``verl.plugins``): stage one, standard library only, cannot fail.

verl swallows an exception raised here, and every process that says ``import verl`` pays for what is imported here.
So this file only leaves callbacks behind; stage two (:mod:`verl_turnkey.plugins.registration`) runs piece by piece
when verl's own modules appear, and keeps a record of each piece.
"""

from __future__ import annotations

import os
import sys
import traceback

failure: str | None = None
"""Traceback of stage one, if it broke; shown by ``turnkey doctor``."""


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

    def stage_two(module_name: str, function_name: str):
        def callback(module: object) -> None:
            from importlib import import_module

            getattr(import_module(f"verl_turnkey.plugins.{module_name}"), function_name)(module)

        return callback

    when_imported("hydra.core.plugins", stage_two("registration", "register_search_path"))
    when_imported("verl.utils.config", stage_two("registration", "register_validation"))
    when_imported("verl.trainer.ppo.core_algos", stage_two("registries", "register_estimators"))
    when_imported("verl.trainer.ppo.core_algos", stage_two("registries", "register_losses"))
    when_imported("verl.trainer.ppo.ray_trainer", stage_two("registration", "register_former_trainer"))
    when_imported("verl.trainer.ppo.v1", stage_two("registration", "register_trainers"))
    when_imported("verl.experimental.agent_loop.agent_loop", stage_two("registration", "register_agent_loops"))


try:
    _start()
except Exception:
    failure = traceback.format_exc()
    print(f"verl-turnkey could not start; run `turnkey doctor`.\n{failure}", file=sys.stderr, flush=True)
