"""OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from verl_turnkey.plugins.gateway.dialects import parts
from verl_turnkey.plugins.gateway.dialects.chat import ROLES
from verl_turnkey.plugins.gateway.limits import Reading
from verl_turnkey.plugins.gateway.messages import GatewayError, Message, Reply, Request, ToolCall, invalid

ORDER = ("reasoning", "message", "function_call")
"""items of one turn of the model, in the order in which replies have them"""
REFERENCES = (
    "item_reference is not supported: the gateway keeps no items. Send each in full: in the Vercel AI SDK set "
    "providerOptions.openai.store=false, or take openai.chat(model)"
)
LOG_PROBS = "message.output_text.logprobs"


class Responses:
    """``POST /responses``. Ids of items name our reply, so that turns without calls are recognized too."""

    path = "/responses"

    def parse(self, body: Mapping[str, Any], *, unsupported: Literal["refuse", "ignore"]) -> Request:
        reading = Reading("responses", unsupported)
        reading.parameters(body)
        sent = body.get("input")
        turns = _Turns(reading)
        if body.get("instructions"):
            turns.messages.append(Message("system", parts.string(body["instructions"], "instructions")))
        if isinstance(sent, str):
            turns.messages.append(Message("user", sent))
        else:
            for number, item in enumerate(parts.items(sent, "input")):
                turns.add(item, f"input[{number}]")
        previous = body.get("previous_response_id")
        return Request(
            parts.conversation(turns.messages),
            **parts.tools(parts.items(body.get("tools"), "tools"), body.get("tool_choice"), reading),
            model=str(body.get("model") or ""),
            max_tokens=parts.limit(body, "max_output_tokens"),
            stream=bool(body.get("stream")),
            log_probs=LOG_PROBS in (body.get("include") or ()),
            previous=None if previous is None else parts.reply_id(previous, "resp_") or str(previous),
            overruled=tuple(reading.overruled),
            instructions=bool(body.get("instructions")),
        )

    def render(self, reply: Reply, request: Request) -> dict[str, Any]:
        return {**_head(reply, request), **_end(reply), "output": _items(reply), "usage": _usage(reply)}

    def stream(self, reply: Reply, request: Request) -> list[str]:
        events: list[str] = []

        def add(kind: str, **data: Any) -> None:
            name = f"response.{kind}"
            events.append(parts.event({"type": name, "sequence_number": len(events), **data}, name))

        begun = {**_head(reply, request), "status": "in_progress", "output": [], "usage": None}
        add("created", response=begun)
        add("in_progress", response=begun)
        for index, item in enumerate(_items(reply)):
            where: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
            empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            add("output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"})
            if item["type"] == "function_call":
                add("function_call_arguments.delta", **where, delta=item["arguments"])
                add("function_call_arguments.done", **where, arguments=item["arguments"], name=item["name"])
            else:
                part = item["content"][0]
                kind, where["content_index"] = part["type"], 0
                tokens = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
                add("content_part.added", **where, part={**part, "text": "", **({"logprobs": []} if tokens else {})})
                add(f"{kind}.delta", **where, delta=part["text"], **tokens)
                add(f"{kind}.done", **where, text=part["text"], **tokens)
                add("content_part.done", **where, part=part)
            add("output_item.done", output_index=index, item=item)
        whole = self.render(reply, request)
        add(whole["status"], response=whole)
        return events

    def error(self, error: GatewayError) -> dict[str, Any]:
        return parts.openai_error(error)


class _Turns:
    """Makes messages of items: reasoning, message and calls of one turn of the model are one message."""

    def __init__(self, reading: Reading) -> None:
        self.messages: list[Message] = []
        self._reading = reading
        self._kind: str | None = None
        """of the last item, while the model's turn may go on"""

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            text, images = parts.content(item.get("output"), self._reading, f"{where}.output")
            call_id = parts.string(item.get("call_id"), f"{where}.call_id")
            self._append(Message("tool", text, call_id=call_id, images=images))
        elif kind == "message" and item.get("role") != "assistant":
            role = ROLES.get(str(item.get("role")))
            if role is None or role == "tool":
                raise invalid(f"{where}.role: expected user, assistant, system or developer, got {item.get('role')!r}")
            text, images = parts.content(item.get("content"), self._reading, f"{where}.content")
            self._append(Message(role, text, images=images))
        elif kind in ORDER:
            self._turn(kind, item, where)
        elif kind == "item_reference":  # without the item a turn of the model would be missing
            raise GatewayError(400, "unsupported_parameter", f"{where}: {REFERENCES}", {"param": f"input/{kind}"})
        else:
            self._reading.refuse(f"input/{kind}", "the gateway reads messages, reasoning and function calls, in full")

    def _append(self, message: Message) -> None:
        self._kind = None
        self.messages.append(message)

    def _turn(self, kind: str, item: Mapping[str, Any], where: str) -> None:
        item_id = _item_id(kind, item)
        if not self._continues(kind, item_id):
            self.messages.append(Message("assistant"))
        self._kind = kind
        turn = self.messages[-1]
        turn = replace(turn, item_id=turn.item_id or item_id)
        if kind == "reasoning":
            thoughts, _ = parts.content(item.get("content") or item.get("summary"), self._reading, where)
            turn = replace(turn, reasoning=(turn.reasoning or "") + thoughts if thoughts else turn.reasoning)
        elif kind == "message":
            text, images = parts.content(item.get("content"), self._reading, f"{where}.content")
            turn = replace(turn, text=turn.text + text, images=turn.images + images)
        else:
            name, call_id = (parts.string(item.get(key), f"{where}.{key}") for key in ("name", "call_id"))
            turn = replace(turn, calls=(*turn.calls, ToolCall(name, parts.arguments(item.get("arguments")), call_id)))
        self.messages[-1] = turn

    def _continues(self, kind: str, item_id: str | None) -> bool:
        if self._kind is None:
            return False
        last_id = self.messages[-1].item_id
        if item_id is not None and last_id is not None:
            return item_id == last_id
        rank, last = ORDER.index(kind), ORDER.index(self._kind)
        return rank > last or kind == self._kind == "function_call"


def _item_id(kind: str, item: Mapping[str, Any]) -> str | None:
    """Our reply that an item belongs to; clients that drop ids keep encrypted reasoning and ids of calls."""
    sent = item.get("id")
    if kind == "reasoning":
        return parts.reply_id(sent, "rs_") or item.get("encrypted_content")
    if kind == "message":
        return parts.reply_id(sent, "msg_")
    return parts.reply_id(sent, "fc_", numbered=True) or parts.reply_id(item.get("call_id"), "call_", numbered=True)


def _head(reply: Reply, request: Request) -> dict[str, Any]:
    nothing = ("error", "incomplete_details", "instructions", "temperature", "top_p", "max_output_tokens")
    return {
        "id": f"resp_{reply.id}",
        "turn": reply.number,
        "object": "response",
        "created_at": parts.CREATED,
        "model": request.model,
        "previous_response_id": None if request.previous is None else f"resp_{request.previous}",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        **dict.fromkeys(nothing),
    }


def _end(reply: Reply) -> dict[str, Any]:
    if reply.finish == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed"}


def _items(reply: Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        item = {"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content}
        items.append({**item, "encrypted_content": reply.id})
    if reply.text or not reply.calls:
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": parts.log_probs(reply)}
        items.append({"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "content": [text]})
    for number, call in enumerate(reply.calls):
        item = {"type": "function_call", "id": f"fc_{reply.id}_{number}", "call_id": call.id, "name": call.name}
        items.append({**item, "arguments": parts.spelled(call)})
    status = "incomplete" if reply.finish == "length" else "completed"
    return [{**item, "status": status} for item in items]


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.completion_tokens,
        "total_tokens": parts.total_tokens(reply),
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
