"""The rows of the table ``credit``: which turn has which numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import Credit, make_record, make_step
from verl_turnkey.plugins.credit.rows import Rows, read_rows
from verl_turnkey.plugins.credit.table import Numbers, credit_columns, of_verl, progress_advantage


def nested(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


MASK = nested([1, 1, 0, 1], [0], [1, 0, 1], [1, 1])


@pytest.fixture
def rows() -> Rows:
    """Of two turns, of a failed episode, of one turn with a gap, and of padding."""

    def record(*numbers: int) -> dict:
        return {"turnkey": make_record([make_step(step=t, reward=1.0, anchor="s") for t in numbers])}

    records = [record(0, 1), {"turnkey": make_record([], failed="died")}, record(2), {}]
    tags = [{}, {}, {}, {"is_padding": True}]
    return read_rows(["g_0_0", "g_1_0", "g_0_1", "pad_0_0"], tags, records, MASK)


def columns(rows: Rows, credit: Credit, **more) -> dict[str, list]:
    arguments = {"train_step": 7, "first_row": 10, "numbers": Numbers(), "chosen": np.ones(3, dtype=bool), **more}
    return {name: np.asarray(column).tolist() for name, column in credit_columns(rows, credit, **arguments).items()}


def test_a_row_for_each_turn_with_all_that_the_method_tells(rows):
    credit = Credit(
        np.array([1.0, 2.0, 4.0]),
        parts={"one": np.array([1.0, 1.0, 3.0]), "rest": np.array([0.0, 1.0, 1.0])},
        levels={"weight": np.array([0.5, 0.25, 0.0])},
        groups={"one": np.array([40, -1, 40])},
    )
    assert columns(rows, credit) == {
        "episode": ["g_0"] * 3,
        "turn": [0, 1, 2],
        "train_step": [7] * 3,
        "row_id": [10, 10, 12],
        "turn_in_row": [0, 1, 0],
        "advantage": [1.0, 2.0, 4.0],
        "part.one": [1.0, 1.0, 3.0],
        "part.rest": [0.0, 1.0, 1.0],
        "level.weight": [0.5, 0.25, 0.0],
        "group.one": [0, -1, 0],
        "size.one": [2, 0, 2],
    }


def test_what_is_not_chosen_has_no_row_but_counts_in_the_sizes_of_groups(rows):
    credit = Credit(np.arange(3.0), np.arange(3.0) + 5, groups={"all": np.array([3, 3, 3])})
    table = columns(rows, credit, chosen=np.array([False, True, False]), kl=np.array([0.1, 0.2, 0.3]))
    assert (table["turn"], table["advantage"], table["value_target"], table["size.all"]) == ([1], [1.0], [6.0], [3])
    assert table["kl"] == pytest.approx([0.2])


def test_groups_are_numbered_through_all_batches_of_a_step():
    numbers = Numbers()
    first, sizes = numbers.of("a", np.array([9, -1, 2, 9]))
    assert (first.tolist(), sizes.tolist()) == ([1, -1, 0, 1], [2, 0, 1, 2])
    assert numbers.of("a", np.array([2, 2]))[0].tolist() == [2, 2]
    assert numbers.of("b", np.array([5]))[0].tolist() == [0]


def test_under_an_estimator_of_verls_a_turn_has_the_means_of_its_tokens(rows):
    scores = nested([0.0, 0.0, 0.0, 1.0], [0.0], [0.0, 9.0, 2.0], [0.0, 0.0])
    data = {
        "advantages": nested([1.0, 3.0, 50.0, 5.0], [70.0], [1.0, 50.0, 2.0], [9.0, 9.0]),
        "returns": nested([1.0, 1.0, 50.0, 1.0], [70.0], [2.0, 50.0, 2.0], [9.0, 9.0]),
        "rm_scores": scores,
    }
    credit, kl = of_verl(rows, data, critic=False)
    assert credit.advantage.tolist() == [2.0, 5.0, 1.5]
    assert credit.returns is kl is None
    data["token_level_rewards"] = nested([-0.25, -0.5, 0.0, 1.0], [0.0], [0.0, 1.0, 1.5], [0.0, 0.0])
    credit, kl = of_verl(rows, data, critic=True)
    assert credit.returns.tolist() == [1.0, 1.0, 2.0]
    assert kl.tolist() == [0.75, 0.0, 0.5]


def test_groups_are_numbered_on_from_batch_to_batch_and_zero_is_a_group():
    numbers = Numbers()
    first = numbers.of("episode", np.array([40, 0, -1, 40]))
    second = numbers.of("episode", np.array([0, 0]))
    other = numbers.of("state", np.array([7]))
    assert [column.tolist() for column in (*first, *second, *other)] == [
        [1, 0, -1, 1],
        [2, 1, 0, 2],
        [2, 2],
        [2, 2],
        [0],
        [1],
    ]


def test_the_progress_advantage_is_a_difference_of_means(rows):
    old = nested([-1.0, -2.0, 9.0, -0.5], [0.0], [-1.0, 9.0, -3.0], [0.0, 0.0])
    reference = nested([-2.0, -2.0, 0.0, -0.25], [0.0], [-1.0, 0.0, -1.0], [0.0, 0.0])
    data = {"old_log_probs": old, "ref_log_prob": reference}
    progress = progress_advantage(rows, data)
    assert progress.tolist() == pytest.approx([0.5, -0.25, -1.0])
    logged = columns(rows, Credit(np.zeros(3)), progress=progress)["progress_advantage"]
    assert logged == pytest.approx([0.5, -0.25, -1.0])
    assert progress_advantage(rows, {"old_log_probs": old}) is None
    silent = read_rows(["g_0_0"], [{}], [{"turnkey": make_record([make_step(step=0, reward=0.0)])}], nested([0]))
    assert np.isnan(progress_advantage(silent, {name: nested([0.5]) for name in data})).all()
