"""An episode while it is played, and the rows that verl gets of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_turnkey.advantage import make_record
from verl_turnkey.envs.rewards import Composition, RewardStep
from verl_turnkey.plugins.credit.metrics import REWARD


@dataclass(frozen=True)
class Prompt:
    """What the model is shown."""

    ids: list[int]
    images: list[Any] | None = None


@dataclass(frozen=True)
class Generated:
    """What the model wrote."""

    ids: list[int]
    log_probs: list[float] | None
    text: str
    extra_fields: dict[str, Any]
    num_preempted: int
    seconds: float


@dataclass(frozen=True)
class PlayedStep:
    """One step of the episode, the last to know how it ends: ``record`` is filled in until then."""

    prompt: Prompt
    turn: Generated
    record: dict[str, Any]
    observation: str
    invalid: str | None
    """why the action was none, if it was"""
    unparsed: bool
    """the text held no action in the format at all"""
    seconds: float
    """of the environment"""
    extra: Mapping[str, Any]
    """``info["extra"]`` of the state the action was taken in"""
    next_extra: Mapping[str, Any]
    """of the state it led to; the same object when it did not reach the environment"""

    def for_reward(self, task: str, row: Mapping[str, Any], success: bool) -> RewardStep:
        """The step as the reward components see it."""
        return RewardStep(
            observation=self.observation,
            action=self.record["action"],
            valid=self.record["valid"],
            unparsed=self.unparsed,
            reason=self.invalid,
            reward=self.record["reward"],
            success=success,
            terminated=self.record["terminated"],
            truncated=self.record["truncated"],
            tokens=len(self.turn.ids),
            text=self.turn.text,
            task=task,
            row=row,
            extra=self.extra,
            next_extra=self.next_extra,
        )

    def for_log(self) -> dict[str, Any]:
        """What the record does not say."""
        return {"observation": self.observation, "text": self.turn.text, "invalid": self.invalid}


@dataclass
class Episode:
    """The steps played so far."""

    steps: list[PlayedStep] = field(default_factory=list)
    task: str = ""
    success: bool = False
    rewards: dict[str, float] = field(default_factory=dict)
    """what each reward component gave to the whole episode, by label"""

    def end(self, success: bool | None) -> None:
        """All steps are known; ``success``: what the environment said last of the task, None when it does not say.

        It then solved the task by ending with a positive reward.
        """
        last = self.steps[-1].record
        self.success = success if success is not None else last["terminated"] and last["reward"] > 0
        for step in self.steps:
            step.record["success"] = self.success

    async def apply_rewards(self, composition: Composition, row: Mapping[str, Any]) -> None:
        """Put the rewards of ``turnkey.rewards`` beside the environment's, once all steps are known.

        ``row``: the fields of the data row.

        Raises:
            RewardError: a component fails, or the sum of the components is too large.
        """
        last = len(self.steps) - 1
        shaped = await composition.run(
            [step.for_reward(self.task, row, self.success and t == last) for t, step in enumerate(self.steps)]
        )
        for step, reward in zip(self.steps, shaped.rewards, strict=True):
            step.record["composed_reward"] = reward
        self.rewards = shaped.sums

    def info(self) -> dict[str, float]:
        """verl's ``reward_extra_info``: the same keys as floats on every row, or verl drops the whole group."""
        records = [step.record for step in self.steps]
        turns = max(1, len(records))
        return {
            "acc": float(self.success),
            "failed": float(not records),
            "episode_return": float(sum(record["reward"] for record in records)),
            "episode_length": float(len(records)),
            "invalid_rate": sum(not record["valid"] for record in records) / turns,
            "unparsed_rate": sum(step.unparsed for step in self.steps) / turns,
            **{f"{REWARD}{label}": value for label, value in self.rewards.items()},
        }


@dataclass(frozen=True)
class RowBuilder:
    """Builds the rows: one constructor, every field always set; one that a row lacks is lost for the whole batch.

    Args:
        eos: token that stands for an empty text.
        log_probs: ``actor_rollout_ref.rollout.calculate_log_probs``.
        labels: of the reward components.
    """

    eos: int
    log_probs: bool
    labels: Sequence[str] = ()

    def played(self, episode: Episode) -> list[AgentLoopOutput]:
        """One row per step, of an episode whose rewards are composed."""
        info = episode.info()
        score = float(sum(step.record["composed_reward"] for step in episode.steps))
        return [
            self._row(
                prompt=step.prompt,
                response_ids=step.turn.ids,
                response_mask=[1] * len(step.turn.ids),
                log_probs=step.turn.log_probs,
                score=score,
                num_turns=2 * (t + 1),
                metrics=AgentLoopMetrics(
                    generate_sequences=step.turn.seconds,
                    tool_calls=step.seconds,
                    num_preempted=step.turn.num_preempted,
                ),
                extra_fields={
                    **step.turn.extra_fields,
                    "turnkey": make_record([step.record]),
                    "reward_extra_info": dict(info),
                },
            )
            for t, step in enumerate(episode.steps)
        ]

    def failed(self, reason: str, global_steps: int) -> list[AgentLoopOutput]:
        """The one masked row of an episode that broke down, whatever it had played before.

        ``global_steps``: the training step that asked for it, which began with the weights of the step before.
        """
        version = max(0, global_steps - 1)
        row = self._row(
            prompt=Prompt([]),
            response_ids=[],
            response_mask=[],
            log_probs=None,
            score=0.0,
            num_turns=0,
            metrics=AgentLoopMetrics(),
            extra_fields={
                # verl takes these two for the age of the row and cannot do without.
                "min_global_steps": version,
                "max_global_steps": version,
                "turnkey": make_record([], failed=reason),
                "reward_extra_info": Episode(rewards=dict.fromkeys(self.labels, 0.0)).info(),
            },
        )
        return [row]

    def _row(
        self,
        *,
        prompt: Prompt,
        response_ids: list[int],
        response_mask: list[int],
        log_probs: list[float] | None,
        score: float,
        num_turns: int,
        metrics: AgentLoopMetrics,
        extra_fields: dict[str, Any],
    ) -> AgentLoopOutput:
        prompt_ids = prompt.ids
        if not response_ids:  # verl cannot hold an empty response: one masked token stands for it
            prompt_ids, response_ids, response_mask, log_probs = prompt_ids or [self.eos], [self.eos], [0], [0.0]
        fields: dict[str, Any] = {}
        if self.log_probs:
            # verl's asynchronous client answers with an empty list where the other has None.
            if log_probs is None or len(log_probs) != len(response_ids):
                raise RuntimeError(
                    "the server returned no log-probabilities although actor_rollout_ref.rollout.calculate_log_probs "
                    "is true: set it to false for a server that cannot"
                )
            fields["response_logprobs"] = log_probs
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=response_mask,
            multi_modal_data={"images": prompt.images} if prompt.images else {},
            reward_score=score,
            num_turns=num_turns,
            metrics=metrics,
            extra_fields={**extra_fields, "turn_scores": [], "tool_rewards": []},
            **fields,
        )


def extras(info: dict[str, Any], next_info: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``info["extra"]`` before a step and after it; one and the same object when the step brought nothing about."""
    extra, next_extra = info.setdefault("extra", {}), next_info.setdefault("extra", {})
    if next_info["invalid"] and next_extra == extra:  # a refused action
        next_extra = next_info["extra"] = extra
    return extra, next_extra


def countable(extra: Mapping[str, Any], next_extra: Mapping[str, Any]) -> dict[str, float | str]:
    """The columns ``extra.<name>`` that an estimator may read: numbers and texts of ``info["extra"]``, lists by length.

    Those of the state that the action led to. What never reached the environment did nothing: 0 in the place of a
    number.
    """
    columns: dict[str, float | str] = {}
    for name, value in next_extra.items():
        if isinstance(value, str):
            columns[name] = value
        elif isinstance(value, bool | int | float | list | tuple):
            number = float(len(value) if isinstance(value, list | tuple) else value)
            columns[name] = 0.0 if next_extra is extra else number
    return columns
