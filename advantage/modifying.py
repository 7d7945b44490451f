"""Modifiers by name: what changes the table before any estimator, or its credit afterwards.

Estimators and modifiers of steps give one number per step, which all its tokens share. What a second prompt says of a
response (:class:`Tokens`) differs from token to token, so its modifiers come last, on one advantage per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import update_wrapper
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from verl_turnkey.advantage.batch import OPTIONAL_COLUMNS, Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, describe
from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.advantage.params import ConfigError, did_you_mean, parse, require_frozen, require_new, require_takes


@dataclass(frozen=True)
class Tokens:
    """The model's tokens of a batch, in the order of its rows; those of a step are in the order they were written.

    ``step`` (T,) int64: the row of the :class:`StepBatch` that a token belongs to. ``gap`` (T,) float64: its
    log-probability under the teacher's prompt minus that under the student's, both by the old weights; 0 where the row
    has no text for a teacher, or there is no teacher. ``training_step``: of the trainer, from 1.

    Raises:
        ValueError: columns of different lengths, or a gap that is not finite.
    """

    step: Ints
    gap: Floats
    training_step: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", np.asarray(self.step, np.int64))
        object.__setattr__(self, "gap", np.asarray(self.gap, np.float64))
        if self.step.ndim != 1 or self.step.shape != self.gap.shape:
            raise ValueError(f"Tokens: expected step and gap of shape (T,), got {self.step.shape} and {self.gap.shape}")
        if bad := np.count_nonzero(~np.isfinite(self.gap)):
            raise ValueError(f"Tokens: expected finite gaps, got {bad} that are not: 0 stands for a row without a text")

    def sums(self, values: Floats, steps: int) -> Floats:
        """Sum of ``values`` (T,) over the tokens of each of ``steps`` steps; 0 for a step without tokens."""
        return np.bincount(self.step, weights=values, minlength=steps).astype(np.float64)  # integers without a token

    def means(self, values: Floats, steps: int) -> Floats:
        """Mean of ``values`` (T,) over the tokens of each of ``steps`` steps; 0 for a step without tokens."""
        return self.sums(values, steps) / np.maximum(np.bincount(self.step, minlength=steps), 1)


#: From the advantage of each token (T,), the tokens, their steps, the parameters, and the state of a stateful modifier
#: to the new advantages (T,).
TokenRule = Callable[..., Floats]


def with_tokens(
    credit: Credit,
    modify: Sequence[Any],
    batch: StepBatch,
    tokens: Tokens | None,
    penalties: Floats,
    state_of: Callable[[str], Mapping[str, float]],
) -> Credit:
    """``credit``, which has no ``penalties`` (S,) in it, with an advantage for each token, which has.

    ``modify``: the modifications of tokens, in order. Advantage and parts of a step follow the mean of its tokens.
    ``state_of``: from the name of a stateful one to its state before this batch.

    Raises:
        ConfigError: there are no ``tokens``.
        ValueError: a modifier did not return one finite number per token.
    """
    if tokens is None:
        raise ConfigError(
            f"modifier {modify[0].spec.name!r} changes the credit of single tokens: pass tokens=Tokens(step=..., "
            "gap=...), the step and the teacher's gap of each"
        )
    advantage, of_step = credit.advantage[tokens.step], credit.advantage
    parts, metrics = dict(credit.parts), dict(credit.metrics)
    for modification in modify:
        spec, before = modification.spec, advantage
        memory = (state_of(spec.name),) if spec.stateful else ()
        advantage = np.asarray(spec.of_tokens(before, tokens, batch, modification.params, *memory), np.float64)
        _check_tokens(spec.name, advantage, len(before))
        moved = tokens.means(advantage - before, len(batch))
        of_step, parts[spec.name] = of_step + moved, parts[spec.name] + moved
        metrics |= describe(f"{spec.name}/tokens", advantage - before)
    return replace(credit, advantage=of_step, parts=parts, metrics=metrics, tokens=advantage + penalties[tokens.step])


def _check_tokens(name: str, advantage: Floats, number: int) -> None:
    expected = f"modifier {name!r}: expected {number} finite numbers, one per token"
    if advantage.shape != (number,):
        raise ValueError(f"{expected}, got shape {advantage.shape}")
    if bad := np.count_nonzero(~np.isfinite(advantage)):
        raise ValueError(f"{expected}, got {bad} that are not finite")


Estimate = Callable[[StepBatch], Credit]
Modifier = TypeVar("Modifier", bound=Callable[..., Credit])
Rule = TypeVar("Rule", bound=TokenRule)

#: How far the sum of parts may be from the advantage, relative to their absolute values.
PARTS_ROUNDING = 1e-6

#: State of modifiers stands beside the estimator's under ``modify/<name>/<key>``.
_STATE = "modify/"


@dataclass(frozen=True)
class ModifierSpec:
    """A registered modifier; the fields are those of an estimator's spec.

    ``fn(batch, params, estimate)``, with ``stateful`` ``fn(batch, params, estimate, state)``, returns a Credit.
    ``of_tokens(advantage, tokens, batch, params)``, with ``stateful`` also ``state``, changes the advantages of tokens
    afterwards; None: those of steps alone. Params whose values decide on that have a property ``by_token``.
    """

    name: str
    params: type
    needs: tuple[str, ...]
    paper: str
    summary: str
    fn: Callable[..., Credit]
    stateful: bool = False
    bounded_outcomes: bool = False
    of_tokens: TokenRule | None = None
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Modification:
    """A modifier with its parameters: one entry of a list ``modify``."""

    spec: ModifierSpec
    params: Any

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it cannot do without."""
        return (*self.spec.needs, *getattr(self.params, "also_needs", ()))

    @property
    def by_token(self) -> bool:
        """Whether it changes the advantages of single tokens."""
        return self.spec.of_tokens is not None and getattr(self.params, "by_token", True)

    @property
    def entry(self) -> dict[str, Any]:
        """The mapping that selects it."""
        return {"name": self.spec.name, **asdict(self.params)}


_MODIFIERS: dict[str, ModifierSpec] = {}


def check_columns(what: str, needs: Sequence[str], before: Sequence[str]) -> None:
    """Raise ValueError where ``needs`` names a column that no table has, or ``before`` no further one of ``what``."""
    for field, columns in (("needs", needs), ("before", before)):
        if isinstance(columns, str):
            raise ValueError(f"{what}: expected {field} to be a tuple of names such as ({columns!r},), got a str")
    for column in needs:
        if column not in OPTIONAL_COLUMNS and not column.startswith("extra."):
            raise ValueError(
                f"{what}: needs names {column!r}, expected one of {', '.join(OPTIONAL_COLUMNS)} or "
                f"extra.<name>{did_you_mean(column, OPTIONAL_COLUMNS)}"
            )
    for column in before:
        if not column.startswith("extra."):
            raise ValueError(f"{what}: before names {column!r}, expected extra.<name>")


def register_modifier(
    name: str,
    *,
    params: type,
    needs: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    stateful: bool = False,
    bounded_outcomes: bool = False,
    of_tokens: TokenRule | None = None,
    paper: str = "",
    summary: str = "",
) -> Callable[[Modifier], Modifier]:
    """Decorate ``fn(batch, params, estimate) -> Credit`` to make it the modifier ``name`` of any estimator.

    ``estimate(table)`` is the estimator, with the modifiers before this one, on a table: ``batch``, or one with other
    numbers (:meth:`StepBatch.replaced`). The table has no penalties: what they change is added at the end. The result's
    ``advantage`` counts, and what the modifier changed of it is the part ``<name>``; ``returns``, ``extra`` and metrics
    of the estimator stay. Its own metrics and levels, bare names, become ``credit/<name>/<metric>`` and
    ``<name>/<level>``. With ``stateful`` it is ``fn(batch, params, estimate, state)``, as for estimators, and
    ``Credit.state`` is its own. ``of_tokens``: see :class:`ModifierSpec`.

    Raises:
        ValueError: the name is taken or contains a slash, ``params`` is not a frozen dataclass or has a field ``name``,
            ``needs`` or ``before`` names an unknown column, or ``fn`` or ``of_tokens`` takes other arguments.
    """
    require_new(f"modifier {name!r}", _MODIFIERS.get(name), "; choose another name")
    if "/" in name:
        raise ValueError(f"modifier {name!r}: a name cannot contain a slash, which separates names of metrics")
    require_frozen(f"modifier {name!r}", params)
    if "name" in {field.name for field in fields(params)}:
        raise ValueError(f"modifier {name!r}: a parameter cannot be called name, which selects the modifier")
    check_columns(f"modifier {name!r}", needs, before)

    def register(fn: Modifier) -> Modifier:
        memory = ["state"] * stateful
        require_takes(f"modifier {name!r}", fn, "batch", "params", "estimate", *memory)
        if of_tokens is not None:
            require_takes(f"modifier {name!r} of tokens", of_tokens, "advantage", "tokens", "batch", "params", *memory)
        _MODIFIERS[name] = ModifierSpec(
            name, params, tuple(needs), paper, summary, fn, stateful, bounded_outcomes, of_tokens, tuple(before)
        )
        return fn

    return register


def register_token_modifier(
    name: str, *, params: type, needs: tuple[str, ...] = (), paper: str = "", summary: str = ""
) -> Callable[[Rule], Rule]:
    """Decorate ``fn(advantage, tokens, batch, params) -> advantages`` to make it a modifier of tokens alone.

    ``advantage`` (T,) float64 is that of the steps, or of the modifiers of tokens before this one, without penalties;
    ``tokens``: :class:`Tokens`. What it changed of a step's advantage, a mean over tokens, is the part ``<name>``.

    Raises:
        ValueError: as :func:`register_modifier`.
    """

    def register(fn: Rule) -> Rule:
        def steps(batch: StepBatch, params: Any, estimate: Estimate) -> Credit:
            return estimate(batch)

        decorate = register_modifier(name, params=params, needs=needs, of_tokens=fn, paper=paper, summary=summary)
        decorate(update_wrapper(steps, fn))
        return fn

    return register


def modifiers() -> dict[str, ModifierSpec]:
    """All registered modifiers by name, sorted."""
    return dict(sorted(_MODIFIERS.items()))


def parse_modify(entries: Any, where: str = "modify", method: str = "") -> tuple[Modification, ...]:
    """The modifiers of a list ``modify``, each a name or a mapping with ``name`` and parameters; None is empty.

    Raises:
        ConfigError: not a list, no or an unknown name, a parameter the modifier does not have, a modifier twice, or the
            one that the ``method`` of its name is made of.
    """
    if entries is None:
        return ()
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise ConfigError(f"{where}: expected a list as in [{{name: empg}}], got {entries!r}")
    modifications: list[Modification] = []
    for i, entry in enumerate(entries):
        here = f"{where}[{i}]"
        if not isinstance(entry, Modification):
            entry = _parsed(entry, here)
        if entry.spec.name in [other.spec.name for other in modifications]:
            raise ConfigError(f"{here}: {entry.spec.name!r} is in the list twice; expected each modifier once")
        if entry.spec.name == method:
            raise ConfigError(f"{here}: the method {method!r} does this already; leave it out")
        modifications.append(entry)
    return tuple(modifications)


def _parsed(entry: Any, here: str) -> Modification:
    mapping = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(mapping, Mapping) or not isinstance(mapping.get("name"), str):
        raise ConfigError(f"{here}: expected a modifier's name, or a mapping with its name, got {entry!r}")
    name = mapping["name"]
    if name not in _MODIFIERS:
        hint = known_as(name) or did_you_mean(name, _MODIFIERS)
        raise ConfigError(f"{here}: unknown modifier {name!r}{hint or ';'} known: {', '.join(modifiers())}")
    spec = _MODIFIERS[name]
    params = parse(spec.params, {key: value for key, value in mapping.items() if key != "name"}, f"{here} ({name})")
    return Modification(spec, params)


def modified(
    estimate: Estimate,
    modify: Sequence[Modification],
    batch: StepBatch,
    state: Mapping[str, float],
    tokens: Tokens | None = None,
) -> Credit:
    """Credit of ``batch`` by ``estimate`` under the modifiers, the first of them next to ``estimate``.

    A modifier sees a table without penalties; what the penalties change in the estimator's own credit is added
    unmodified. ``state`` and the credit's: those of the modifiers, under ``modify/<name>/<key>``, and the estimator's.
    The credit has the estimator's parts, or one, ``method``, of an estimator that names none, and one named after each
    modifier: what it changed. What a modifier changed in the table is in the parts that the estimator made of it.
    Modifiers of tokens come after all others, in their own order.
    """
    if not modify:
        return estimate(batch)
    change = np.zeros(len(batch))

    def without_penalties(table: StepBatch) -> Credit:
        free = estimate(table)
        whole = estimate(table.replaced(penalty=batch.penalty)) if batch.penalty.any() else free
        change[:] = whole.advantage - free.advantage
        return replace(whole, advantage=free.advantage, parts=whole.parts or {"method": whole.advantage})

    whole = without_penalties
    for modification in modify:
        whole = _wrapped(whole, modification, state)
    credit = whole(batch.replaced(penalty=np.zeros(len(batch))) if batch.penalty.any() else batch)
    if by_token := [modification for modification in modify if modification.by_token]:
        credit = with_tokens(credit, by_token, batch, tokens, change, lambda name: _own_state(state, name))
    return replace(credit, advantage=credit.advantage + change)


def _wrapped(estimate: Estimate, modification: Modification, state: Mapping[str, float]) -> Estimate:
    spec, prefix = modification.spec, _prefix(modification.spec.name)

    def wrapper(batch: StepBatch) -> Credit:
        inner: list[Credit] = []

        def inside(table: StepBatch) -> Credit:
            inner.append(estimate(table))
            return replace(inner[-1], metrics={}, state={})

        memory = (_own_state(state, spec.name),) if spec.stateful else ()
        credit = spec.fn(batch, modification.params, inside, *memory)
        if not isinstance(credit, Credit) or not inner:
            got = "without a call of estimate" if inner == [] else type(credit).__name__
            raise ValueError(f"modifier {spec.name!r}: expected a Credit made of estimate(batch), got one {got}")
        check_numbers(f"modifier {spec.name!r}", credit, len(batch))
        base = inner[-1]
        metrics = {f"credit/{spec.name}/{key.removeprefix('credit/')}": value for key, value in credit.metrics.items()}
        kept = {f"{prefix}{key}": value for key, value in credit.state.items()}
        parts = {**base.parts, spec.name: base.parts.get(spec.name, 0.0) + credit.advantage - base.advantage}
        own_levels = {key: level for key, level in credit.levels.items() if level is not base.levels.get(key)}
        levels = {**base.levels, **{f"{spec.name}/{key}": level for key, level in own_levels.items()}}
        merged = {"metrics": {**base.metrics, **metrics}, "state": {**base.state, **kept}}
        return replace(base, advantage=credit.advantage, parts=parts, levels=levels, **merged)

    return wrapper


def _prefix(name: str) -> str:
    return f"{_STATE}{name}/"


def _own_state(state: Mapping[str, float], name: str) -> dict[str, float]:
    """What the modifier ``name`` remembers."""
    prefix = _prefix(name)
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def check_numbers(who: str, credit: Credit, steps: int) -> None:
    """Raise ValueError where ``credit`` of ``who`` is not one finite number per step."""
    columns = {"advantage": credit.advantage, "returns": credit.returns, **credit.extra}
    columns |= {f"part {name!r}": part for name, part in credit.parts.items()}
    columns |= {f"level {name!r}": level for name, level in credit.levels.items()}
    for column, array in columns.items():
        if array is None:
            continue
        expected = f"{who}: expected {column} to be {steps} finite numbers, one per step"
        if np.shape(array) != (steps,):
            raise ValueError(f"{expected}, got shape {np.shape(array)}")
        if bad := np.count_nonzero(~np.isfinite(array)):
            raise ValueError(f"{expected}, got {bad} that are not finite")
    for name, array in credit.targets.items():
        if np.shape(array) != (steps,) or np.isinf(array).any():
            raise ValueError(f"{who}: expected target {name!r} to be {steps} numbers, one per step, finite or nan")
    for name, codes in credit.groups.items():
        array = np.asarray(codes)
        if array.shape != (steps,) or array.dtype.kind not in "iu" or array.min(initial=0) < -1:
            got = f"{array.dtype} of shape {array.shape}, from {array.min(initial=0)}"
            raise ValueError(f"{who}: expected groups {name!r} to be {steps} integers >= -1, one per step, got {got}")
    for key, value in credit.metrics.items():
        if np.asarray(value).shape or np.asarray(value).dtype.kind not in "biuf":
            raise ValueError(f"{who}: expected Credit.metrics to hold numbers by name, got {value!r} for {key!r}")
    if twice := credit.parts.keys() & credit.levels.keys():
        raise ValueError(f"{who}: {min(twice)!r} is a part and a level; expected different names, as both are logged")
    if unknown := credit.groups.keys() - credit.parts.keys() - credit.levels.keys():
        names = ", ".join([*credit.parts, *credit.levels]) or "none"
        raise ValueError(f"{who}: expected each name in groups to be a part or level ({names}), got {min(unknown)!r}")
    for key, value in credit.state.items():
        if not isinstance(key, str) or not isinstance(value, Real) or not np.isfinite(float(value)):
            raise ValueError(f"{who}: expected Credit.state to hold finite numbers by name, got {credit.state}")


def check_sum(who: str, credit: Credit) -> None:
    """Raise ValueError where the parts of ``credit`` of ``who``, if it has any, do not add up to its advantage."""
    if not credit.parts:
        return
    total = sum(credit.parts.values(), start=np.zeros_like(credit.advantage))
    scale = 1.0 + sum(np.abs(part) for part in credit.parts.values())
    wrong = np.flatnonzero(np.abs(total - credit.advantage) > PARTS_ROUNDING * scale)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{who}: expected the parts {', '.join(credit.parts)} to add up to the advantage, got {total[row]:g} for "
            f"{credit.advantage[row]:g} in row {row}: what does not add up belongs in Credit.levels"
        )


def estimators_state(state: Mapping[str, float]) -> dict[str, float]:
    """``state`` without that of modifiers."""
    return {key: value for key, value in state.items() if not key.startswith(_STATE)}
