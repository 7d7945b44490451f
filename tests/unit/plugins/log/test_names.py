"""One meaning per name: a reward and a return are called the same in record, log, metrics and product text."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl_turnkey.advantage import Credit, make_record, make_step
from verl_turnkey.plugins.credit.metrics import episode_metrics, reward_metrics
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.credit.table import Numbers, credit_columns
from verl_turnkey.plugins.log.former_names import COLUMNS
from verl_turnkey.plugins.log.schema import SCHEMA_VERSION, TABLES
from verl_turnkey.plugins.rollout.trajectory_log import Logged, _Turn

ROOT = Path(__file__).parents[4]
# quantity -> where it is: a field of a record's step, columns of the log, a metric
NAMES = {
    "reward": ("reward", {"turns"}, None),
    "composed_reward": ("composed_reward", {"turns"}, None),
    "env_return": (None, {"episodes"}, "episode/env_return/mean"),
    "composed_return": (None, {"episodes"}, "episode/composed_return/mean"),
    "value_target": (None, {"credit"}, None),
    "anchor": ("anchor", {"turns"}, None),
    "next_anchor": ("next_anchor", {"turns"}, None),
}
# An episode of two steps: each quantity has a value of its own.
RECORD = make_record(
    [
        make_step(step=0, reward=1.0, composed_reward=5.0, anchor="A", extra={"next_anchor": "B"}),
        make_step(step=1, reward=2.0, composed_reward=6.5, anchor="B", extra={"next_anchor": "C"}, terminated=True),
    ]
)
VALUES = {
    "reward": [1.0, 2.0],
    "composed_reward": [5.0, 6.5],
    "env_return": 3.0,
    "composed_return": 11.5,
    "value_target": [0.25, 0.75],
    "anchor": ["A", "B"],
    "next_anchor": ["B", "C"],
}


def logged() -> dict[str, dict[str, list]]:
    """The tables of the rollout and of the trainer that hold the episode."""
    episode = SimpleNamespace(
        branch=0, owners=(), begins=0, success=True, started=0.0, seconds_start=0.0, seconds_waiting=0.0,
        parts={"step": [5.0, 6.5]}, task="",
    )  # fmt: skip
    turns = [_Turn(step, (), False, 0, 0, None, "", None, "", None, None, None, 0.0, 0.0) for step in RECORD["steps"]]
    whole = Logged(
        episode=episode, turns=turns, rollout="g_0", group="g", global_step=1, split="train", validation=False,
        row_task=None, task=None, failed=None, rows={0: (0, 0), 1: (0, 1)}, decode=lambda ids: "",
    )  # fmt: skip
    tables = {name: columns for name, _, columns in whole.tables()}
    credit = Credit([0.0, 0.0], VALUES["value_target"], parts={})
    made = {"train_step": 1, "first_row": 0, "numbers": Numbers(), "chosen": [True, True]}
    return tables | {"credit": credit_columns(rows(), credit, **made)}


def rows():
    mask = torch.nested.as_nested_tensor([torch.tensor([1, 0, 1])], layout=torch.jagged)
    return read_rows(["g_0_0"], [{}], [{"turnkey": RECORD}], mask)


def test_the_record_has_the_names_of_the_table():
    for quantity, (field, _, _) in NAMES.items():
        if field is not None:
            assert [{**step, **step["extra"]}[field] for step in RECORD["steps"]] == VALUES[quantity]


@pytest.mark.parametrize("quantity", NAMES)
def test_a_quantity_is_in_its_tables_alone(quantity: str):
    assert {table for table, held in TABLES.items() if quantity in {c.name for c in held.columns}} == NAMES[quantity][1]
    tables = logged()
    for table in NAMES[quantity][1]:
        value = VALUES[quantity]
        assert list(tables[table][quantity]) == (value if isinstance(value, list) else [value])


def test_components_are_beside_their_sum():
    assert logged()["turns"]["composed_reward.step"] == VALUES["composed_reward"]
    info = {"env_return": 3.0, "composed_return.step": 11.5}
    extra_fields = [{"turnkey": RECORD, "reward_extra_info": info}]
    assert reward_metrics(rows(), ["g_0_0"], extra_fields) == {"episode/composed_return.step/mean": 11.5}


def test_metrics_have_the_names_of_the_table():
    metrics = episode_metrics(rows())
    for quantity, (_, _, metric) in NAMES.items():
        if metric is not None:
            assert metrics[metric] == VALUES[quantity]
    unlike = re.compile(r"/(return|reward|score)(/|$)")
    assert not [name for name in metrics if unlike.search(name)], "a return has its kind in its name"


def test_a_former_column_is_gone_and_its_successor_is_there():
    assert SCHEMA_VERSION == 2
    for table, former in COLUMNS.items():
        kept = {column.name for column in TABLES[table].columns}
        for before, now in former.items():
            assert now in kept or f"{now}*" in kept
            assert before in kept if before == "reward" else before not in kept


@pytest.mark.parametrize(("room", "ends"), [("plugins", ("py", "js")), ("docs", ("md",)), ("recipe", ("yaml",))])
def test_no_former_name_is_left(room: str, ends: tuple[str, ...]):
    names = r"episode/return|episode/reward/|groups/score|episode_return|env_reward|next_key"
    columns = r'(?<!Literal)(?:\[|at\(|of\()"(?:state_key|return|score)"'
    former = re.compile(names if room == "docs" else f"{names}|{columns}")  # a page shows info["state_key"]
    files = [path for end in ends for path in (ROOT / room).rglob(f"*.{end}")]
    matches = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.name != "former_names.py" and "vendor" not in path.parts
        for match in former.finditer(path.read_text(encoding="utf-8"))
    }
    assert len(files) > 20
    assert not matches
