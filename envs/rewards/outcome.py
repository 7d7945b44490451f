"""Components that look at an episode's outcome: ``answer``, ``contrastive``, ``function`` and ``sweet_spot``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from verl_turnkey.advantage.params import ConfigError, check
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.errors import RewardError
from verl_turnkey.envs.model_texts import f1, same
from verl_turnkey.envs.rewards.components import (
    RewardStep,
    Steps,
    Values,
    at_the_end,
    call_own,
    groups,
    number,
    register_reward,
)
from verl_turnkey.envs.user_modules import load_function


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
        grouped = self.pattern is None or groups(self.pattern) > 0
        check(grouped, "pattern", "a regular expression with a group", self.pattern)

    def __call__(self, steps: Steps) -> Values:
        right, answer = right_answers(steps[0]), steps[-1].action or ""
        if self.pattern is not None:
            matches = [match[1] or "" for match in re.finditer(self.pattern, answer)]
            answer = matches[-1] if matches else ""
        if self.match == "f1":
            return at_the_end(steps, max(f1(answer, gold) for gold in right))
        return at_the_end(steps, float(any(same(answer, gold) for gold in right)))


@register_reward("contrastive")
@dataclass(frozen=True)
class Contrastive:
    """Minus the mean reward of stored baseline episodes of the task, on the last step.

    With the components that give the reward r the sum is r' = r - mean_j r_j, where r_j are the rewards of episodes
    that another policy, such as the initial one, played of the same task. They stand in a field of the data row, or in
    a JSON file from a field of the data row to a number or a list of numbers.

    Source: arXiv:2403.07708; the number of baseline samples is not known. A method that compares inside the group of a
    task takes the baseline out again.
    """

    field: str = "extra_info.baseline_rewards"
    """field of the data row that holds a number or a list of them; not read when there is a file"""
    file: str | None = None
    """JSON file: an object with a number, or a list of them, per task"""
    key: str = "turnkey_task"
    """of the file: field of the data row that names the task in it; a dot goes into a field"""
    missing: float | None = None
    """baseline of a task that has none; null: its episode fails"""

    def __post_init__(self) -> None:
        check(self.missing is None or math.isfinite(self.missing), "missing", "a finite number", self.missing)
        if self.file is not None:
            check(len(self._stored) > 0, "file", "a JSON object with at least one task", self.file)

    @cached_property
    def _stored(self) -> Mapping[str, Any]:
        path = Path(str(self.file)).expanduser()
        try:
            stored = json.loads(read_text(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"file: {self.file} cannot be read ({type(error).__name__}: {error})") from error
        check(isinstance(stored, dict), "file", "a JSON object from tasks to rewards", type(stored).__name__)
        return stored

    def __call__(self, steps: Steps) -> Values:
        row = steps[-1].row
        if self.file is None:
            where, stored = f"the field {self.field} of the data row", _at(row, self.field)
        else:
            name = _at(row, self.key)
            where, stored = f"{self.file}, task {str(name)[:200]}", self._stored.get(str(name))
        stored = self.missing if stored is None else stored
        values: Any = getattr(stored, "tolist", lambda: stored)()
        values = list(values) if isinstance(values, list | tuple) else [values]
        good = [isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values]
        if not values or not all(good):
            hint = "; the option missing is the baseline of tasks without one" if stored is None else ""
            raise RewardError(f"{where}: expected a number or a list of numbers, got {stored!r}{hint}")
        return at_the_end(steps, -math.fsum(values) / len(values))


def _at(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


@register_reward("verl")
@dataclass(frozen=True)
class VerlFunction:
    """What verl's reward function returns for the episode, on the last step.

    It is called once per episode as verl's reward manager ``naive`` calls it for a row::

        function(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs)

    ``data_source``, ``reward_model.ground_truth`` and ``extra_info`` are those of the data row, ``solution_str`` is the
    text of the last turn. ``extra_info`` further holds ``num_turns`` (messages, two per turn),
    ``rollout_reward_scores`` (empty) and, of ours, ``turns``: a dict with observation, text, content, action, valid,
    reward and success for each. The result is a number, or a dict with the key ``score``.
    """

    path: str | None = None
    """of the file, or pkg://a.module; null: reward.custom_reward_function.path of verl's configuration"""
    function: str = "compute_score"
    """its name there"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """further arguments"""

    def __post_init__(self) -> None:
        check(bool(self.path), "path", "a file, here or as reward.custom_reward_function.path", self.path)
        load_function(self._target, "reward.custom_reward_function.path")  # a missing function is an error at the start

    @property
    def _target(self) -> str:
        path = str(self.path).removeprefix("file://")
        if path.startswith("pkg://"):
            path = path.removeprefix("pkg://").replace("/", ".")
        return f"{path}:{self.function}"

    async def __call__(self, steps: Steps) -> Values:
        row, function = steps[-1].row, load_function(self._target, "reward.custom_reward_function.path")
        names = ("observation", "text", "content", "action", "valid", "reward", "success", "won")
        arguments = {
            "data_source": row.get("data_source"),
            "solution_str": steps[-1].text,
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "extra_info": {
                **(row.get("extra_info") or {}),
                "num_turns": 2 * len(steps),
                "rollout_reward_scores": {},
                "turns": [{name: getattr(step, name) for name in names} for step in steps],
            },
            **self.kwargs,
        }
        result = await call_own(function, **arguments)
        score: Any = result.get("score") if isinstance(result, Mapping) else result
        score = score.item() if hasattr(score, "item") else score
        if not isinstance(score, int | float):  # True is 1 to verl, too
            raise RewardError(f"expected {self.function} to return a number or a dict with 'score', got {result!r}")
        return at_the_end(steps, float(score))


def tier(closeness: float, tiers: Sequence[float]) -> float:
    """The value of the zone that ``closeness``, from 0 to 1, is in: zones of equal width, the farthest first."""
    return tiers[min(int(closeness * len(tiers)), len(tiers) - 1)]


@register_reward("sweet_spot")
@dataclass(frozen=True)
class SweetSpot:
    """SSL's tiered closeness of the episode, on the last step; its weight is the paper's alpha.

    The closeness of a state, from 0 to 1, is the environment's ``extra[key]``: the share of what is to be matched that
    is matched, or ``exp(-d^2 / 2)`` of a distance d. The states that the steps led to are aggregated, and the result
    falls into one of ``zones`` zones of equal width.

    Source: summaries of arXiv:2601.22491: R = C + alpha S with four zones (quartiles of the matched share), S over the
    steps. Neither alpha nor the values of the tiers are known. Our reading: evenly spaced tiers from 0 to 1, the mean
    over the steps.
    """

    key: str = "closeness"
    """where the closeness stands in the environment's ``info["extra"]``"""
    aggregate: Literal["mean", "max", "last"] = "mean"
    """of the states after the steps: their mean, the best, or the last"""
    zones: int = 4
    """number of zones"""
    tiers: list[float] = field(default_factory=list)
    """values of the zones, the farthest first; empty: evenly spaced from 0 to 1"""

    def __post_init__(self) -> None:
        check(self.zones >= 2, "zones", "an integer >= 2", self.zones)
        fits = not self.tiers or len(self.tiers) == self.zones
        check(fits, "tiers", f"one value for each of the {self.zones} zones, or none", self.tiers)
        rising = all(map(math.isfinite, self.tiers)) and list(self.tiers) == sorted(self.tiers)
        check(rising, "tiers", "finite numbers that do not fall", self.tiers)

    def __call__(self, steps: Steps) -> Values:
        close = []
        for t, step in enumerate(steps):
            # Nothing was done yet, and reset did not say: no reason to lose the episode.
            silent = step.next_extra is step.extra and self.key not in step.extra
            value = 0.0 if silent else number(step.next_extra, self.key, f"after step {t}")
            if not 0 <= value <= 1:
                raise RewardError(
                    f"after step {t}: expected info['extra'][{self.key!r}] to be from 0 to 1, got {value:g}"
                )
            close.append(value)
        total = {"mean": math.fsum(close) / len(close), "max": max(close), "last": close[-1]}[self.aggregate]
        tiers = self.tiers or [zone / (self.zones - 1) for zone in range(self.zones)]
        return at_the_end(steps, tier(total, tiers))
