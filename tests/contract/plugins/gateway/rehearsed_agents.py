"""Agents that ``turnkey agent`` plays."""

from __future__ import annotations

import json
import threading
from typing import Any

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


async def adder(task: dict[str, Any], agent: Any) -> float:
    """Adds by calling its tool; asks for a temperature of its own."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    async with agent.client() as client:
        for _ in range(5):
            reply = await client.chat.completions.create(
                model=agent.model, messages=messages, tools=[ADD], temperature=0
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float(message.content == task["answer"])
            for call in message.tool_calls:
                numbers = json.loads(call.function.arguments)
                result = str(numbers["a"] + numbers["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


async def rewriting(task: dict[str, Any], agent: Any) -> dict[str, Any]:
    """Drops a turn, starts over, changes an answer, and asks another model for a title."""
    async with agent.client() as client:

        async def ask(*messages: Any, model: str = agent.model) -> Any:
            reply = await client.chat.completions.create(model=model, messages=messages)
            return reply.choices[0].message.model_dump(exclude_none=True)

        start = {"role": "user", "content": "a"}
        first = await ask(start)
        await ask(start, first, {"role": "user", "content": "b"})
        await ask(start, first, {"role": "user", "content": "c"})
        await ask({"role": "user", "content": "a summary"})
        await ask(start, model="small")
    return {"reward": 0.5, "success": True}


async def demanding(task: dict[str, Any], agent: Any) -> float:
    """Needs what the policy cannot give."""
    async with agent.client(max_retries=0) as client:
        await client.chat.completions.create(model=agent.model, messages=[{"role": "user", "content": "a"}])
        await client.chat.completions.create(model=agent.model, messages=[{"role": "user", "content": "a"}], n=2)
    return 1.0


def idle(task: dict[str, Any], agent: Any) -> float:
    return 1.0


async def raises(task: dict[str, Any], agent: Any) -> float:
    """Fails after seven turns and a title."""
    messages: list[Any] = []
    print("the agent prints")
    async with agent.client() as client:
        for number in range(7):
            messages.append({"role": "user", "content": str(number)})
            reply = await client.chat.completions.create(model=agent.model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        await client.chat.completions.create(model="small", messages=messages[:1])
    raise ValueError(f"I give up at {agent.base_url}")


def leaves_a_thread(task: dict[str, Any], agent: Any) -> float:
    threading.Thread(target=threading.Event().wait, daemon=True, name="asker").start()
    with agent.client() as client:
        client.chat.completions.create(model=agent.model, messages=[{"role": "user", "content": "a"}])
    return 1.0
