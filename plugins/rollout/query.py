"""Queries the model in a state without stepping the environment: what it writes next, or how probable a text is."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from verl_turnkey.envs import PromptTooLongError
from verl_turnkey.envs.model_texts import close_thoughts
from verl_turnkey.envs.rewards import RewardError, RewardStep
from verl_turnkey.plugins.rollout.action_reader import OPENING
from verl_turnkey.plugins.rollout.episode import Generated, Prompt
from verl_turnkey.plugins.rollout.trajectories import Trajectory

SCORING = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
"""with these sampling parameters verl's vLLM server returns the log-probability of each token of a prompt"""


@dataclass(frozen=True)
class Query:
    """The state and the model that a strategy's ``Ask.value`` takes: a ``QueriedState``.

    Args:
        trajectory: ends in the state, and is charged for the written tokens.
        prompt: of the turn that comes next.
        row: the fields of the data row.
        room: maximum tokens of a prompt and its answer.
    """

    trajectory: Trajectory
    prompt: Prompt
    row: Mapping[str, Any]
    tokenizer: Any
    generate: Callable[[Trajectory, Prompt], Awaitable[Generated]]
    room: int

    def turn(self, text: str, action: str) -> RewardStep:
        episode, info = self.trajectory.episode, self.trajectory.seen.info
        first = episode.steps[0].extra if episode.steps else {}
        extra = {**first, **info.get("extra", {})}  # includes what only the reset gives, such as a right answer
        return RewardStep(
            observation=self.trajectory.seen.observation,
            action=action,
            truncated=True,
            text=text,
            task=episode.task,
            row=self.row,
            extra=extra,
            next_extra=extra,
        )

    async def write(self, begun: str, tokens: int, temperature: float, stop: Sequence[str]) -> str:
        sampling = self.trajectory.sampling
        stops = [*sampling.get("stop", ()), *stop]
        sampling = {**sampling, "max_tokens": tokens, "temperature": temperature, **({"stop": stops} if stops else {})}
        turn = await self._generate(self._encode(self._closing(begun) + _whole(begun)), sampling)
        return min((turn.text.partition(end)[0] for end in stops), key=len, default=turn.text)

    async def log_prob(self, begun: str, text: str) -> float:
        closing = self._closing(begun)
        before, full = self._encode(closing + _whole(begun)), self._encode(closing + begun + text)
        # A token that spans the end of ``begun`` and the beginning of ``text`` counts as the text's.
        same = (n for n, (token, other_token) in enumerate(zip(before, full, strict=False)) if token != other_token)
        first = next(same, min(len(before), len(full)))
        if first == len(full):
            raise RewardError(f"the text {text!r} has no token of its own after {begun!r}")
        turn = await self._generate(full, SCORING)
        scored = turn.extra_fields.get("prompt_logprobs")
        if scored is None:
            raise RewardError("the server gives no log-probabilities of a prompt (sampling parameter prompt_logprobs)")
        # Place i of the list is token i + 1 of the prompt, and the last place is padding.
        log_probs = [float(scored[len(self.prompt.ids) + i - 1][0]) for i in range(first, len(full))]
        if not all(map(math.isfinite, log_probs)):
            raise RewardError(f"the server gives the log-probabilities {log_probs} of {text!r}")
        return fmean(log_probs)

    def _closing(self, begun: str) -> str:
        """What closes thoughts that the prompt opens: inside them nothing is an answer."""
        return close_thoughts(self.tokenizer.decode(self.prompt.ids[-OPENING:], skip_special_tokens=False), begun)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def _generate(self, begun: list[int], sampling: Mapping[str, Any]) -> Generated:
        if (needs := len(self.prompt.ids) + len(begun) + sampling["max_tokens"]) > self.room:
            raise PromptTooLongError(
                f"{needs} tokens of a prompt with an answer exceed data.max_prompt_length + data.max_response_length, "
                f"or actor_rollout_ref.rollout.max_model_len where it is less: {self.room}"
            )
        trajectory = replace(self.trajectory, sampling=dict(sampling))
        try:
            return await self.generate(trajectory, replace(self.prompt, ids=[*self.prompt.ids, *begun]))
        finally:
            self.trajectory.spent = trajectory.spent


def _whole(text: str) -> str:
    """``text`` without trailing spaces, which belong to the first token of what follows."""
    return text.rstrip(" ")
