"""The component ``scorer``: a process reward model behind an endpoint that scores all steps of an episode at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.components import Steps, Values, register_reward
from verl_turnkey.envs.rewards.endpoint import Endpoint, EndpointConfig, finite
from verl_turnkey.envs.rewards.transcript import check_template, fill

TEXT = "{task}\n\n{transcript}"


@register_reward("scorer", hindsight=True)
@dataclass(frozen=True)
class Scorer(EndpointConfig):
    """The scores of a process reward model: one request per episode, with all of its steps.

    ``api="classify"`` is that of vLLM's ``/classify``, which verl's own reward models use, too::

        {"model": ..., "input": [text of step 0, ...]}  ->  {"data": [{"index": 0, "probs": [..., score]}, ...]}

    The text of a step shows the episode up to and including it; its score is the last of ``probs``. ``api="turns"`` is
    for a server of your own::

        {"model": ..., "task": ..., "turns": [{"observation": ..., "text": ..., "action": ..., "valid": ...}, ...]}
            ->  {"scores": [score of step 0, ...]}
    """

    url: str
    """the whole address, such as http://host:8000/classify"""
    model: str | None = None
    """name of the model there; null: it is not sent"""
    api: Literal["classify", "turns"] = "classify"
    """what is sent and what comes back"""
    text: str = TEXT
    """of classify: what is shown of a step, with the fields of the judge's prompt"""
    max_chars: int = 20_000
    """of classify: characters of a transcript that are shown; of longer ones beginning and end"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.max_chars > 0, "max_chars", "a positive integer", self.max_chars)
        check_template(self.text, "text")

    async def __call__(self, steps: Steps) -> Values:
        return await self._endpoint.ask(self.question(steps), values=len(steps))

    def question(self, steps: Steps) -> dict[str, Any]:
        """What the server is asked about an episode, besides ``model`` and ``params``."""
        if self.api == "classify":
            return {"input": [fill(self.text, steps[: t + 1], self.max_chars) for t in range(len(steps))]}
        names = ("observation", "text", "action", "valid")
        turns = [{name: getattr(step, name) for name in names} for step in steps]
        return {"task": steps[0].task, "turns": turns}

    @cached_property
    def _endpoint(self) -> Endpoint[list[float]]:
        expected, read = {
            "classify": ("data with probs, one list of numbers per step", _classes),
            "turns": ("scores, one number per step", _scores),
        }[self.api]
        return Endpoint(self, "", who="the scorer", expected=expected, read=read)


def _classes(answer: Any) -> list[float] | None:
    rows = sorted(answer["data"], key=lambda row: row["index"])
    return _numbers([row["probs"][-1] for row in rows])


def _scores(answer: Any) -> list[float] | None:
    return _numbers(answer["scores"])


def _numbers(values: list[Any]) -> list[float] | None:
    numbers = [None if isinstance(value, str) else finite(value) for value in values]
    return None if None in numbers else [number for number in numbers if number is not None]
