"""Groups: their outcomes, which differ most, how often each task is played, and what is stored to be trained again."""

import itertools
import statistics
from fractions import Fraction

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.plugins import notices
from verl_turnkey.plugins.credit.rows import Rows, read_rows
from verl_turnkey.plugins.trainer.groups import FARTHEST, RULES, TaskHistory, by_prior, by_variance, hint_share, learn
from verl_turnkey.plugins.trainer.outcomes import TOLERANCE, _outcome, most_spread, spread, warn_of_other_outcomes
from verl_turnkey.plugins.trainer.replay import Buffer, Memory, Stored, StoredGroup, all_ended

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


def test_another_outcome_than_the_sum_is_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(notices, "_warned", set())
    for outcome in (1.0, 2.0, 2.0):
        warn_of_other_outcomes(rows(), scores(0.75, 0.75, outcome))
    [message] = [record.getMessage() for record in caplog.records if record.name == "verl_turnkey"]
    assert "1 of 2 episodes do not add up to verl's outcome (the first: 1 and 2)" in message


BY_HAND = {"a": [1, 0, 1, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 1], "d": [0, 0, 0, 0]}


def test_by_hand():
    spreads = {name: spread(scores) for name, scores in BY_HAND.items()}
    assert [round(value, 6) for value in spreads.values()] == [0.57735, 0.0, 0.5, 0.0]
    assert most_spread(spreads, 0.25, "groups") == ["a"]
    assert most_spread(spreads, 0.5, "groups") == ["a", "c"]
    assert most_spread(spreads, 0.9, "spread") == ["a", "c"]  # up to 0.959615
    assert most_spread(spreads, 0.5, "spread") == ["a"]
    assert most_spread(spreads, 1.0, "spread") == ["a", "c", "b", "d"]


def naive(spreads: dict[str, float], share: float, by: str) -> list[str]:
    left, kept = dict(spreads), []
    while left:
        best = min(name for name in left if left[name] == max(left.values()))
        enough = len(kept) + 1 > share * len(spreads) + 1e-9
        if by == "spread":
            enough = sum(spreads[name] for name in kept) >= share * sum(spreads.values()) - TOLERANCE
        if kept and enough:
            break
        left.pop(best)
        kept.append(best)
    return kept


@pytest.mark.parametrize("by", ["groups", "spread"])
@pytest.mark.parametrize("seed", range(20))
def test_like_a_loop(by, seed):
    rng = np.random.default_rng(seed)
    scores = {f"g{i}": rng.integers(0, 3, rng.integers(1, 6)).tolist() for i in range(rng.integers(1, 30))}
    spreads = {name: spread(held) for name, held in scores.items()}
    for name, held in scores.items():
        assert spreads[name] == pytest.approx(statistics.stdev(held) if len(held) > 1 else 0.0)
    share = float(rng.uniform(0.05, 0.95))
    assert most_spread(spreads, share, by) == naive(spreads, share, by)


def test_edges():
    assert spread([0.1] * 3) == 0.0  # no remainder of a mean in floating point
    assert most_spread({f"{i:03}": float(i) for i in range(100)}, 0.29, "groups")[-1] == "071"
    for by in ("groups", "spread"):
        assert most_spread({"b": 0.0, "a": 0.0}, 0.2, by) == ["a"]


def history(share: float, surprise: float = 0.0) -> TaskHistory:
    return TaskHistory(8.0, 8 * share, surprise)


def test_what_is_remembered_of_a_task():
    first = learn(None, [1, 0, 0, 0], 1.0)
    assert first == TaskHistory(4, 1, FARTHEST)
    # V = 0.25 and m = 1 are -0.5 and 1 in V_0.5's scale; k = 4
    assert learn(first, [1, 1, 1, 1], 1.0) == TaskHistory(8, 5, 1.5**2 - 1 / 4)
    assert learn(first, [1, 0, 0, 0], 0.5) == TaskHistory(6, 1.5, 0.0)
    assert learn(first, [1, 1], 0.0) == TaskHistory(2, 2, 1.5**2 - 1 / 2)


def test_hints_of_tasks_that_nobody_solved_last_time():
    """Shares of failures so far: 1, then 6 of 8; every other group has no hint."""
    never = learn(None, [0, 0, 0, 0], 1.0)
    assert never == TaskHistory(4, 0, FARTHEST, unsolved=1)
    assert hint_share(never, 0.25, 0.75) == 0.75
    assert hint_share(never._replace(unsolved=0.0), 0.25, 0.75) == 0
    again = learn(learn(None, [1, 1, 0, 0], 1.0), [0, 0, 0, 0], 1.0)
    assert hint_share(again, 0.25, 0.75) == 0.25 + 0.5 * 6 / 8
    assert hint_share(learn(again, [0, 0.5], 1.0), 0.25, 0.75) == 0
    assert hint_share(None, 0.25, 0.75) == 0


def test_variance_by_hand():
    """Weights 1, 1, 0.75, 0.01 (solved), 0.01 (never solved): 30 above the least are 10.8, 10.8, 8.1, 0.1, 0.1."""
    tasks = [None, history(0.5), history(0.25), history(0.875), history(0.0)]
    assert by_variance(tasks, 5 * 8, 2, 30) == [13, 13, 10, 2, 2]
    assert by_variance(tasks, 5 * 8, 2, 12) == [12, 12, 12, 2, 2]
    assert by_variance(tasks, 5 * 8, 2, 11) == [11, 11, 11, 4, 3]


def naive_allocation(tasks: list[TaskHistory | None], total: int, low: int, high: int) -> list[int]:
    """Rounds of shares in exact fractions; a share is cut where its task is full, and the next round divides that."""
    counts = [low] * len(tasks)
    while sum(counts) < total:
        left, weight = total - sum(counts), {}
        for i, task in enumerate(tasks):
            if counts[i] < high:
                p = Fraction(task.solved) / Fraction(task.episodes) if task else Fraction(1, 2)
                weight[i] = Fraction(0.01) if p >= Fraction(0.85) else max(Fraction(0.01), 4 * p * (1 - p))
        share = {i: left * w / sum(weight.values()) for i, w in weight.items()}
        whole = {i: int(s) for i, s in share.items()}
        for i in sorted(share, key=lambda i: (whole[i] - share[i], i))[: left - sum(whole.values())]:
            whole[i] += 1
        for i in whole:
            counts[i] = min(high, counts[i] + whole[i])
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_variance_like_a_loop(seed):
    rng = np.random.default_rng(seed)
    tasks = [
        None if rng.random() < 0.2 else TaskHistory(16.0, float(k), 0.0)
        for k in rng.integers(0, 17, rng.integers(1, 40))
    ]
    assert by_variance(tasks, 16 * len(tasks), 8, 24) == naive_allocation(tasks, 16 * len(tasks), 8, 24)


@pytest.mark.parametrize("seed", range(5))
def test_prior_is_the_best_of_all_divisions(seed):
    """V_0.5's error with its own weight w, summed over the tasks."""
    rng = np.random.default_rng(seed)
    tasks = [history(0.5, float(d)) for d in rng.uniform(0, FARTHEST, 4)]

    def error(counts: tuple[int, ...]) -> float:
        total = 0.0
        for k, task in zip(counts, tasks, strict=True):
            w = task.surprise / (task.surprise + 1 / k)
            total += w**2 / k + (1 - w) ** 2 * task.surprise
        return total

    divisions = [c for c in itertools.product(range(2, 9), repeat=4) if sum(c) == 16]
    assert error(tuple(by_prior(tasks, 16, 2, 8))) == pytest.approx(min(map(error, divisions)), abs=1e-12)


def test_prior_at_its_edges():
    assert by_prior([history(0.5)] * 3, 12, 2, 8) == [4, 4, 4]  # nothing surprised: all alike
    assert by_prior([history(1.0, 0.0), None, history(0.0, 0.0)], 12, 2, 8) == [2, 8, 2]
    assert by_prior([history(1.0, 0.0), None, history(0.0, 0.0)], 14, 2, 8) == [3, 8, 3]


@pytest.mark.parametrize("rule", RULES.values())
def test_one_task_and_narrow_bounds(rule):
    assert rule([None], 4, 2, 8) == [4]
    assert sorted(rule([history(0.0, 0.0)] * 3, 11, 3, 4)) == [3, 4, 4]


def episode(step: int) -> Stored:
    return Stored(step, [{}], [{}])


def group(name: str, step: int, spread: float = 1.0) -> StoredGroup:
    return StoredGroup(name, spread, [episode(step)])


def test_the_newest_of_each_end_are_kept():
    memory = Memory(2, 9, 99)
    memory.learn("t", [episode(1), episode(2)], [episode(1)])
    memory.learn("t", [episode(3)], [])
    assert [episode.step for episode in memory.take("t", True, 4)] == [2, 3]
    assert [episode.step for episode in memory.take("t", False, 4)] == [1]
    assert memory.take("other", True, 4) == []


def test_the_task_played_least_recently_is_forgotten():
    memory = Memory(1, 2, 99)
    for task in ("a", "b"):
        memory.learn(task, [episode(1)], [])
    memory.learn("a", [], [])  # played, with nothing to store
    memory.learn("c", [episode(1)], [])
    assert [bool(memory.take(task, True, 2)) for task in "abc"] == [True, False, True]
    assert len(memory) == 2


def test_old_ones_are_not_taken_and_then_dropped():
    memory = Memory(2, 9, 3)
    memory.learn("a", [episode(1), episode(2)], [])
    assert [episode.step for episode in memory.take("a", True, 4)] == [1, 2]
    assert [episode.step for episode in memory.take("a", True, 5)] == [2]
    assert memory.take("a", True, 1) == []  # its own step, and before those of the other one
    assert [episode.step for episode in memory.take("a", True, 2)] == [1]
    memory.forget(5)
    assert len(memory) == 1
    memory.forget(6)
    assert len(memory) == 0


@pytest.mark.parametrize(
    ("solved", "expected"),
    [([1.0, 1.0], True), ([0.0, 0.0], False), ([0.0, 1.0], None), ([0.0, 0.5], None), ([1.0, 0.5], None), ([], None)],
)
def test_how_all_of_a_group_ended(solved, expected):
    assert all_ended(solved) is expected


def test_a_full_buffer_forgets_the_oldest_group():
    buffer = Buffer(2, 9, 0)
    buffer.learn([group("a", 1)])
    buffer.learn([group("b", 2), group("c", 2)])
    assert [group.name for group in buffer.draw(3, 3)] == ["b", "c"]


def test_a_group_is_drawn_once_and_not_when_it_is_too_old():
    buffer = Buffer(9, 2, -1)  # a seed that verl takes, too
    buffer.learn([group("a", 1), group("b", 2)])
    buffer.forget(4)
    assert [group.name for group in buffer.draw(2, 4)] == ["b"]
    assert buffer.draw(2, 4) == []
    buffer.learn([group("c", 4)])
    assert buffer.draw(1, 4) == []  # of this very step
    assert buffer.draw(0, 5) == []
    buffer.forget(6)
    assert len(buffer) == 1
    buffer.forget(7)
    assert len(buffer) == 0


def test_groups_are_drawn_in_proportion_to_their_spread():
    """One of three with spreads 1, 2 and 5: within five deviations of 4,000 draws; another seed draws others."""
    names = []
    for seed in range(4000):
        buffer = Buffer(3, 9, seed)
        buffer.learn([group("a", 1, 1.0), group("b", 1, 2.0), group("c", 1, 5.0)])
        names.append(buffer.draw(1, 2)[0].name)
    for name, share in (("a", 1 / 8), ("b", 2 / 8), ("c", 5 / 8)):
        assert names.count(name) / 4000 == pytest.approx(share, abs=5 * (share * (1 - share) / 4000) ** 0.5)


def test_the_draws_of_equal_buffers_depend_on_seed_step_and_update():
    def drawn(*when: int, seed: int = 7) -> list[str]:
        buffer = Buffer(40, 9, seed)
        buffer.learn([group(str(i), 1, 1 + i % 3) for i in range(40)])
        return [group.name for group in buffer.draw(10, *when)]

    assert drawn(2) == drawn(2) == sorted(drawn(2), key=int)
    assert len({tuple(names) for names in (drawn(2), drawn(3), drawn(2, 1), drawn(2, seed=8))}) == 4
