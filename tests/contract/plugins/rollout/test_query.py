"""Queries of the model in each state of an episode: the real agent loop, real hosts, a server with known answers."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from forking import CONVERSATION, SHORT, table, trained_once, way
from scripted import Script

from verl_turnkey.advantage import compute_credit
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION

#: Shows random numbers that no seed decides on: it cannot be cloned.
TREE = Task("contract/Unsteady-v0", 3)
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


def counted(outputs: list[Any]) -> dict[str, float]:
    info = outputs[-1].extra_fields["reward_extra_info"]
    return {name.partition("/")[2]: value for name, value in info.items() if name.startswith("branching/")}


@PROMPTS
def test_values_are_mean_rewards_of_short_answers(play, tokenizer, prompt):
    outputs, script = play(Answering("RL"), TREE, PROBE, SHORT, *prompt, fields=GOLD)
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
    counts = counted(outputs)
    written = sum(len(script.answers[i]) for i, ids in enumerate(script.prompts) if ids not in turns)
    assert counts == {
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
    outputs, script = play(Answering("RL"), TREE, PROBE_GOLD, SHORT, *prompt, fields=GOLD)
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
    assert counted(outputs)["measured"] == 2
    assert compute_credit("information_gain", batch).metrics["credit/information_gain/mean"] == 0


@PROMPTS
@pytest.mark.parametrize(
    ("begun", "expected"), [("I say ", "\n</think>\n\nI say"), ("</think>I say ", "</think>I say")]
)
@pytest.mark.parametrize("strategy", [PROBE, PROBE_GOLD])
def test_thoughts_that_the_template_opens_end_before_an_answer(
    play, tokenizer, monkeypatch, prompt, strategy, begun, expected
):
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    monkeypatch.setitem(play.__globals__, "Script", Scoring)

    def answering(text: str) -> str:
        return "" if "I say" in text.rpartition("<think>")[2] else f"</think>{Answering('RL').trunk[len(way(text))]}"

    strategy = strategy.replace("I say ", begun)
    _, script = play(answering, TREE, strategy, SHORT, *prompt, fields=GOLD, tokenizer=thinking)
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
            play(Answering("RL"), TREE, strategy, SHORT, fields=fields)
        return
    outputs, _ = play(Answering("RL"), TREE, strategy, SHORT, fields=fields)
    batch = table(outputs)
    assert batch.extra["value_rollouts"].tolist() == [0, 0]
    np.testing.assert_allclose(compute_credit("progress", batch, alpha=0).advantage, 0.0)
    assert counted(outputs)["failed"] > 0
    assert any(message in reason for reason in loop_worker._process.failed_branches.latest.values())


def test_answers_keep_to_what_the_model_takes(play):
    less = "actor_rollout_ref.rollout.max_model_len=20"
    outputs, _ = play(Answering("RL"), TREE, PROBE, SHORT, less, fields=GOLD)
    assert table(outputs).extra["value_rollouts"].tolist() == [0, 0]
    assert all(
        "max_model_len where it is less: 20" in reason
        for reason in loop_worker._process.failed_branches.latest.values()
    )


def test_answers_keep_to_the_budget(play):
    """Room for three answers of 21 tokens, of which each gives back what it did not write."""
    outputs, script = play(Answering("RL"), TREE, PROBE, SHORT, "turnkey.rollout.branch_tokens=63", fields=GOLD)
    counts = counted(outputs)
    assert max(map(len, script.answers)) <= 21
    assert 42 < counts["measured_tokens"] <= 63
    assert counts["measured"] == sum(table(outputs).extra["value_rollouts"]) < 8


def test_validation_asks_nothing(play):
    _, script = play(Answering("RL"), TREE, PROBE, SHORT, fields={**GOLD, VALIDATION: True})
    assert len(script.prompts) == 2
