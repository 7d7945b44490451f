"""Which episodes and groups are remembered, and which of them are trained again."""

from __future__ import annotations

import pytest

from verl_turnkey.plugins.trainer.replay import Buffer, Memory, Stored, StoredGroup, all_ended


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
