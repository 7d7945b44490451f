"""The comparison of methods with a language model: its numbers from known values, its table from its lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from verl_turnkey.advantage import StepBatch, compute_credit

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import real_model

TURNS, EPISODES, GROUPS = 3, 8, 4


def played() -> tuple[StepBatch, np.ndarray]:
    """Each episode wins or loses in its second turn alone; values are those of states before the turns."""
    n = GROUPS * EPISODES
    won = np.arange(n) % 2
    step = np.tile(np.arange(TURNS), n)
    trajectory = np.repeat(np.arange(n), TURNS)
    group = trajectory // EPISODES
    outcome = won[trajectory]
    reward = np.where(step == TURNS - 1, outcome, 0.0)
    anchor = [f"{s}-{o if s == TURNS - 1 else ''}" for s, o in zip(step, outcome, strict=True)]
    values = np.where(step == TURNS - 1, outcome, 0.5)
    batch = StepBatch(
        group=group,
        trajectory=trajectory,
        step=step,
        reward=reward,
        anchor=anchor,
        action=["go"] * len(step),
        valid=np.ones(len(step), dtype=bool),
        success=outcome.astype(bool),
        tokens=np.ones(len(step), dtype=int),
    )
    return batch, values


def test_credit_is_held_against_the_values_of_states() -> None:
    steps, values = played()
    comparison = real_model.against_values(steps, values, rollouts=64)
    assert (comparison["steps"], comparison["groups"]) == (GROUPS * EPISODES * TURNS, GROUPS)
    assert comparison["clear"] == GROUPS * EPISODES  # the second turns, in which an episode is decided
    # The truth is +-0.5 there and 0 elsewhere; the same +-1 on all three turns correlates by 1/sqrt(3) with it.
    assert comparison["methods"]["grpo_steps"]["correlation"] == pytest.approx(3**-0.5, abs=1e-3)
    for numbers in comparison["methods"].values():
        assert numbers["sign"] == 1.0
        assert numbers["interval"][0] <= numbers["correlation"] <= numbers["interval"][1]


def test_a_turn_without_an_action_is_a_step_too(monkeypatch) -> None:
    episodes = {"episode": ["e"], "group": ["g"], "success": [True], "split": ["train"], "parent": [None]}
    turns = {"episode": ["e"] * 2, "turn": [0, 1], "extra": ['{"turn_value": 0.25}', '{"turn_value": 0.5}']}
    turns |= {"composed_reward": [0.0, 1.0], "anchor": ["a", "b"], "action": [None, "go"], "valid": [False, True]}
    turns |= {"terminated": [False, True], "truncated": [False, False], "response_tokens": [3, 2]}
    tables = {"episodes": pd.DataFrame({**episodes, "failed": [None]}), "turns": pd.DataFrame(turns)}
    tables["turns"]["action"] = pd.Series([None, "go"], dtype="str")
    monkeypatch.setattr(real_model, "read", lambda _, table: tables[table])
    steps, values = real_model.played(Path("log"))
    assert list(values) == [0.25, 0.5]
    assert compute_credit("gigpo", steps).advantage.shape == (2,)


def test_the_tables_are_made_from_the_kept_lines(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(real_model, "LINES", tmp_path / "lines.jsonl")
    for seed in (0, 1):
        line = {
            "kind": "run",
            "game": "errands",
            "seed": seed,
            "steps": 2,
            "curve": [0.25, 0.75],
            "success_before": 0.25,
        }
        real_model.keep({**line, "method": "gigpo", "success_after": 0.5 + seed / 4, "solved_after": [0, 1]})
        real_model.keep({**line, "method": "turn_norm", "success_after": 1.0, "solved_after": [1, 1]})
    real_model.keep({**line, "game": "service", "method": "gigpo", "success_after": 0.125, "solved_after": [0, 0]})
    steps, values = played()
    real_model.keep({"kind": "credit", "model": "made", "rollouts": 64, **real_model.against_values(steps, values, 64)})
    capsys.readouterr()
    real_model.table()
    printed = capsys.readouterr().out
    assert "| `gigpo` | 2 | 0.25 0.25 | 0.50 0.75 | 0.50 0.50 |  |" in printed
    assert "| 1.00 1.00 | 0.50 0.50 | +0.50 [+0.00, +1.00] |" in printed
    assert "service, 2 steps" in printed
    assert "| `gigpo` | 1 | 0.25 | 0.12 | 0.50 |  |" in printed
    assert "made: 96 steps, 4 groups, 64 continuations" in printed
    assert "| `grpo_steps` | 0.58 |" in printed
    assert json.loads((tmp_path / "lines.jsonl").read_text().splitlines()[0])["versions"]["verl"]
