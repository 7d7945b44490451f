"""The rows of the table ``credit``: which turn has which numbers."""

import json
import random
from functools import partial
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_tables import nested, table

from verl_turnkey.advantage import ConfigError, Credit, RecordError, ValueHead, make_record, make_step
from verl_turnkey.advantage.methods.hae import HEADS
from verl_turnkey.advantage.modifiers.rank_shaping import NAMES
from verl_turnkey.advantage.registry import FROM_TRAINER, HOW_TO_SET
from verl_turnkey.envs.tasks import Task
from verl_turnkey.losses.turns import Turns
from verl_turnkey.plugins.config.scorers import TURN_SCORE
from verl_turnkey.plugins.credit.estimator import CreditStep
from verl_turnkey.plugins.credit.rows import Rows, Runs, read_rows, split_key, token_counts
from verl_turnkey.plugins.credit.table import Numbers, credit_columns, of_verl, progress_advantage
from verl_turnkey.plugins.credit.trainer_columns import (
    SOURCES,
    VALUES,
    check_supplied,
    fields,
    from_trainer,
    head_values,
    positions,
    supply,
    target_columns,
    target_field,
    task_key,
    value_field,
)

MASK = nested([[1, 1, 0, 1], [0], [1, 0, 1], [1, 1]])


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
    logged = columns(rows, credit, chosen=np.array([False, True, False]), kl=np.array([0.1, 0.2, 0.3]))
    assert (logged["turn"], logged["advantage"], logged["value_target"], logged["size.all"]) == ([1], [1.0], [6.0], [3])
    assert logged["kl"] == pytest.approx([0.2])


def test_under_an_estimator_of_verls_a_turn_has_the_means_of_its_tokens(rows):
    data = {
        "advantages": nested([[1.0, 3.0, 50.0, 5.0], [70.0], [1.0, 50.0, 2.0], [9.0, 9.0]]),
        "returns": nested([[1.0, 1.0, 50.0, 1.0], [70.0], [2.0, 50.0, 2.0], [9.0, 9.0]]),
        "rm_scores": nested([[0.0, 0.0, 0.0, 1.0], [0.0], [0.0, 9.0, 2.0], [0.0, 0.0]]),
    }
    credit, kl = of_verl(rows, data, critic=False)
    assert credit.advantage.tolist() == [2.0, 5.0, 1.5]
    assert credit.returns is kl is None
    data["token_level_rewards"] = nested([[-0.25, -0.5, 0.0, 1.0], [0.0], [0.0, 1.0, 1.5], [0.0, 0.0]])
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
    old = nested([[-1.0, -2.0, 9.0, -0.5], [0.0], [-1.0, 9.0, -3.0], [0.0, 0.0]])
    reference = nested([[-2.0, -2.0, 0.0, -0.25], [0.0], [-1.0, 0.0, -1.0], [0.0, 0.0]])
    data = {"old_log_probs": old, "ref_log_prob": reference}
    progress = progress_advantage(rows, data)
    assert progress.tolist() == pytest.approx([0.5, -0.25, -1.0])
    logged = columns(rows, Credit(np.zeros(3)), progress=progress)["progress_advantage"]
    assert logged == pytest.approx([0.5, -0.25, -1.0])
    assert progress_advantage(rows, {"old_log_probs": old}) is None
    silent = table({"g_0_0": make_record([make_step(step=0, reward=0.0)])}, nested([[0]]))
    assert np.isnan(progress_advantage(silent, {name: nested([[0.5]]) for name in data})).all()


# --- Rows of the queue: their keys and records, and the runs of ones in a response mask, against loops over th --------
ROWS = st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=6).filter(any)


jagged = partial(nested, dtype=torch.int64)  # a row may be empty


def naive(rows: list[list[int]]) -> list[tuple[int, int, int]]:
    """Row, start in the flat mask and length of each run."""
    turns, at = [], 0
    for number, row in enumerate(rows):
        for trained, run in groupby(row):
            length = len([*run])
            if trained:
                turns.append((number, at, length))
            at += length
    return turns


@given(rows=ROWS)
def test_runs_of_ragged_rows(rows: list[list[int]]):
    runs, expected = Runs.of(jagged(rows)), naive(rows)
    assert [*zip(runs.row.tolist(), runs.start.tolist(), runs.length.tolist(), strict=True)] == expected
    assert runs.count.tolist() == [sum(run[0] == row for run in expected) for row in range(len(rows))]
    assert runs.first.tolist() == [sum(run[0] < row for run in expected) for row in range(len(rows))]
    assert token_counts(jagged(rows)).tolist() == [sum(row) for row in rows]


@given(rows=ROWS)
def test_what_is_written_on_runs_is_on_their_tokens_alone(rows: list[list[int]]):
    runs = Runs.of(jagged(rows))
    spread = runs.spread(np.arange(len(runs.start)), -1)
    expected = torch.full((sum(map(len, rows)),), -1)
    for number, (_, start, length) in enumerate(naive(rows)):
        expected[start : start + length] = number
    assert spread.values().tolist() == expected.tolist()
    assert spread.offsets().tolist() == jagged(rows).offsets().tolist()


@pytest.mark.parametrize(
    ("rows", "row", "turn", "of_run", "tokens"),
    [
        pytest.param([[1, 0, 1], [1]], [0, 0, 1], [0, 1, 0], [0, 1, 2], [1, 1, 1], id="a turn for each run"),
        pytest.param([[1, 0, 1], [1, 1]], [0, 1], [0, 0], [0, 0, 1], [2, 2], id="a step with a gap"),
        pytest.param([[0, 0], [1, 1]], [0, 1], [0, 0], [1], [0, 2], id="a step without a token"),
        pytest.param([[1, 0, 1], [1]], [1], [0], [1, 1, 0], [1], id="a row without steps"),
        pytest.param([[1, 0, 1, 1], [1]], [1, 0, 0], [0, 1, 0], [2, 1, 0], [1, 2, 1], id="steps in another order"),
    ],
)
def test_the_step_of_each_run(rows, row, turn, of_run, tokens):
    runs = Runs.of(jagged(rows))
    steps = runs.steps(np.array(row), np.array(turn))
    assert steps.tolist() == of_run
    turns = runs.turns(steps, len(row))
    assert turns.tokens.tolist() == tokens
    assert turns.n == len(row)


@pytest.mark.parametrize("uid", ["1f-e", "task_7", "a_b_3"])
def test_a_key_ends_with_session_and_index_whatever_the_uid_is(uid):
    assert split_key(f"{uid}_2_13") == (uid, f"{uid}_2", 13)


def test_records_are_there_when_every_row_but_the_padding_has_one():
    with_record = {"turnkey": make_record([make_step(step=0, reward=0.0)])}
    tags = [{}, {}, {"is_padding": True}]

    def step(*extra_fields):
        return CreditStep(None, ["a_0_0", "b_0_0", "p_0_0"], tags, extra_fields, torch.ones(3, 1))

    assert step(with_record, with_record, {}).has_records
    assert not step(with_record, {}, {}).has_records
    assert not step({}, {}, with_record).has_records


def test_an_answer_is_an_empty_text_on_the_steps_before_it():
    """As copo's page says: a record holds no None, and a step with an action that lacks it takes the column away."""

    def extra(*answers):
        extras = [{} if answer is None else {"answer": answer} for answer in answers]
        steps = [make_step(step=t, reward=0.0, action="go", extra=more) for t, more in enumerate(extras)]
        return table({f"a_0_{t}": make_record([step]) for t, step in enumerate(steps)}).steps.extra

    assert extra("", "", "Paris")["answer"].tolist() == ["", "", "Paris"]
    assert extra(7.0, 7.0)["answer"].tolist() == [7.0, 7.0]
    assert "answer" not in extra(None, "Paris")
    with pytest.raises(RecordError, match=r"extra\.answer: expected a float or a str .* got None"):
        make_step(step=0, reward=0.0, extra={"answer": None})


def test_a_step_without_an_action_may_leave_out_what_its_answer_would_say():
    """A 0, or None for a text, is right of what nothing changed, and wrong of whose move it was."""
    full = {"turn_score": 1.0, "said": "yes", "role": "white", "turn_value": 0.5}
    steps = [make_step(step=0, reward=0.0), make_step(step=1, reward=0.0, action="go", extra=full)]
    records = {f"a_0_{t}": make_record([step]) for t, step in enumerate(steps)}
    answer = {"turn_score": [0.0, 1.0], "said": [None, "yes"]}

    def columns(*before):
        extra = table(records, nested([[1, 1], [1]]), before=before).steps.extra
        return {name: column.tolist() for name, column in extra.items()}

    assert columns("role", "turn_value") == answer
    assert columns("role") == {**answer, "turn_value": [0.0, 0.5]}  # of a method that takes it from the answer


# --- Columns that the trainer supplies, the key of a task; where heads of a critic are read and fitted, agains --------
def test_a_task_without_roles_leaves_the_others_theirs():
    def columns(*roles):
        """Of two rollouts, a step for each role."""
        records = {
            f"g_{session}_{t}": make_record([make_step(step=t, reward=0.0, action="go", extra=extra)])
            for session, of in enumerate(roles)
            for t, extra in enumerate(of)
        }
        extra = table(records, nested([[1]] * len(records))).steps.extra
        return {name: column.tolist() for name, column in extra.items()}

    x, y = ({"role": role, "role_outcome": 1.0} for role in "xy")
    mixed = columns([x, y], [{}, {"role": "x"}])
    assert mixed["role"] == ["x", "y", None, None]
    assert str(mixed["role_outcome"]) == "[1.0, 1.0, nan, nan]"
    assert "role" not in columns([{"role": "x"}, {"role": "x"}], [{}, {}])


def test_every_promised_column_has_a_source():
    assert set(SOURCES) == {*FROM_TRAINER, TURN_SCORE} == from_trainer("implicit", critic=True)
    for column in from_trainer(None, critic=True):
        assert FROM_TRAINER[column] in HOW_TO_SET[column]
    values = {f"extra.value_{head}" for head in ("low", "high", "term")}
    assert from_trainer(None, critic=False) == from_trainer(None, critic=True) - values
    assert values <= from_trainer(None, critic=True)


def test_only_what_is_needed_is_fetched():
    assert fields(("anchor", "extra.role")) == []
    assert fields(("anchor", "extra.entropy")) == ["entropy"]
    assert set(supply(("anchor", "extra.entropy", "extra.log_prob"), {"entropy": None})) == {"entropy"}


def test_steps_have_the_ranks_of_their_rows():
    ranks = torch.nested.as_nested_tensor([torch.tensor([3.0, 0.5, -0.1]), torch.tensor([2.0, 0.0, 0.0])])
    columns = supply([f"extra.{name}" for name in NAMES], {"turnkey_rank": ranks})
    made = {name: column(None, np.array([1, 0, 0])).tolist() for name, column in columns.items()}
    assert made == {
        "rank": [2.0, 3.0, 3.0],
        "rank_velocity": [0.0, 0.5, 0.5],
        "rank_acceleration": pytest.approx([0.0, -0.1, -0.1]),
    }


def test_a_step_without_tokens_or_text_has_no_number_of_them():
    """Three steps: one without a token, one in a row without a text, and one of two tokens."""
    records = {f"g_{session}_0": make_record([make_step(step=0, reward=0.0)]) for session in range(3)}
    columns = (f"extra.{name}" for name in ("entropy", "teacher_gap", "teacher_gap_mean", "teacher_log_prob_mean"))
    data = {
        "entropy": nested([[7.0], [0.5], [0.5, 1.0]]),
        "has_teacher": torch.tensor([True, False, True]),
        "old_log_probs": nested([[-9.0], [-1.0], [-1.0, -2.0]]),
        "teacher_log_prob": nested([[-1.0], [-1.0], [0.0] * 2]),
    }
    rows = table(records, nested([[0], [1], [1, 1]]), supply=supply(columns, data))
    nan = np.nan
    expected = {
        "entropy": [nan, 0.5, 0.75],
        "teacher_gap": [nan, nan, 3.0],
        "teacher_gap_mean": [nan, nan, 1.5],
        "teacher_log_prob_mean": [nan, nan, 0.0],
    }
    for name, column in expected.items():
        np.testing.assert_array_equal(rows.steps.extra[name], column, name)


PROMPT = [{"role": "user", "content": "2 + 2?"}]
ROW = {"turnkey_task": None, "data_source": "sums", "index": 3, "raw_prompt": PROMPT}


def test_a_task_of_ours_is_known_by_itself():
    tasks = [Task("turnkey/MiniGrid-v0", seed, kwargs).to_json() for seed in (1, 2) for kwargs in ({}, {"size": 5})]
    keys = [task_key({"turnkey_task": task, "index": 7, "raw_prompt": PROMPT}) for task in tasks]
    assert len(set(keys)) == 4
    assert keys == [task_key({"turnkey_task": task}) for task in tasks]


@pytest.mark.parametrize(
    "other", [{"data_source": "x"}, {"index": 4}, {"raw_prompt": [{"role": "user", "content": "2 + 3?"}]}]
)
def test_other_rows_are_known_by_source_index_and_prompt(other):
    assert task_key(ROW) != task_key({**ROW, **other})


@pytest.mark.parametrize("index", [np.int64(3), np.array(3)])
def test_the_key_does_not_depend_on_the_type_of_a_number(index):
    assert task_key({**ROW, "index": index}) == task_key(ROW)


class Image:
    """As PIL's: its text has an address in it."""

    def __init__(self, pixels: bytes) -> None:
        self.pixels = pixels

    def tobytes(self) -> bytes:
        return self.pixels


def test_images_of_a_prompt_count_by_their_pixels():
    def key(image: object) -> str:
        return task_key({**ROW, "raw_prompt": [{"role": "user", "content": [{"type": "image", "image": image}]}]})

    assert key(Image(b"red")) == key(Image(b"red")) != key(Image(b"blue"))
    assert key(np.zeros(3)) == key(np.zeros(3)) != key(np.ones(3))
    assert key(object()) == key(object())


def test_the_key_is_the_same_in_every_run():
    """States of checkpoints are kept under it."""
    assert task_key({"turnkey_task": json.dumps({"env_id": "x", "seed": 1})}) == "afe11f5958f8a9cf"
    assert task_key(ROW) == "a8e2d37953681b0d"


def test_entropies_that_verl_does_not_compute():
    check_supplied(["mine"], ("extra.log_prob", "extra.task"))
    with pytest.raises(
        ConfigError, match=r"^mine with other needs 'extra\.entropy'.*bypass_mode=true: set it to false"
    ):
        check_supplied(["mine", "other"], ("extra.task", "extra.entropy"))


LOW, HIGH, TERM = HEADS


def drawn(seed):
    """Masks of rows with turns, and of each turn its row, its tokens, and where its switch and its subgoal end."""
    rng, masks, turns = random.Random(seed), [], []
    for row in range(4):
        mask = [0] * rng.randrange(2)
        for _ in range(rng.randrange(1, 4)):
            tokens = rng.randrange(1, 7)
            switch = rng.choice([0, rng.randrange(1, tokens + 1)])
            subgoal = rng.choice([0, rng.randrange(switch, tokens + 1)])
            turns.append((row, range(len(mask), len(mask) + tokens), switch, subgoal))
            mask += [1] * tokens + [0] * rng.randrange(1, 3)
        masks.append(mask)
    return masks, turns


def place(head, turn):
    """The token of the row before which a head is read."""
    _, tokens, switch, subgoal = turn
    if head != LOW:
        return tokens[0]
    behind = subgoal or switch
    return tokens[min(behind, len(tokens) - 1)]


@pytest.mark.parametrize("seed", range(20))
def test_values_and_targets_stand_at_the_token_of_each_head(seed):
    masks, turns = drawn(seed)
    mask = nested(masks)
    draw = np.random.default_rng(seed)
    values = {value_field(HEADS, head): [draw.normal(size=len(row)) for row in masks] for head in HEADS}
    extra = {"to_switch": [turn[2] for turn in turns], "to_subgoal": [turn[3] for turn in turns]}
    by_token, row = Turns.of(mask), np.array([turn[0] for turn in turns])
    columns = head_values(HEADS, {name: nested(rows) for name, rows in values.items()}, by_token, row, extra)
    targets = {head.name: draw.normal(size=len(turns)) for head in HEADS}
    targets["high"][::2] = np.nan  # the turns inside segments
    trained = [[x and draw.random() < 0.8 for x in row] for row in masks]
    credit = Credit(np.zeros(len(turns)), targets=targets)
    written = target_columns(HEADS, credit, by_token, extra, nested(trained, torch.int64))
    assert list(columns) == ["value_low", "value_high", "value_term"]
    for head in HEADS:
        expected = [np.full(len(row), np.nan) for row in masks]
        for t, turn in enumerate(turns):
            at = place(head, turn)
            assert columns[f"value_{head.name}"][t] == values[value_field(HEADS, head)][turn[0]][at]
            if trained[turn[0]][at]:
                expected[turn[0]][at] = targets[head.name][t]
        for got, want in zip(written[target_field(head)].unbind(), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_fields_are_distinct_and_the_first_is_verls():
    assert [value_field(HEADS, head) for head in HEADS] == [VALUES, "turnkey_value_high", "turnkey_value_term"]
    assert len({target_field(head) for head in HEADS}) == 3


def test_where_heads_are_read():
    """A row's only turn may have masked tokens inside; behind two of its own is the token 4 of the row."""
    turns = Turns.of(nested([[1, 0, 1, 0, 1, 1]]), nested([[0] * 6]))
    assert positions(LOW, turns, {"to_subgoal": [2]}).tolist() == [4]
    assert positions(HIGH, turns, {"to_subgoal": [2]}).tolist() == [0]
    turns = Turns.of(nested([[0, 1, 1, 0, 1]]))
    for head in HEADS:
        assert positions(head, turns, {}).tolist() == [1, 4]


def step(number, **extra):
    return make_step(step=number, reward=0.0, extra={"switch": 1, **extra})


def test_a_record_with_values_keeps_its_own_and_a_turn_without_tokens_has_that_of_its_row():
    heads = (LOW, ValueHead("own"))
    records = [make_record([step(0, to_switch=1, value_own=7.0)]), make_record([step(1, to_switch=0, value_own=8.0)])]
    fields = {VALUES: nested([[0.5, 1.5], [2.5, 3.5]]), "turnkey_value_own": nested([[0.0] * 2] * 2)}
    of_heads = partial(head_values, heads, fields)
    by_key = dict(zip(("g_0_0", "g_0_1"), records, strict=True))
    rows = table(by_key, nested([[1, 1], [0, 0]]), values=fields[VALUES], heads=of_heads)
    assert rows.steps.extra["value_own"].tolist() == [7.0, 8.0]
    assert rows.steps.extra["value_low"].tolist() == rows.steps.value.tolist() == [1.5, 2.5]
