"""Sources of a teacher's text: what they read, by which names they are known, and those of this package."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isawaitable
from typing import Any, Literal, TypeVar

from verl_turnkey.advantage.params import ConfigError, check, did_you_mean, parse, require_frozen
from verl_turnkey.envs.http import Endpoint, EndpointConfig, chat_endpoint
from verl_turnkey.envs.model_texts import after_first_thoughts, after_thoughts
from verl_turnkey.envs.rewards import RewardError, RewardStep, right_answers
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.config.scorers import TeacherConfig

KEY = "turnkey.teacher.source"


@dataclass(eq=False)
class TeacherEpisode:
    """A played episode of the batch."""

    name: str
    """its trajectory, ``{uid}_{session}``, with ``.{branch}`` for a branch"""
    score: float
    """the sum of its rewards"""
    success: bool
    """whether its record says that the task is solved; without a record: the score is positive"""
    steps: Sequence[Mapping[str, Any]] = ()
    """the steps of its record, in order; none without a record"""
    read_turns: Callable[[], list[str]] = field(default=list, repr=False)
    """decodes ``turns``"""

    @cached_property
    def turns(self) -> list[str]:
        """What the model wrote in each turn, without control tokens."""
        return self.read_turns()


@dataclass(eq=False)
class TeacherRow:
    """A row of the batch that may get a text."""

    key: str
    data: Mapping[str, Any]
    """fields of the data row: ``extra_info``, ``reward_model``, ``data_source``, and the columns of the source"""
    steps: Sequence[Mapping[str, Any]]
    """the steps of the row's own record; none without a record"""
    episode: TeacherEpisode
    """the row's own, with all of its steps"""
    others: Sequence[TeacherEpisode] = ()
    """the other episodes of the row's group, in the order of the batch"""
    reward_info: Mapping[str, Any] = field(default_factory=dict)
    """``reward_extra_info`` of the row"""


Text = str | None
Source = Callable[[TeacherRow], Text | Awaitable[Text]]


@dataclass(frozen=True)
class TeacherSource:
    """A source known by name."""

    name: str
    cls: type
    """the frozen dataclass whose fields are the options, and which is called with a :class:`TeacherRow`"""
    summary: str
    per_turn: bool = False
    """its text is about one turn, so a row with several turns cannot have it"""
    observations: bool = False
    """it reads ``extra.text`` of the record, the observation of a step, which the rollout then writes"""


_SOURCES: dict[str, TeacherSource] = {}
C = TypeVar("C", bound=type)


def register_teacher_source(name: str, *, per_turn: bool = False, observations: bool = False) -> Callable[[C], C]:
    """Decorate a frozen dataclass with ``__call__(self, row) -> str | None`` (may be ``async``) as the source ``name``.

    None: the row gets no text, and its teacher is the policy. An attribute ``columns`` (a tuple of names) makes the
    columns of the data that it reads part of ``row.data``. The first line of the docstring is the summary in tables.
    Everything else is as in :class:`TeacherSource`.

    Raises:
        ValueError: the name is taken, or the class is not a frozen dataclass.
    """

    def register(cls: C) -> C:
        require_frozen(f"teacher source {name!r}", cls)
        if name in _SOURCES:
            raise ValueError(f"teacher source {name!r} is registered already; choose another name")
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        _SOURCES[name] = TeacherSource(name, cls, summary, per_turn, observations)
        return cls

    return register


def teacher_sources() -> dict[str, TeacherSource]:
    """All registered sources by name, sorted."""
    return dict(sorted(_SOURCES.items()))


def read_source(value: str | Mapping[str, Any]) -> tuple[TeacherSource | None, Source]:
    """The source that ``turnkey.teacher.source`` selects, ready to be called; no entry for ``module:function``.

    The entry of a placebo is that of the source whose text it replaces, since it reads the same.

    Raises:
        ConfigError: an unknown source (with the closest match), or an option that does not fit.
        ModuleImportError: the function cannot be loaded.
    """
    entry = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = str(entry.pop("name", None))
    if ":" in name:
        if entry:
            raise ConfigError(f"{KEY}: {name} is a function and takes no options, got {', '.join(entry)}")
        return None, load_function(name, KEY, "row")
    if name not in _SOURCES:
        raise ConfigError(
            f"{KEY}: there is no source {name!r}{did_you_mean(name, _SOURCES) or '.'} There are "
            f"{', '.join(teacher_sources())}; one of your own is module:function, or registered by a module of "
            "turnkey.modules"
        )
    spec = _SOURCES[name]
    source = parse(spec.cls, entry, KEY)
    return getattr(source, "replaced", (spec,))[0], source


def reads_observations(options: TeacherConfig) -> bool:
    """Whether the rollout has to write the observations of steps into their records for the source."""
    if options.source is None:
        return False
    spec, _ = read_source(options.source)
    return spec is None or spec.observations  # a function may read them


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
        return _text(row.data.get(self.column)) or _text((row.data.get("extra_info") or {}).get(self.column))


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


def _best(row: TeacherRow, success: bool) -> list[TeacherEpisode]:
    """The other episodes of the group that solved the task, or did not, the best first."""
    return sorted((other for other in row.others if other.success == success), key=lambda episode: -episode.score)


@dataclass(frozen=True)
class _OfGroup:
    episodes: int = 1
    """of so many other episodes at most, the best first"""

    def __post_init__(self) -> None:
        check(self.episodes > 0, "episodes", "positive", self.episodes)

    def _join(self, row: TeacherRow, success: bool) -> str | None:
        return "\n\n".join(map(transcript, _best(row, success)[: self.episodes])) or None


@register_teacher_source("group_success")
@dataclass(frozen=True)
class GroupSuccess(_OfGroup):
    """What the model wrote in another episode of the group that solved the task, without its thoughts (SDPO)."""

    def __call__(self, row: TeacherRow) -> str | None:
        return self._join(row, success=True)


@register_teacher_source("group_failures")
@dataclass(frozen=True)
class GroupFailures(_OfGroup):
    """What the model wrote in other episodes of the group that did not solve the task, without its thoughts."""

    def __call__(self, row: TeacherRow) -> str | None:
        return self._join(row, success=False)


@register_teacher_source("next_observation", per_turn=True, observations=True)
@dataclass(frozen=True)
class NextObservation:
    """What the environment answered to the row's own turn: a text per turn, so rows must hold one turn each.

    TRIAL and HERO look at a turn's own consequence. The last turn of an episode has none.
    """

    def __call__(self, row: TeacherRow) -> str | None:
        later = [step for step in row.episode.steps if row.steps and step["step"] > row.steps[0]["step"]]
        return observation_of(later[0]) if later else None


@register_teacher_source("outcome", observations=True)
@dataclass(frozen=True)
class SuccessfulEnd:
    """How a successful episode ended: the row's own if it was one, else the group's best (HCAPO).

    The text has the last observation, where the environment gave one, and the last action.
    """

    def __call__(self, row: TeacherRow) -> str | None:
        episode = row.episode if row.episode.success else next(iter(_best(row, success=True)), None)
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


PROMPTS = {
    "group": (
        "Below are several attempts by an agent at the same task. Some solved it, some did not. Compare them and say "
        "what the next attempt should do and what it should avoid: at most five short lines, each beginning with DO "
        "or AVOID. Write only these lines.\n\n{attempts}"
    ),
    "episode": (
        "Below is an attempt by an agent at a task. Say what the next attempt should do, or, if this one did not "
        "solve the task, what it should avoid: at most three short lines. Write only these lines.\n\n{attempts}"
    ),
}
SEEN, WRITTEN = 400, 600
"""characters shown of an observation and of a turn"""
OUTCOMES = {True: "solved the task", False: "did not solve the task"}


@register_teacher_source("reflection", observations=True)
@dataclass(frozen=True)
class Reflection(EndpointConfig):
    """What a model behind an OpenAI-compatible endpoint advises after the episode, or after the group's (OPID, GRSD).

    ``about=group``: one text for all rows of a group in which some episodes solved the task and some did not; the best
    and the worst ``episodes`` of each kind are shown (GRSD condenses reflections on all of them). ``about=episode``: a
    text for each episode, which its outcome is in (OPID's episode skill). The model sees what the policy saw and wrote
    in each turn, without thoughts, observations cut at 400 characters and turns at 600, as in GRSD; the task is what
    the observations show of it. A request that fails leaves its rows without a text.
    """

    about: Literal["group", "episode"] = "group"
    """what the model reflects on"""
    episodes: int = 2
    """about=group: so many episodes that solved the task are shown, and as many that did not"""
    prompt: str | None = None
    """the question, with {attempts}; null: one for each value of about"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.episodes > 0, "episodes", "positive", self.episodes)
        check(self.prompt is None or "{attempts}" in self.prompt, "prompt", "a text with {attempts}", self.prompt)

    async def __call__(self, row: TeacherRow) -> str | None:
        if (attempts := self._attempts(row)) is None:
            return None
        question = (self.prompt or PROMPTS[self.about]).replace("{attempts}", "\n\n".join(map(_described, attempts)))
        answer = await self._endpoint.ask({"messages": [{"role": "user", "content": question}]})
        return after_first_thoughts(answer)

    @cached_property
    def _endpoint(self) -> Endpoint[str]:
        return chat_endpoint(self, "the model of reflections")

    def _attempts(self, row: TeacherRow) -> list[TeacherEpisode] | None:
        """The same for all rows of a group, so that equal questions are asked once."""
        if self.about == "episode":
            return [row.episode]
        every = sorted((row.episode, *row.others), key=lambda episode: (-episode.score, episode.name))
        solved, failed = ([e for e in every if e.success == kind] for kind in (True, False))
        return [*solved[: self.episodes], *failed[-self.episodes :]] if solved and failed else None


def _described(episode: TeacherEpisode) -> str:
    lines = [f"This attempt {OUTCOMES[episode.success]}:"]
    for number, turn in enumerate(episode.turns):
        if number < len(episode.steps) and (seen := observation_of(episode.steps[number])):
            lines.append(f"Seen: {seen[:SEEN]}")
        lines.append(f"Turn {number + 1}: {answer_of(turn)[:WRITTEN]}")
    return "\n".join(lines)
