"""OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from verl_turnkey.plugins.gateway.dialects import parts
from verl_turnkey.plugins.gateway.limits import Reading
from verl_turnkey.plugins.gateway.messages import GatewayError, Message, Reply, Request, ToolCall, invalid

ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
THOUGHTS = ("reasoning_content", "reasoning")
"""keys in which clients send reasoning back; replies have the first"""


class Chat:
    """``POST /chat/completions``."""

    path = "/chat/completions"

    def parse(self, body: Mapping[str, Any], *, unsupported: Literal["refuse", "ignore"]) -> Request:
        reading = Reading("chat", unsupported)
        reading.parameters(body)
        schemas = [
            {"type": tool.get("type", "function"), **parts.mapping(tool["function"], "tools")}
            if "function" in tool
            else {"type": tool.get("type")}
            for tool in parts.items(body.get("tools"), "tools")
        ]
        sent = parts.items(body.get("messages"), "messages")
        options = body.get("stream_options")
        return Request(
            parts.conversation([_message(item, reading, f"messages[{n}]") for n, item in enumerate(sent)]),
            **parts.tools(schemas, body.get("tool_choice"), reading),
            model=str(body.get("model") or ""),
            max_tokens=parts.limit(body, "max_tokens", "max_completion_tokens"),
            stop=parts.stops(body.get("stop"), "stop"),
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")) if isinstance(options, Mapping) else False,
            log_probs=bool(body.get("logprobs")),
            overruled=tuple(reading.overruled),
        )

    def render(self, reply: Reply, request: Request) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
        if reply.reasoning:
            message[THOUGHTS[0]] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_call(call) for call in reply.calls]
        choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": _log_probs(reply)}
        return {**_head(reply, request, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def stream(self, reply: Reply, request: Request) -> list[str]:
        head = _head(reply, request, "chat.completion.chunk")

        def chunk(delta: Mapping[str, Any], finish: str | None = None, log_probs: Any = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": log_probs}
            return parts.event({**head, "choices": [choice]})

        chunks = [chunk({"role": "assistant", "content": None if reply.calls and not reply.text else ""})]
        if reply.reasoning:
            chunks.append(chunk({THOUGHTS[0]: reply.reasoning}))
        if reply.text or reply.log_probs:
            chunks.append(chunk({"content": reply.text} if reply.text else {}, log_probs=_log_probs(reply)))
        calls = [{"index": number, **_call(call)} for number, call in enumerate(reply.calls)]
        chunks += [chunk({"tool_calls": [call]}) for call in calls]
        chunks.append(chunk({}, _finish(reply)))
        if request.include_usage:
            chunks.append(parts.event({**head, "choices": [], "usage": _usage(reply)}))
        return [*chunks, parts.event("[DONE]")]

    def error(self, error: GatewayError) -> dict[str, Any]:
        return parts.openai_error(error)


def _message(item: Mapping[str, Any], reading: Reading, where: str) -> Message:
    role = ROLES.get(str(item.get("role")))
    if role is None:
        raise invalid(f"{where}.role: expected one of {', '.join(ROLES)}, got {item.get('role')!r}")
    text, images = parts.content(item.get("content"), reading, f"{where}.content")
    if role == "tool":
        call_id = parts.string(item.get("tool_call_id"), f"{where}.tool_call_id")
        return Message(role, text, call_id=call_id, images=images)
    if role != "assistant":
        return Message(role, text, images=images)
    sent = parts.items(item.get("tool_calls"), f"{where}.tool_calls")
    calls = tuple(_read_call(call, f"{where}.tool_calls") for call in sent)
    thoughts = next((item[key] for key in THOUGHTS if isinstance(item.get(key), str)), None)
    return Message(role, text, calls, thoughts, images=images)


def _read_call(item: Mapping[str, Any], where: str) -> ToolCall:
    function = parts.mapping(item.get("function"), f"{where}.function")
    name = parts.string(function.get("name"), f"{where}.function.name")
    return ToolCall(name, parts.arguments(function.get("arguments")), parts.string(item.get("id"), f"{where}.id"))


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": parts.spelled(call)}}


def _head(reply: Reply, request: Request, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "turn": reply.number,
        "object": kind,
        "created": parts.CREATED,
        "model": request.model,
    }


def _finish(reply: Reply) -> str:
    return "length" if reply.finish == "length" else "tool_calls" if reply.calls else "stop"


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": parts.total_tokens(reply),
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _log_probs(reply: Reply) -> dict[str, Any] | None:
    return {"content": parts.log_probs(reply), "refusal": None} if reply.log_probs else None
