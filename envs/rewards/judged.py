"""The component ``judge``: a model scores the episode, or each of its steps (a process reward model)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from verl_turnkey.advantage.params import check, did_you_mean
from verl_turnkey.envs.rewards.components import Steps, Values, at_the_end, register_reward
from verl_turnkey.envs.rewards.composition import gather
from verl_turnkey.envs.rewards.judge import Judge, JudgeConfig

PROMPT = """An agent was given this task:
{task}

What happened:
{transcript}

How well did the agent do, up to here? End with one line, 'Score: ' and a number from 0 (useless) to 10 (solved)."""
_FIELDS = ("task", "transcript", "observation", "action")
_FIELD = re.compile(r"\{(\w+)\}")


@register_reward("judge")
@dataclass(frozen=True)
class JudgeReward(JudgeConfig):
    """The score of a model behind an OpenAI-compatible endpoint, for the episode or for each step."""

    per: Literal["episode", "step"] = "episode"
    """episode: one score, on the last step; step: every step is scored, given the episode up to and including it"""
    prompt: str = PROMPT
    """the question, with the fields {task}, {transcript} and, of the last step shown, {observation} and {action}"""
    system: str | None = None
    """system message; null: none"""
    max_chars: int = 20_000
    """characters of a transcript that are shown; of longer ones beginning and end, and how much was left out"""
    score_range: tuple[float, float] | None = (0.0, 10.0)
    """the worst and the best score the model may give; they become 0 and 1. null: the score is taken as it is"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.max_chars > 0, "max_chars", "a positive integer", self.max_chars)
        named = _FIELD.findall(self.prompt)
        for name in named:
            hint = did_you_mean(name, _FIELDS)
            check(name in _FIELDS, "prompt", f"only fields among {', '.join(_FIELDS)}{hint}", f"{{{name}}}")
        seen = {"transcript", "action"} & set(named)
        check(bool(seen), "prompt", "to show the {transcript} or the {action}", self.prompt)

    async def __call__(self, steps: Steps) -> Values:
        if self.per == "step":
            return await gather(self._judge.score(self.messages(steps[: t + 1])) for t in range(len(steps)))
        return at_the_end(steps, await self._judge.score(self.messages(steps)))

    def messages(self, steps: Steps) -> list[dict[str, str]]:
        """What the model is asked about ``steps``."""
        said = [step.text or step.action or "" for step in steps]
        values = {
            "task": steps[0].task,
            "transcript": _shortened(
                "\n\n".join(
                    f"Observation {t}: {step.observation}\nAgent {t}: {words}"
                    for t, (step, words) in enumerate(zip(steps, said, strict=True), 1)
                ),
                self.max_chars,
            ),
            "observation": steps[-1].observation,
            "action": steps[-1].action or said[-1],
        }
        # In one pass: text of a model or an environment is never taken for a field.
        user = {"role": "user", "content": _FIELD.sub(lambda match: values[match[1]], self.prompt)}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]

    @cached_property
    def _judge(self) -> Judge:
        return Judge(JudgeConfig(**{entry.name: getattr(self, entry.name) for entry in fields(JudgeConfig)}))


def _shortened(text: str, most: int) -> str:
    """``text`` without its middle when it is longer than ``most``: its beginning and its end matter most."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    head = most // 2
    return f"{text[:head]}\n[{left_out} characters left out]\n{text[head + left_out :]}"
