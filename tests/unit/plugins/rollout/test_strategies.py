"""Strategies as functions of a fork point and of what was measured, and the budget of branches."""

from __future__ import annotations

import asyncio
import math
import random
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.log import writer
from verl_turnkey.plugins.rollout.branching import Allowance, Budget, Cost
from verl_turnkey.plugins.rollout.columns import hint_line, skill_line
from verl_turnkey.plugins.rollout.strategies import (
    Fork,
    ForkPoint,
    most_clones,
    read_strategy,
    register_strategy,
    registry,
    strategies,
)
from verl_turnkey.plugins.rollout.strategies.builtin import (
    EntropyBranch,
    Probe,
    ProbeGold,
    Siblings,
    SpoChain,
    Tree,
    Vine,
)
from verl_turnkey.plugins.rollout.trajectory_log import TrajectoryLog, token_lengths


def point(turn: int, depth: int = 0) -> ForkPoint:
    return ForkPoint(turn, 0, depth, [])


def test_a_vine_measures_the_states_that_it_is_asked_to():
    assert [Vine(rollouts=3).fork(point(t)) for t in range(3)] == [Fork(3, trained=False)] * 3
    sparse = Vine(every=2, turns=5)
    assert [sparse.fork(point(t)) for t in range(3)] == [Fork(9, False, 5), None, Fork(9, False, 5)]


def test_spos_chain_is_cut_before_the_turn_with_another_n_unlikely_tokens():
    sure, unsure = math.log(0.95), math.log(0.85)
    turns = [[sure] * 9, [unsure, sure, unsure], [unsure], [unsure] * 5, [sure], [unsure]]
    played = [SimpleNamespace(turn=SimpleNamespace(log_probs=turn)) for turn in turns]
    chain = SpoChain(rollouts=4, every=3, turns=2)
    doubts = [chain.doubt(ForkPoint(t, 0, 0, played[:t]), played[t].turn) for t in range(len(turns))]
    cut = Fork(4, trained=False, turns=2)
    assert doubts == [None, None, cut, cut, None, cut]  # 0, 2, 3, 8, 8 and 9 of them so far
    assert chain.fork(ForkPoint(2, 0, 0, played[:2])) is None
    assert SpoChain(every=1).doubt(ForkPoint(0, 0, 0, []), played[1].turn) == Fork(9, trained=False)
    assert SpoChain(every=1, below=0.5).doubt(ForkPoint(0, 0, 0, []), played[1].turn) is None


REWARDS = [0.5, 0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("measured", "values", "credit"),
    [
        ([[1.0, 3.0], [2.0], [1.0], [0.0, 1.0]], [2.0, 2.0, 1.0, 0.5], [0.5, -1.0, 0.5, 1.5]),
        ([[2.0], [], [4.0], []], [2.0, 1.5, 4.0, 3.0], [0.0, 2.5, 0.0, -1.0]),  # of a segment at its end
        ([[], [], [4.0], []], [4.5, 4.0, 4.0, 3.0], [0.0, 0.0, 0.0, -1.0]),  # none before the first measured state
        ([[], [], [], []], [3.5, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_states_that_were_not_measured_move_no_credit(measured, values, credit):
    columns = Vine().columns(REWARDS, measured)
    assert columns["turn_value"] == pytest.approx(values)
    assert columns["value_rollouts"] == [len(returns) for returns in measured]
    batch = StepBatch(
        group=["g"] * 4, trajectory=["a"] * 4, step=range(4), reward=REWARDS, extra={"turn_value": values}
    )
    np.testing.assert_allclose(compute_credit("progress", batch, alpha=0).advantage, credit)
    assert sum(credit) == pytest.approx(sum(REWARDS) - values[0])


def test_probes_ask_where_they_are_to():
    probe, gold = Probe(answers=2, tokens=7, every=2), ProbeGold(every=3)
    forks = [probe.fork(point(t)) for t in range(3)]
    assert [fork and (fork.times, fork.tokens) for fork in forks] == [(2, 7), None, (2, 7)]
    forks = [gold.fork(point(t)) for t in range(4)]
    assert [fork and (fork.times, fork.tokens) for fork in forks] == [(1, 1), None, None, (1, 1)]
    assert Probe().columns(REWARDS, [[2.0], [], [4.0], []]) == Vine().columns(REWARDS, [[2.0], [], [4.0], []])


@pytest.mark.parametrize(
    ("measured", "gold"),
    [
        ([[0.2], [0.3], [0.1]], [0.2, 0.3, 0.1]),
        ([[], [0.3], []], [0.3, 0.3, 0.3]),
        ([[], [], []], [1.0, 1.0, 1.0]),
    ],
)
def test_a_state_that_was_not_scored_is_no_gain(measured, gold):
    assert ProbeGold().columns([0.0, 0.0, 1.0], measured)["gold_probability"] == gold


def test_a_tree_forks_at_its_turns_down_to_its_depth():
    tree = Tree(branches=3, first=1, every=2, depth=2)
    assert [tree.fork(point(t)) is not None for t in range(6)] == [False, True, False, True, False, True]
    assert tree.fork(point(1)) == Fork(2, trained=True)
    assert tree.fork(point(5, depth=1)) is not None
    assert tree.fork(point(5, depth=2)) is None


def written(*log_probs: float) -> Any:
    return SimpleNamespace(log_probs=list(log_probs))


def doubted(strategy: EntropyBranch, first: Any, now: Any) -> bool:
    """Whether the turn ``now`` makes a path fork; asked before any turn it does not."""
    at = ForkPoint(1, 0, 0, [SimpleNamespace(turn=first)])
    assert strategy.fork(at) is None
    return strategy.doubt(at, now) is not None


def test_arpo_forks_where_a_turn_begins_with_more_entropy_than_the_first_one():
    """log(4) is the scale, so that tokens of chance 1/4 have an entropy of 1 each, and those of chance 1 none."""
    unsure, sure = [-math.log(4)], [0.0]
    rule = {"vocabulary": 4, "alpha": 0.4, "beta": 0.2, "tau": 0.5}
    for params, first, now, forks in (
        (rule, sure, unsure, True),  # 0.6 > 0.5
        (rule, unsure, sure, False),  # 0.2
        (rule, unsure, unsure, False),  # 0.4
        (rule | {"tau": 0.61}, sure, unsure, False),
        (rule | {"tau": 0.61}, sure * 2, unsure * 2, True),  # summed: 0.8
        (rule | {"tau": 0.61, "tokens": 1}, sure * 2, unsure * 2, False),
        (rule, unsure, unsure * 3, False),  # of turns of unequal length the tokens that both have count
        (rule, sure, [], False),
        ({}, sure, [-1e-6], True),  # by the paper's numbers any doubt more is enough
        ({}, sure, sure, False),
    ):
        assert doubted(EntropyBranch(**params), written(*first), written(*now)) == forks, (params, first, now)
    assert EntropyBranch().doubt(point(0), written(*unsure)) is None
    at = ForkPoint(1, 0, 0, [SimpleNamespace(turn=written(0.0))])
    assert EntropyBranch(branches=3).doubt(at, written(-1)) == Fork(2, trained=True)


def test_arpo_forks_by_chance_as_its_code_does():
    unsure, sure = -math.log(4), 0.0
    random.seed(1)
    chance = EntropyBranch(vocabulary=4, tau=None)
    forked = [doubted(chance, written(sure), written(unsure)) for _ in range(1000)]
    assert sum(forked) / 1000 == pytest.approx(0.7, abs=0.06)  # over 4 deviations
    forked = [doubted(chance, written(unsure), written(sure)) for _ in range(1000)]
    assert sum(forked) / 1000 == pytest.approx(0.3, abs=0.06)


def test_slate_chooses_by_the_advantages_of_the_candidates():
    assert Siblings(candidates=3).fork(point(4)) == Fork(2, trained=True, turns=1)
    random.seed(2)
    scores, drawn = [2.0, 1.0, 0.0, 0.0, -1.0], 4000
    shares = np.bincount([Siblings().choose(scores) for _ in range(drawn)], minlength=5) / drawn
    expected = np.array([0.679, 0.194, 0.055, 0.055, 0.016])  # the paper's numbers, worked out by hand
    assert np.all(np.abs(shares - expected) < 4 * np.sqrt(expected / drawn) + 0.001)
    assert {Siblings(eta=0).choose(scores[::-1]) for _ in range(50)} == {4}
    assert {Siblings(eta=0).choose([1.0, 3.0, 3.0]) for _ in range(50)} == {1}, "the first of the best"
    assert Siblings().choose([7.0]) == 0
    assert {Siblings().choose([0.5, 0.5]) for _ in range(200)} == {0, 1}
    assert {Siblings(eta=1e-9).choose([1e18, -1e18]) for _ in range(50)} == {0}


def test_a_group_begins_no_more_branches_than_it_may():
    limited, free = Allowance(2), Allowance()
    assert [limited.take(1), limited.take(3), limited.take(1)] == [1, 1, 0]
    limited.give_back(1)
    assert [limited.take(2), limited.take(1)] == [1, 0]
    assert free.take(100) == 100


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("vines", ": there is no strategy 'vines'; did you mean 'vine'?"),
        ("vine rolouts=2", ".rolouts: unknown key; did you mean 'rollouts'?"),
        ("vine rollouts=0", ".rollouts: expected an integer >= 1, got 0"),
        ("vine every=0", ".every: expected an integer >= 1, got 0"),
        ("vine turns=0", ".turns: expected null or an integer >= 1, got 0"),
        ("probe answers=0", ".answers: expected an integer >= 1, got 0"),
        ("probe tokens=0", ".tokens: expected an integer >= 1, got 0"),
        ("probe temperature=-1", ".temperature: expected a number >= 0, got -1"),
        ("probe stop=['']", ".stop: expected a list of strings that are not empty, got ['']"),
        ("probe reward={name: answer, match: en}", ".reward.match"),
        ("probe_gold answers=3", ".answers: unknown key"),
        ("probe_gold every=0", ".every: expected an integer >= 1, got 0"),
        ("tree branches=1", ".branches: expected an integer >= 2, got 1"),
        ("tree first=-1", ".first: expected zero or more, got -1"),
        ("tree depth=0", ".depth: expected an integer >= 1, got 0"),
        ("entropy_branch tau=.nan", ".tau: expected a finite number, got"),
        ("entropy_branch alpha=.inf", ".alpha: expected a finite number, got"),
        ("entropy_branch vocabulary=1", ".vocabulary: expected an integer >= 2, got 1"),
        ("spo_chain below=0", ".below: expected a number in (0, 1], got 0"),
        ("spo_chain every=0", ".every: expected an integer >= 1, got 0"),
        ("siblings turns=2", ".turns: unknown key"),
        ("siblings candidates=1", ".candidates: expected an integer >= 2, got 1"),
        ("siblings eta=-0.1", ".eta: expected a finite number >= 0, got -0.1"),
        ("null rollouts=2", ": there is no strategy None"),
        ("independent rollouts=2", ": there is no strategy 'independent'"),
    ],
)
def test_what_no_strategy_takes(value: str, message: str):
    name, _, param = value.partition(" ")
    key, _, number = param.partition("=")
    with pytest.raises(ConfigError) as error:
        read_strategy({"name": yaml.safe_load(name), **({key: yaml.safe_load(number)} if key else {})})
    assert f"turnkey.rollout.strategy{message}" in str(error.value)


def test_strategies_are_read_by_name_or_with_parameters():
    assert read_strategy("independent") is None
    for value, expected in (("vine", Vine()), ({"name": "vine", "rollouts": 2}, Vine(rollouts=2))):
        spec, vine = read_strategy(value)
        assert (spec.name, vine) == ("vine", expected)


@pytest.mark.parametrize(
    ("strategy", "clones"),
    [
        ({"name": "vine", "rollouts": 9}, 4),  # as many as may be measured at once
        ("spo_chain", 4),
        ({"name": "tree", "branches": 3, "depth": 2}, 8),
        ({"name": "siblings", "candidates": 5}, 4),
        ({"name": "entropy_branch", "trajectories": 17}, 2),  # of nine branches for eight episodes
        ("probe", 0),
    ],
)
def test_clones_of_an_episode_that_are_open_at_once(strategy, clones):
    options = read_strategy(strategy)
    assert options is not None
    assert most_clones(*options, rollouts=8, measured=4) == clones


def test_what_cannot_be_registered():
    @dataclass(frozen=True)
    class Frozen:
        pass

    for name, cls, gives, message in (
        ("vine", Frozen, (), "there already"),
        ("independent", Frozen, (), "there already"),
        ("own", Frozen, ("parent",), "every strategy gives the column 'parent'"),
        ("own", type("Loose", (), {}), (), "frozen"),
    ):
        with pytest.raises(ValueError, match=message):
            register_strategy(name, gives=gives)(cls)
    assert "own" not in strategies()


def test_the_strategy_of_the_page_works(tmp_path):
    page = (Path(__file__).parents[4] / "docs" / "branching.md").read_text(encoding="utf-8")
    (tmp_path / "my_strategy.py").write_text(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0])
    try:
        import_modules([str(tmp_path / "my_strategy.py")])
        spec, retry = read_strategy({"name": "retry", "tries": 3})
        steps = [SimpleNamespace(record={"valid": valid}) for valid in (True, False)]
        assert [retry.fork(ForkPoint(t, 0, 0, steps[:t])) for t in range(3)] == [None, None, Fork(3, trained=False)]
        assert retry.columns([0.0, 1.0], [[], [1.0, 2.0]]) == {spec.gives[0]: [0.0, 1.5]}
    finally:
        registry._STRATEGIES.pop("retry", None)


def test_a_budget_is_never_exceeded_and_gives_back_what_was_not_spent():
    async def play() -> list[int]:
        budget = Budget(tokens=100, steps=None, at_once=9)
        granted = [await budget.reserve(Cost(40, 4), 3)]
        budget.give_back(Cost(40, 4), Cost(10, 4), measured=False)
        granted += [await budget.reserve(Cost(51, 1), 1), await budget.reserve(Cost(10, 1), 9)]
        return granted

    assert asyncio.run(play()) == [2, 0, 5]


def test_a_budget_waits_for_branches_that_are_measured():
    """Those always end; a trained one may wait itself, so nobody waits for it."""

    async def play() -> list[int]:
        budget, numbers = Budget(tokens=None, steps=10, at_once=2), []
        assert await budget.reserve(Cost(0, 4), 2) == 2
        for _ in range(2):
            await budget.begin()

        async def more() -> None:
            numbers.append(await budget.reserve(Cost(0, 3), 2))

        waiting = asyncio.create_task(more())
        for spent in (2, 3):
            await asyncio.sleep(0)
            assert not numbers  # 2 steps are left, later 4: not enough for both
            budget.give_back(Cost(0, 4), Cost(0, spent), measured=True)
        await waiting
        return numbers

    assert asyncio.run(play()) == [1]


def test_branches_that_run_at_once_are_bounded():
    async def play() -> list[str]:
        budget, log = Budget(tokens=None, steps=None, at_once=2), []

        async def branch(name: str) -> None:
            await budget.begin()
            log.append(name)

        tasks = [asyncio.create_task(branch(name)) for name in "abc"]
        for _ in range(3):
            await asyncio.sleep(0)
        assert log == ["a", "b"]
        budget.give_back(Cost(), Cost(), measured=True)
        await asyncio.gather(*tasks)
        return log

    assert asyncio.run(play()) == ["a", "b", "c"]


def test_vines_are_unbiased_in_a_tree_with_known_values():
    """Every outcome of two moves once from each state: the mean is the value, and the credit what the move adds."""
    leaves = {"LL": 0.0, "LR": 1.0, "RL": 2.0, "RR": 5.0}
    value = {"": np.mean(list(leaves.values())), "L": 0.5, "R": 3.5}
    for way, outcome in leaves.items():
        measured = [list(leaves.values()), [leaves[way[0] + move] for move in "LR"]]
        values = Vine().columns([0.0, outcome], measured)["turn_value"]
        batch = StepBatch(
            group=[0, 0], trajectory=[0, 0], step=[0, 1], reward=[0.0, outcome], extra={"turn_value": values}
        )
        credit = compute_credit("progress", batch, alpha=0).advantage
        np.testing.assert_allclose(credit, [value[way[0]] - value[""], outcome - value[way[0]]])


# --- What of a hint, and of a skill, stands behind the task -----------------------------------------------------------
TEXT = "Open the  red box\nthen leave"


def test_the_first_words_of_a_hint_up_to_a_share():
    words = {0.01: "Open", 0.5: "Open the red", 0.51: "Open the red box", 1.0: "Open the red box then leave"}
    for share, first_words in words.items():
        assert hint_line({"turnkey_hint": TEXT, "turnkey_hint_share": share}) == f"\nHint: {first_words}"
    rows = [{}, {"turnkey_hint": TEXT}, {"turnkey_hint": TEXT, "turnkey_hint_share": 0.0}]
    rows += [{"turnkey_hint": text, "turnkey_hint_share": 1.0} for text in (None, "", " ")]
    assert [hint_line(row) for row in rows] == [""] * 6


def test_a_skill_is_shown_whole_from_a_column_or_from_extra_info():
    for row in ({"skill": TEXT}, {"extra_info": {"skill": TEXT}}, {"skill": TEXT, "extra_info": None}):
        assert skill_line(row, "skill") == f"\n{TEXT}"
        assert skill_line(row, None) == skill_line(row, "other") == ""
    assert [skill_line({"skill": text}, "skill") for text in (None, "", "  ", 3, float("nan"))] == [""] * 5


# --- When the rows of episodes come to the disk -----------------------------------------------------------------------
def test_a_file_is_written_after_five_minutes_unless_a_step_ends_before(tmp_path: Path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(writer, "monotonic", lambda: clock[0])
    config = {
        "data": {"train_batch_size": 4},
        "actor_rollout_ref": {"rollout": {"n": 2, "val_kwargs": {"n": 1}}},
        "turnkey": {"log": {"trajectories": str(tmp_path / "log")}},
    }
    tables = TrajectoryLog(config, turnkey_config(config).log).tables

    def files(now: float) -> int:
        clock[0] = now
        for _ in range(2):  # the second is taken when everything due at the first is written
            taken = threading.Event()
            tables.put_later(lambda taken=taken: [taken.set()][:0], 0, 0)
            assert taken.wait(10)
        return len(list((tmp_path / "log").rglob("*.parquet")))

    tables.put("turns", 1, {"episode": ["a_0"], "turn": [0]})
    assert files(0) == 0
    assert files(299) == 0
    assert files(300) == 1
    tables.put("turns", 1, {"episode": ["a_1"], "turn": [0]})
    tables.put("turns", 2, {"episode": ["b_0"], "turn": [0]})
    assert files(301) == 2
    assert tables.drain(10)
    assert files(301) == 3


def of_bytes(ids: list[int], skip_special_tokens: bool = False) -> str:
    """A tokenizer of bytes, with 256 as its one special token."""
    return bytes(i for i in ids if i < 256).decode(errors="replace") + "</s>" * (256 in ids and not skip_special_tokens)


def test_a_character_of_several_tokens_counts_at_the_last():
    ids = [*"aé🙂".encode(), 256]
    assert token_lengths(ids, "aé🙂", of_bytes) == [1, 0, 1, 0, 0, 0, 1, 0]
    assert token_lengths([], "", of_bytes) == []
    assert token_lengths([*b"a\xf0"], "a\ufffd", of_bytes) is None, "the text ends inside a character"
    assert token_lengths([*b" a"], "a", of_bytes) is None, "the tokenizer drops a space"
