"""Our estimators and losses in verl's registries; called again once a user's modules have added theirs.

Ray workers run :func:`verify` and :func:`configure`: this file imports nothing that they do not need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from types import ModuleType
from typing import Any

from verl_turnkey.plugins.verl_api import ledger
from verl_turnkey.plugins.verl_api.ledger import claim, guarded, loss_names


def register_estimators(module: ModuleType | None = None) -> None:
    """Every estimator of :mod:`verl_turnkey.advantage`, also those a user's module added (core_algos)."""
    core_algos = module or sys.modules["verl.trainer.ppo.core_algos"]

    def register() -> None:
        from verl_turnkey.advantage import estimators
        from verl_turnkey.plugins.credit.estimator import verl_estimator

        _claim_functions("estimator", estimators(), core_algos.ADV_ESTIMATOR_REGISTRY, verl_estimator)

    guarded("estimator", "*", register)


def register_losses(module: ModuleType | None = None) -> None:
    """The policy losses of :mod:`verl_turnkey.losses` (core_algos)."""
    core_algos = module or sys.modules["verl.trainer.ppo.core_algos"]

    def register() -> None:
        from verl_turnkey.plugins.actor.loss import verl_loss

        _claim_functions("loss", loss_names(), core_algos.POLICY_LOSS_REGISTRY, verl_loss)

    guarded("loss", "*", register)


def verify(worker: Any) -> None:
    """Check that the process of a training worker has loaded the plugin."""
    ledger.verify(("estimator",))


def configure(worker: Any, modules: Sequence[str], name: str, params: Any) -> None:
    """Set the parameters of our loss ``name``, which one of ``modules`` (``turnkey.modules``) may register."""
    from verl_turnkey.envs.user_modules import import_modules
    from verl_turnkey.plugins.actor import loss

    import_modules(modules, kinds=("losses",))
    register_losses()
    ledger.verify(("loss",), (name,))
    loss.use(worker, name, params)


def _claim_functions(
    kind: str, names: Iterable[str], registry: MutableMapping[str, Any], make: Callable[[str], Any]
) -> None:
    """``make(name)`` under each name and as ``turnkey/<name>``."""
    for name in names:
        for alias in (name, f"turnkey/{name}"):
            # One function per name for the life of the process: verl compares them by identity.
            function = registry.get(alias)
            claim(kind, alias, registry, function if getattr(function, "turnkey", False) else make(name))
