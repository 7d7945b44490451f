"""Forks before turns that turned out uncertain, in a tree of four leaves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from forking import CONVERSATION, MOVES, SHORT, TREE, table, trained_once, way
from scripted import Script

from verl_turnkey.advantage import compute_credit

#: Log-probabilities of the tokens of a turn, by the moves before it.
SURE, UNSURE = -0.1, -3.0


class Doubter:
    """Goes to the right, and then left and right in turn; the tokens of its second turn have one log-probability."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, second: float = UNSURE, third: str = "") -> None:
        self.visits: Counter[str] = Counter()
        self.third = third
        generate = Script.generate

        async def doubting(script: Script, *args: Any, **kwargs: Any) -> Any:
            output = await generate(script, *args, **kwargs)
            there = way(script.tokenizer.decode(kwargs["prompt_ids"]))
            output.log_probs = [second if there else SURE] * len(output.token_ids)
            return output

        monkeypatch.setattr(Script, "generate", doubting)

    def __call__(self, prompt: str) -> str:
        there = way(prompt)
        self.visits[there] += 1
        if not there:
            return "R"
        return self.third if self.third and self.visits[there] == 3 else MOVES[self.visits[there] % 2]


def strategy(**params: Any) -> str:
    values = ", ".join(f"{name}: {value}" for name, value in {"trajectories": 9, **params}.items())
    return f"turnkey.rollout.strategy={{name: entropy_branch, {values}}}"


def counts(outputs: Any) -> dict[str, float]:
    info = outputs[-1].extra_fields["reward_extra_info"]
    return {name.partition("/")[2]: value for name, value in info.items() if name.startswith("branching/")}


@pytest.mark.parametrize("layout", ["steps", "merged"])
@pytest.mark.parametrize("prompt", [(), CONVERSATION])
def test_branches_begin_before_the_turn_that_was_uncertain(play, monkeypatch, prompt, layout):
    overrides = (strategy(), SHORT, f"turnkey.rollout.layout={layout}", *prompt)
    outputs, script = play(Doubter(monkeypatch), TREE, *overrides)
    trained_once(outputs, script)
    batch = table(outputs)
    order = np.lexsort((batch.step, batch.extra["branch"]))
    assert batch.step[order].tolist() == [0, 1, 1]
    assert batch.extra["parent"][order].tolist() == ["start", "0.0.1", "0.0.1"]
    # The way there has a reward of 0.25. The path itself moved right (5), its branch left (2).
    assert batch.extra["leaf_outcome"][order].tolist() == [5.25, 5.25, 2.25]
    credit = compute_credit("tree", batch, rule="arpo", norm="mean").advantage[order]
    np.testing.assert_allclose(credit, [0.0, 1.5, -1.5], atol=1e-12)
    counted = counts(outputs)
    assert (counted["forks"], counted["trained"], counted["trained_steps"], counted["failed"]) == (1, 1, 1, 0)


def test_a_turn_as_sure_as_the_first_one_makes_no_branch(play, monkeypatch):
    outputs, script = play(Doubter(monkeypatch, second=SURE), TREE, strategy(), SHORT)
    assert len(script.prompts) == 2
    assert counts(outputs)["forks"] == 0


def test_a_branch_that_fails_costs_itself(play, monkeypatch):
    outputs, script = play(Doubter(monkeypatch, third="break"), TREE, strategy(branches=4), SHORT)
    trained_once(outputs, script, measured=1)
    assert sorted(table(outputs).extra["branch"].tolist()) == [0.0, 0.0, 1.0, 3.0]
    assert (counts(outputs)["trained"], counts(outputs)["failed"]) == (2, 1)


@pytest.mark.parametrize(("key", "limit"), [("steps", 2), ("tokens", 16)])
def test_the_budget_of_a_rollout_holds(play, monkeypatch, key, limit):
    """A branch before the last turn may take one step, and 8 tokens."""
    limits = (f"turnkey.rollout.branch_{key}={limit}", "turnkey.rollout.max_turns=2")
    outputs, script = play(Doubter(monkeypatch), TREE, strategy(branches=5), SHORT, *limits)
    trained_once(outputs, script)
    assert counts(outputs)["trained"] == 2


def test_an_episode_that_is_cut_before_its_second_turn_makes_no_branch(play, monkeypatch):
    outputs, _ = play(Doubter(monkeypatch), TREE, strategy(), SHORT, "turnkey.rollout.max_turns=1")
    assert counts(outputs)["forks"] == 0


def test_a_group_has_no_more_trajectories_than_it_may(play, monkeypatch):
    """Three rollouts in doubt, of which each would make two branches; then the next group."""
    n = "actor_rollout_ref.rollout.n=3"
    for fresh in (True, False):
        begun = (strategy(trajectories=7, branches=3), SHORT, n)
        episodes, _ = play(Doubter(monkeypatch), TREE, *begun, sessions=3, fresh=fresh)
        outputs = [row for rows in episodes for row in rows]
        paths = {row.extra_fields["turnkey"].get("branch", 0) for row in outputs}
        assert paths == {0, 1, 2}
        assert len(outputs) == 3 * 2 + 4


@pytest.mark.parametrize("prompt", [(), CONVERSATION])
def test_spos_chain_measures_the_state_before_the_uncertain_turn(play, monkeypatch, prompt):
    """Only the second turn has unlikely tokens: from the state before it branches move left, right, left and right."""
    chain = "turnkey.rollout.strategy={name: spo_chain, rollouts: 4, every: 1, below: 0.5}"
    outputs, script = play(Doubter(monkeypatch), TREE, chain, SHORT, *prompt)
    batch = table(outputs)
    order = np.argsort(batch.step)
    assert batch.extra["value_rollouts"][order].tolist() == [0, 4]
    measured = [2.0 if move == "L" else 5.0 for move in "LRLR"]
    assert batch.extra["turn_value"][order].tolist() == [0.25 + np.mean(measured), np.mean(measured)]
    credit = compute_credit("progress", batch, alpha=0, segments=True).advantage[order]
    np.testing.assert_allclose(credit, [0.0, 5.0 - np.mean(measured)], atol=1e-12)
    trained_once(outputs, script, measured=4)
    assert counts(outputs)["measured"] == 4
