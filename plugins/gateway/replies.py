"""The reply that an agent gets of what the model wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_turnkey.plugins.gateway.codec import Parsed, TurnCodec
from verl_turnkey.plugins.gateway.messages import Reply, Request
from verl_turnkey.plugins.rollout.episode import Generated, Prompt


def reply_of(
    turn: str,
    request: Request,
    prompt: Prompt,
    generated: Generated,
    parsed: Parsed,
    sampling: Mapping[str, Any],
    codec: TurnCodec,
    cut: bool,
) -> Reply:
    """The reply ``turn`` to ``request``; ``cut``: the limit of tokens ended it."""
    calls = tuple(replace(call, id=f"call_{turn}_{j}", written=call.id) for j, call in enumerate(parsed.calls))
    ended = codec.ended(generated.ids)
    string = None if ended else _first(sampling.get("stop") or (), generated.text)
    log_probs: list[tuple[str, float]] = []
    if request.log_probs and generated.log_probs is not None:
        log_probs = [(codec.token(i), p) for i, p in zip(generated.ids, generated.log_probs, strict=True)]
    return Reply(
        id=turn,
        text=parsed.text,
        calls=calls,
        reasoning=parsed.reasoning,
        finish="length" if cut else "stop",
        prompt_tokens=len(prompt.ids),
        completion_tokens=len(generated.ids),
        log_probs=log_probs,
        cached_tokens=generated.extra_fields.get("num_cached_tokens") or 0,
        stop=string if string in request.stop else None,
    )


def _first(strings: Sequence[str], text: str) -> str | None:
    """The string that occurs first in ``text``, at which the model's server stopped."""
    return min((string for string in strings if string in text), key=text.index, default=None)
