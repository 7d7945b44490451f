"""verl on a machine without a GPU: opt-in only.

verl 0.9.1 ships no CPU platform. With ``TURNKEY_DEVICE=cpu`` in the environment, or ``+turnkey/device=cpu`` on the
command line (which carries the variable to every worker), this package registers one and applies the patches of
:data:`PATCHES`, each to one module at the moment that module is imported.

Without the opt-in nothing here runs: the head node of a GPU cluster often has no GPU either.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from verl_turnkey.plugins.cpu.patches import PATCHES, TESTED_WITH, Patch
from verl_turnkey.plugins.verl_api.import_hooks import when_imported

__all__ = ["ENV_VAR", "PATCHES", "TESTED_WITH", "Patch", "activate", "opted_in"]

ENV_VAR = "TURNKEY_DEVICE"
_SWITCH = "turnkey/device=cpu"


def opted_in() -> bool:
    """Whether this process asked for the CPU: in its environment (workers) or on its command line (driver)."""
    if ENV_VAR in os.environ:
        return os.environ[ENV_VAR].strip().lower() == "cpu"
    return any(argument.lstrip("+") == _SWITCH for argument in sys.argv[1:])


def activate() -> None:
    """Register every patch and pass the opt-in to child processes. Nothing of verl is imported here."""
    os.environ[ENV_VAR] = "cpu"
    when_imported("omegaconf", _register_choices)
    for patch in PATCHES:
        when_imported(patch.target, patch.apply)


def _register_choices(_: ModuleType) -> None:
    """Every process can read a configuration with the recipe's choices, whoever composed it."""
    from verl_turnkey.plugins.config import machine

    machine.register()
