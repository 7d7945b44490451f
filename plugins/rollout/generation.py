"""What agent loops ask of the model: a turn, or what it would write in a state, and how probable a text is there."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any

from verl.utils.tokenizer.tokenizer import get_processor_token_id

from verl_turnkey.envs import EnvironmentFailure, PromptTooLongError
from verl_turnkey.envs.model_texts import close_thoughts
from verl_turnkey.envs.rewards import GroupMember, RewardError, RewardStep
from verl_turnkey.plugins.rollout.action_reader import OPENING
from verl_turnkey.plugins.rollout.branching import Trajectory
from verl_turnkey.plugins.rollout.episode import Generated, Prompt
from verl_turnkey.plugins.rollout.token_spans import common_start
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase

    from verl_turnkey.plugins.rollout.worker import WorkerProcess


async def generate(loop: AgentLoopBase, request_id: str, prompt: Prompt, sampling: Mapping[str, Any]) -> Generated:
    """The model's response to ``prompt``.

    Args:
        request_id: turns with equal ids come to the same server, which has the earlier prompt cached.
        sampling: verl's sampling parameters.

    Raises:
        EnvironmentFailure: the response contains the token that stands for an image.
    """
    further: dict[str, Any] = {}
    if prompt.images:
        further |= {"image_data": prompt.images, "mm_processor_kwargs": loop._get_mm_processor_kwargs()}
    if prompt.messages is not None:
        further["messages"] = prompt.messages
    started = perf_counter()
    output = await loop.server_manager.generate(
        request_id=request_id, prompt_ids=[*prompt.ids], sampling_params=dict(sampling), **further
    )
    turn = Generated.of(output, loop.tokenizer, perf_counter() - started)
    if get_processor_token_id(loop.processor, "image") in turn.ids:
        raise EnvironmentFailure("images", "the model wrote the token that stands for an image: no image belongs to it")
    return turn


def was_cut(turn: Generated, sampling: Mapping[str, Any], ended: bool) -> bool:
    """Whether the limit of tokens ended a turn: what it says last is not finished.

    ``ended``: its last token is one that ends turns. Servers of verl's do not tell a limit from an end.
    """
    if ended or turn.stop_reason == "stop" or any(string in turn.text for string in sampling.get("stop") or ()):
        return False
    return turn.stop_reason == "length" or len(turn.ids) >= sampling["max_tokens"]


def group_member(shared: WorkerProcess, row: Mapping[str, Any]) -> GroupMember | None:
    """A training episode as a member of its task's group; None unless a reward compares them."""
    if row.get(VALIDATION) or shared.rewards.compares is None:
        return None
    return shared.groups.join(str(row["uid"]), str(row["session_id"]))


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
        first = common_start(before, full)
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
