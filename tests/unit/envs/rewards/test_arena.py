"""ArenaRL's tournament: places, byes, ties, independence of the order, and the judge of pairs."""

import asyncio
import hashlib
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import JudgeServer

from verl_turnkey.envs.rewards import (
    Groups,
    Judge,
    JudgeConfig,
    JudgeError,
    RewardError,
    RewardStep,
    Shaped,
    Standing,
    compose,
    pairwise,
    tournament,
)
from verl_turnkey.envs.rewards.arena import Arena


def run(members, judge, seed=0) -> Standing:
    return asyncio.run(tournament(members, judge, seed=seed))


async def by_strength(a: float, b: float) -> tuple[float, float]:
    """Exact, and the same in both orders."""
    return a, b


def group(*strengths: float) -> dict[str, float]:
    return {f"r{i}": strength for i, strength in enumerate(strengths)}


def test_a_strict_order_of_four():
    standing = run(group(3, 9, 1, 5), by_strength)
    assert standing.order == ("r1", "r3", "r0", "r2")
    assert standing.rewards == pytest.approx({"r1": 1.0, "r3": 2 / 3, "r0": 1 / 3, "r2": 0.0})
    rewards = list(standing.rewards.values())
    z = [(reward - statistics.mean(rewards)) / statistics.stdev(rewards) for reward in rewards]
    assert z == pytest.approx([1.1619, 0.3873, -0.3873, -1.1619], abs=1e-4)


@pytest.mark.parametrize("n", range(1, 18))
def test_every_size(n):
    """An exact judge: the seeding list is the true one, the best two meet in the final, nobody is left out."""
    strengths = random.Random(n).sample(range(100), n)
    standing = run(group(*strengths), by_strength, seed=n)
    true = sorted(group(*strengths), key=group(*strengths).__getitem__, reverse=True)
    assert list(standing.order[:2]) == true[:2]
    assert sorted(standing.order) == sorted(true)
    assert standing.games == 2 * (n - 1)
    assert sorted(standing.rewards.values()) == pytest.approx([i / (n - 1) for i in range(n)] if n > 1 else [0.0])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(0, 3), st.randoms(use_true_random=True))
def test_the_order_of_the_members_does_not_matter(strengths, seed, shuffle):
    """With ties and a judge of moods: the standing is a function of keys, texts and seed alone."""

    async def moody(a, b):
        mood = random.Random(f"{a} {b}")
        return a[1] + mood.randint(-2, 2), b[1] + mood.randint(-2, 2)

    members = {key: (key, strength) for key, strength in group(*strengths).items()}
    shuffled = list(members.items())
    shuffle.shuffle(shuffled)
    assert run(members, moody, seed) == run(dict(shuffled), moody, seed)


def slow_tournament(members, judge, seed, pivot_games):
    """By hand: seed i meets seed last - i, and the winner takes the better number."""
    lot = sorted(members, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).hexdigest())
    scores = {key: [] for key in lot}

    def play(a, b):
        there, back = judge(members[a], members[b]), judge(members[b], members[a])
        scores[a].append(there[0] + back[1])
        scores[b].append(there[1] + back[0])
        return scores[a][-1] >= scores[b][-1]

    def mean(key):
        return sum(scores[key]) / len(scores[key]) if scores[key] else 0.0

    for key in lot[1:]:
        play(key, lot[0])
    if pivot_games == "mean" and len(lot) > 1:
        scores[lot[0]] = [sum(scores[lot[0]]) / (len(lot) - 1)]
    seeds = sorted(lot, key=lambda key: (-mean(key), lot.index(key)))
    slots, places, out = dict(enumerate(seeds)), 1, []
    while places < len(lot):
        places *= 2
    while places > 1:
        losers = []
        for i in range(places // 2):
            if places - 1 - i in slots:
                a, b = slots[i], slots.pop(places - 1 - i)
                slots[i], loser = (a, b) if play(a, b) else (b, a)
                losers.append(loser)
        out = [losers, *out]
        places //= 2
    ranked = [sorted(losers, key=lambda key: (-mean(key), seeds.index(key))) for losers in out]
    return [slots[0], *(key for losers in ranked for key in losers)]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 11), st.integers(0, 3), st.integers(0, 1000), st.sampled_from(["mean", "all"]))
def test_as_in_slow_loops(n, seed, mood, pivot_games):
    """A judge without any order in it, with many ties."""

    def scores(a, b):
        draw = random.Random(f"{mood} {a} {b}")
        return draw.randint(0, 2), draw.randint(0, 2)

    async def judge(a, b):
        return scores(a, b)

    members = group(*range(n))
    order = asyncio.run(tournament(members, judge, seed=seed, pivot_games=pivot_games)).order
    assert list(order) == slow_tournament(members, scores, seed, pivot_games)


def directly(members, judge, options):
    return asyncio.run(tournament(members, judge, **options)).order


judges = []


async def by_the_last_judge(first, second):
    return await judges[-1](first[0].action, second[0].action)


def as_a_reward(members, judge, options):
    """By the component, whose members are episodes: here of one step each, with the key for its action."""
    judges.append(judge)
    component = Arena(compare=f"{__name__}:by_the_last_judge", **options)
    places, _ = asyncio.run(component.of_group({key: [RewardStep("", key)] for key in members}))
    return sorted(places, key=places.__getitem__, reverse=True)


@pytest.mark.parametrize("way", [directly, as_a_reward])
@pytest.mark.parametrize(
    ("options", "third"), [({}, "b"), ({"pivot_games": "mean"}, "b"), ({"pivot_games": "all"}, "pivot")]
)
def test_the_pivots_seeding_games_count_as_one(way, options, third):
    """Two losers of the first round: b has 4 and 3, the pivot 6 on average of three seeding games and 0 in the bracket.

    That is 3.5 for b; for the pivot 3 when the seeding games are one score, 4.5 when they are three.
    """
    lot = sorted("wxyz", key=lambda key: hashlib.sha256(f"0:{key}".encode()).digest())
    pivot, a, b, c = lot
    seeding = {a: 9, b: 4, c: 8}  # against the pivot, which makes 6 of each
    played: list[str] = []

    async def judge(contestant, other):
        played.append(contestant)
        if len(played) <= 6:
            return (seeding[contestant] / 2, 3.0) if other == pivot else (3.0, seeding[other] / 2)
        points = {a: 5, c: 5, b: 1.5, pivot: 0}
        return points[contestant], points[other]

    order = way({key: key for key in lot}, judge, options)
    assert order[2] == {"b": b, "pivot": pivot}[third]
    assert {*order[:2]} == {a, c}


def test_the_ways_to_count_the_pivots_games():
    with pytest.raises(ValueError, match="pivot_games: expected 'mean' or 'all', got 'each'"):
        asyncio.run(tournament(group(1, 2), by_strength, pivot_games="each"))


def test_another_seed_draws_another_seeding():
    async def draw(a, b):
        return 1.0, 1.0

    orders = {run(group(*[0] * 8), draw, seed).order for seed in range(8)}
    assert len(orders) == 8
    assert run(group(*[0] * 8), draw, 3).order == run(group(*[0] * 8), draw, 3).order


def test_a_liking_for_the_first_cancels_out():
    async def biased(a, b):
        return a + 3.0, b

    assert run(group(3, 9, 1, 5, 4), biased).order[:2] == ("r1", "r3")


def test_a_judge_that_fails():
    under_way: list[int] = []

    async def judge(a, b):
        under_way.append(1)
        try:
            if {a, b} == {1, 2}:
                raise JudgeError("gone")
            await asyncio.sleep(60)
        finally:
            under_way.pop()
        return 0.0, 0.0

    with pytest.raises(JudgeError, match="gone"):
        run(group(1, 2), judge)
    assert not under_way

    async def nothing(a, b):
        return float("nan"), 0.0

    with pytest.raises(RewardError, match="expected finite scores from the judge of pairs, got nan"):
        run(group(1, 2), nothing)
    with pytest.raises(ValueError, match="at least one member"):
        run({}, nothing)


def test_a_model_as_the_judge(monkeypatch):
    """The stub scores a text by its length; the question has the rubric and both texts, each way round."""

    def answer(question):
        prompt = question["messages"][0]["content"]
        assert "Longer is better." in prompt
        first = prompt.split("<first>\n")[1].split("\n</first>")[0]
        second = prompt.split("<second>\n")[1].split("\n</second>")[0]
        return f'I think {{so}}. {{"first": {len(first)}, "second": {len(second)}}}'

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with JudgeServer(answer) as server:
        judge = Judge(JudgeConfig(server.url, "m"))
        texts = {"a": "xx {json}", "b": "x", "c": "xxxxxxxxxxxx"}
        assert run(texts, pairwise(judge, "Longer is better.")).order == ("c", "a", "b")
        assert server.calls <= 8
        server.answer = lambda question: '{"first": 1}'
        with pytest.raises(JudgeError, match="a JSON object with numbers under first, second, got"):
            run({"a": "new", "b": "newer"}, pairwise(judge))


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
