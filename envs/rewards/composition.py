"""From configuration to one function of an episode: :func:`compose`."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, cast

from verl_turnkey.advantage.columns import LARGEST_REWARD
from verl_turnkey.advantage.params import ConfigError, did_you_mean, parse, require_takes
from verl_turnkey.envs.errors import RewardError
from verl_turnkey.envs.rewards.components import Component, GroupMember, Length, Paid, Steps, rewards
from verl_turnkey.envs.user_modules import load_function

_OWN = ("name", "weight", "label", "column")
LOOPS_OWN = ("images", "next_anchor", "text", "turn_limit")  # columns that the agent loop writes itself


@dataclass(frozen=True)
class Shaped:
    """The rewards of an episode."""

    rewards: list[float]
    """per step: the sum of the parts that give no column"""
    parts: dict[str, list[float]]
    """label of a component -> its weighted values per step"""
    columns: dict[str, list[float]] = field(default_factory=dict)
    """name of a column -> per step the sum of the parts that give it; no part of the rewards"""
    calls: dict[str, float] = field(default_factory=dict)
    """label of a component that compares episodes, with _calls -> the episode's share of its comparisons"""
    outcomes: list[float] = field(default_factory=list)
    """per step: the part of the reward that is for the episode as a whole, or for the step's role in it"""

    @property
    def sums(self) -> dict[str, float]:
        """Label of a component -> the sum of its values over the whole episode; and ``calls``."""
        return {label: math.fsum(values) for label, values in self.parts.items()} | self.calls


@dataclass(frozen=True)
class _Part:
    label: str
    weight: float
    values: Component
    where: str
    column: str | None = None
    group: bool = False
    own: bool = False
    """a function of a user's"""

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label, f"{self.label}_calls") if self.group else (self.label,)


class Composition:
    """A weighted sum of components, built by :func:`compose`. It has no state between episodes."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = tuple(parts)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names under which the parts are logged, in the order of the configuration."""
        return tuple(label for part in self._parts for label in part.labels)

    def without(self, labels: Collection[str]) -> Composition:
        """The other components; where none of them gives a reward, also the environment's own."""
        parts = [part for part in self._parts if part.label not in labels]
        own = [] if any(part.column is None for part in parts) else [_part({"name": "step"}, "turnkey.rewards")]
        return Composition([*parts, *own])

    @property
    def counting_tokens(self) -> tuple[str, ...]:
        """Labels of the components that count tokens."""
        lengths = ((part.label, part.values) for part in self._parts)
        return tuple(label for label, values in lengths if isinstance(values, Length) and values.unit == "tokens")

    @property
    def compares(self) -> str | None:
        """The first component that compares the episodes of a task, by its place in the configuration; None: none."""
        return next((f"{part.where} ({part.label})" for part in self._parts if part.group), None)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that components give instead of a reward."""
        return tuple(dict.fromkeys(part.column for part in self._parts if part.column is not None))

    async def run(self, steps: Steps, member: GroupMember | None = None) -> Shaped:
        """The rewards of an episode, given all of its steps; components that wait for a server wait at the same time.

        ``member``: the episode in its group, for components that compare episodes; None: no comparison.

        Raises:
            RewardError: a component fails, or gives anything but one number per step, up to 1e18 in size; or the sum of
                the components is larger.
        """
        if not steps:
            raise RewardError("an episode without steps has no rewards")
        # An episode of which another component fails is not compared.
        meet = [part for part in self._parts if part.group and member is not None]
        alone = [part for part in self._parts if not part.group or member is None]
        part_values: dict[int, Paid] = {}
        for chosen, place in ((alone, None), (meet, member)):
            values = await gather(self._named_value(part, steps, place) for part in chosen)
            part_values |= zip(map(id, chosen), values, strict=True)
        pairs = [(part, part_values[id(part)]) for part in self._parts]
        shares = {} if member is None else member.calls
        sums = _sums(values for part, values in pairs if part.column is None)
        columns = {name: _sums(values for part, values in pairs if part.column == name) for name in self.columns}
        for what, column in (("components", sums), *((f"components of the column {n}", c) for n, c in columns.items())):
            for t, total in enumerate(column):
                if abs(total) > LARGEST_REWARD:
                    raise RewardError(f"the {what} sum up to {total:g} at step {t}: expected up to 1e18 in size")
        calls = {part.labels[1]: shares.get(part.label, 0.0) for part in self._parts if part.group}
        paid = zip(*(values.outcomes for part, values in pairs if part.column is None), strict=True)
        outcomes = [*map(math.fsum, paid)] or [0.0] * len(steps)
        return Shaped(sums, {part.label: [*values] for part, values in pairs}, columns, calls, outcomes)

    def __call__(self, steps: Steps) -> Shaped:
        """As :meth:`run`, outside of an event loop."""
        return asyncio.run(self.run(steps))

    async def _named_value(self, part: _Part, steps: Steps, member: GroupMember | None) -> Paid:
        try:
            return await self._value(part, steps, member)
        except RewardError as error:
            error.component = part.label
            raise

    @staticmethod
    async def _value(part: _Part, steps: Steps, member: GroupMember | None) -> Paid:
        where = f"{part.where} ({part.label})"
        component: Any = part.values
        try:
            values: Any = component(steps) if member is None else member.values(part.label, component, steps)
            values = await values if inspect.isawaitable(values) else values
            paid = values.outcomes if isinstance(values, Paid) else None
            values = [float(value) for value in values]
        except RewardError as error:
            raise type(error)(f"{where}: {error}") from error
        except Exception as error:
            raise RewardError(f"{where} failed: {type(error).__name__}: {error}") from error
        if len(values) != len(steps):
            raise RewardError(f"{where}: expected {len(steps)} numbers, one per step, got {len(values)}")
        for t, value in enumerate(values):
            if not math.isfinite(value):
                raise RewardError(f"{where}: expected finite numbers, got {value} at step {t}")
            if abs(part.weight * value) > LARGEST_REWARD:
                raise RewardError(
                    f"{where}: expected rewards up to 1e18 in size, got {value} at step {t} with weight {part.weight:g}"
                )
        if paid is None:  # a function of a user's that pays on the last step alone pays for the episode
            paid = values if part.own and not any(values[:-1]) else [0.0] * len(values)
        return Paid([part.weight * value for value in values], [part.weight * value for value in paid])


async def gather(awaitables: Iterable[Any]) -> list[Any]:
    """The results of all; when one fails, the others are cancelled and awaited before its error goes on."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def compose(entries: Sequence[Mapping[str, Any]], where: str = "turnkey.rewards") -> Composition:
    """A composition from plain configuration data.

    Each entry has the ``name`` of a component, its ``weight``, a ``label`` for the logs (default: the name) and the
    component's options::

        compose([{"name": "step"}, {"name": "length", "weight": -0.001, "unit": "tokens"}, {"name": "my.module:bonus"}])

    A name with a colon is your own, ``package.module:name`` or ``path/to/file.py:name``. A function takes the steps and
    the options and returns one number per step, or a coroutine of them. A class is instantiated once with the options
    and then called with the steps of each episode. What waits for a server or a file must be a coroutine, or all
    rollouts of its process wait too.

    ``weight`` is 1 by default. Components that count undesired behaviour have no default: give a negative one.

    With ``column`` the values of a component are not a reward: they become a column of that name, which a method reads.
    Components with the same column add up::

        compose([{"name": "step"}, {"name": "my.module:score", "column": "turn_score"}])

    Raises:
        ConfigError: unknown name or option (with the closest match), a value that does not fit, two equal labels, no
            component that gives a reward. The message opens with ``where`` and the place in the list.
        ModuleImportError: a function of your own that cannot be loaded.
        MissingPackageError: a component needs a package that is not installed.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence) or not entries:
        raise ConfigError(
            f"{where}: expected a list with at least one component such as {{name: step}}, got {entries!r}"
        )
    parts: list[_Part] = []
    for i, entry in enumerate(entries):
        part = _part(entry, f"{where}[{i}]")
        if taken := {*part.labels} & {label for other in parts for label in other.labels}:
            raise ConfigError(f"{part.where}.label: {min(taken)!r} is there already; give this component another label")
        parts.append(part)
    if all(part.column is not None for part in parts):
        raise ConfigError(
            f"{where}: each component gives a column, and none a reward: add {{name: step}}, with weight 0 if all "
            "rewards are to be 0"
        )
    return Composition(parts)


def compose_single(entry: Mapping[str, Any], where: str) -> Composition:
    """As :func:`compose`, of one component that stands alone at ``where``.

    Raises:
        ConfigError: as there, and for a component that gives a column.
    """
    part = _part(entry, where)
    if part.column is not None:
        raise ConfigError(f"{where}.column: expected a component that gives a reward, got one for {part.column!r}")
    return Composition([part])


def _sums(parts: Iterable[list[float]]) -> list[float]:
    """Per step, over all parts."""
    return [math.fsum(values) for values in zip(*parts, strict=True)]


def column_clash(name: str) -> str:
    """The message when the environment gives a column that a component gives as well."""
    return (
        f"the environment gives info['extra'][{name!r}] itself, and so does a component with column: {name}: give the "
        "component another column, or leave it out"
    )


def _part(entry: Any, where: str) -> _Part:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"{where}: expected a mapping with the name of a component, got {entry!r}")
    name, options = entry["name"], {key: value for key, value in entry.items() if key not in _OWN}
    specs = rewards()
    if name in specs:  # a misspelt weight is not a missing one
        _check_options(options, [field.name for field in fields(specs[name].cls) if field.init], where)
    label = entry.get("label", name.rpartition(":")[2])
    if not isinstance(label, str) or not label:
        raise ConfigError(f"{where}.label: expected a text, got {label!r}")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{where}.weight: expected a finite number, got {weight!r}")
    column = entry.get("column")
    if column is not None and (not isinstance(column, str) or not column.isidentifier() or column in LOOPS_OWN):
        taken = f"{', '.join(LOOPS_OWN[:-1])} and {LOOPS_OWN[-1]}"
        hint = f"; write {column[6:]}" if isinstance(column, str) and column.startswith("extra.") else ""
        raise ConfigError(
            f"{where}.column: expected the name of a column such as turn_score, other than {taken}, "
            f"got {column!r}{hint}"
        )
    if ":" in name:
        return _Part(label, float(weight), _own(name, options, where), where, column, own=True)
    if name not in specs:
        raise ConfigError(
            f"{where}.name: no reward component is called {name!r}{did_you_mean(name, specs) or '.'} There are "
            f"{', '.join(sorted(specs))}; one of your own is given as module:function"
        )
    spec = specs[name]
    if spec.cost and column is None and ("weight" not in entry or weight > 0):
        raise ConfigError(
            f"{where}.weight: expected a number below 0, because {name!r} counts what is to be avoided, "
            f"got {entry.get('weight', 'none')!r}"
        )
    return _Part(label, float(weight), parse(spec.cls, options, where), where, column, spec.group)


def _own(name: str, options: dict[str, Any], where: str) -> Component:
    target: Any = load_function(name, f"{where}.name")
    parameters = list(inspect.signature(target).parameters.values())
    parameters = parameters if inspect.isclass(target) else parameters[1:]  # the first of a function takes the steps
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        _check_options(options, [parameter.name for parameter in parameters], where)
    for parameter in parameters:
        free = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if not free and parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"{where}.{parameter.name}: missing; {name} needs it, and there is no default")
    if not inspect.isclass(target):
        component = partial(target, **options)
        require_takes(f"{where}.name={name}", component, "steps")
        return component
    try:
        made = target(**options)
    except Exception as error:
        raise ConfigError(f"{where}: {name} cannot be made ({type(error).__name__}: {error})") from error
    if not callable(made):
        raise ConfigError(f"{where}.name: expected {name!r} to have a method __call__(self, steps)")
    require_takes(f"{where}.name={name}", made, "steps")
    return cast("Component", made)


def _check_options(options: Mapping[str, Any], option_names: Sequence[str], where: str) -> None:
    names = [*_OWN, *option_names]
    for key in options:
        if key not in names:
            raise ConfigError(
                f"{where}.{key}: unknown key{did_you_mean(key, names) or '.'} Known keys: {', '.join(names)}"
            )
