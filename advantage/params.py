"""Parse a mapping into a dataclass, strictly.

One parser serves the parameters of every estimator and loss and the plugin's whole ``turnkey:`` node, so that a wrong
key or value always reads the same: the full dotted key, what was expected, what came, and the closest match.
"""

from __future__ import annotations

import difflib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

#: What other frameworks call the things of this package. An empty entry is a name that means something else there: it
#: is never taken for a misspelling of one of ours.
ALIASES: dict[str, tuple[str, ...]] = {
    # parameters of estimators
    "mode": ("norm",),  # verl-agent
    "enable_similarity": ("similarity",),
    "similarity_thresh": ("similarity",),
    "length_weight_alpha": ("alpha",),
    "base_group": ("episode_level",),
    "compute_mean_std_cross_steps": ("scope",),
    "step_reward_weight": ("step_advantage_w",),  # ROLL
    "step_reward_gamma": ("gamma",),
    "whiten_advantages": ("whiten",),
    "high_level_gamma": ("gamma",),  # RAGEN
    "norm_adv_by_std_in_grpo": ("norm",),  # verl
    "scale_rewards": ("norm",),  # TRL
    "lam": ("lam", "lam_actor"),
    "lambda": ("lam", "lam_actor"),
    "gae_lambda": ("lam", "lam_actor"),
    "discount": ("gamma",),
    "omega": ("step_advantage_w",),
    "eps": ("epsilon",),
    # of the rollout
    "history_length": ("history",),
    "max_steps": ("max_turns",),
    "max_turn": ("max_turns",),
    "invalid_action_penalty_coef": ("invalid_action_penalty",),
    "use_invalid_action_penalty": ("invalid_action_penalty",),
    "format_penalty": ("invalid_action_penalty",),
    "env_name": ("id",),
    "env_type": ("id",),
    # methods (further names of papers: paper_names.py)
    "grpo": ("grpo_steps",),
    "gae": ("turn_gae",),
    "ppo": ("turn_gae",),
    "remax": (),
    "gdpo": (),
    "reinforce": (),
}


class ConfigError(ValueError):
    """A configuration value that cannot be used; the message names the key to change."""


class ConfigErrors(ConfigError):
    """Several errors in one numbered message; ``where`` says where they are."""

    def __init__(self, errors: Sequence[Exception], where: str = "") -> None:
        lines = [f"{number}. {error}" for number, error in enumerate(errors, 1)]
        super().__init__("\n".join([f"{len(errors)} errors{where}:", *lines]))
        self.errors = errors


def raise_all(errors: Sequence[Exception], where: str = "") -> None:
    """Raise ``errors``, each once: one as it is, several as :class:`ConfigErrors`; return if there are none."""
    single = (part for error in errors for part in (error.errors if isinstance(error, ConfigErrors) else [error]))
    unique = list({str(error): error for error in single}.values())
    if unique:
        raise unique[0] if len(unique) == 1 else ConfigErrors(unique, where)


def check(ok: bool, key: str, expected: str, value: object, hint: str = "") -> None:
    """Raise :class:`ConfigError` unless ``ok``: the range check of a params dataclass, for its ``__post_init__``.

    ``key`` is the bare field name; :func:`parse` puts the path in front of it. ``hint`` is appended.
    """
    if not ok:
        raise ConfigError(f"{key}: expected {expected}, got {value!r}{hint}")


@dataclass(frozen=True)
class Range:
    """The numbers that a field takes: whether one ``holds``, and the ``words`` of errors for them."""

    holds: Callable[[Any], bool]
    words: str


Unit = Annotated[float, Range(lambda x: 0 <= x <= 1, "a number in [0, 1]")]
PositiveUnit = Annotated[float, Range(lambda x: 0 < x <= 1, "a number in (0, 1]")]
BelowOne = Annotated[float, Range(lambda x: 0 <= x < 1, "a number in [0, 1)")]
NotNegative = Annotated[float, Range(lambda x: 0 <= x < math.inf, "a finite number >= 0")]
Positive = Annotated[float, Range(lambda x: 0 < x < math.inf, "a finite number > 0")]
Finite = Annotated[float, Range(math.isfinite, "a finite number")]
AboveOne = Annotated[float, Range(lambda x: x > 1, "a number > 1")]
Count = Annotated[int, Range(lambda x: x >= 0, "an integer >= 0")]
AtLeastOne = Annotated[int, Range(lambda x: x >= 1, "an integer >= 1")]


class Ranged:
    """Base of dataclasses whose fields are annotated with a :class:`Range`: ``gamma: Unit = 0.95``.

    A field that may be None, too, is ``Unit | None``. Conditions on several fields stand in a ``__post_init__`` that
    calls this one.

    Raises:
        ConfigError: a value is out of its range.
    """

    def __post_init__(self) -> None:
        for key, limits, optional in _ranges(type(self)):
            value = getattr(self, key)
            if not (optional and value is None):
                check(limits.holds(value), key, f"null or {limits.words}" if optional else limits.words, value)


@cache
def _ranges(cls: type) -> list[tuple[str, Range, bool]]:
    """Name and range of each field that has one, and whether it may be None."""
    ranges: dict[str, tuple[str, Range, bool]] = {}
    for base in reversed(cls.__mro__[:-1]):  # a field that a subclass gives another default keeps its range
        for key, hint in get_type_hints(base, include_extras=True).items():
            members = get_args(hint) if get_origin(hint) in _UNIONS else (hint,)
            extras = [extra for member in members for extra in getattr(member, "__metadata__", ())]
            if limits := [extra for extra in extras if isinstance(extra, Range)]:
                ranges[key] = key, limits[-1], type(None) in members
    return list(ranges.values())


def require_frozen(what: str, params: object) -> None:
    """Raise ValueError unless ``params`` is a frozen dataclass; ``what`` it belongs to opens the message."""
    if not (is_dataclass(params) and isinstance(params, type) and params.__dataclass_params__.frozen):  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"{what}: expected params to be a class with @dataclass(frozen=True), got {params!r}")


def require_new(what: str, holder: Any, instead: str = "") -> None:
    """Raise ValueError if the name of ``what`` has a ``holder``, a spec with its function ``fn``."""
    if holder is not None:
        by = f"{holder.fn.__module__}.{holder.fn.__qualname__}"
        raise ValueError(f"{what} is already registered by {by}{instead}")


def require_takes(what: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise ConfigError unless ``function`` takes ``arguments`` by position; ``what`` begins the message."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(f"{what}: expected a function of ({', '.join(arguments)}), got one of {signature}") from None


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """``; did you mean 'x'?`` for what ``name`` is called here, or for the closest of ``known``; empty without any.

    A name that another framework has given to something else (:data:`ALIASES`) is not a misspelling of ours.
    """
    by_lower = {str(k).lower(): str(k) for k in known}
    lower = str(name).lower()
    close = [alias for alias in ALIASES.get(lower, ()) if alias in by_lower]
    if not close and ALIASES.get(lower) != ():
        close = difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def parse(cls: type[T], mapping: Mapping[str, Any] | None, where: str) -> T:
    """Build the dataclass ``cls`` from ``mapping`` (None counts as empty); ``where`` is the dotted path of the mapping.

    Supported annotations: bool, int, float (an int is accepted, a bool is not), str, Any, None, Literal, Optional and
    unions, list, tuple, dict, and nested dataclasses. Lists and dicts of any Sequence or Mapping type (OmegaConf's
    included) come out as plain ones.

    Raises:
        ConfigError: unknown keys, missing keys, wrong types, values outside a Literal (all at once), or else a failed
            range check in ``__post_init__``.
    """
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: expected a mapping of keys, got {_got(mapping)}")
    known = {f.name: f for f in fields(cls) if f.init}  # pyright: ignore[reportArgumentType]
    hints, names = _hints(cls), ", ".join(sorted(known)) or "none"
    errors: list[Exception] = [
        ConfigError(f"{_join(where, name)}: missing; expected {_expected(hints[name])}, and there is no default")
        for name, field in known.items()
        if name not in mapping and field.default is MISSING and field.default_factory is MISSING
    ]
    values = {}
    for key, value in mapping.items():
        place = _join(where, str(key))
        if key not in known:
            hint = did_you_mean(key, known)
            errors.append(ConfigError(f"{place}: unknown key{hint or '.'} Known keys: {names}"))
            continue
        try:
            values[key] = _value(value, hints[key], place)
        except ConfigError as error:
            errors.append(error)
    raise_all(errors)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_join(where, str(error))) from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _got(value: object) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"


_LISTS, _MAPPINGS, _UNIONS = (list, tuple, Sequence), (dict, Mapping), (Union, types.UnionType)
# annotation -> the values that it takes (a bool is not a number), and how errors call it
_SCALARS: dict[Any, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
    type(None): (type(None), "None"),
    None: (type(None), "None"),
}


def _expected(hint: Any) -> str:
    """The annotation in words."""
    kind = get_origin(hint) or hint
    if is_dataclass(hint) or kind in _MAPPINGS:
        return "a mapping"
    if kind is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    if kind in _UNIONS:
        return " or ".join(_expected(member) for member in get_args(hint))
    if kind in _LISTS:
        return "a list"
    return _SCALARS[hint][1] if hint in _SCALARS else getattr(hint, "__name__", str(hint))


def _wrong(value: Any, hint: Any, where: str, choices: Sequence[Any] = ()) -> ConfigError:
    return ConfigError(f"{where}: expected {_expected(hint)}, got {_got(value)}{did_you_mean(value, choices)}")


def _value(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the type ``hint``, or a ConfigError that names ``where``."""
    kind = get_origin(hint) or hint
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return parse(hint, value, where)
    if kind in _UNIONS:
        return _union(value, hint, where)
    if kind is Literal:
        for choice in get_args(hint):
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        raise _wrong(value, hint, where, get_args(hint))
    if kind in _LISTS:
        return _items(value, hint, where)
    if kind in _MAPPINGS:
        return _mapping(value, hint, where)
    takes, _ = _SCALARS.get(hint, ((), ""))
    if not isinstance(value, takes) or isinstance(value, bool) != (hint is bool):
        raise _wrong(value, hint, where)
    return hint(value) if hint in (int, float) else value


def _items(value: Any, hint: Any, where: str) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, str) and value:
        raise ConfigError(f"{_wrong(value, hint, where)}; write [{value}]")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _wrong(value, hint, where)
    args = get_args(hint)
    if (get_origin(hint) or hint) is not tuple:
        return [_value(item, args[0] if args else Any, f"{where}[{i}]") for i, item in enumerate(value)]
    if not args or args[-1] is Ellipsis:
        args = (args[0] if args else Any,) * len(value)
    if len(args) != len(value):
        raise ConfigError(f"{where}: expected a list of {len(args)} entries, got {len(value)}: {list(value)!r}")
    return tuple(_value(item, arg, f"{where}[{i}]") for i, (item, arg) in enumerate(zip(value, args, strict=True)))


def _mapping(value: Any, hint: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(value, hint, where)
    of_keys, of_items = get_args(hint) or (Any, Any)
    return {
        _value(key, of_keys, f"{where} (key)"): _value(item, of_items, _join(where, str(key)))
        for key, item in value.items()
    }


def _union(value: Any, hint: Any, where: str) -> Any:
    """The first member that takes the value."""
    members = get_args(hint)
    if value is None and type(None) in members:
        return None
    nested = [member for member in members if is_dataclass(member) and isinstance(member, type)]
    if nested and isinstance(value, Mapping):
        # A mapping can only be meant for the nested dataclass: its own error says more than "none of these types".
        return parse(nested[0], value, where)
    for member in members:
        if member in nested:
            continue
        try:
            return _value(value, member, where)
        except ConfigError:
            continue
    raise _wrong(
        value, hint, where, [c for member in members if get_origin(member) is Literal for c in get_args(member)]
    )
