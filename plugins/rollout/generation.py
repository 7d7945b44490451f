"""What the agent loops of this package share: a turn of the model, and an episode's place in its group."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from verl.utils.tokenizer.tokenizer import get_processor_token_id

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.rewards import GroupMember
from verl_turnkey.plugins.rollout.episode import Generated, Prompt
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
    tokenizer: Any = loop.tokenizer
    images = {"image_data": prompt.images, "mm_processor_kwargs": loop._get_mm_processor_kwargs()}
    started = perf_counter()
    output = await loop.server_manager.generate(
        request_id=request_id,
        prompt_ids=[*prompt.ids],
        sampling_params=dict(sampling),
        **(images if prompt.images else {}),
    )
    seconds = perf_counter() - started
    ids = list(output.token_ids)
    if get_processor_token_id(loop.processor, "image") in ids:
        raise EnvironmentFailure("images", "the model wrote the token that stands for an image: no image belongs to it")
    return Generated(
        ids=ids,
        log_probs=list(output.log_probs) if output.log_probs is not None else None,
        text=tokenizer.decode(ids, skip_special_tokens=True),
        extra_fields=dict(output.extra_fields),
        num_preempted=-1 if output.num_preempted is None else output.num_preempted,
        seconds=seconds,
        stop_reason=output.stop_reason,
    )


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
