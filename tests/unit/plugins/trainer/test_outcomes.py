"""Records of somebody's agent loop beside the outcome that verl computed."""

from __future__ import annotations

import pytest
import torch

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.plugins import notices
from verl_turnkey.plugins.credit.rows import Rows, read_rows
from verl_turnkey.plugins.trainer.outcomes import _outcome, warn_of_other_outcomes

KEYS = ["u_0_0", "u_0_1", "u_1_0"]
REWARDS = [[0.25], [0.5], [0.0, 1.0]]


def rows() -> Rows:
    """Two episodes: one of two rows, one of a row with two turns."""
    records = []
    for number, rewards in enumerate(REWARDS):
        first = number if number < 2 else 0
        steps = [make_step(step=first + i, reward=reward, anchor=None) for i, reward in enumerate(rewards)]
        records.append({"turnkey": make_record(steps)})
    mask = torch.nested.nested_tensor([torch.tensor(m) for m in ([1, 1], [1], [1, 0, 1])], layout=torch.jagged)
    return read_rows(KEYS, [{}] * 3, records, mask)


def scores(*outcomes: float) -> torch.Tensor:
    tokens = [torch.zeros(n) for n in (2, 1, 3)]
    for row, outcome in zip(tokens, outcomes, strict=True):
        row[-1] = outcome
    return torch.nested.nested_tensor(tokens, layout=torch.jagged)


@pytest.mark.parametrize(
    ("acc", "flags", "solved"),
    [(0.5, [True], 0.5), (None, [False, True], 1.0), (None, [False], 0.0), (None, [], 0.3), (0.0, [], 0.0)],
)
def test_solved_is_acc_else_the_records_flag_else_the_score(acc, flags, solved):
    steps = [make_step(step=t, reward=0.3, success=flag) for t, flag in enumerate(flags)]
    extra = {"turnkey": make_record(steps)} if steps else {}
    info = {} if acc is None else {"acc": acc}
    assert _outcome("u_0", 0.3, extra | {"reward_extra_info": info}).solved == solved


def ours(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "verl_turnkey"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(notices, "_warned", set())


def test_equal_sums_are_silent(caplog):
    warn_of_other_outcomes(rows(), scores(0.75, 0.75, 1.0))
    assert ours(caplog) == []


def test_another_outcome_is_warned_of_once(caplog):
    for _ in range(2):
        warn_of_other_outcomes(rows(), scores(0.75, 0.75, 2.0))
    [message] = ours(caplog)
    assert "1 of 2 episodes do not add up to verl's outcome (the first: 1 and 2)" in message
