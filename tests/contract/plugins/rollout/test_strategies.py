"""Strategies in the agent loop: where a turn is unsure, several candidates for a turn, queries of a state."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scripted import (
    BRANCH,
    CONVERSATION,
    MOVES,
    SHORT,
    TREE,
    Script,
    columns,
    counts,
    opening_thoughts,
    table,
    trained_once,
    way,
)

from verl_turnkey.advantage import compute_credit, validate_record
from verl_turnkey.envs.rewards import RewardError
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.branching import Branching, Trajectory
from verl_turnkey.plugins.rollout.episode import Episode
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION

# --- entropy_branch ---------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("second", "overrides", "turns"), [(SURE, (), 2), (UNSURE, ("turnkey.rollout.max_turns=1",), 1)]
)
def test_a_turn_as_sure_as_the_first_one_and_a_cut_episode_make_no_branch(play, monkeypatch, second, overrides, turns):
    outputs, script = play(Doubter(monkeypatch, second=second), TREE, strategy(), SHORT, *overrides)
    assert len(script.prompts) == turns
    assert counts(outputs)["forks"] == 0


def test_a_branch_that_fails_costs_itself(play, monkeypatch):
    outputs, script = play(Doubter(monkeypatch, third="break"), TREE, strategy(branches=4), SHORT)
    trained_once(outputs, script, measured=1)
    assert sorted(table(outputs).extra["branch"].tolist()) == [0.0, 0.0, 1.0, 3.0]
    assert (counts(outputs)["trained"], counts(outputs)["failed"]) == (2, 1)


@pytest.mark.parametrize(("key", "limit"), [("steps", 2), ("tokens", 16)])
def test_the_budget_of_uncertain_turns_holds(play, monkeypatch, key, limit):
    """A branch before the last turn may take one step, and 8 tokens."""
    limits = (f"turnkey.rollout.branch_{key}={limit}", "turnkey.rollout.max_turns=2")
    outputs, script = play(Doubter(monkeypatch), TREE, strategy(branches=5), SHORT, *limits)
    trained_once(outputs, script)
    assert counts(outputs)["trained"] == 2


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


# --- siblings ---------------------------------------------------------------------------------------------------------

BEST = "turnkey.rollout.strategy={name: siblings, candidates: 3, eta: 0}"
pytestmark = pytest.mark.usefixtures("numbered")


def candidate() -> int:
    """The number among the candidates of a turn of who asks; 0: the trajectory itself."""
    branch = BRANCH.get()
    return 0 if branch is None or not branch[2] else (branch[2] - 1) % 2 + 1


def moves(*turns: Sequence[str]) -> Callable[[str], str]:
    """Of each turn: what the trajectory itself plays, and its two other candidates."""

    def turn(prompt: str) -> str:
        return turns[len(way(prompt))][candidate()]

    return turn


@pytest.mark.parametrize("env", ["Tree", "ReplayedTree"])
@pytest.mark.parametrize("layout", ["steps", "merged"])
@pytest.mark.parametrize("prompt", [(), CONVERSATION])
def test_the_best_candidate_goes_on_and_each_is_trained_once(play, prompt, layout, env):
    """The trajectory's own turns lose; one candidate breaks."""
    overrides = (BEST, SHORT, f"turnkey.rollout.layout={layout}", *prompt)
    plan = moves(["L", "R", "break"], ["L", "L", "R"])
    outputs, script = play(plan, Task(f"contract/{env}-v0", 3), *overrides)
    for i, row in enumerate(outputs):
        validate_record(row.extra_fields["turnkey"], f"row {i}")
    trained_once(outputs, script, measured=1)
    for text in map(script.text, range(len(script.prompts))):  # the past that is shown is that of the candidate
        past = re.findall(r"assistant\n([LR])", text) if prompt else re.findall(r"Action: ([LR])", text)
        assert past == list(way(text))
    batch = table(outputs)
    order = np.lexsort((batch.extra["branch"], batch.step))
    assert batch.extra["parent"][order].tolist() == ["0"] * 2 + ["0.0.1"] * 3
    assert batch.extra["branch"][order].tolist() == [0, 1, 0, 3, 4]
    assert batch.extra["candidate_score"][order].tolist() == [0.25, 0.0, 5.0, 2.0, 2.0]
    assert batch.extra["leaf_outcome"][order].tolist() == [5.25, 0.0, 5.25, 2.25, 2.25]
    assert batch.terminated[order].tolist() == [False, False, True, True, True]
    assert batch.truncated[order].tolist() == [False, True, False, False, False]
    credit = compute_credit("siblings", batch, norm="mean").advantage[order]
    np.testing.assert_allclose(credit, [0.125, -0.125, 2.0, -1.0, -1.0], atol=1e-12)
    counted = counts(outputs)
    assert (counted["forks"], counted["trained"], counted["failed"], counted["trained_steps"]) == (2, 3, 1, 4)
    assert outputs[-1].reward_score == 5.25


@pytest.mark.parametrize(("limit", "candidates"), [(1, [2, 1]), (2, [3, 1]), (3, [3, 2]), (4, [3, 3])])
def test_the_budget_of_a_rollout_holds(play, limit, candidates):
    """What is left over is spent on the first turns; a turn with one candidate is trained, with an advantage of 0."""
    outputs, script = play(moves("LRR", "LRR"), TREE, BEST, SHORT, f"turnkey.rollout.branch_steps={limit}")
    trained_once(outputs, script)
    batch = table(outputs)
    assert [Counter(batch.step.tolist())[t] for t in range(2)] == candidates
    assert counts(outputs)["trained_steps"] == sum(candidates) - 2
    alone = compute_credit("siblings", batch).advantage[batch.step == 1]
    assert (alone == 0).all() == (candidates[1] == 1)


def test_an_episode_is_cut_after_its_last_turn(play):
    outputs, script = play(moves("LRL"), TREE, BEST, SHORT, "turnkey.rollout.max_turns=1")
    trained_once(outputs, script)
    batch = table(outputs)
    assert batch.truncated.tolist() == [True] * 3
    assert sorted(batch.extra["candidate_score"].tolist()) == [0.0, 0.0, 0.25]


def test_a_turn_of_the_path_that_fails_costs_the_rollout(play):
    outputs, _ = play(moves("LRL", ["break", "R", "L"]), TREE, BEST, SHORT)
    (row,) = outputs
    assert "the branch broke" in row.extra_fields["turnkey"]["failed"]


def test_without_a_rival_that_lasts_the_path_goes_on_itself(play):
    broken = ["L", "break", "break"]
    outputs, script = play(moves(broken, broken), TREE, BEST, SHORT)
    trained_once(outputs, script, measured=4)
    batch = table(outputs)
    assert batch.extra["branch"].tolist() == [0.0, 0.0]
    assert batch.extra["candidate_score"].tolist() == [0.0, 0.0]


def test_a_candidate_that_cannot_be_scored_costs_itself(play, monkeypatch):
    inner = Episode.score

    async def score(self: Episode, *args: Any) -> float:
        if self.branch == 1:
            raise RewardError("no judge")
        return await inner(self, *args)

    monkeypatch.setattr(Episode, "score", score)
    outputs, script = play(moves("LRR", "LRL"), TREE, BEST, SHORT)
    trained_once(outputs, script, measured=1)
    batch = table(outputs)
    assert sorted(batch.extra["branch"].tolist()) == [0.0, 0.0, 2.0, 3.0, 4.0]
    assert counts(outputs)["failed"] == 1
    assert outputs[-1].reward_score == 5.25


def test_a_candidate_that_lost_is_closed_before_it_is_judged(play, monkeypatch):
    branches: list[Trajectory] = []
    still_open: list[bool] = []
    course, rewards = Branching._to_the_choice, Episode.apply_rewards

    async def to_the_choice(self: Branching, clone: Any, candidate: Any, branch: Trajectory) -> float:
        branches.append(branch)
        return await course(self, clone, candidate, branch)

    async def apply(self: Episode, *args: Any) -> None:
        still_open.extend(branch.environment._open for branch in branches if branch.episode is self)
        await rewards(self, *args)

    monkeypatch.setattr(Branching, "_to_the_choice", to_the_choice)
    monkeypatch.setattr(Episode, "apply_rewards", apply)
    outputs, script = play(moves("LRR", "LRR"), TREE, BEST, SHORT)
    trained_once(outputs, script)
    assert still_open == [False] * 4


def test_a_choice_by_chance_keeps_every_candidate(play):
    for _ in range(4):
        outputs, script = play(moves("LRL", "RLR"), TREE, BEST.replace(", eta: 0", ""), SHORT)
        trained_once(outputs, script)
        batch = table(outputs)
        assert len(batch) == 6
        path = np.flatnonzero(batch.extra["branch"] == 0)
        scores = batch.extra["candidate_score"][path]
        assert batch.extra["leaf_outcome"][path].tolist() == [scores.sum()] * 2


def player(*turns: Sequence[str]) -> Callable[[str], str]:
    """As :func:`moves`, where the state does not tell the turn."""

    def turn(prompt: str) -> str:
        past = re.findall(r"Action: (find|wait)\b", prompt)
        return turns[len(past)][candidate()]

    return turn


def test_candidates_that_end_the_episode_and_others_are_compared(play):
    """Of equal scores the first one is chosen: find, 0.5, goes on where the trajectory itself had lost."""
    plan = player(["lose", "find", "win"], ["wait", "time out", "lose"])
    outputs, script = play(plan, Task("contract/Awkward-v0", 3), BEST, SHORT)
    trained_once(outputs, script)
    batch = table(outputs)
    assert columns(batch, "branch", "candidate_score", "terminated", "truncated", "success") == (
        [0, 1, 2, 0, 3, 4],
        [0.5, 0.0, 0.5, 0.5, 0.0, 0.0],
        [False, True, True, False, False, True],
        [False, False, False, True, True, False],
        [False, False, True, False, False, False],
    )
    assert outputs[-1].reward_score == 1.0


def test_an_episode_ends_with_the_candidate_that_ends_it(play):
    paid = "turnkey.rewards=[{name: outcome}]"
    outputs, script = play(player(["wait", "lose", "win"]), Task("contract/Awkward-v0", 3), BEST, SHORT, paid)
    trained_once(outputs, script)
    batch = table(outputs)
    assert columns(batch, "step", "candidate_score", "leaf_outcome", "success", "truncated") == (
        [0] * 3,
        [1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0],
        [True, False, False],
        [False, False, True],
    )


# --- queries ----------------------------------------------------------------------------------------------------------

#: Shows random numbers that no seed decides on: it cannot be cloned.
UNSTEADY = Task("contract/Unsteady-v0", 3)
GOLD = {"reward_model": {"ground_truth": "the right one"}}
#: How many of four answers are right, by the way so far.
RIGHT = {"": 1, "R": 3}
PROBE = 'turnkey.rollout.strategy={name: probe, answers: 4, tokens: 21, text: "I say "}'
PROBE_GOLD = 'turnkey.rollout.strategy={name: probe_gold, text: "I say "}'
PROMPTS = pytest.mark.parametrize("prompt", [(), CONVERSATION])


class Answering:
    """Moves as told; asked to say something, it is right as often as ``RIGHT`` has it."""

    def __init__(self, trunk: str) -> None:
        self.trunk, self.visits = trunk, Counter[str]()

    def __call__(self, prompt: str) -> str:
        here = way(prompt)
        if prompt.endswith("the right one"):  # what is scored: verl's servers have to write a token
            return ""
        if not prompt.endswith("I say"):
            return self.trunk[len(here)]
        self.visits[here] += 1
        return " The right one!\nNo." if self.visits[here] <= RIGHT[here] else " the right"


@PROMPTS
def test_values_are_mean_rewards_of_short_answers(play, tokenizer, prompt):
    outputs, script = play(Answering("RL"), UNSTEADY, PROBE, SHORT, *prompt, fields=GOLD)
    batch = table(outputs)
    assert batch.extra["turn_value"].tolist() == [0.25, 0.75]
    assert batch.extra["value_rollouts"].tolist() == [4, 4]
    credit = compute_credit("progress", batch, alpha=0).advantage
    np.testing.assert_allclose(credit, [0.25 + 0.75 - 0.25, 2.0 - 0.75])
    trained_once(outputs, script, measured=8)
    begun = tokenizer.encode("I say")
    turns = [ids for ids, params in zip(script.prompts, script.params, strict=True) if params["max_tokens"] == 8]
    queries = [(ids, params) for ids, params in zip(script.prompts, script.params, strict=True) if ids not in turns]
    assert (len(turns), len(queries)) == (2, 8)
    for ids, params in queries:  # the very prompt of the turn, and the beginning of an answer
        assert ids[: -len(begun)] in turns
        assert ids[-len(begun) :] == begun
        assert (params["max_tokens"], params["temperature"], params["stop"]) == (21, 0.6, ["\n"])
    counted = counts(outputs)
    written = sum(len(script.answers[i]) for i, ids in enumerate(script.prompts) if ids not in turns)
    assert counted == {
        "forks": 2, "trained": 0, "measured": 8, "failed": 0, "trained_tokens": 0, "trained_steps": 0,
        "measured_tokens": written, "measured_steps": 0,
    }  # fmt: skip


class Scoring(Script):
    """Gives the log-probability -0.5 * (id % 3) - 0.1 to each token of a prompt, in the layout of verl's servers."""

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **arguments: Any) -> Any:
        output = await super().generate(request_id, sampling_params=sampling_params, **arguments)
        if "prompt_logprobs" in sampling_params:
            ids = [*arguments["prompt_ids"][1:], 0]
            output.extra_fields |= {"prompt_ids": [[i] for i in ids], "prompt_logprobs": [[score(i)] for i in ids]}
        return output


def score(token: int) -> float:
    return -0.5 * (token % 3) - 0.1


@PROMPTS
def test_probabilities_are_those_of_the_right_answers_tokens(play, tokenizer, monkeypatch, prompt):
    monkeypatch.setitem(play.__globals__, "Script", Scoring)
    outputs, script = play(Answering("RL"), UNSTEADY, PROBE_GOLD, SHORT, *prompt, fields=GOLD)
    gold = tokenizer.encode(" the right one")
    expected = math.exp(sum(map(score, gold)) / len(gold))
    batch = table(outputs)
    assert batch.extra["gold_probability"].tolist() == pytest.approx([expected] * 2)
    assert batch.extra["turn_value"].tolist() == pytest.approx([expected] * 2)
    scored = [i for i, params in enumerate(script.params) if "prompt_logprobs" in params]
    assert len(scored) == 2
    for i in scored:
        assert script.prompts[i][-len(gold) :] == gold
        assert script.text(i).endswith("I say the right one")
        assert script.params[i]["max_tokens"] == 1
    assert counts(outputs)["measured"] == 2
    assert compute_credit("information_gain", batch).metrics["credit/information_gain/mean"] == 0


@PROMPTS
@pytest.mark.parametrize(
    ("begun", "expected"), [("I say ", "\n</think>\n\nI say"), ("</think>I say ", "</think>I say")]
)
@pytest.mark.parametrize("strategy", [PROBE, PROBE_GOLD])
def test_thoughts_that_the_template_opens_end_before_an_answer(
    play, tokenizer, monkeypatch, prompt, strategy, begun, expected
):
    monkeypatch.setitem(play.__globals__, "Script", Scoring)

    def answering(text: str) -> str:
        return "" if "I say" in text.rpartition("<think>")[2] else f"</think>{Answering('RL').trunk[len(way(text))]}"

    strategy = strategy.replace("I say ", begun)
    _, script = play(answering, UNSTEADY, strategy, SHORT, *prompt, fields=GOLD, tokenizer=opening_thoughts(tokenizer))
    queries = [text for text in map(script.text, range(len(script.prompts))) if "I say" in text]
    assert len(queries) == (8 if strategy.startswith(PROBE[:40]) else 2)
    assert {text.rpartition("<think>\n")[2].removesuffix(" the right one") for text in queries} == {expected}


@pytest.mark.parametrize(
    ("strategy", "fields", "message"),
    [
        (PROBE, {}, "the task has no right answer"),
        (PROBE_GOLD, GOLD, "the server gives no log-probabilities"),
        (PROBE.replace("tokens: 21", "tokens: 9999"), GOLD, "exceed data.max_prompt_length"),
        (PROBE.replace("tokens: 21", "tokens: 21, reward: {name: 'fractions:Fraction'}"), GOLD, None),
    ],
)
def test_a_question_that_fails_costs_itself(play, strategy, fields, message):
    if message is None:  # what no component can be is an error of the configuration
        with pytest.raises(Exception, match=r"turnkey\.rollout\.strategy.*reward"):
            play(Answering("RL"), UNSTEADY, strategy, SHORT, fields=fields)
        return
    outputs, _ = play(Answering("RL"), UNSTEADY, strategy, SHORT, fields=fields)
    batch = table(outputs)
    assert batch.extra["value_rollouts"].tolist() == [0, 0]
    np.testing.assert_allclose(compute_credit("progress", batch, alpha=0).advantage, 0.0)
    assert counts(outputs)["failed"] > 0
    assert any(message in reason for reason in loop_worker._process.failed_branches.latest.values())


def test_answers_keep_to_what_the_model_takes(play):
    less = "actor_rollout_ref.rollout.max_model_len=20"
    outputs, _ = play(Answering("RL"), UNSTEADY, PROBE, SHORT, less, fields=GOLD)
    assert table(outputs).extra["value_rollouts"].tolist() == [0, 0]
    assert all(
        "max_model_len where it is less: 20" in reason
        for reason in loop_worker._process.failed_branches.latest.values()
    )


def test_answers_keep_to_the_budget(play):
    """Room for three answers of 21 tokens, of which each gives back what it did not write."""
    outputs, script = play(Answering("RL"), UNSTEADY, PROBE, SHORT, "turnkey.rollout.branch_tokens=63", fields=GOLD)
    counted = counts(outputs)
    assert max(map(len, script.answers)) <= 21
    assert 42 < counted["measured_tokens"] <= 63
    assert counted["measured"] == sum(table(outputs).extra["value_rollouts"]) < 8


def test_validation_asks_nothing(play):
    _, script = play(Answering("RL"), UNSTEADY, PROBE, SHORT, fields={**GOLD, VALIDATION: True})
    assert len(script.prompts) == 2
