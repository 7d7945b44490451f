"""The run that a launch line describes, as every check reads it, what many rules require, and the sizes of a step.

Every refusal names the key to change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import EstimatorSpec, ValueHead
from verl_turnkey.plugins.checks.files import ROLLOUTS, columns, local_parquet, rows, training_loops
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.schema import (
    TurnkeyConfig,
    closest,
    credit_modify,
    credit_params,
    estimator_of,
    loss_of,
    loss_params,
    turnkey_config,
)
from verl_turnkey.plugins.rollout.strategies import StrategySpec, read_strategy
from verl_turnkey.plugins.rollout.strategies.registry import Most, most_of_group, times
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS, VERLS_LOOPS

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec  # imports torch


OURS, AGENT = AGENT_LOOPS
"""our agent loops: of environments, and of an agent of the user's own"""
ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
MODE, LOSS = "trainer.v1.trainer_mode", f"{ACTOR}.policy_loss.loss_mode"
N, LOG_PROBS = f"{ROLLOUT}.n", f"{ROLLOUT}.calculate_log_probs"
BATCH, FILTER = "data.train_batch_size", "algorithm.filter_groups.enable"
ESTIMATOR, KL = "algorithm.adv_estimator", "algorithm.use_kl_in_reward"


@dataclass(frozen=True)
class CheckedRun:
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

    def value_text(self, key: str) -> str:
        """The value of ``key``, as on the launch line."""
        value = self.get(key)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def setting(self, key: str) -> str:
        """``key=value``, as on the launch line."""
        return f"{key}={self.value_text(key)}"

    def needs_our_trainer(self, id: str, /, **values: object) -> None:
        """Refuse what the rule is about with a trainer of verl."""
        if not self.our_trainer:
            refuse(id, mode=self.mode, **values)

    def needs_our_loop(self, id: str, /, **values: object) -> None:
        """Refuse what the rule is about where turnkey_env plays no training row."""
        if OURS not in self.loops:
            refuse(id, loop=min(self.loops), **values)

    def needs_on(self, id: str, key: str, /, **values: object) -> None:
        """Refuse ``key=false``."""
        if not self.get(key):
            refuse(id, **values)

    def needs_off(self, id: str, key: str, /, **values: object) -> None:
        """Refuse ``key=true``."""
        if self.get(key):
            refuse(id, **values)

    @staticmethod
    def needs_name(id: str, name: Any, names: Iterable[str], /, **values: object) -> None:
        """Refuse a ``name`` that is not among ``names``, with the closest one."""
        if name not in names:
            refuse(id, name=name, choices=closest(str(name), [*names]), **values)

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
        return sizes(self.config, self.turnkey, self.loops)

    @property
    def our_loops(self) -> list[str]:
        return sorted({*AGENT_LOOPS} & {*self.loops})

    @property
    def verls_loops(self) -> list[str]:
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


def run_of(config: DictConfig) -> CheckedRun:
    """The run of a configuration that has passed the checks."""
    # As verl.trainer.ppo.utils.need_critic decides, without its warning.
    enabled = config.critic.enable
    use_critic = str(config.algorithm.adv_estimator) == "gae" if enabled is None else bool(enabled)
    return CheckedRun(config, turnkey_config(config), sorted(training_loops(config)), use_critic)


def spread_of(engine: Any) -> int:
    """Over how many GPUs an engine of FSDP spreads a sequence."""
    return max(engine.ulysses_sequence_parallel_size, engine.fsdp_config.ulysses_sequence_parallel_size)


def heads_of(config: DictConfig, turnkey: TurnkeyConfig) -> tuple[ValueHead, ...]:
    """The heads that the method reads of a critic; none: verl's one value is enough."""
    spec = estimator_of(config)
    return () if spec is None else spec.heads(credit_params(config, turnkey))


def updates_of_a_step(config: DictConfig) -> int:
    """Updates per training step: more than one with ``separate_async``."""
    mode, key = str(config.trainer.v1.trainer_mode), "trainer.v1.separate_async.parameter_sync_step"
    return int(OmegaConf.select(config, key)) if mode.removeprefix("turnkey_") == "separate_async" else 1


@dataclass(frozen=True)
class Span:
    """A lower and an upper bound; ``high=None``: no upper bound is known."""

    low: int
    high: int | None

    @property
    def most(self) -> int:
        """``high`` where a bound is known."""
        assert self.high is not None
        return self.high

    def __mul__(self, number: int) -> Span:
        return Span(self.low * number, None if self.high is None else self.high * number)

    def __str__(self) -> str:
        if self.high is None:
            return f"{self.low} or more"
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Sizes:
    """Of one training step."""

    tasks: int
    """groups that are played, without those that verl's group filter replaces"""
    rollouts: Span
    """of each task"""
    episodes: Span
    """of all tasks, without branches"""
    trained_groups: Span
    """groups with trained episodes, including those from the buffer"""
    stored: int
    """stored episodes that may join at most"""
    trajectories: Span
    """trained trajectories: episodes of trained groups, trained branches, stored episodes"""
    rows: Span | None
    """trained rows; None: a user's own loop decides"""
    measured: int | None
    """branches and queries that only measure a state, at most; None: any number"""


def sizes(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> Sizes:
    """``loops``: the agent loops of the training rows."""
    groups, updates, rollout = turnkey.groups, updates_of_a_step(config), turnkey.rollout
    tasks, n = int(config.data.train_batch_size), int(config.actor_rollout_ref.rollout.n)
    rollouts = _rollouts(config, turnkey)
    even = groups.allocation != "even" or rollouts == Span(n, n)
    episodes = Span(tasks * n, tasks * n) if even else rollouts * tasks
    trained_groups, most_trained = Span(tasks, tasks), episodes.most
    our_trainer = str(config.trainer.v1.trainer_mode).startswith("turnkey_")
    if our_trainer and groups.keep < 1:
        number = updates * max(1, groups.kept(tasks / updates))
        trained_groups = Span(number, number) if groups.keep_by == "groups" else Span(updates, tasks)
        most_trained = min(episodes.most, trained_groups.most * rollouts.most)
    drawn = updates * min(groups.buffer, tasks // updates) if our_trainer else 0
    stored = (tasks * groups.replay if our_trainer else 0) + drawn * rollouts.most
    fewest_rows = episodes.low if trained_groups.low == tasks else min(episodes.low, trained_groups.low * rollouts.low)
    if {*loops} - {*AGENT_LOOPS, *VERLS_LOOPS}:
        return Sizes(tasks, rollouts, episodes, trained_groups, stored, Span(fewest_rows, None), None, 0)
    our_loop = bool({*AGENT_LOOPS} & {*loops})
    turns = rollout.max_turns if our_loop else 1
    of_group = n if even else rollouts.most
    group = Most(of_group, of_group * turns, 0)
    if our_loop and (strategy := read_strategy(rollout.strategy)):
        tokens = rollout.max_tokens_per_turn or config.data.max_response_length
        limits = (rollout.branch_tokens, rollout.branch_steps)
        group = most_of_group(*strategy, of_group, turns, tokens=tokens, limits=limits)
    trajectories, trained = most_trained, most_trained * turns
    if group.trajectories != of_group:  # with trained branches all groups are kept
        trajectories, trained = times(tasks, group.trajectories), times(tasks, group.turns)
    return Sizes(
        tasks,
        rollouts,
        episodes,
        Span(trained_groups.low, trained_groups.most + drawn),
        stored,
        Span(fewest_rows, None if trajectories is None else trajectories + stored),
        Span(fewest_rows, None if trained is None else trained + stored * turns),
        times(tasks, group.measured),
    )


def _rollouts(config: DictConfig, turnkey: TurnkeyConfig) -> Span:
    """Rollouts per task: from the allocation, the data's own column, or ``rollout.n``."""
    n = int(config.actor_rollout_ref.rollout.n)
    if turnkey.groups.allocation != "even":
        return Span(*turnkey.groups.bounds(n))
    files = [file for file in local_parquet(config) if ROLLOUTS in columns(file)]
    numbers = [number for file in files for (number,) in rows(file, [ROLLOUTS])]
    return Span(min(numbers), max(numbers)) if numbers and all(isinstance(k, int) for k in numbers) else Span(n, n)


@dataclass(frozen=True)
class Updates:
    """Optimizer steps of one update of a training step: ``mini_batches x epochs``."""

    mini_batches: int
    epochs: int
    exact: bool
    """False: the number is an upper bound"""

    @property
    def steps(self) -> int:
        return self.mini_batches * self.epochs


def optimizer_steps(config: DictConfig, turnkey: TurnkeyConfig, size: Sizes, role: str = "actor") -> Updates:
    """The optimizer steps of the actor or the critic, with the trainers of this package."""
    part = config.critic if role == "critic" else config.actor_rollout_ref.actor
    update, groups, epochs = turnkey.update, turnkey.groups, int(part.ppo_epochs)
    if role == "actor" and update.order == "reverse_turns":
        return Updates(turnkey.rollout.max_turns, epochs, exact=False)
    number, exact = update.mini_batches, True
    if number is None:
        update_tasks = size.tasks / updates_of_a_step(config)
        if groups.keep_by == "groups" and groups.keep < 1:
            update_tasks = max(1, groups.kept(update_tasks))
        exact = groups.keep_by == "groups"
        number = math.ceil(update_tasks / part.ppo_mini_batch_size)
    loss = loss_of(config)
    if role == "actor" and loss is not None and loss.compares_groups:
        most = size.trained_groups.most  # a mini-batch has whole groups
    else:
        trained_episodes = size.episodes.most + size.stored  # trained branches are dealt with their episode
        most = trained_episodes if size.trajectories.high is None else min(trained_episodes, size.trajectories.high)
    number = min(number, -(-most // updates_of_a_step(config)))  # a mini-batch has at least one
    return Updates(number, epochs, exact)
