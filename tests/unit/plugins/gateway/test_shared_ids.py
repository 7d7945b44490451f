"""Ids that begin as earlier ones do: as lists, and what of them is stored."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.plugins.gateway.tree import SharedIds

IDS = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(IDS, IDS, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([1, 2, -1])), min_size=1))
def test_they_are_read_as_a_list(turns: list[tuple[list[int], list[int], int, int, int]]) -> None:
    before, past = None, list[int]()
    for prompt, response, start, stop, step in turns:
        expected = [*past[: max(0, start)], *prompt]
        ids = SharedIds.of(expected, before)
        assert (len(ids), [*ids], ids[start:stop:step]) == (len(expected), expected, expected[start:stop:step])
        assert all(ids[i] == expected[i] and isinstance(ids[i], int) for i in range(-len(ids), len(ids)))
        assert past[: ids.shared] == expected[: ids.shared]
        assert past[ids.shared : ids.shared + 1] != expected[ids.shared : ids.shared + 1] or ids.shared == len(expected)
        before, past = ids.followed_by(response), [*expected, *response]
        assert [*before] == past


def test_the_prompts_of_an_episode_are_stored_once() -> None:
    prompts, before = [SharedIds.of(range(1000))], None
    for turn in range(50):
        before = prompts[-1].followed_by([turn])
        prompts.append(SharedIds.of([*before, 7, 8], before))
    assert [len(prompt.own) for prompt in prompts] == [1000] + [2] * 50
    assert all([*later][: len(earlier)] == [*earlier] for earlier, later in pairwise(prompts))
