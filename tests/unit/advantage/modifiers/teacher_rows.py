"""Random steps with tokens that a teacher has scored, and what an estimator and a modifier make of them."""

from random import Random

import numpy as np
from estimator_cases import step_rows
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, Tokens, compute_credit

GAPS = (-6.0, -0.5, -0.05, 0.0, 0.1, 0.4, 3.0)
TEACHER = ("teacher_gap", "teacher_gap_mean", "teacher_log_prob_mean")


@st.composite
def teacher_rows(draw, text=True, gaps=GAPS):
    """Steps without penalties, each with up to five tokens; some rows have no text, and ``text=False``: none has."""
    random = Random(draw(st.integers(0, 2**64 - 1)))
    rows = []
    for row in draw(step_rows("success")):
        has_text = text and random.random() < 0.8
        own = [random.choice(gaps) if has_text else 0.0 for _ in range(random.randint(0, 5))]
        teacher = [-random.random() * 3 for _ in own]
        rows.append({**row, "penalty": 0.0, "gaps": own, "teacher": teacher, "has_text": has_text})
    ends = {row["trajectory"]: [random.choice([0.0, 0.0, 1.0, 10.0]) for _ in range(2)] for row in rows}
    return [{**row, **dict(zip(("score", "env_return"), ends[row["trajectory"]], strict=True))} for row in rows]


def table(rows):
    """The steps as a batch, and their tokens, row after row."""
    names = [name for name in rows[0] if name not in ("gaps", "teacher", "has_text")]
    known = [row["has_text"] and bool(row["gaps"]) for row in rows]
    columns = {
        "teacher_gap": [sum(row["gaps"]) for row in rows],
        "teacher_gap_mean": [np.mean(row["gaps"] or [0.0]) for row in rows],
        "teacher_log_prob_mean": [np.mean(row["teacher"] or [0.0]) for row in rows],
    }
    extra = {name: np.where(known, column, np.nan) for name, column in columns.items()}
    batch = StepBatch(
        **{name: [row[name] for row in rows] for name in names}, tokens=[len(row["gaps"]) for row in rows], extra=extra
    )
    step = np.repeat(np.arange(len(rows)), [len(row["gaps"]) for row in rows])
    return batch, Tokens(step, np.array([gap for row in rows for gap in row["gaps"]], dtype=float), training_step=7)


def credit(rows, *modify, method="grpo_steps"):
    batch, tokens = table(rows)
    return compute_credit(method, batch, modify=list(modify), tokens=tokens)
