"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from verl_turnkey.plugins.gateway.dialects import parts
from verl_turnkey.plugins.gateway.dialects.chat import ROLES
from verl_turnkey.plugins.gateway.limits import Reading
from verl_turnkey.plugins.gateway.messages import GatewayError, Message, Reply, Request, ToolCall, invalid


class Messages:
    """``POST /messages``. The signature of a thought is the id of our reply."""

    path = "/messages"

    def parse(self, body: Mapping[str, Any], *, unsupported: Literal["refuse", "ignore"]) -> Request:
        reading = Reading("messages", unsupported)
        reading.parameters(body)
        messages: list[Message] = []
        if body.get("system"):
            text, images = parts.content(body["system"], reading, "system")
            messages.append(Message("system", text, images=images))
        for number, item in enumerate(parts.items(body.get("messages"), "messages")):
            messages += _messages(item, reading, f"messages[{number}]")
        schemas = [
            {
                "type": "function" if "input_schema" in tool else tool.get("type"),
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
                "strict": tool.get("strict"),
            }
            for tool in parts.items(body.get("tools"), "tools")
        ]
        return Request(
            parts.conversation(messages),
            **parts.tools(schemas, body.get("tool_choice"), reading, "input_schema"),
            model=str(body.get("model") or ""),
            max_tokens=parts.limit(body, "max_tokens"),
            stop=parts.stops(body.get("stop_sequences"), "stop_sequences"),
            stream=bool(body.get("stream")),
            overruled=tuple(reading.overruled),
        )

    def render(self, reply: Reply, request: Request) -> dict[str, Any]:
        return {**_head(reply, request), "content": _blocks(reply), **_stop(reply), "usage": _usage(reply)}

    def stream(self, reply: Reply, request: Request) -> list[str]:
        def event(kind: str, **data: Any) -> str:
            return parts.event({"type": kind, **data}, kind)

        usage = {**_usage(reply), "output_tokens": 0}
        events = [event("message_start", message={**_head(reply, request), "content": [], "usage": usage})]
        for index, block in enumerate(_blocks(reply)):
            empty, deltas = _streamed(block)
            events.append(event("content_block_start", index=index, content_block=empty))
            events += [event("content_block_delta", index=index, delta=delta) for delta in deltas]
            events.append(event("content_block_stop", index=index))
        return [*events, event("message_delta", delta=_stop(reply), usage=_usage(reply)), event("message_stop")]

    def error(self, error: GatewayError) -> dict[str, Any]:
        return parts.anthropic_error(error)


def _messages(item: Mapping[str, Any], reading: Reading, where: str) -> list[Message]:
    """The messages in one of Anthropic's, whose user message holds the results of tools too."""
    role = ROLES.get(str(item.get("role")))
    if role is None or role == "tool":
        raise invalid(f"{where}.role: expected user, assistant or system, got {item.get('role')!r}")
    if not isinstance(item.get("content"), list):
        return [Message(role, parts.content(item.get("content"), reading, where)[0])]
    results, calls, rest = [], [], []
    thoughts: str | None = None
    signature: str | None = None
    for block in parts.items(item["content"], f"{where}.content"):
        match block.get("type"):
            case "tool_result":
                text, images = parts.content(block.get("content"), reading, f"{where}.tool_result")
                call_id = parts.string(block.get("tool_use_id"), f"{where}.tool_use_id")
                error = bool(block.get("is_error"))
                results.append(Message("tool", text, call_id=call_id, error=error, images=images))
            case "tool_use":
                name, call_id = (parts.string(block.get(key), f"{where}.tool_use.{key}") for key in ("name", "id"))
                calls.append(ToolCall(name, parts.arguments(block.get("input")), call_id))
            case "thinking":
                thoughts = (thoughts or "") + parts.string(block.get("thinking"), f"{where}.thinking")
                signature = block.get("signature") or signature
            case "redacted_thinking":
                continue
            case _:
                rest.append(block)
    text, images = parts.content(rest, reading, f"{where}.content")
    if role != "assistant":
        return [*results, Message(role, text, images=images)] if rest or not results else results
    return [Message(role, text, tuple(calls), thoughts, item_id=signature, images=images)]


def _head(reply: Reply, request: Request) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.id}",
        "turn": reply.number,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        **_why(None),
    }


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.id})
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return blocks


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream begins it, and what fills it."""
    match block["type"]:
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}, [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "text":
            return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    arguments = parts.spelled(ToolCall(block["name"], block["input"], block["id"]))
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _stop(reply: Reply) -> dict[str, Any]:
    if reply.finish == "length":
        return _why("max_tokens")
    if reply.calls:  # also before a stop string: clients answer calls for this reason alone
        return _why("tool_use")
    return _why("end_turn") if reply.stop is None else _why("stop_sequence", reply.stop)


def _why(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.completion_tokens,
    }
