"""The components of a reward over one trajectory; :func:`~verl_turnkey.envs.rewards.compose` adds them up.

A component is a frozen dataclass: its fields are the options that a configuration may set, calling it with the steps of
an episode gives one number per step. ``@register_reward("name")`` makes it known by name.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from verl_turnkey.advantage.params import check, did_you_mean, require_frozen
from verl_turnkey.envs.errors import RewardError
from verl_turnkey.envs.model_texts import after_thoughts


@dataclass(frozen=True)
class RewardStep:
    """One step as a reward sees it. Only ``observation`` and ``action`` have to be given."""

    observation: str
    """what the agent saw"""
    action: str | None
    """the action that was taken; None: the model's text has no action, or none that is valid"""
    valid: bool = True
    """the text has an action, and it could be applied"""
    unparsed: bool = False
    """the model's text has no action in the format at all"""
    reason: str | None = None
    """why the step is not valid"""
    reward: float = 0.0
    """the environment's own reward of this step"""
    outcome: float = 0.0
    """the part of it that is for the episode as a whole, or for the role in it, where an agent says which"""
    success: bool = False
    """the task is solved after this step"""
    terminated: bool = False
    """the environment ended the episode here"""
    truncated: bool = False
    """a limit ended the episode here"""
    tokens: int = 0
    """tokens that the model wrote"""
    text: str = ""
    """what the model wrote"""
    content: str = None  # pyright: ignore[reportAssignmentType]
    """the part of ``text`` after the thoughts, empty if it ends before they do; taken from ``text`` unless set"""
    task: str = ""
    """the task of the episode"""
    row: Mapping[str, Any] = field(default_factory=dict)
    """fields of the data row that the episode plays: ``data_source``, ``reward_model``, ``extra_info``, ..."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """the environment's ``info["extra"]`` on the state the action was taken in; on the first step, that of ``reset``"""
    next_extra: Mapping[str, Any] = field(default_factory=dict)
    """the same on the state it led to; the very object ``extra`` when the action never reached the environment"""

    def __post_init__(self) -> None:
        if self.content is None:
            object.__setattr__(self, "content", after_thoughts(self.text) or "")

    @property
    def won(self) -> bool:
        """verl-agent's name for ``success``."""
        return self.success

    @property
    def brought(self) -> Mapping[str, Any]:
        """``next_extra`` if the action reached the environment, else empty: no effect is counted twice."""
        return {} if self.next_extra is self.extra else self.next_extra


Steps = Sequence[RewardStep]
Values = Sequence[float]


class Paid(list[float]):
    """Numbers per step, of which ``outcomes``, one per step, are for the episode as a whole."""

    def __init__(self, values: Values, outcomes: Values) -> None:
        super().__init__(values)
        self.outcomes = outcomes


class Component(Protocol):
    """Gives one number per step of an episode, at once or to be awaited. The steps are never empty."""

    def __call__(self, steps: Steps, /) -> Values | Awaitable[Values]: ...


@dataclass(frozen=True)
class RewardSpec:
    """A component known by name."""

    name: str
    cls: type
    """the frozen dataclass whose fields are the options"""
    cost: bool
    """it counts undesired behaviour: its weight is required and must not be positive"""
    summary: str
    hindsight: bool = False
    """it rates a step by its outcome, so it cannot give a column about the state before the step"""
    group: bool = False
    """it compares the episodes of a task: it has a method ``of_group``, and alone it gives 0"""


_REWARDS: dict[str, RewardSpec] = {}
C = TypeVar("C", bound=type)


def register_reward(name: str, *, cost: bool = False, hindsight: bool = False, group: bool = False) -> Callable[[C], C]:
    """Decorate a frozen dataclass with ``__call__(self, steps)`` (may be ``async``) to make it the component ``name``.

    The first line of its docstring is its summary in tables; the rest is as in :class:`RewardSpec`.

    Raises:
        ValueError: the name is taken, or the class is not a frozen dataclass.
    """

    def register(cls: C) -> C:
        require_frozen(f"reward component {name!r}", cls)
        if name in _REWARDS:
            holder = _REWARDS[name].cls
            raise ValueError(
                f"reward component {name!r} is already registered by {holder.__module__}.{holder.__qualname__}"
            )
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        _REWARDS[name] = RewardSpec(name, cls, cost, summary, hindsight, group)
        return cls

    return register


def rewards() -> dict[str, RewardSpec]:
    """The known components by name."""
    return dict(_REWARDS)


def groups(pattern: str) -> int:
    """How many groups a regular expression has; -1: it is not one."""
    try:
        return re.compile(pattern).groups
    except re.error:
        return -1


async def call_own(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a user's function returns; in a thread unless it is async, since all rollouts share the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **options)
    return await asyncio.to_thread(function, *arguments, **options)


def at_the_end(steps: Steps, value: float) -> Paid:
    """``value`` on the last step, for the whole episode, 0 before."""
    values = [0.0] * (len(steps) - 1) + [value]
    return Paid(values, values)


def number(extra: Mapping[str, Any], key: str, where: str) -> float:
    """The finite number ``extra[key]``; an error begins with ``where``.

    Raises:
        RewardError: it is not there or no finite number.
    """
    value: Any = extra.get(key)
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(f"{where}: expected the environment to give a number, info['extra'][{key!r}], got {value!r}")
    return float(value)


@register_reward("step")
@dataclass(frozen=True)
class StepReward:
    """The environment's own reward of each step."""

    def __call__(self, steps: Steps) -> Values:
        return Paid([step.reward for step in steps], [step.outcome for step in steps])


@register_reward("outcome")
@dataclass(frozen=True)
class OutcomeReward:
    """1 on the last step of a solved episode."""

    lost: float = 0.0
    """reward of an episode that is not solved"""

    def __call__(self, steps: Steps) -> Values:
        return at_the_end(steps, 1.0 if steps[-1].success else self.lost)


@register_reward("extra")
@dataclass(frozen=True)
class Extra:
    """A number that the environment gives with each step, ``info["extra"][key]``.

    0 for a turn whose action did not reach the environment.
    """

    key: str
    """where it stands"""

    def __call__(self, steps: Steps) -> Values:
        return [
            0.0 if step.next_extra is step.extra else number(step.next_extra, self.key, f"step {t}")
            for t, step in enumerate(steps)
        ]


@register_reward("potential")
@dataclass(frozen=True)
class Potential:
    """Potential-based shaping, gamma Phi(s') - Phi(s) (Ng, Harada and Russell 1999).

    Phi is a number that the environment gives for each state, ``extra[key]``. A terminal state has potential 0,
    whatever the environment says of it. The discounted sum over a terminated episode is then -Phi(s_0), the same for
    every way of acting, so that the order of policies by discounted return does not change. This needs the ``gamma`` of
    the estimator. A method that compares whole episodes by their undiscounted sum of rewards (``grpo_steps``, the
    episode part of ``gigpo``) discounts by 1: any other ``gamma`` here would change what it prefers.

    A truncated episode ends in a state that is not terminal, and it depends on the learner what is right:

    - ``at_truncation="zero"``: Phi counts as 0 after the cut, the sum is -Phi(s_0) again. Right where a cut is treated
      as the end, with no value after it, as all methods without a critic do; then the limit is part of the task. An
      episode earns nothing by being close to the goal when it is cut.
    - ``at_truncation="keep"``: the potential of the state reached, ``next_extra[key]``. Right where a critic's value of
      that state is added to the return: a critic learned from shaped rewards estimates V - Phi, and the two potentials
      cancel. Without one, an episode of T steps keeps gamma^T Phi(s_T): a reward for progress, which may change what is
      best.
    """

    gamma: float
    """discount: that of the estimator, 1 for methods that compare undiscounted sums"""
    key: str = "potential"
    """where Phi stands in the environment's ``info["extra"]``"""
    at_truncation: Literal["zero", "keep"] = "zero"
    """what the potential after a truncated episode's last step is"""

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, "gamma", "a number from 0 to 1", self.gamma)

    def __call__(self, steps: Steps) -> Values:
        phi = [number(step.extra, self.key, f"step {t}") for t, step in enumerate(steps)]
        after = 0.0
        if self.at_truncation == "keep" and not steps[-1].terminated:
            after = number(steps[-1].next_extra, self.key, "after the last step")
        return [self.gamma * there - here for here, there in zip(phi, [*phi[1:], after], strict=True)]


@register_reward("invalid", cost=True)
@dataclass(frozen=True)
class Invalid:
    """1 for each step without an action that could be applied."""

    def __call__(self, steps: Steps) -> Values:
        return [float(not step.valid) for step in steps]


@register_reward("grounded")
@dataclass(frozen=True)
class Grounded:
    """1 for each step whose action was applied, and for the last step (SPA-RL's grounding, arXiv:2505.20732)."""

    def __call__(self, steps: Steps) -> Values:
        return [*(float(step.valid) for step in steps[:-1]), 1.0]


@register_reward("format", cost=True)
@dataclass(frozen=True)
class Format:
    """1 for each step that breaks the format. Such a step is usually invalid too, and counts in both."""

    pattern: str | None = None
    """regular expression for the whole of what the model wrote (a dot matches a newline too, white space around it is
    dropped); null: a step breaks the format when it holds no action"""

    def __post_init__(self) -> None:
        check(self.pattern is None or groups(self.pattern) >= 0, "pattern", "a regular expression", self.pattern)

    def __call__(self, steps: Steps) -> Values:
        if self.pattern is None:
            return [float(step.unparsed) for step in steps]
        expression = re.compile(self.pattern, re.DOTALL)
        return [float(expression.fullmatch(step.text.strip()) is None) for step in steps]


@register_reward("length", cost=True)
@dataclass(frozen=True)
class Length:
    """How long the episode takes: the tokens of each step, or 1 per turn."""

    unit: Literal["tokens", "turns"] = "tokens"
    """what is counted"""

    def __call__(self, steps: Steps) -> Values:
        return [float(step.tokens) if self.unit == "tokens" else 1.0 for step in steps]


Ranking = tuple[Mapping[str, float], int]
"""the reward of each episode of a group by its name, and how many calls that took"""


class OfGroup(Protocol):
    """A component that is computed once for a whole group."""

    def of_group(self, members: Mapping[str, Steps]) -> Awaitable[Ranking]: ...


class Group:
    """The episodes of one task."""

    def __init__(self) -> None:
        self.open_members = 0
        self.whole = asyncio.Event()
        self._playing: set[str] = set()
        self._ended: dict[str, Steps] = {}
        self._rankings: dict[str, asyncio.Future[Ranking]] = {}

    def enter(self, name: str) -> None:
        self.open_members += 1
        self._playing.add(name)

    def leave(self, name: str) -> None:
        self._playing.discard(name)
        if not self._playing:
            self.whole.set()

    async def ranking(self, label: str, name: str, steps: Steps, component: OfGroup) -> Ranking:
        """That of all episodes that ended well, once the last one of the group has ended."""
        self._ended[name] = steps
        self.leave(name)
        await self.whole.wait()
        if label not in self._rankings:
            self._rankings[label] = asyncio.ensure_future(component.of_group(dict(self._ended)))
        return await asyncio.shield(self._rankings[label])  # a cancelled waiter does not cancel it for the others


class GroupMember:
    """An episode as a member of its group."""

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self.calls: dict[str, float] = {}
        """label of a component -> the episode's share of its calls"""
        group.enter(name)

    async def values(self, label: str, component: OfGroup, steps: Steps) -> list[float]:
        """The reward of the episode in its group, on its last step."""
        rewards, calls = await self._group.ranking(label, self._name, steps, component)
        self.calls[label] = calls / len(rewards)
        return at_the_end(steps, rewards[self._name])

    def leave(self) -> None:
        """The episode has ended, well or not."""
        self._group.leave(self._name)
        self._group.open_members -= 1


class Groups:
    """The groups whose episodes play now, by a key of their own."""

    def __init__(self) -> None:
        self._open: dict[str, Group] = {}

    def join(self, key: str, name: str) -> GroupMember:
        """Make episode ``name`` a member of group ``key``; all of its episodes must join before the first one ends."""
        self._open = {k: group for k, group in self._open.items() if group.open_members}
        group = self._open.get(key)
        if group is None or group.whole.is_set():  # an earlier group under the same key
            group = self._open[key] = Group()
        return GroupMember(group, name)


FIELDS = ("task", "transcript", "observation", "action")
_FIELD = re.compile(r"\{(\w+)\}")


def check_template(template: str, key: str) -> None:
    """Refuse a ``template``, the option ``key``, with unknown fields, or with none that shows what the agent did.

    Raises:
        ConfigError: names the field.
    """
    named = _FIELD.findall(template)
    for name in named:
        hint = did_you_mean(name, FIELDS)
        check(name in FIELDS, key, f"only fields among {', '.join(FIELDS)}{hint}", f"{{{name}}}")
    seen = {"transcript", "action"} & set(named)
    check(bool(seen), key, "to show the {transcript} or the {action}", template)


def fill(template: str, steps: Steps, max_chars: int) -> str:
    """``template`` with its fields: {observation} and {action} are those of the last of ``steps``."""
    transcript = "\n\n".join(
        f"Observation {t}: {step.observation}\nAgent {t}: {step.text or step.action or ''}"
        for t, step in enumerate(steps, 1)
    )
    if (left_out := len(transcript) - max_chars) > 0:  # its beginning and its end matter most
        head = max_chars // 2
        transcript = f"{transcript[:head]}\n[{left_out} characters left out]\n{transcript[head + left_out :]}"
    values = {
        "task": steps[0].task,
        "transcript": transcript,
        "observation": steps[-1].observation,
        "action": steps[-1].action or steps[-1].content or "(no action)",
    }
    # In one pass: text of a model or an environment is never taken for a field.
    return _FIELD.sub(lambda match: values[match[1]], template)
