"""The state of an episode, and the rows that verl gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import time
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.advantage import make_record
from verl_turnkey.envs.rewards import Composition, GroupMember, RewardError, RewardStep, Shaped, column_clash
from verl_turnkey.plugins.credit.metrics import BRANCHING
from verl_turnkey.plugins.credit.rows import BREAK, CACHED, OBSERVED
from verl_turnkey.plugins.log.schema import COMPONENT
from verl_turnkey.plugins.rollout.columns import ROLE, ROLE_OUTCOME
from verl_turnkey.plugins.rollout.merging import merge_rows, without_steps


@dataclass(frozen=True)
class Prompt:
    """The prompt of one step."""

    ids: Sequence[int]
    images: list[Any] | None = None
    """all images in the prompt"""
    broke: str | None = None
    """why a conversation's prompt does not extend the one before: ``full``, ``tools``, ``thinking`` or ``boundary``"""
    cut: bool = False
    """it shows fewer past turns, or less of them, than configured, because they did not fit"""
    observed: Sequence[tuple[int, int]] | None = None
    """where the last observation is, see ``OBSERVED`` in :mod:`~verl_turnkey.plugins.credit.metrics`; None: unknown"""
    messages: Sequence[Mapping[str, Any]] | None = None
    """what the ids render, where the server takes messages"""
    request: str | None = None
    """the message that asks for a summary of the turns so far; None: the prompt shows an observation"""


@dataclass(frozen=True)
class Generated:
    """One response of the model."""

    ids: list[int]
    log_probs: list[float] | None
    text: str
    extra_fields: dict[str, Any]
    num_preempted: int
    seconds: float
    stop_reason: str | None = None
    """as the server reports it"""
    ended: float = field(default_factory=time, compare=False)
    """Unix time in seconds at which it was there"""

    @classmethod
    def of(cls, output: TokenOutput, tokenizer: Any, seconds: float, since: float = 0.0) -> Generated:
        """What the server returned after ``seconds``, ``since`` seconds ago."""
        ids = list(output.token_ids)
        return cls(
            ids=ids,
            log_probs=None if output.log_probs is None else list(output.log_probs),
            text=tokenizer.decode(ids, skip_special_tokens=True),
            extra_fields=dict(output.extra_fields),
            num_preempted=-1 if output.num_preempted is None else output.num_preempted,
            seconds=seconds,
            stop_reason=output.stop_reason,
            ended=time() - since,
        )

    @property
    def version(self) -> int | None:
        """The newest weights version that wrote a token of it; None if the server reports none."""
        newest = self.extra_fields.get("max_global_steps")
        return None if newest is None else int(newest)


@dataclass(frozen=True)
class OtherTurn:
    """A turn of another role."""

    role: str
    by: str
    """random, or the name of the model"""
    observation: str
    response: str
    action: str | None
    invalid: str | None
    """why the action is invalid; None if it is valid"""

    @property
    def logged(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class PlayedStep:
    """One step of the episode; ``record`` is complete when the episode has ended."""

    prompt: Prompt
    turn: Generated
    record: dict[str, Any]
    observation: str
    """what the agent saw before it"""
    answer: str
    """the environment's answer; the observation again if the action never reached it"""
    invalid: str | None
    """why the action is invalid; None if it is valid"""
    unparsed: bool
    """the response contained no action in the format"""
    seconds: float
    """duration of the environment's step"""
    extra: Mapping[str, Any]
    """``info["extra"]`` of the state the action was taken in"""
    next_extra: Mapping[str, Any]
    """``info["extra"]`` of the next state; the same object if the action was not applied"""
    images: Sequence[Any] = ()
    """the pictures that this state added, PIL images or arrays of (height, width, 3) bytes"""
    content: str | None = None
    """the response after its thoughts; None: thoughts were not cut off"""
    reward: float = 0.0
    """the environment's own, without what later answers pay by role"""
    pays: Mapping[str, float] = field(default_factory=dict)
    """role -> what the environment's answer pays it, on its last turn so far"""
    outcome: Mapping[str, float] = field(default_factory=dict)
    """role -> the part of that which is for the episode as a whole"""
    others: Sequence[OtherTurn] = ()
    """turns of roles that the policy does not play, between it and the next one"""

    @property
    def role(self) -> Any:
        """Who took it; None: the environment has no roles."""
        return self.extra.get(ROLE)

    def copied(self) -> PlayedStep:
        """The same step with a record of its own."""
        return replace(self, record={**self.record, "extra": {**self.record["extra"]}})

    def for_reward(self, task: str, row: Mapping[str, Any], success: bool) -> RewardStep:
        """The step as the reward components see it."""
        return RewardStep(
            observation=self.observation,
            action=self.record["action"],
            valid=self.record["valid"],
            unparsed=self.unparsed,
            reason=self.invalid,
            reward=self.record["reward"],
            outcome=self.record.get("outcome", 0.0),
            success=success,
            terminated=self.record["terminated"],
            truncated=self.record["truncated"],
            tokens=len(self.turn.ids),
            text=self.turn.text,
            content=self.content,  # pyright: ignore[reportArgumentType]
            task=task,
            row=row,
            extra=self.extra,
            next_extra=self.next_extra,
        )

    @property
    def cached(self) -> dict[str, list[float]]:
        """The share of the prompt that the server had cached, as an extra field; empty if it reports none."""
        tokens = self.turn.extra_fields.get("num_cached_tokens")
        return {} if tokens is None else {CACHED: [tokens / len(self.prompt.ids)]}


@dataclass(frozen=True)
class Opening:
    """What others did before the policy's first turn."""

    turns: Sequence[OtherTurn] = ()
    pays: Mapping[str, float] = field(default_factory=dict)
    outcome: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Episode:
    """The steps played so far."""

    steps: list[PlayedStep] = field(default_factory=list)
    task: str = ""
    roles: Sequence[str] = ()
    """those that the environment declares"""
    opening: Opening | None = None
    """what came before the first step where others play the other roles; None: the policy plays all"""
    success: bool = False
    rewards: dict[str, float] = field(default_factory=dict)
    """sum of each reward component over the episode, by label, including those with a column"""
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """the same per step, after the rewards are composed"""
    started: float = field(default_factory=time)
    """Unix time in seconds"""
    seconds_start: float = 0.0
    """in the environment's start, without waiting for a slot"""
    seconds_waiting: float = 0.0
    """waiting for a slot to run the environment"""
    other_calls: Sequence[Mapping[str, Any]] = ()
    """requests of an agent that another model than the policy answered"""
    branch: int = 0
    """its branch of the rollout; 0: the rollout itself"""
    owners: Sequence[int] = ()
    """the branch that trains each step, itself from some step on; empty without forks"""
    branching: Mapping[str, float] = field(default_factory=dict)
    """the rollout's metrics of all branches; empty without forks"""

    def end(self, success: bool | None) -> None:
        """End the episode and write its success to every step.

        ``success``: the environment's last ``info["success"]``. If None, an episode is a success if it terminated with
        a positive reward; with outcomes by role, if that of the role that moved first is positive. Where others play
        the other roles, the policy's outcome counts even then, since an environment does not know its role.
        """
        last = self.steps[-1].record
        outcome = self._pay() if len(self.roles) > 1 else {}
        if outcome and (success is None or self.opening is not None):
            success = outcome.get(self.steps[0].role, 0.0) > 0
        self.success = success if success is not None else last["terminated"] and last["reward"] > 0
        for step in self.steps:
            step.record["success"] = self.success

    def _pay(self) -> dict[str, float]:
        """Pay each role on its last turn so far what the environment gave by role; role -> its outcome.

        May be called again, when the episode goes on or has another last turn.
        """
        rewards, last = [step.reward for step in self.steps], dict[Any, int]()
        opening = self.opening or Opening()
        outcome: dict[str, float] = {**opening.outcome}
        early: dict[str, float] = {
            **opening.pays
        }  # before a role's first turn, which is paid then; what is left never moved
        for t, step in enumerate(self.steps):
            last[step.role] = t
            rewards[t] += early.pop(step.role, 0.0)
            for role, number in step.pays.items():
                if role in last:
                    rewards[last[role]] += number
                else:
                    early[role] = early.get(role, 0.0) + number
            for role, number in step.outcome.items():
                outcome[role] = outcome.get(role, 0.0) + number
        for step, reward in zip(self.steps, rewards, strict=True):
            step.record["reward"] = reward
            step.record["extra"].pop(ROLE_OUTCOME, None)
            if outcome:  # else each role succeeds with the episode
                step.record["extra"][ROLE_OUTCOME] = outcome.get(step.role, 0.0)
        return outcome

    async def apply_rewards(
        self, composition: Composition, row: Mapping[str, Any], member: GroupMember | None = None
    ) -> None:
        """Write the composed reward and the columns of components to every step, after the episode has ended.

        ``row``: the fields of the data row. ``member``: the episode in the group of its task.

        Raises:
            RewardError: a component fails, the sum of the components is too large, or the environment itself provides a
                column of a component's name.
        """
        shaped = await self._composed(composition, row, member)
        for t, (step, reward) in enumerate(zip(self.steps, shaped.rewards, strict=True)):
            step.record["composed_reward"] = reward
            if "outcome" in step.record:
                step.record["outcome"] = shaped.outcomes[t]
            columns = {name: values[t] for name, values in shaped.columns.items()}
            if clash := columns.keys() & step.record["extra"].keys():
                raise RewardError(column_clash(min(clash)))
            step.record["extra"] |= columns
        self.rewards, self.parts = shaped.sums, shaped.parts

    @property
    def players(self) -> list[Any]:
        """Who took each step: where its state names no role, who moved before, or first."""
        role = next((step.role for step in self.steps if step.role is not None), None)
        players = []
        for step in self.steps:
            role = role if step.role is None else step.role
            players.append(role)
        return players

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the model's turns, of environment calls, and of waiting for a slot."""
        return {
            "model": sum(step.turn.seconds for step in self.steps),
            "environment": self.seconds_start + sum(step.seconds for step in self.steps),
            "waiting": self.seconds_waiting,
        }

    @property
    def begins(self) -> int:
        """Number of its first step that no other branch trains."""
        return self.owners.index(self.branch) if self.owners else 0

    async def score(self, composition: Composition, row: Mapping[str, Any]) -> float:
        """The composed reward of the last step, as if the episode ended with it. Nothing is written."""
        return (await self._composed(composition, row)).rewards[-1]

    async def _composed(
        self, composition: Composition, row: Mapping[str, Any], member: GroupMember | None = None
    ) -> Shaped:
        steps = [step.for_reward(self.task, row, self.success and step is self.steps[-1]) for step in self.steps]
        return await composition.run(steps, member)

    def info(self) -> dict[str, float]:
        """verl's ``reward_extra_info``: floats under the same keys on every row, failed episodes included."""
        records = [step.record for step in self.steps]
        turns = max(1, len(records))
        return {
            "acc": float(self.success),
            "failed": float(not records),
            "env_return": float(sum(record["reward"] for record in records)),
            "episode_length": float(len(records)),
            "invalid_rate": sum(not record["valid"] for record in records) / turns,
            "unparsed_rate": sum(step.unparsed for step in self.steps) / turns,
            **{f"{COMPONENT}{label}": value for label, value in self.rewards.items()},
            **{f"{BRANCHING}{name}": value for name, value in self.branching.items()},
        }


@dataclass(frozen=True)
class RowBuilder:
    """Builds all rows with the same fields: a field that one row lacks is lost for the whole batch.

    Args:
        eos: the token that replaces an empty prompt or response.
        log_probs: ``actor_rollout_ref.rollout.calculate_log_probs``.
        labels: of the reward components.
        merged: ``turnkey.rollout.layout`` is merged.
        max_response_length: ``data.max_response_length``, the budget of a merged row.
    """

    eos: int
    log_probs: bool
    labels: Sequence[str] = ()
    merged: bool = False
    max_response_length: int | None = None

    def played(self, episode: Episode) -> list[AgentLoopOutput]:
        """The rows of an episode whose rewards are composed: one per step, or fewer where steps extend each other.

        Merged rows come role by role, that of the last step last: turns of others would stand between those that extend
        each other. Rows of a branch contain only its own steps.
        """
        steps = self._steps(episode, by_role=self.merged)
        rows = merge_rows(steps, self.max_response_length) if self.merged else [*steps]
        return without_steps(rows, episode.begins) if episode.begins else rows

    def _steps(self, episode: Episode, by_role: bool) -> Iterator[AgentLoopOutput]:
        """One row per step, made when it is asked for: the prompts of long episodes do not fit into memory together."""
        info = episode.info()
        score = float(sum(step.record["composed_reward"] for step in episode.steps))
        players = episode.players
        order: Sequence[int] = range(len(players))
        if by_role:
            last = {player: t for t, player in enumerate(players)}
            order = sorted(order, key=lambda t: last[players[t]])
        before = players[order[0]]
        for t in order:
            step = episode.steps[t]
            broke, before = "role" if by_role and players[t] != before else step.prompt.broke, players[t]
            yield self._row(
                step.prompt,
                step.turn.ids,
                step.turn.log_probs,
                score=score,
                num_turns=2 * (t + 1),
                metrics=AgentLoopMetrics(
                    generate_sequences=step.turn.seconds, tool_calls=step.seconds, num_preempted=step.turn.num_preempted
                ),
                extra_fields={
                    **step.turn.extra_fields,
                    "turnkey": make_record([step.record], branch=episode.branch),
                    "reward_extra_info": dict(info),
                    BREAK: broke,
                    **step.cached,
                    **({} if step.prompt.observed is None else {OBSERVED: [list(step.prompt.observed)]}),
                },
            )

    def failed(
        self, reason: str, global_steps: int, branching: Mapping[str, float] | None = None
    ) -> list[AgentLoopOutput]:
        """The one masked row of a failed episode; its steps so far are left out.

        ``global_steps``: the training step that requested it, which began with the weights of the step before.
        ``branching``: as in :class:`Episode`.
        """
        version = max(0, global_steps - 1)
        row = self._row(
            Prompt([]),
            [],
            None,
            score=0.0,
            num_turns=0,
            metrics=AgentLoopMetrics(),
            extra_fields={
                # verl requires these two, from which it computes the row's staleness.
                "min_global_steps": version,
                "max_global_steps": version,
                "turnkey": make_record([], failed=reason),
                "reward_extra_info": Episode(rewards=dict.fromkeys(self.labels, 0.0), branching=branching or {}).info(),
                BREAK: None,
            },
        )
        return [row]

    def _row(
        self,
        prompt: Prompt,
        response_ids: list[int],
        log_probs: list[float] | None,
        *,
        score: float,
        num_turns: int,
        metrics: AgentLoopMetrics,
        extra_fields: dict[str, Any],
    ) -> AgentLoopOutput:
        prompt_ids, response_mask = [*prompt.ids], [1] * len(response_ids)
        if not response_ids:  # verl accepts no empty response: one masked token replaces it
            prompt_ids, response_ids, response_mask, log_probs = prompt_ids or [self.eos], [self.eos], [0], [0.0]
        fields: dict[str, Any] = {}
        if self.log_probs:
            # Without log-probabilities verl's asynchronous client returns an empty list, the synchronous one None.
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
