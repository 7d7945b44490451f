"""The run that a launch line describes, as every check reads it, and the requirements that many rules share.

Every refusal names the key to change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import EstimatorSpec
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.config.schema import (
    TurnkeyConfig,
    closest,
    credit_modify,
    credit_params,
    estimator_of,
    loss_of,
    loss_params,
)
from verl_turnkey.plugins.rollout.strategies import StrategySpec, read_strategy
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec  # imports torch
    from verl_turnkey.plugins.checks.sizes import Sizes

OURS, AGENT = AGENT_LOOPS
"""our agent loops: of environments, and of an agent of the user's own"""
ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
MODE, LOSS = "trainer.v1.trainer_mode", f"{ACTOR}.policy_loss.loss_mode"
N, LOG_PROBS = f"{ROLLOUT}.n", f"{ROLLOUT}.calculate_log_probs"
BATCH, FILTER = "data.train_batch_size", "algorithm.filter_groups.enable"
ESTIMATOR, KL = "algorithm.adv_estimator", "algorithm.use_kl_in_reward"


@dataclass(frozen=True)
class Run:
    """A configuration, and what several checks read from it."""

    config: DictConfig
    turnkey: TurnkeyConfig
    loops: Collection[str] = (OURS,)
    """the agent loops of the training rows"""
    use_critic: bool = False
    use_reference: bool = False
    files: Sequence[str] = ()
    """the training files on this machine"""

    def get(self, key: str) -> Any:
        """The value of ``key``; below ``turnkey`` with its defaults."""
        value = OmegaConf.select(self.config, key)
        if value is None and key.startswith("turnkey."):
            return reduce(lambda node, name: getattr(node, name, None), key.split(".")[1:], self.turnkey)
        return value

    def setting(self, key: str) -> str:
        """``key=value``, as on the launch line."""
        value = self.get(key)
        return f"{key}={str(value).lower() if isinstance(value, bool) else value}"

    @property
    def mode(self) -> str:
        return str(self.get(MODE))

    @property
    def our_trainer(self) -> bool:
        return self.mode.startswith("turnkey_")

    @property
    def trains(self) -> bool:
        """Whether it does more than validate once."""
        return not self.config.trainer.get("val_only")

    @cached_property
    def sizes(self) -> Sizes:
        from verl_turnkey.plugins.checks.sizes import sizes

        return sizes(self.config, self.turnkey, self.loops)

    @property
    def our_loops(self) -> list[str]:
        return sorted({*AGENT_LOOPS} & {*self.loops})

    @property
    def verls_loops(self) -> list[str]:
        from verl_turnkey.plugins.credit.rows import VERLS_LOOPS  # imports torch

        return sorted({*VERLS_LOOPS} & {*self.loops})

    @property
    def actor(self) -> Any:
        return self.config.actor_rollout_ref.actor

    @property
    def rollout(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    @property
    def pools(self) -> dict[str, tuple[int, int]]:
        """Nodes and GPUs per node of each pool; two pools may share a node."""
        trainer, rollout = self.config.trainer, self.rollout
        pools = {"trainer": (trainer.nnodes, trainer.n_gpus_per_node)}
        if self.mode.endswith("separate_async") and rollout.nnodes:
            pools[ROLLOUT] = (rollout.nnodes, rollout.n_gpus_per_node)
        return pools

    @property
    def estimator(self) -> EstimatorSpec | None:
        """The method, if it is one of this package; ``params``, ``modifiers``: of it."""
        return estimator_of(self.config)

    @property
    def params(self) -> Any:
        return credit_params(self.config, self.turnkey)

    @property
    def modifiers(self) -> Any:
        return credit_modify(self.config, self.turnkey)

    @property
    def columns(self) -> Collection[str]:
        """Those that the method reads with its modifiers."""
        return () if self.estimator is None else self.estimator.columns(self.params, self.modifiers)

    @property
    def columns_before(self) -> Collection[str]:
        """The columns of the state before a step that the method reads, by their names in ``info["extra"]``."""
        return () if self.estimator is None else self.estimator.names_before(self.modifiers)

    @property
    def loss(self) -> LossSpec | None:
        """The policy loss, if it is one of this package."""
        return loss_of(self.config)

    @property
    def loss_params(self) -> Any:
        return loss_params(self.config, self.turnkey)

    @property
    def loss_name(self) -> str:
        return str(self.actor.policy_loss.get("loss_mode", "vanilla"))

    @property
    def strategy(self) -> StrategySpec | None:
        """By which episodes fork; None: they do not."""
        selected = read_strategy(self.turnkey.rollout.strategy)
        return selected[0] if selected else None

    @property
    def trains_branches(self) -> bool:
        return self.strategy is not None and self.strategy.trains


def spread_of(engine: Any) -> int:
    """Over how many GPUs an engine of FSDP spreads a sequence."""
    return max(engine.ulysses_sequence_parallel_size, engine.fsdp_config.ulysses_sequence_parallel_size)


def needs_our_trainer(id: str, run: Run, setting: str) -> None:
    """Refuse ``setting`` with a trainer of verl."""
    if not run.our_trainer:
        refuse(id, f"{setting} needs a trainer of this package: set {MODE}=turnkey_{run.mode}, got {run.mode}")


def needs_on(id: str, run: Run, key: str, why: str) -> None:
    """Refuse ``key=false``."""
    if not run.get(key):
        refuse(id, f"{why}: set {key}=true")


def needs_off(id: str, run: Run, key: str, why: str) -> None:
    """Refuse ``key=true``."""
    if run.get(key):
        refuse(id, f"{why}: set {key}=false")


def needs_name(id: str, key: str, name: Any, known: Iterable[str]) -> None:
    """Refuse a name of ``key`` that is not ``known``, with the closest one."""
    if name not in known:
        refuse(id, f"there is no {key}={name!r}{closest(str(name), [*known])}")


def needs_our_loop(id: str, run: Run, setting: str, does: str) -> None:
    """Refuse ``setting`` where turnkey_env plays no training row; ``does``: what it alone does."""
    if OURS not in run.loops:
        refuse(id, f"{setting} has no effect with the agent loop {min(run.loops)}: only {OURS} {does}; drop it")


def warn_idle(id: str, setting: str, why: str) -> None:
    """Warn of a ``setting`` that nothing reads."""
    warn(id, f"{setting} has no effect: {why}")
