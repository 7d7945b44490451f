"""The sources of this package: a skill, the right answer, feedback, other episodes of the group, what came next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isawaitable
from typing import Any

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.model_texts import after_thoughts
from verl_turnkey.envs.rewards import RewardError, RewardStep, right_answers
from verl_turnkey.plugins.teacher.registry import (
    Source,
    TeacherEpisode,
    TeacherRow,
    TeacherSource,
    read_source,
    register_teacher_source,
)


def _text(value: Any) -> str | None:
    """A text with something in it; None for all else, such as NaN of a data row without the column."""
    return value if isinstance(value, str) and value.strip() else None


@register_teacher_source("task_skill")
@dataclass(frozen=True)
class TaskSkill:
    """A text of the task: a column of the data, or a key of its extra_info.

    RLSD, Skill-SD, SDAR, AgentOPSD and ADRS use such skills.
    """

    column: str = "skill"
    """the column of the data; where it has none of that name, the key of extra_info"""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, row: TeacherRow) -> str | None:
        own = _text(row.data.get(self.column))
        return own if own is not None else _text((row.data.get("extra_info") or {}).get(self.column))


@register_teacher_source("gold_answer")
@dataclass(frozen=True)
class GoldAnswer:
    """The right answer of the task: the environment's, else reward_model.ground_truth; of several, the first."""

    def __call__(self, row: TeacherRow) -> str | None:
        extra = row.episode.steps[0]["extra"] if row.episode.steps else {}
        try:
            return right_answers(RewardStep("", None, row=row.data, extra=extra))[0]
        except RewardError:
            return None


@register_teacher_source("feedback")
@dataclass(frozen=True)
class Feedback:
    """What the environment, or the reward, says of the episode: the last text under a key of info["extra"].

    SDPO's "rich feedback". It is about the row's own episode.
    """

    key: str = "feedback"
    """of info["extra"] after a step, or of reward_extra_info"""

    def __call__(self, row: TeacherRow) -> str | None:
        texts = [_text(step["extra"].get(self.key)) for step in row.episode.steps]
        last = next((text for text in reversed(texts) if text), None)
        return last or _text(row.reward_info.get(self.key))


@dataclass(frozen=True)
class _OfGroup:
    episodes: int = 1
    """of so many other episodes at most, the best first"""

    def __post_init__(self) -> None:
        check(self.episodes > 0, "episodes", "positive", self.episodes)

    def _join(self, episodes: Sequence[TeacherEpisode]) -> str | None:
        texts = [transcript(episode) for episode in episodes[: self.episodes]]
        return "\n\n".join(texts) or None


@register_teacher_source("group_success")
@dataclass(frozen=True)
class GroupSuccess(_OfGroup):
    """What the model wrote in another episode of the group that solved the task, without its thoughts (SDPO)."""

    def __call__(self, row: TeacherRow) -> str | None:
        return self._join(sorted((e for e in row.others if e.success), key=lambda e: -e.score))


@register_teacher_source("group_failures")
@dataclass(frozen=True)
class GroupFailures(_OfGroup):
    """What the model wrote in other episodes of the group that did not solve the task, without its thoughts."""

    def __call__(self, row: TeacherRow) -> str | None:
        return self._join(sorted((e for e in row.others if not e.success), key=lambda e: -e.score))


@register_teacher_source("next_observation", per_turn=True, observations=True)
@dataclass(frozen=True)
class NextObservation:
    """What the environment answered to the row's own turn: a text per turn, so rows must hold one turn each.

    TRIAL and HERO look at a turn's own consequence. The last turn of an episode has none.
    """

    def __call__(self, row: TeacherRow) -> str | None:
        number = row.steps[0]["step"] + 1 if row.steps else -1
        return next((observation_of(step) for step in row.episode.steps if step["step"] == number), None)


@register_teacher_source("outcome", observations=True)
@dataclass(frozen=True)
class Outcome:
    """How a successful episode ended: the row's own if it was one, else the group's best (HCAPO).

    The text has the last observation, where the environment gave one, and the last action.
    """

    def __call__(self, row: TeacherRow) -> str | None:
        solved = sorted((e for e in row.others if e.success), key=lambda e: -e.score)
        episode = row.episode if row.episode.success else next(iter(solved), None)
        if episode is None:
            return None
        last: Mapping[str, Any] = episode.steps[-1] if episode.steps else {}
        action = last.get("action") or (answer_of(episode.turns[-1]) if episode.turns else None)
        lines = ("The task was solved.", observation_of(last), action and f"Last action: {action}")
        return "\n".join(line for line in lines if line)


NEUTRAL = "This line says nothing about the task."


@register_teacher_source("placebo")
@dataclass(frozen=True)
class Placebo:
    """Meaningless words, as many as the text of another source would have: what a text does by being there."""

    of: str | dict[str, Any] = field(default_factory=lambda: "task_skill")
    """the source whose text it replaces: a name, or a mapping with its name and options"""

    def __post_init__(self) -> None:
        _ = self.replaced

    @cached_property
    def replaced(self) -> tuple[TeacherSource | None, Source]:
        """The entry of that source, and the source."""
        return read_source(self.of)

    @property
    def columns(self) -> tuple[str, ...]:
        return getattr(self.replaced[1], "columns", ())

    async def __call__(self, row: TeacherRow) -> str | None:
        text = self.replaced[1](row)
        if isawaitable(text):
            text = await text
        if not isinstance(text, str):
            return None
        words, number = NEUTRAL.split(), len(text.split())
        return " ".join((words * (number // len(words) + 1))[:number]) or None


def observation_of(step: Mapping[str, Any]) -> str | None:
    return _text((step.get("extra") or {}).get("text"))


def answer_of(turn: str) -> str:
    return (after_thoughts(turn) or "").strip()


def transcript(episode: TeacherEpisode) -> str:
    """What the model wrote in an episode, without its thoughts; of several turns, numbered."""
    answers = [answer_of(turn) for turn in episode.turns]
    if len(answers) == 1:
        return answers[0]
    return "\n".join(f"Turn {number}: {answer}" for number, answer in enumerate(answers, 1))
