"""The component ``judge``: a model scores the episode, or each of its steps (a process reward model)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.components import Steps, Values, at_the_end, register_reward
from verl_turnkey.envs.rewards.composition import gather
from verl_turnkey.envs.rewards.judge import Judge, JudgeConfig
from verl_turnkey.envs.rewards.progress import differences
from verl_turnkey.envs.rewards.transcript import check_template, fill

PROMPT = """An agent was given this task:
{task}

What happened:
{transcript}

How well did the agent do, up to here? End with one line, 'Score: ' and a number from 0 (useless) to 10 (solved)."""
BINARY_PROMPT = """An agent was given this task:
{task}

What happened:
{transcript}

Will the agent solve the task? Answer 1 for yes or 0 for no."""


@register_reward("judge", hindsight=True)
@dataclass(frozen=True)
class JudgeReward(JudgeConfig):
    """The score of a model behind an OpenAI-compatible endpoint, for the episode or for each step."""

    per: Literal["episode", "step", "gain"] = "episode"
    """episode: one score, on the last step; step: every step is scored, given the episode up to and including it; gain:
    how much that score rose, from 0 before the first step"""
    prompt: str | None = None
    """the question, with the fields {task}, {transcript} and, of the last step shown, {observation} and {action}; null:
    how well the agent did, from 0 to 10, and with binary whether it will solve the task"""
    system: str | None = None
    """system message; null: none"""
    max_chars: int = 20_000
    """characters of a transcript that are shown; of longer ones beginning and end, and how much was left out"""
    score_range: tuple[float, float] | None = (0.0, 10.0)
    """the worst and the best score the model may give; they become 0 and 1. null: the score is taken as it is"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.max_chars > 0, "max_chars", "a positive integer", self.max_chars)
        check_template(self.question, "prompt")

    async def __call__(self, steps: Steps) -> Values:
        if self.per == "episode":
            return at_the_end(steps, await self._judge.score(self.messages(steps)))
        scores = await gather(self._judge.score(self.messages(steps[: t + 1])) for t in range(len(steps)))
        return differences([0.0, *scores]) if self.per == "gain" else scores

    @property
    def question(self) -> str:
        """``prompt``, or the default one."""
        return self.prompt or (BINARY_PROMPT if self.binary else PROMPT)

    def messages(self, steps: Steps) -> list[dict[str, str]]:
        """What the model is asked about ``steps``."""
        user = {"role": "user", "content": fill(self.question, steps, self.max_chars)}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]

    @cached_property
    def _judge(self) -> Judge:
        return Judge(JudgeConfig(**{entry.name: getattr(self, entry.name) for entry in fields(JudgeConfig)}))
