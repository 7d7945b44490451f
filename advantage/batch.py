"""The table that every estimator reads, and the credit that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage import columns as col
from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.columns import Bools, Column
from verl_turnkey.advantage.group_ops import Floats, Ints, Runs, joint_codes, read_conversations, run_sums, sort_runs

#: Columns an estimator can need, apart from the four required ones and ``extra.<name>``.
OPTIONAL_COLUMNS = tuple(
    "score penalty anchor action valid terminated truncated success env_return value tokens text".split()  # noqa: SIM905
)


class StepBatch:
    """All steps of a batch, one row per step, in any order; immutable.

    Columns go in as sequences or arrays of length S and are stored as read-only arrays (S,):

    ==============  ===================================================================================================
    group           prompt id (uid): the trajectories of a group faced the same task and the same seed
    trajectory      rollout id, unique in the batch; belongs to one group
    step            integer >= 0, unique in its trajectory. Only the order counts: steps need not start at 0 or be
                    contiguous, and a discounted return takes one factor gamma from each step to the next one present
    reward          reward of the step: the environment's, or what was composed of it
    score           outcome of the trajectory, given per row (rows may differ); default: the sum of its rewards
    penalty         >= 0, of an invalid action: taken from the step's own advantage at the end, in units of
                    advantage (or, as released codes do, from its return and score before statistics: see ``scope``);
                    default 0
    anchor          the state the action was taken in (the environment's ``info["state_key"]``); None never matches
    action          the parsed action; None never matches
    valid           did the action parse and apply; default True
    terminated      the environment ended the episode here; default False
    truncated       a limit ended the episode here; default False
    success         did the trajectory solve the task; default False
    env_return      the environment's return of the trajectory, given per row, before KL, process rewards and shaping: a
                    trajectory is solved by it where there is no success; default: the score
    value           critic value before the first token of the turn; default nan
    tokens          number of model tokens of the turn; default 0
    text            observation text; default None
    after           of a trajectory whose steps are a tree: the step whose reply the step's request holds, -1 where it
                    begins a conversation; default, and None in all steps of a trajectory: the step before
    request         equal in a trajectory for samples of one request; None: no other step is one
    outcome         the part of ``reward`` that a tree's trajectory earned as a whole; default 0
    extra           further columns by name: numbers become float64 (None is nan), anything else an object array
    ==============  ===================================================================================================

    ``group``, ``trajectory``, ``anchor`` and ``action`` may hold any structure (str, int, tuple, list, dict, array,
    ...). Two are the same when Python says they are equal, lists, tuples and arrays counting alike (so 1, 1.0 and True
    are the same). They are stored as integer codes: equal code, equal id; ``ids[column][code]`` is the id in hashable
    form. A None anchor or action gets a code of its own that no other row has and that is not in ``ids``.

    A missing entry is None, NA or NaT of pandas or numpy: one without a match in anchor and action, None in text and in
    objects, nan in value and in extra numbers, refused in all other columns.

    Further attributes: ``given``, the optional columns that were passed; ``runs``, the rows of each trajectory in step
    order, with the tree of ``after`` and ``request`` if any is one; ``first_rows`` (n_trajectories,), the row of each
    trajectory's earliest step; ``n_groups``; ``n_trajectories``.

    Raises:
        ValueError: a column of another length, a value of the wrong type or not finite, a reward, score or penalty
            beyond 1e18, a negative penalty, a step that is negative or not an integer, a repeated (trajectory, step), a
            trajectory in two groups, an ``after`` that names no earlier step. Names the column and the row.
    """

    group: Ints
    trajectory: Ints
    step: Ints
    reward: Floats
    score: Floats
    penalty: Floats
    anchor: Ints
    action: Ints
    valid: Bools
    terminated: Bools
    truncated: Bools
    success: Bools
    env_return: Floats
    value: Floats
    tokens: Ints
    text: NDArray[np.object_]
    outcome: Floats
    extra: dict[str, NDArray[Any]]
    ids: dict[str, list[Any]]
    given: frozenset[str]
    runs: Runs
    first_rows: Ints
    n_groups: int
    n_trajectories: int

    def __init__(
        self,
        *,
        group: Column,
        trajectory: Column,
        step: Column,
        reward: Column,
        score: Column | None = None,
        penalty: Column | None = None,
        anchor: Column | None = None,
        action: Column | None = None,
        valid: Column | None = None,
        terminated: Column | None = None,
        truncated: Column | None = None,
        success: Column | None = None,
        env_return: Column | None = None,
        value: Column | None = None,
        tokens: Column | None = None,
        text: Column | None = None,
        after: Column | None = None,
        request: Column | None = None,
        outcome: Column | None = None,
        extra: Mapping[str, Column] | None = None,
    ) -> None:
        optional: dict[str, Any] = {
            "score": score,
            "penalty": penalty,
            "anchor": anchor,
            "action": action,
            "valid": valid,
            "terminated": terminated,
            "truncated": truncated,
            "success": success,
            "env_return": env_return,
            "value": value,
            "tokens": tokens,
            "text": text,
            "after": after,
            "request": request,
            "outcome": outcome,
        }
        if not hasattr(extra, "items") and extra is not None:
            raise ValueError(f"extra: expected a dict of columns by name, got {type(extra).__name__}")
        extra = {name: column for name, column in (extra or {}).items() if column is not None}
        optional |= {f"extra.{name}": column for name, column in extra.items()}
        passed: dict[str, Any] = {name: column for name, column in optional.items() if column is not None}
        size = col.common_length({"group": group, "trajectory": trajectory, "step": step, "reward": reward, **passed})
        self.given = frozenset(passed)

        self.ids = {}
        self.group, self.ids["group"] = col.encode("group", group, none_allowed=False)
        self.trajectory, self.ids["trajectory"] = col.encode("trajectory", trajectory, none_allowed=False)
        self.n_groups, self.n_trajectories = len(self.ids["group"]), len(self.ids["trajectory"])
        self.step = col.ints("step", step, self._place)
        self.runs = sort_runs(self.trajectory, self.step)
        self.first_rows = self.runs.order[self.runs.starts]
        self._check_trajectories()
        if after is not None:
            tree = read_conversations(self.trajectory, self.step, self.runs.order, after, request, self._place)
            self.runs = sort_runs(self.trajectory, self.step, tree)

        def constant(default: float) -> Floats:
            return np.broadcast_to(np.float64(default), size)

        def bools(name: str, default: bool) -> Bools:
            if name not in passed:
                return np.broadcast_to(np.bool_(default), size)
            return col.bools(name, passed[name], self._place)

        def codes(name: str) -> Ints:
            if name not in passed:
                self.ids[name] = []
                return np.arange(size)
            result, self.ids[name] = col.encode(name, passed[name], none_allowed=True)
            return result

        self.reward = col.amounts("reward", reward, self._place)
        if score is None:
            self.score = run_sums(self.reward, self.runs)[self.trajectory]
        else:
            self.score = col.amounts("score", score, self._place)
        # It is subtracted: a negative one would pay for what it punishes.
        self.penalty = constant(0.0) if penalty is None else col.amounts("penalty", penalty, self._place, low=0.0)
        self.anchor, self.action = codes("anchor"), codes("action")
        self.valid = bools("valid", True)
        self.terminated, self.truncated = bools("terminated", False), bools("truncated", False)
        self.success = bools("success", False)
        self.env_return = self.score if env_return is None else col.amounts("env_return", env_return, self._place)
        self.value = constant(np.nan) if value is None else col.values("value", value, self._place)
        self.tokens = np.broadcast_to(np.int64(0), size)
        if tokens is not None:
            self.tokens = col.ints("tokens", tokens, self._place)
        self.outcome = constant(0.0)
        if outcome is not None:
            self.outcome = col.amounts("outcome", [value or 0.0 for value in outcome], self._place)
        self.text = np.broadcast_to(np.array(None, dtype=object), size) if text is None else col.objects(text)
        self.extra = {name: col.numbers_or_objects(column) for name, column in extra.items()}
        for array in (*vars(self).values(), *self.extra.values()):
            if isinstance(array, np.ndarray):
                array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.group)

    @cached_property
    def anchor_groups(self) -> tuple[Ints, int]:
        """Codes (S,) of the sets of steps taken from the same state in the same group, and the number of sets."""
        return joint_codes(self.group, self.anchor)

    def rewards(self, gamma: float) -> Floats:
        """Rewards (S,) for recursions over ``runs`` with this discount: ``reward``, unless a trajectory is a tree."""
        return ops.conversation_rewards(self.reward, self.outcome, self.runs, gamma)

    def returns(self, gamma: float) -> Floats:
        """Discounted return from each step on (S,), along its conversation: :func:`.conversation_rewards`."""
        return ops.discounted_returns(self.rewards(gamma), self.runs, gamma)

    def replaced(self, **columns: Floats) -> StepBatch:
        """The same table with other numbers (S,) in ``reward``, ``outcome``, ``score`` or ``penalty``.

        A score that was never given stays the sum of the rewards.

        Raises:
            ValueError: another column, a wrong length, or values that a table refuses.
        """
        other = copy(self)
        col.common_length({"group": self.group, **columns})
        for name, column in columns.items():
            if name not in ("reward", "outcome", "score", "penalty"):
                raise ValueError(f"replaced: expected reward, outcome, score or penalty, got {name}")
            bounds = {"low": 0.0} if name == "penalty" else {}
            numbers = col.amounts(name, column, self._place, **bounds)
            numbers.setflags(write=False)
            setattr(other, name, numbers)
        other.given = self.given | (columns.keys() - {"reward"})
        if "reward" in columns and "score" not in other.given:
            other.score = run_sums(other.reward, self.runs)[self.trajectory]
            other.score.setflags(write=False)
        return other

    def by_role(self) -> StepBatch:
        """The same steps, in which what each role did in a trajectory is a trajectory, in a group of the role's own.

        So any method compares returns, groups and anchors of one role. Roles are those of ``extra.role``; the table
        itself, if it has none or one. In a tree a step continues the nearest step of its role on its path. A
        role is rewarded by its own steps; it succeeds if
        its ``extra.role_outcome``, where there is one, is above 0; its last step has the flags of the trajectory's last
        one. Its next state is the one in which it moves again, and a key of the task is one of the role's. A turn limit
        is dropped, since it counts the turns of all.
        """
        if "extra.role" not in self.given or "extra.parent" in self.given:
            return self
        keys = [None if isinstance(key, float) and key != key else key for key in self.extra["role"].tolist()]
        role, ids = col.encode("extra.role", keys, none_allowed=True)
        role, ids = np.minimum(role, len(ids)), [*ids, None]
        if not len(role) or (role == role[0]).all():
            return self
        other, names = copy(self), [ids[code] for code in role]
        vars(other).pop("anchor_groups", None)
        gone = ("next_anchor", "turn_limit")  # of all roles together
        other.ids, other.extra = dict(self.ids), {k: v for k, v in self.extra.items() if k not in gone}
        other.given = self.given - {f"extra.{name}" for name in gone}
        for column in ("group", "trajectory"):
            codes, number = joint_codes(vars(self)[column], role)
            _, rows = np.unique(codes, return_index=True)
            other.ids[column] = [(self.ids[column][vars(self)[column][row]], names[row]) for row in rows.tolist()]
            setattr(other, column, codes)
            setattr(other, f"n_{'groups' if column == 'group' else 'trajectories'}", number)
        if (tree := self.runs.tree) is not None:
            parent = tree.parent.copy()
            while (foreign := (parent >= 0) & (role[parent] != role)).any():
                parent[foreign] = tree.parent[parent[foreign]]
            tree = ops.conversations(parent, joint_codes(tree.request, role)[0], self.step)
        other.runs = sort_runs(other.trajectory, other.step, tree)
        other.first_rows = other.runs.order[other.runs.starts]
        if "score" not in self.given:
            other.score = run_sums(self.reward, other.runs)[other.trajectory]
        if "env_return" not in self.given:
            other.env_return = other.score
        if "role_outcome" in self.extra:
            paid = col.numbers_or_objects(self.extra["role_outcome"])
            other.success = np.where(np.isnan(paid), self.success, paid > 0)
        last = other.runs.last
        for flag in ("terminated", "truncated"):
            flags = vars(self)[flag].copy()
            flags[last] |= flags[self.runs.last[self.trajectory[last]]]
            setattr(other, flag, flags)
        if "task" in self.extra:
            tasks = [f"{task} {name}" for task, name in zip(self.extra["task"].tolist(), names, strict=True)]
            other.extra["task"] = col.objects(tasks)
        for array in (*vars(other).values(), *other.extra.values()):
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        return other

    def __repr__(self) -> str:
        return f"StepBatch({len(self)} steps, {self.n_trajectories} trajectories, {self.n_groups} groups)"

    def _place(self, row: int) -> str:
        """The position of a row for error messages, as far as it is known at this point of the construction."""
        place = f"row {row}, trajectory {self.ids['trajectory'][self.trajectory[row]]!r}"
        return f"{place}, step {self.step[row]}" if hasattr(self, "step") else place

    def _check_trajectories(self) -> None:
        order = self.runs.order
        trajectory, step = self.trajectory[order], self.step[order]
        repeated = np.flatnonzero((trajectory[1:] == trajectory[:-1]) & (step[1:] == step[:-1]))
        if len(repeated):
            first_row, second_row = sorted(order[repeated[0] : repeated[0] + 2].tolist())
            raise ValueError(
                f"step: {self._place(second_row)}: the same step of this trajectory is already in row {first_row}; "
                "expected each (trajectory, step) once (is the trajectory id unique in the batch?)"
            )
        strangers = np.flatnonzero(self.group[self.first_rows][self.trajectory] != self.group)
        if len(strangers):
            row = int(strangers[0])
            first = int(self.first_rows[self.trajectory[row]])
            here, there = (self.ids["group"][self.group[r]] for r in (row, first))
            raise ValueError(
                f"group: {self._place(row)}: got group {here!r}, but row {first} of the same trajectory has group "
                f"{there!r}; expected one group per trajectory"
            )


@dataclass(frozen=True)
class Credit:
    """What an estimator returns.

    ``advantage`` (S,) float64, in the row order of the batch; ``returns`` (S,) float64, the value target of a
    critic, or None; ``metrics``, what the method wants logged; ``extra``, further columns (S,) that a policy loss may
    ask for by name (an estimator declares them in ``gives``); ``state``, of a ``stateful`` estimator: what the next
    batch begins with, numbers by name, which the caller keeps and saves with its checkpoints.

    Why a step got its credit, by name, (S,) each, if the method says so: ``parts``, which add up to ``advantage``;
    ``levels``, further quantities behind them, such as weights and values of states; ``groups``, the steps that a part
    or level of that name compared: those with the same integer, none with -1. The names do not depend on the batch.
    :func:`compute_credit` logs mean, std and share of non-zero entries of parts and levels.

    ``targets``: what heads of a critic of its own are fitted to, by the name of the :class:`~.registry.ValueHead`, (S,)
    each; nan where a head learns nothing of a step.

    ``tokens`` (T,): the advantage of each token, where a modifier tells them apart (:mod:`.tokens`); that of a step is
    then the mean over its tokens. None: all tokens of a step have its advantage.
    """

    advantage: Floats
    returns: Floats | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Floats] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    parts: Mapping[str, Floats] = field(default_factory=dict)
    levels: Mapping[str, Floats] = field(default_factory=dict)
    groups: Mapping[str, Ints] = field(default_factory=dict)
    targets: Mapping[str, Floats] = field(default_factory=dict)
    tokens: Floats | None = None

    @classmethod
    def of_parts(
        cls,
        parts: Mapping[str, Floats],
        penalty: Floats,
        returns: Floats | None = None,
        *,
        total: Floats | None = None,
        **other: Any,
    ) -> Credit:
        """Credit whose advantage is the sum of ``parts``, in their order, minus ``penalty``, one more part.

        ``total`` (S,): the sum of ``parts``, if the method computes it with less rounding. ``other``: further fields.

        Raises:
            ValueError: a part is not one number per step.
        """
        parts = {name: np.asarray(part, np.float64) for name, part in parts.items()}
        for name, part in parts.items():
            if part.shape != np.shape(penalty):
                raise ValueError(f"part {name!r}: expected {len(penalty)} numbers, one per step, got {part.shape}")
        advantage = (sum(parts.values()) if total is None else total) - penalty
        return cls(advantage, returns, parts={**parts, "penalty": 0.0 - penalty}, **other)

    def __post_init__(self) -> None:
        object.__setattr__(self, "advantage", np.asarray(self.advantage, np.float64))
        if self.returns is not None:
            object.__setattr__(self, "returns", np.asarray(self.returns, np.float64))
