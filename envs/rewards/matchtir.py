"""MatchTIR (arXiv:2601.10712 and its code): tool calls are matched with the gold calls of the task, turns get rewards.

The similarity of two calls and the soft variant are as in the released code. The hard variant is the optimal assignment
that the paper speaks of; the released code takes the best pair first, then the best of what is left, which can give a
smaller total (``matching="greedy"``). The optimal one needs scipy (``pip install "verl-turnkey[matchtir]"``).
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.errors import MissingPackageError, RewardError
from verl_turnkey.envs.rewards.components import Steps, Values, register_reward

Floats = NDArray[np.float64]
SINKHORN_STEPS = 1000
SINKHORN_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def similarity(predicted: ToolCall, gold: ToolCall) -> float:
    """0 for different tools (upper and lower case are the same), else up to 1 for the same arguments and values.

    ``(1 + J + values) / (2 + arguments of gold)``, where J is the Jaccard index of the two sets of argument names, 1
    when both are empty, and ``values`` counts the arguments of gold that have exactly the same value.
    """
    if predicted.name.lower() != gold.name.lower():
        return 0.0
    made, wanted = predicted.arguments, gold.arguments
    union = made.keys() | wanted.keys()
    jaccard = len(made.keys() & wanted.keys()) / len(union) if union else 1.0
    values = sum(name in made and bool(made[name] == value) for name, value in wanted.items())
    return (1.0 + jaccard + values) / (2.0 + len(wanted))


def similarities(predicted: Sequence[ToolCall], gold: Sequence[ToolCall]) -> Floats:
    """(predicted, gold), of every pair."""
    return np.array([[similarity(p, g) for g in gold] for p in predicted]).reshape(len(predicted), len(gold))


def hard_rewards(scores: Floats, unmatched: float = 0.0) -> list[float]:
    """One reward per predicted call: its score in the one-to-one assignment with the largest total.

    ``unmatched``: what a call without a partner of a score above 0 gets (0 in the released run, -0.5 by default in its
    function).

    Raises:
        MissingPackageError: scipy is not installed.
    """
    rewards = [unmatched] * len(scores)
    for i, j in zip(*_assignment()(scores, maximize=True), strict=True):
        if scores[i, j] > 0:
            rewards[i] = float(scores[i, j])
    return rewards


def greedy_rewards(scores: Floats, unmatched: float = 0.0) -> list[float]:
    """As :func:`hard_rewards`, but the best pair first, then the best of what is left: the released code's matching.

    Of equal pairs the earlier call comes first, then the earlier gold call.
    """
    rewards, taken = [unmatched] * len(scores), set()
    matched: set[int] = set()
    pairs = sorted(np.ndindex(scores.shape), key=lambda pair: -scores[pair])
    for i, j in pairs:
        if scores[i, j] > 0 and i not in matched and j not in taken:
            rewards[i] = float(scores[i, j])
            matched.add(i)
            taken.add(j)
    return rewards


def _assignment() -> Callable[..., Any]:
    try:
        from scipy.optimize import linear_sum_assignment
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "the optimal assignment of MatchTIR needs the package 'scipy': pip install \"verl-turnkey[matchtir]\"",
            name="scipy",
        ) from error
    return linear_sum_assignment


def soft_rewards(scores: Floats, regularization: float = 0.1) -> list[float]:
    """One reward per predicted call: its row of ``sum(plan * scores)``, where plan is the entropic transport plan.

    Uniform weights on both sides, cost ``-scores``, Sinkhorn's algorithm. Every row of the plan sums to
    1 / predicted, the largest possible reward. Without gold calls every reward is 0.
    """
    p, g = scores.shape
    if p == 0 or g == 0:
        return [0.0] * p
    log_kernel = scores / regularization
    u, v = np.zeros(p), np.zeros(g)
    for _ in range(SINKHORN_STEPS):
        u = -np.log(p) - np.logaddexp.reduce(log_kernel + v, axis=1)
        v = -np.log(g) - np.logaddexp.reduce(log_kernel + u[:, None], axis=0)
        rows = np.exp(log_kernel + u[:, None] + v).sum(axis=1)  # the columns are exact now
        if np.abs(rows - 1 / p).max() < SINKHORN_TOLERANCE:
            break
    plan = np.exp(log_kernel + u[:, None] + v)
    return (plan * scores).sum(axis=1).tolist()


def turn_rewards(
    turns: Sequence[Sequence[ToolCall]],
    gold: Sequence[ToolCall],
    *,
    variant: Literal["hard", "soft"] = "hard",
    unmatched: float = 0.0,
    regularization: float = 0.1,
    matching: Literal["optimal", "greedy"] = "optimal",
) -> list[float]:
    """One reward per turn: the mean over the calls that were made in it, 0 for a turn without any."""
    scores = similarities([call for turn in turns for call in turn], gold)
    hard = hard_rewards if matching == "optimal" else greedy_rewards
    flat = iter(hard(scores, unmatched) if variant == "hard" else soft_rewards(scores, regularization))
    return [sum(next(flat) for _ in turn) / max(1, len(turn)) for turn in turns]


def answer_f1(answer: str, gold: str) -> float:
    """F1 of the two sets of words, in lower case and without punctuation; the reward of the turn with the answer."""
    answer_words, gold_words = _words(answer), _words(gold)
    common = len(answer_words & gold_words)
    return 2 * common / (len(answer_words) + len(gold_words)) if common else 0.0


def _words(text: str) -> set[str]:
    return set(re.sub(f"[{re.escape(string.punctuation)}]", " ", text.lower()).split())


@register_reward("matchtir")
@dataclass(frozen=True)
class MatchTIR:
    """MatchTIR's turn rewards: tool calls against the gold calls, the final answer against the gold answer.

    In ``info["extra"]`` the environment gives ``gold_tool_calls`` (and ``gold_answer``, if there is one) at reset, and
    after each step ``tool_calls``, the calls made in it, or ``answer``, the final answer. A call is a dict with
    ``name`` and ``arguments`` (or ``parameters``, as in the paper's gold calls), a dict or JSON text. Where there is a
    gold answer, only the answer counts in its turn: as in the released code, calls in it are not matched.
    """

    variant: Literal["hard", "soft"] = "hard"
    """one-to-one assignment, or optimal transport"""
    unmatched: float = 0.0
    """of hard: reward of a call without a partner"""
    regularization: float = 0.1
    """of soft: entropy of the plan"""
    matching: Literal["optimal", "greedy"] = "optimal"
    """of hard: the assignment with the largest total (paper), or the best pair first (released code)"""

    def __post_init__(self) -> None:
        check(self.regularization > 0, "regularization", "a positive number", self.regularization)
        if self.variant == "hard" and self.matching == "optimal":
            _assignment()  # found missing now, not at the end of the first episode

    def __call__(self, steps: Steps) -> Values:
        task = steps[0].extra
        if "gold_tool_calls" not in task:
            raise RewardError("expected the environment's reset to give info['extra']['gold_tool_calls']")
        done, gold = [step.brought for step in steps], task.get("gold_answer")
        answers = [None if gold is None else extra.get("answer") for extra in done]
        rewards = turn_rewards(
            [_calls(extra.get("tool_calls") if a is None else ()) for extra, a in zip(done, answers, strict=True)],
            _calls(task["gold_tool_calls"]),
            variant=self.variant,
            unmatched=self.unmatched,
            regularization=self.regularization,
            matching=self.matching,
        )
        return [
            reward if answer is None else answer_f1(str(answer), str(gold))
            for reward, answer in zip(rewards, answers, strict=True)
        ]


def _calls(value: Any) -> list[ToolCall]:
    """Calls as an environment states them. Arguments that are not a JSON object are none at all."""
    calls = []
    for call in value or ():
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise RewardError(
                f"expected a tool call to be a dict with name and arguments (or parameters), got {call!r}"
            )
        arguments = call.get("arguments", call.get("parameters")) or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        calls.append(ToolCall(call["name"], arguments if isinstance(arguments, Mapping) else {}))
    return calls
