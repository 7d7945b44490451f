"""The component ``answer``: the last action against the task's right answers, as SQuAD's evaluation compares texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.components import RewardError, RewardStep, Steps, Values, at_the_end, register_reward
from verl_turnkey.envs.squad import f1, same


def right_answers(first: RewardStep) -> list[str]:
    """The right answers of a task, the preferred one first, as the first step of an episode has them.

    ``info["extra"]["gold_answers"]`` (a list) or ``["gold_answer"]`` of the environment; where it gives neither,
    ``reward_model.ground_truth`` of the data row: a text, a number, a list of them, or a dict with ``target``.

    Raises:
        RewardError: there is none.
    """
    truth = (first.row.get("reward_model") or {}).get("ground_truth")
    truth = truth.get("target") if isinstance(truth, dict) else truth
    sources = (first.extra.get("gold_answers"), first.extra.get("gold_answer"), truth)
    for answers in map(_texts, sources):
        if answers:
            return answers
    raise RewardError(
        "the task has no right answer: expected info['extra']['gold_answers'] or ['gold_answer'] of the environment, "
        f"or reward_model.ground_truth of the data row, got {', '.join(map(repr, sources))}"
    )


def _texts(value: Any) -> list[str]:
    value = value.tolist() if hasattr(value, "tolist") else value  # arrays, as parquet gives lists
    values = value if isinstance(value, list | tuple) else [value]
    return [str(entry) for entry in values if isinstance(entry, str | int | float) and str(entry).strip()]


@register_reward("answer")
@dataclass(frozen=True)
class Answer:
    """How well the last action answers the task, whose right answers the environment or the data row has."""

    match: Literal["em", "f1"] = "em"
    """em: 1 for one of the right answers, else 0; f1: that of the words with the best of them"""
    pattern: str | None = None
    """regular expression whose first group is the answer, in the last match; null: the action itself is"""

    def __post_init__(self) -> None:
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error:
                groups = 0
            check(groups > 0, "pattern", "a regular expression with a group", self.pattern)

    def __call__(self, steps: Steps) -> Values:
        right, answer = right_answers(steps[0]), steps[-1].action or ""
        if self.pattern is not None:
            matches = [match[1] or "" for match in re.finditer(self.pattern, answer)]
            answer = matches[-1] if matches else ""
        if self.match == "f1":
            return at_the_end(steps, max(f1(answer, gold) for gold in right))
        return at_the_end(steps, float(any(same(answer, gold) for gold in right)))
