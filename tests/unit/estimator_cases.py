"""What the tests of every estimator share: random step rows, oracle files, and how to compare with them."""

import inspect
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch

ORACLE = Path(__file__).parents[1] / "data" / "oracle"
NORMS = {"mean_std": "mean_std_norm", "mean": "mean_norm"}
TOLERANCE = {"mean_std": 1e-4, "mean": 2e-5}  # the reference computes in float32

#: Parameters that many estimators share, for st.fixed_dictionaries.
GAMMA = {"gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0])}
EPSILON = {"epsilon": st.sampled_from([1e-6, 1e-3])}
NORM = {"norm": st.sampled_from(["mean_std", "mean"]), **EPSILON}
EPISODE = {
    **NORM,
    "scope": st.sampled_from(["outcomes", "trajectories", "steps"]),
    "singleton": st.sampled_from(["zero", "score"]),
}

#: What a row can have beyond group, trajectory and step; few values, so that they meet.
COLUMNS = {
    "reward": [0.0, 0.0, 1.0, 10.0, -0.3, 0.1, 1e4],
    "penalty": [0.0, 0.0, 0.1],
    "score": [0.0, 1.0, 10.0],
    "anchor": ["A", "B", 3, (1, 2), None],
    "action": ["a", "b", 7, None],
    "value": [0.0, 0.5, -1.25, 3.0],
    "tokens": [0, 1, 17],
    "success": [False, False, True],
    "text": [
        "You open the fridge 1 and see an apple 1.",
        "You open the fridge 1 and see an apple 2.",
        "You open the fridge 2 and see a mug 1.",
        "Nothing happens.",
        "Nothing  Happens",
        "x",
        "",
        None,
    ],
    "tool_calls": [0, 1, 3],
    "next_anchor": ["A", "B", None],
    "role": ["guesser", "setter", None],
    "valid": [True, True, False],
    "turn_score": [0.0, 0.5, 1.0, -2.0],
    "candidate_score": [0.0, 0.5, 1.0, -2.0],
    "turn_value": [0.0, 0.2, 0.5, 1.0],
    "prover_value": [0.0, 0.1, 0.9],
    "potential": [0.0, 0.5, 0.95, 1.0, -1.0],
    "gold_probability": [0.1, 0.3, 0.5, 1.0],
    "switch": [0, 1, None],
    "entropy": [0.1, 0.5, 1.7],
    "log_prob": [-0.3, -4.0, 0.0],
    "teacher_gap": [0.3, -2.0, 0.0, None],
    "teacher_gap_mean": [0.1, -0.5, 0.0, None],
    "teacher_log_prob_mean": [-0.1, -2.0, None],
    "rank": [0.0, 1.5, 12.0],
    "rank_velocity": [0.0, 0.5, -0.1],
    "rank_acceleration": [0.0, 0.2, -0.3],
    "answer": ["yes", "no", "maybe", None],
    "task": ["t", "u", 3],
    "prior": [0.0, 0.3, 1.0],
    **{f"value_{stream}": [0.0, 0.5, -1.25] for stream in ("low", "high", "term")},
}
STEP_COLUMNS = set(inspect.signature(StepBatch).parameters)  # any other column is an extra one


@st.composite
def step_rows(draw, *columns, ends=False):
    """Ragged trajectories in groups of any size, few states and few reward values so that they meet, in any order.

    ``columns`` of COLUMNS are drawn for every row; ``ends`` says of each trajectory how it ended. Hypothesis draws the
    sizes, which it makes small where a test fails, and a seed for all the rest: a draw for each value is slow.
    """
    sizes = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 4)))]
    longest = draw(st.integers(1, 6))
    random = Random(draw(st.integers(0, 2**64 - 1)))
    rows = []
    for group, size in enumerate(sizes):
        for trajectory in range(size):
            steps = random.sample(range(10), random.randint(1, longest))
            how = random.choice(["terminated", "truncated", "both", "unknown", "early"])
            at = steps[0] if how == "early" else max(steps)  # early: both flags in the middle
            for step in steps:
                row = {"group": f"g{group}", "trajectory": f"g{group}t{trajectory}", "step": step}
                if ends:
                    row["terminated"] = step == at and how in ("terminated", "both", "early")
                    row["truncated"] = step == at and how in ("truncated", "both", "early")
                rows.append(row)
    for name in ("reward", "penalty", *["score"] * random.randint(0, 1), *columns):
        some = random.choices(COLUMNS[name], k=random.randint(1, 6))  # with a single one, all rows are equal
        for row, value in zip(rows, random.choices(some, k=len(rows)), strict=True):
            row[name] = value
        if name == "task":  # all trajectories of a group play the same one
            of_group = {row["group"]: row[name] for row in rows}
            for row in rows:
                row[name] = of_group[row["group"]]
    random.shuffle(rows)
    return rows


def with_rates(rows):
    """The rows with scores in [0, 1], as methods ask that read outcomes as success rates."""
    return [{**row, "score": min(1.0, max(0.0, row.get("score", row["reward"])))} for row in rows]


def with_gaps(rows):
    """The rows without the entropy of step 3."""
    return [{**row, "entropy": None if row["step"] == 3 else row["entropy"]} for row in rows]


def with_parents(rows):
    """The rows with ``parent``, the actions of their trajectory so far: a None action leads nowhere."""
    paths = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        path = paths.setdefault(row["trajectory"], [])
        row["parent"] = repr(path)
        if row["action"] is not None:
            path.append(row["action"])
    return rows


def with_numeric_parents(rows):
    """The same with numbers for keys."""
    codes = {}
    for row in with_parents(rows):
        row["parent"] = codes.setdefault(row["parent"], len(codes) / 2)
    return rows


def as_batch(rows):
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    extra = {name: columns.pop(name) for name in set(columns) - STEP_COLUMNS}
    return StepBatch(**columns, extra=extra)


def columns(reward, trajectory=None, *, group=None, step=None, **further):
    """Columns of a batch: one group, a trajectory for each row and steps counted in it, where nothing else is said.

    In the texts ``trajectory`` and ``group`` each letter is a row's.
    """
    trajectory = list(range(len(reward)) if trajectory is None else trajectory)
    step = [trajectory[:i].count(t) for i, t in enumerate(trajectory)] if step is None else step
    return {
        "group": list(group or "g" * len(reward)),
        "trajectory": trajectory,
        "step": step,
        "reward": reward,
        **further,
    }


def table(reward, trajectory=None, *, extra=None, **further):
    """A batch of :func:`columns`; those that no batch has by name are extra ones. None: there is no such column."""
    named = columns(reward, trajectory, **{name: column for name, column in further.items() if column is not None})
    extra = {**(extra or {}), **{name: named.pop(name) for name in set(named) - STEP_COLUMNS}}
    return StepBatch(**named, extra=extra)


def assert_same_credit(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-7)


def cases(name):
    listed = json.loads((ORACLE / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["id"]) for case in listed]


def oracle_batch(case):
    inputs, params = case["inputs"], case["params"]
    cost = params.get("invalid_action_penalty_coef", 0.0)
    return StepBatch(
        group=inputs["uid"],
        trajectory=inputs["traj_uid"],
        step=inputs["step_idx"],
        reward=inputs["raw_step_reward"],
        anchor=inputs["anchor_obs"],
        penalty=[0.0 if valid else cost for valid in inputs["is_action_valid"]],
    )


def assert_rows(got, expected_tokens, case, tolerance):
    """The reference spreads a row's credit over the tokens of its response mask."""
    mask = np.array(case["inputs"]["response_mask"])
    assert mask.any(), "a case without tokens would compare nothing"
    np.testing.assert_allclose(got[:, None] * mask, np.array(expected_tokens), rtol=0, atol=tolerance)
