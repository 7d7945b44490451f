"""The ``turnkey:`` node as dataclasses.

The same dataclasses are parsed in the driver before Ray starts, in the trainer and in every agent-loop worker; the
recipe files are written from them (``turnkey recipe NAME``), so each parameter has one definition and one default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl_turnkey.advantage import EstimatorSpec, estimators
from verl_turnkey.advantage.params import check, did_you_mean, parse

if TYPE_CHECKING:  # torch is slow to import, and most commands do without
    from verl_turnkey.losses import LossSpec


@dataclass(frozen=True)
class EnvConfig:
    """Which environment runs the episodes, and where."""

    id: str | None = None
    """gymnasium id; null: every task of the data names its own"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """arguments of the environment, under those of the task"""
    hosts: int | Literal["auto"] = "auto"
    """environment host processes per agent-loop worker; auto: 1"""
    instances_per_host: int = 64
    """episodes a host holds at once; further ones wait, without a deadline"""
    step_timeout: float = 30.0
    """seconds one environment step may take"""
    reset_timeout: float = 120.0
    """seconds one environment start and reset may take"""
    probe: bool = True
    """start one environment in the driver before Ray, to find a bad environment or prompt budget in seconds"""

    def __post_init__(self) -> None:
        check(self.hosts == "auto" or int(self.hosts) > 0, "hosts", "auto or a positive integer", self.hosts)
        check(self.instances_per_host > 0, "instances_per_host", "positive", self.instances_per_host)
        check(self.step_timeout > 0, "step_timeout", "positive seconds", self.step_timeout)
        check(self.reset_timeout > 0, "reset_timeout", "positive seconds", self.reset_timeout)


@dataclass(frozen=True)
class RolloutConfig:
    """How an episode becomes rows."""

    layout: Literal["steps"] = "steps"
    """steps: one row per step"""
    history: int = 2
    """past turns shown in a prompt; fewer when data.max_prompt_length is too small for them"""
    max_turns: int = 50
    """model turns before an episode is truncated"""
    max_tokens_per_turn: int | None = None
    """tokens the model may write per turn; null: data.max_response_length"""
    invalid_action_penalty: float = 0.1
    """subtracted from the step's own return and score when the action did not parse or apply"""
    action_format: Literal["plain", "tags", "boxed"] = "plain"
    """where the action stands in the model's turn"""
    template: str = "default"
    """prompt template: a shipped name or the path of a text file"""
    system: str | None = None
    """system message; null: none"""
    stop: list[str] = field(default_factory=list)
    """strings that end a turn, besides the tokenizer's end of turn"""
    stop_token_ids: list[int] = field(default_factory=list)
    """token ids that end a turn"""

    def __post_init__(self) -> None:
        check(self.history >= 0, "history", "zero or more", self.history)
        check(self.max_turns > 0, "max_turns", "positive", self.max_turns)
        check(
            self.max_tokens_per_turn is None or self.max_tokens_per_turn > 0,
            "max_tokens_per_turn",
            "null or positive",
            self.max_tokens_per_turn,
        )
        check(
            self.invalid_action_penalty >= 0,
            "invalid_action_penalty",
            "zero or more (it is subtracted)",
            self.invalid_action_penalty,
        )


@dataclass(frozen=True)
class UpdateConfig:
    """How a batch of rows becomes optimizer steps."""

    mini_batches: int | None = None
    """optimizer steps per batch and epoch; null: train_batch_size / ppo_mini_batch_size, whatever the episode length"""
    order: Literal["batch", "reverse_turns"] = "batch"
    """batch: all turns at once; reverse_turns: turn after turn from the last, each weighed by the ratio that the later
    turns' updates left behind (SeeUPO)"""
    old_policy: Literal["turn", "iteration"] = "turn"
    """reverse_turns: the policy that ratios refer to, before the turn's update (SeeUPO's code) or at the beginning of
    the step (its paper)"""
    ratio_clip: float = 0.2
    """reverse_turns: the ratio of a turn and the accumulated one are clipped to [1 - ratio_clip, 1 + ratio_clip]"""

    def __post_init__(self) -> None:
        check(self.mini_batches is None or self.mini_batches > 0, "mini_batches", "positive", self.mini_batches)
        check(0 < self.ratio_clip < 1, "ratio_clip", "a number in (0, 1)", self.ratio_clip)
        check(
            self.order == "batch" or self.mini_batches is None,
            "mini_batches",
            "null with order=reverse_turns: each turn is one optimizer step per epoch",
            self.mini_batches,
        )


@dataclass(frozen=True)
class LogConfig:
    """What is written to disk beside verl's own logs."""

    trajectories: str | None = None
    """folder for one JSON line per training and validation episode; null: none"""


@dataclass(frozen=True)
class TurnkeyConfig:
    """The whole node. ``credit`` and ``loss`` are parsed by the estimator's and the loss's own dataclass."""

    credit: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    log: LogConfig = field(default_factory=LogConfig)
    modules: list[str] = field(default_factory=list)
    """your own estimators and environments: dotted modules or .py files, for driver, trainer and environment hosts"""


def turnkey_config(config: Mapping[str, Any]) -> TurnkeyConfig:
    """Parse the ``turnkey`` node of a whole verl configuration; an absent node means all defaults.

    Raises:
        ConfigError: an unknown key (with the closest match), a wrong type or a value out of range.
    """
    from omegaconf import OmegaConf

    node = config.get("turnkey")
    plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    return parse(TurnkeyConfig, plain or {}, "turnkey")


def estimator_of(config: Mapping[str, Any]) -> EstimatorSpec | None:
    """Our estimator that ``algorithm.adv_estimator`` selects, or None for one of verl's own."""
    name = str(getattr(config["algorithm"]["adv_estimator"], "value", config["algorithm"]["adv_estimator"]))
    return estimators().get(name.removeprefix("turnkey/"))


def credit_params(config: Mapping[str, Any], turnkey: TurnkeyConfig) -> Any:
    """The selected estimator's parameters as its own frozen dataclass; None for an estimator of verl's.

    Raises:
        ConfigError: unknown or ill-typed parameter under ``turnkey.credit``.
    """
    spec = estimator_of(config)
    if spec is None:
        return None
    return parse(spec.params, turnkey.credit, "turnkey.credit")


def loss_of(config: Mapping[str, Any]) -> LossSpec | None:
    """Our policy loss that ``actor_rollout_ref.actor.policy_loss.loss_mode`` selects, or None for one of verl's own."""
    from verl_turnkey.losses import losses

    name = str(config["actor_rollout_ref"]["actor"]["policy_loss"].get("loss_mode", "vanilla"))
    return losses().get(name.removeprefix("turnkey/"))


def loss_params(config: Mapping[str, Any], turnkey: TurnkeyConfig) -> Any:
    """The selected loss's parameters as its own frozen dataclass; None for a loss of verl's.

    Raises:
        ConfigError: unknown or ill-typed parameter under ``turnkey.loss``.
    """
    spec = loss_of(config)
    return None if spec is None else parse(spec.params, turnkey.loss, "turnkey.loss")


def closest(name: str, choices: list[str]) -> str:
    """``"; did you mean 'x'?"``, or the list of choices, to end an error with."""
    return did_you_mean(name, choices) or f"; choices: {', '.join(sorted(choices))}"
