"""Estimators by name: one function, one frozen params dataclass and one decorator make a method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import describe, describe_groups
from verl_turnkey.advantage.modifying import (
    Modification,
    Tokens,
    check_columns,
    check_numbers,
    check_sum,
    estimators_state,
    modified,
    parse_modify,
)
from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.advantage.params import ConfigError, did_you_mean, parse, require_frozen, require_new, require_takes

Estimator = TypeVar("Estimator", bound=Callable[..., Credit])


#: Columns that the trainers supply where a method needs them and the rollout has none, and what stands in each.
FROM_TRAINER = {
    "extra.log_prob": "the sum of the old policy's log-probabilities of the turn's own tokens",
    "extra.entropy": "the mean entropy of the old policy at the turn's own tokens",
    "extra.task": "a key of the task, the same in every batch and in every run",
    "extra.teacher_gap": "the sum of the teacher's minus the old policy's log-probabilities of the turn's own tokens",
    "extra.teacher_gap_mean": "the mean of the same",
    "extra.teacher_log_prob_mean": "the mean log-probability of the turn's own tokens under the teacher's prompt",
    "extra.value_low": "the critic's value before the action, with critic.enable=True",
    "extra.value_high": "that before the turn, by a head of its own",
    "extra.value_term": "the same, by another head",
    "extra.rank": "the effective rank of the old policy's hidden states over the row's own tokens",
    "extra.rank_velocity": "how it differs from the ranks of earlier prefixes, on average",
    "extra.rank_acceleration": "how that difference changes from prefix to prefix, on average",
}

#: How a rollout comes to have a column, for the error that says it is missing.
HOW_TO_SET = {
    **{
        column: f"in training the trainers supply it: {what}; else pass it to StepBatch"
        for column, what in FROM_TRAINER.items()
    },
    "anchor": 'the environment must set info["state_key"] (a key of the full state the action is taken in), or your '
    'own agent loop the record field "anchor"',
    "action": 'the agent loop must set the record field "action" (a key of the parsed action)',
    "success": 'the agent loop must set the record field "success"',
    "terminated": 'the agent loop must set the record field "terminated"',
    "truncated": 'the agent loop must set the record field "truncated"',
    "valid": 'the agent loop must set the record field "valid"',
    "value": "the method needs a critic: set critic.enable=True",
}


def how_to_set(column: str, before: Collection[str] = ()) -> str:
    """How a rollout comes to have ``column``, to end an error with; ``before``: names as in ``names_before``."""
    if column in FROM_TRAINER or not column.startswith("extra."):
        return HOW_TO_SET.get(column, f"pass it to StepBatch ({column})")
    key = column.removeprefix("extra.")
    when, whose = (" with the reset and every step", " of your own") if key in before else ("", "")
    return (
        f'the environment must set info["extra"]["{key}"]{when}, or your own agent loop "{key}" in the record field '
        f'"extra", on every step; or a component{whose} in turnkey.rewards gives it (column: {key})'
        + (", or a model beside the policy (turnkey.prm.kind=implicit)" if key == "turn_score" else "")
    )


@dataclass(frozen=True)
class ValueHead:
    """A head of the critic: the value before one token of each turn, which trainers supply as ``extra.value_<name>``.

    That token is the first one behind the first of the decisions ``behind`` that the turn has (``extra.to_<decision>``
    says where it ends), or of a turn without them the first one. There alone the head is fitted, to
    ``Credit.targets[name]``.
    """

    name: str
    behind: tuple[str, ...] = ()


@dataclass(frozen=True)
class EstimatorSpec:
    """A registered estimator.

    ``params``: its frozen dataclass. ``needs``: the StepBatch columns it cannot do without, ``extra.<name>`` for an
    extra one. ``gives``: the columns it returns in ``Credit.extra``, for policy losses that need them. ``paper`` and
    ``summary``: where it comes from and what it does, one line each. ``fn(batch, params)`` returns a Credit. A
    ``stateful`` one remembers something from batch to batch: ``fn(batch, params, state)`` gets the ``Credit.state`` of
    the batch before, empty at the start. ``before``: columns ``extra.<name>`` that describe the state before the step:
    ``turnkey_env`` takes them from what the environment said of that state, all others from its answer to the step.
    ``bounded_outcomes``: it refuses outcomes out of bounds or gives them no credit, and verl's KL penalty in the reward
    would move them there. ``independent``: it takes trajectories to be independent of each other, so that rollouts that
    share a prefix are refused. ``tier``: a key of :data:`TIERS`.
    Params whose values decide on further columns have a property ``also_needs``; on whether a stateful one remembers
    anything, ``remembers``; on the heads of the critic, ``value_heads``.
    """

    name: str
    params: type
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    paper: str
    summary: str
    fn: Callable[..., Credit]
    stateful: bool = False
    before: tuple[str, ...] = ()
    bounded_outcomes: bool = False
    independent: bool = False
    tier: str = "from_paper"

    def columns(self, params: Any, modify: Sequence[Modification] = ()) -> tuple[str, ...]:
        """The columns that it cannot do without under ``params``, and those of the modifiers."""
        needs = (*self.needs, *getattr(params, "also_needs", ()))
        return tuple(dict.fromkeys((*needs, *(column for modification in modify for column in modification.columns))))

    @staticmethod
    def heads(params: Any) -> tuple[ValueHead, ...]:
        """The heads of the critic that it reads under ``params``; none: one value serves, or none is read."""
        return getattr(params, "value_heads", ())

    def names_before(self, modify: Sequence[Modification] = ()) -> frozenset[str]:
        """Names, without ``extra.``, of the columns that describe the state before the step, also the modifiers'."""
        columns = (*self.before, *(column for modification in modify for column in modification.spec.before))
        return frozenset(column.removeprefix("extra.") for column in columns)


_ESTIMATORS: dict[str, EstimatorSpec] = {}

#: What a method's numbers were compared with, the strongest first; the default is the last.
TIERS = {
    "core": "agrees with recorded outputs of released code; has end-to-end runs and measured evidence",
    "reproduced": "agrees with recorded outputs of the authors' code",
    "from_paper": "follows the equations of its paper; no outputs of the authors' code to compare with",
}

#: Arguments of :func:`compute_credit`, which no parameter can be called.
RESERVED = ("name", "batch", "state", "modify", "tokens")


def register_estimator(
    name: str,
    *,
    params: type,
    needs: tuple[str, ...] = (),
    gives: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    stateful: bool = False,
    bounded_outcomes: bool = False,
    independent: bool = False,
    paper: str = "",
    summary: str = "",
    tier: str = "from_paper",
) -> Callable[[Estimator], Estimator]:
    """Decorate ``fn(batch: StepBatch, params) -> Credit`` to make it the estimator ``name``.

    With ``stateful`` it is ``fn(batch, params, state)``: see :class:`EstimatorSpec`.

    Raises:
        ValueError: the name is taken, ``params`` is not a frozen dataclass or has a field called as an argument of
            :func:`compute_credit`, ``needs`` or ``before`` names an unknown column, ``tier`` is unknown, or ``fn``
            takes other arguments.
    """
    if tier not in TIERS:
        raise ValueError(f"estimator {name!r}: tier: expected one of {', '.join(map(repr, TIERS))}, got {tier!r}")
    require_new(f"estimator {name!r}", _ESTIMATORS.get(name), "; choose another name")
    require_frozen(f"estimator {name!r}", params)
    if taken := [entry.name for entry in fields(params) if entry.name in RESERVED]:
        raise ValueError(f"estimator {name!r}: a parameter cannot be called {taken[0]!r}; choose another name for it")
    check_columns(f"estimator {name!r}", needs, before)

    def register(fn: Estimator) -> Estimator:
        require_takes(f"estimator {name!r}", fn, "batch", "params", *["state"] * stateful)
        source = (tuple(needs), tuple(gives), paper, summary, fn)
        _ESTIMATORS[name] = EstimatorSpec(
            name, params, *source, stateful, tuple(before), bounded_outcomes, independent, tier
        )
        return fn

    return register


def estimators() -> dict[str, EstimatorSpec]:
    """All registered estimators by name, sorted."""
    return dict(sorted(_ESTIMATORS.items()))


def compute_credit(
    name: str,
    batch: StepBatch,
    *,
    state: Mapping[str, float] | None = None,
    modify: Sequence[Any] = (),
    tokens: Tokens | None = None,
    **params: Any,
) -> Credit:
    """Credit of every step of ``batch`` by the estimator ``name``; ``params`` are the fields of its dataclass.

    A method that does not read ``extra.role`` takes each role's part of a trajectory as a trajectory of its own, where
    there are several (:meth:`.StepBatch.by_role`).

    ``modify`` lists modifiers, each by its name or as a mapping with ``name`` and its parameters: the first modifies
    the estimator, each later one the result of those before it. ``tokens``: for modifiers of single tokens, whose
    result is ``Credit.tokens``. ``state`` is the ``Credit.state`` of the last batch, for stateful estimators and
    modifiers; None at the start.

    Raises:
        ConfigError: unknown estimator, modifier or parameter (with the closest match), a value of the wrong type or
            range, or a needed column that the batch lacks.
        ValueError: the estimator did not return one finite number per step.
    """
    if name not in _ESTIMATORS:
        hint = known_as(name) or did_you_mean(name, _ESTIMATORS)
        raise ConfigError(f"unknown estimator {name!r}{hint or ';'} known: {', '.join(estimators())}")
    if not isinstance(batch, StepBatch):
        raise ConfigError(
            f"compute_credit: expected a StepBatch, got a {type(batch).__name__}: pass its columns by name, as in "
            "StepBatch(group=..., trajectory=..., step=..., reward=...)"
        )
    spec = _ESTIMATORS[name]
    parsed = parse(spec.params, params, where=name)
    chosen = parse_modify(modify, method=name)
    before = spec.names_before(chosen)
    readers = [(f"modifier {modification.spec.name!r}", modification.columns) for modification in chosen]
    for reader, columns in ((f"estimator {name!r}", spec.columns(parsed)), *readers):
        for column in columns:
            if column not in batch.given:
                how = how_to_set(column, before)
                raise ConfigError(f"{reader} needs the column {column!r}, which this batch does not have: {how}")
    state = state or {}
    if "extra.role" not in spec.needs:
        batch = batch.by_role()

    def estimate(table: StepBatch) -> Credit:
        memory = (estimators_state(state),) if spec.stateful else ()
        return _checked(spec, spec.fn(table, parsed, *memory), len(batch), parsed)

    credit = modified(estimate, chosen, batch, state, tokens)
    anchors = describe_groups("anchor", *batch.anchor_groups) if "anchor" in batch.given else {}
    described_parts = [describe(part, numbers) for part, numbers in (*credit.levels.items(), *credit.parts.items())]
    metrics = {
        key: value for described in (anchors, *described_parts, credit.metrics) for key, value in described.items()
    }
    return replace(credit, metrics=metrics | describe("advantage", credit.advantage))


def _checked(spec: EstimatorSpec, credit: Any, steps: int, params: Any) -> Credit:
    """The estimator's result, or a ValueError that says what is wrong with it."""
    estimator = f"estimator {spec.name!r}"
    if not isinstance(credit, Credit):
        raise ValueError(f"{estimator}: expected it to return a Credit, got {type(credit).__name__}")
    if set(credit.extra) != set(spec.gives):
        raise ValueError(f"{estimator}: expected Credit.extra to hold {spec.gives}, got {sorted(credit.extra)}")
    check_numbers(estimator, credit, steps)
    check_sum(estimator, credit)
    if lacking := {head.name for head in spec.heads(params)} - {*credit.targets}:
        raise ValueError(f"{estimator}: expected Credit.targets of each of its value heads, got none of {min(lacking)}")
    if foreign := set(credit.state) - set(estimators_state(credit.state)):
        raise ValueError(f"{estimator}: Credit.state: {min(foreign)!r} begins like the state of modifiers; rename it")
    return credit
