"""A teacher's text that a model writes: advice from what an episode, or a group of them, did."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.http import Endpoint, EndpointConfig, chat_endpoint
from verl_turnkey.envs.model_texts import after_first_thoughts
from verl_turnkey.plugins.teacher.registry import TeacherEpisode, TeacherRow, register_teacher_source
from verl_turnkey.plugins.teacher.sources import answer_of, observation_of

PROMPTS = {
    "group": (
        "Below are several attempts by an agent at the same task. Some solved it, some did not. Compare them and say "
        "what the next attempt should do and what it should avoid: at most five short lines, each beginning with DO "
        "or AVOID. Write only these lines.\n\n{attempts}"
    ),
    "episode": (
        "Below is an attempt by an agent at a task. Say what the next attempt should do, or, if this one did not "
        "solve the task, what it should avoid: at most three short lines. Write only these lines.\n\n{attempts}"
    ),
}
SEEN, WRITTEN = 400, 600
"""characters shown of an observation and of a turn"""
OUTCOMES = {True: "solved the task", False: "did not solve the task"}


@register_teacher_source("reflection", observations=True)
@dataclass(frozen=True)
class Reflection(EndpointConfig):
    """What a model behind an OpenAI-compatible endpoint advises after the episode, or after the group's (OPID, GRSD).

    ``about=group``: one text for all rows of a group in which some episodes solved the task and some did not; the best
    and the worst ``episodes`` of each kind are shown (GRSD condenses reflections on all of them). ``about=episode``: a
    text for each episode, which its outcome is in (OPID's episode skill). The model sees what the policy saw and wrote
    in each turn, without thoughts, observations cut at 400 characters and turns at 600, as in GRSD; the task is what
    the observations show of it. A request that fails leaves its rows without a text.
    """

    about: Literal["group", "episode"] = "group"
    """what the model reflects on"""
    episodes: int = 2
    """about=group: so many episodes that solved the task are shown, and as many that did not"""
    prompt: str | None = None
    """the question, with {attempts}; null: one for each value of about"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.episodes > 0, "episodes", "positive", self.episodes)
        check(self.prompt is None or "{attempts}" in self.prompt, "prompt", "a text with {attempts}", self.prompt)

    async def __call__(self, row: TeacherRow) -> str | None:
        if (attempts := self._attempts(row)) is None:
            return None
        question = (self.prompt or PROMPTS[self.about]).replace("{attempts}", "\n\n".join(map(_described, attempts)))
        answer = await self._endpoint.ask({"messages": [{"role": "user", "content": question}]})
        return after_first_thoughts(answer)

    @cached_property
    def _endpoint(self) -> Endpoint[str]:
        return chat_endpoint(self, "the model of reflections")

    def _attempts(self, row: TeacherRow) -> list[TeacherEpisode] | None:
        """The same for all rows of a group, so that equal questions are asked once."""
        if self.about == "episode":
            return [row.episode]
        every = sorted((row.episode, *row.others), key=lambda episode: (-episode.score, episode.name))
        solved, failed = ([e for e in every if e.success == kind] for kind in (True, False))
        return [*solved[: self.episodes], *failed[-self.episodes :]] if solved and failed else None


def _described(episode: TeacherEpisode) -> str:
    lines = [f"This attempt {OUTCOMES[episode.success]}:"]
    for number, turn in enumerate(episode.turns):
        if number < len(episode.steps) and (seen := observation_of(episode.steps[number])):
            lines.append(f"Seen: {seen[:SEEN]}")
        lines.append(f"Turn {number + 1}: {answer_of(turn)[:WRITTEN]}")
    return "\n".join(lines)
