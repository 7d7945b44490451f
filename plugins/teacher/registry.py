"""Sources of a teacher's text: what they read, and by which names they are known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from verl_turnkey.advantage.params import ConfigError, did_you_mean, parse, require_frozen
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
        return None, load_function(name, KEY)
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
