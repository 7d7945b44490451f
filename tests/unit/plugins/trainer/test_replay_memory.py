"""Which episodes are remembered, and which of them join a group."""

from __future__ import annotations

import pytest

from verl_turnkey.plugins.trainer.replay_memory import Memory, Stored, all_ended


def episode(step: int) -> Stored:
    return Stored(step, [{}], [{}])


def test_the_newest_of_each_end_are_kept():
    memory = Memory(2, 9, 99)
    memory.learn("t", [episode(1), episode(2)], [episode(1)])
    memory.learn("t", [episode(3)], [])
    assert [one.step for one in memory.take("t", True, 4)] == [2, 3]
    assert [one.step for one in memory.take("t", False, 4)] == [1]
    assert memory.take("other", True, 4) == []


def test_the_task_played_least_recently_is_forgotten():
    memory = Memory(1, 2, 99)
    for task in ("a", "b"):
        memory.learn(task, [episode(1)], [])
    memory.learn("a", [], [])  # played, with nothing to store
    memory.learn("c", [episode(1)], [])
    assert [bool(memory.take(task, True, 1)) for task in "abc"] == [True, False, True]
    assert len(memory) == 2


def test_old_ones_are_not_taken_and_then_dropped():
    memory = Memory(2, 9, 3)
    memory.learn("a", [episode(1), episode(2)], [])
    assert [one.step for one in memory.take("a", True, 4)] == [1, 2]
    assert [one.step for one in memory.take("a", True, 5)] == [2]
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
