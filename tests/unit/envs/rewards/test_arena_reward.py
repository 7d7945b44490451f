"""The component ``arena``: episodes of a task that meet, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from judge_server import JudgeServer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.rewards import Groups, RewardError, RewardStep, Shaped, compose

RULE = f"{__name__}:higher"


def higher(first: Any, second: Any) -> tuple[float, float]:
    return first[-1].reward, second[-1].reward


async def slower(first: Any, second: Any) -> tuple[float, float]:
    await asyncio.sleep(0)
    return second[-1].reward, first[-1].reward


def broken(first: Any, second: Any) -> Any:
    return 3.0


def episode(reward: float) -> list[RewardStep]:
    return [RewardStep("a", "x"), RewardStep("b", "y", reward=reward)]


def meet(entries: list[dict[str, Any]], rewards: list[float | None], groups: Groups | None = None) -> list[Any]:
    """What the episodes of a task with these rewards are given; None: that episode fails before it is composed."""
    rewarded, groups = compose(entries), groups or Groups()

    async def play(name: int, reward: float | None) -> Shaped | None:
        member = groups.join("task", str(name))
        try:
            for _ in range(name):
                await asyncio.sleep(0)
            return None if reward is None else await rewarded.run(episode(reward), member)
        finally:
            member.leave()

    async def together() -> list[Any]:
        playing = [asyncio.create_task(play(*pair)) for pair in enumerate(rewards)]
        return await asyncio.wait_for(asyncio.gather(*playing, return_exceptions=True), 20)

    return asyncio.run(together())


def test_places_are_rewards():
    results = meet([{"name": "arena", "compare": RULE}], [0.1, 0.4, 0.2, 0.3])
    places = [0, 1, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert [shaped.rewards for shaped in results] == [[0, place] for place in places]
    # Three seeding games and three of the bracket, each in both orders.
    assert [shaped.sums["arena_calls"] for shaped in results] == [2 * 6 / 4] * 4


def test_it_adds_to_other_components_with_its_weight():
    entries = [{"name": "step"}, {"name": "arena", "compare": f"{__name__}:slower", "weight": 0.5, "label": "best"}]
    results = meet(entries, [0.1, 0.4])
    assert [shaped.rewards[1] for shaped in results] == [0.1 + 0.5, 0.4]
    assert compose(entries).labels == ("step", "best", "best_calls")
    assert results[0].sums == {"step": 0.1, "best": 0.5, "best_calls": 2.0}


def test_episodes_that_failed_take_no_part():
    entries = [{"name": "arena", "compare": RULE}]
    assert [shaped and shaped.rewards[1] for shaped in meet(entries, [0.1, None, 0.2])] == [0.0, None, 1.0]
    assert [shaped and shaped.rewards[1] for shaped in meet(entries, [None, 0.2])] == [None, 0]


def test_an_episode_that_another_component_fails_takes_no_part():
    entries = [{"name": "potential", "gamma": 1.0, "weight": 0}, {"name": "arena", "compare": RULE}]
    results = meet(entries, [0.1, 0.2])
    assert all(isinstance(shaped, RewardError) and "potential" in str(shaped) for shaped in results)


def test_a_rule_that_fails_costs_the_group():
    results = meet([{"name": "arena", "compare": f"{__name__}:broken"}], [0.1, 0.2])
    assert all("expected two scores" in str(shaped) for shaped in results)


def test_groups_of_one_key_that_follow_each_other_are_not_one():
    groups = Groups()
    for _ in range(2):
        results = meet([{"name": "arena", "compare": RULE}], [0.1, 0.2], groups)
        assert [shaped.rewards[1] for shaped in results] == [0, 1]
    assert len(groups._open) <= 1


def test_alone_it_is_0():
    shaped = compose([{"name": "arena", "compare": RULE}])(episode(1.0))
    assert shaped.rewards == [0, 0]
    assert shaped.sums == {"arena": 0, "arena_calls": 0}


def test_a_model_compares_what_it_is_shown():
    def answer(question: dict[str, Any]) -> str:
        text = question["messages"][0]["content"]
        first, second = text.split("<second>")
        return f'{{"first": {first.count("+")}, "second": {second.count("+")}}}'

    with JudgeServer(answer) as server:
        entry = {"name": "arena", "url": server.url, "model": "m", "text": "{transcript}", "rubric": "Which is more?"}
        rewarded, groups = compose([entry]), Groups()

        async def play(n: int) -> Shaped:
            member = groups.join("task", str(n))
            try:
                return await rewarded.run([RewardStep("a", "x", text="+" * n)], member)
            finally:
                member.leave()

        async def together() -> list[Shaped]:
            return await asyncio.gather(*map(play, range(3)))

        results = asyncio.run(together())
    assert [shaped.rewards for shaped in results] == [[0.0], [0.5], [1.0]]
    assert sum(shaped.sums["arena_calls"] for shaped in results) >= server.calls > 0
    assert all("Which is more?" in question["messages"][0]["content"] for question in server.questions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "url: expected either url and model, or compare"),
        ({"url": "http://h/v1", "model": "m", "compare": RULE}, "url: expected either"),
        ({"url": "http://h/v1"}, "model: expected the name of the judge"),
        ({"compare": RULE, "pivot_games": "none"}, "pivot_games: expected one of"),
        ({"compare": RULE, "text": "{transcipt}"}, "text: expected only fields"),
    ],
)
def test_wrong_configurations(options, message):
    with pytest.raises(ConfigError, match=message):
        compose([{"name": "arena", **options}])
