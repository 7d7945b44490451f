"""Agents as users bring them, by ``module:function``, in training and for ``turnkey agent``."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

# --- in training ------------------------------------------------------------------------------------------------------

KEPT: list[Any] = []


async def chat(task: dict[str, Any], agent: Any) -> Any:
    """So many turns; the task says how the episode ends."""
    bytearray(task.get("allocates", 0))
    await asyncio.sleep(task.get("sleeps", 0))
    messages: list[Any] = [{"role": "user", "content": task.get("question", "Where?")}]
    async with agent.client() as client:
        for _ in range(task.get("turns", 2)):
            reply = await client.chat.completions.create(model=agent.model, messages=messages)
            text = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"You said {text}"}]
    if task.get("ends") == "raise":
        raise KeyError("lost" * 500)
    if task.get("ends") == "hang":
        await asyncio.sleep(600)
    if task.get("ends") == "post":
        await agent.reward(0.5)
        return None
    if task.get("ends") == "nothing":
        return None
    return {
        "reward": task.get("reward", 1.0),
        "success": True,
        "turns": {0: 0.25},
        "extra": {"found": 3, **task.get("extra", {})},
    }


async def several(task: dict[str, Any], agent: Any) -> Any:
    """The roles a, b, a, b by turns, then the model without a role; the task says what it reports and returns."""
    async with agent.client() as client:

        async def ask(role: str, text: str = "Go on.") -> None:
            name = f"{agent.model}/{role}" if role else agent.model
            await client.chat.completions.create(model=name, messages=[{"role": "user", "content": text}])

        roles = task.get("roles", ["a", "b", "a", "b"])
        if task.get("at_once"):
            await asyncio.gather(*map(ask, [*roles, "a"]))
        else:
            for number, role in enumerate(roles):
                await ask(role, f"Go on, {number}.")
        await ask("")
    for role, reward in task.get("posts", {}).items():
        await agent.reward(reward, role=role)
    return task.get("returns")


async def judged(task: dict[str, Any], agent: Any) -> float:
    """A turn, and a judge's word on it, unless the task asks nothing of it."""
    async with agent.client(max_retries=0) as client:
        await client.chat.completions.create(model=agent.model, messages=[{"role": "user", "content": "Go on."}])
        if (words := task.get("asks", "Good?")) is not None:
            await client.chat.completions.create(model="judge", messages=[{"role": "user", "content": words}])
    return 1.0


def write(task: dict[str, Any], agent: Any) -> float:
    """Writes a file before each turn but the first."""
    with agent.client() as client:
        for text in (None, "a", task["text"]):
            if text is not None:
                Path(agent.workspace, "note.txt").write_text(text)
            client.chat.completions.create(model=agent.model, messages=[{"role": "user", "content": "Go on."}])
    return 1.0


def _ask(client: Any, agent: Any) -> None:
    client.chat.completions.create(model=agent.model, messages=[{"role": "user", "content": "Go on."}])


def keeps(task: dict[str, Any], agent: Any) -> float:
    """Keeps what the first episode made: the handle's client, one of its own, or a thread that goes on asking."""
    if task["keeps"] == "thread":
        KEPT.append(agent)
        if len(KEPT) == 1:
            threading.Thread(target=_go_on, daemon=True, name="asker").start()
    elif not KEPT:
        own = OpenAI(base_url=agent.base_url, api_key=agent.key, max_retries=0)
        KEPT.append(agent.client(max_retries=0) if task["keeps"] == "client" else own)
    if task["keeps"] == "thread" or task.get("mixes"):
        _ask(agent.client(), agent)
    if task["keeps"] != "thread":
        _ask(KEPT[0], agent)
    return 1.0


def _go_on() -> None:
    """Asks for the episode of the time, so that a later one would get its turns."""
    while True:
        time.sleep(0.01)
        if len(KEPT) > 1:
            _ask(KEPT[-1].client(), KEPT[-1])


async def keeps_async(task: dict[str, Any], agent: Any) -> float:
    """A client belongs to an event loop, too."""
    KEPT.append(agent.client(max_retries=0))
    messages: Any = [{"role": "user", "content": "Go on."}]
    await KEPT[0].chat.completions.create(model=agent.model, messages=messages)
    return 1.0


# --- turnkey agent ----------------------------------------------------------------------------------------------------

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


async def forking(task: dict[str, Any], agent: Any) -> float:
    """Samples two answers at the same time, goes on with the first and rewards both; one episode in three is worse."""
    FORKED.append(agent)
    number = len(FORKED)
    async with agent.client() as client:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        replies = [await client.chat.completions.create(model=agent.model, messages=messages)]
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}]
        parallel = (client.chat.completions.create(model=agent.model, messages=messages) for _ in range(2))
        replies += await asyncio.gather(*parallel)
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "So?"}]
        await client.chat.completions.create(model=agent.model, messages=messages)
    for reply in replies[1:]:
        await agent.reward(0.25, turn=reply.id)
    return float(number % 3 != 0)


FORKED: list[Any] = []


async def drafting(task: dict[str, Any], agent: Any) -> float:
    """Samples two drafts at the same time, and goes on with the one that comes first or, in every other episode, last.

    A task may have a date.
    """
    FORKED.append(agent)
    kept = len(FORKED) % 2
    date = f", episode {len(FORKED)}" if task.get("dated") else ""
    messages: list[Any] = [{"role": "user", "content": f"{task['question']}{date}"}]
    drafts: list[str] = []
    async with agent.client() as client:

        async def draft() -> None:
            reply = await client.chat.completions.create(model=agent.model, messages=messages)
            drafts.append(reply.choices[0].message.content)

        await asyncio.gather(draft(), draft())
        messages += [{"role": "assistant", "content": drafts[-kept]}, {"role": "user", "content": "And?"}]
        await draft()
    return 1.0


async def delegating(task: dict[str, Any], agent: Any) -> dict[str, Any]:
    """A planner's reply starts two workers of two turns at the same time, of the roles that the task names."""
    async with agent.client() as client:

        async def ask(role: str, messages: list[Any], text: str, parent: str = "") -> Any:
            messages.append({"role": "user", "content": text})
            headers = {"X-Turnkey-Parent": parent} if parent else {}
            model = f"{agent.model}/{role}" if role else agent.model
            reply = await client.chat.completions.create(model=model, messages=messages, extra_headers=headers)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            return reply

        planner, worker = task.get("roles", ("", ""))
        planned: list[Any] = []
        plan = await ask(planner, planned, task["question"])

        async def work(number: int) -> Any:
            messages: list[Any] = []
            await ask(worker, messages, f"Look up {number}.", plan.id)
            return await ask(worker, messages, "Sum up.")

        report, _ = await asyncio.gather(work(0), work(1))
        await ask(planner, planned, "They are done.")
    return {"reward": 1.0, "turns": {report.id: 0.2}}


async def _at_once(agent: Any) -> list[Any]:
    async with agent.client(max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Go on."}]
        parallel = (client.chat.completions.create(model=agent.model, messages=messages) for _ in range(2))
        return await asyncio.gather(*parallel)


async def numbering(task: dict[str, Any], agent: Any) -> dict[str, Any]:
    """Names the turns of parallel calls by number."""
    await _at_once(agent)
    return {"reward": 1.0, "turns": {0: 0.5}}


async def steering(task: dict[str, Any], agent: Any) -> float:
    """Posts the state of one of two parallel calls."""
    await agent.state("here")
    await _at_once(agent)
    return 1.0


async def renaming(task: dict[str, Any], agent: Any) -> float:
    """Gives calls ids of its own, changes its question, and posts a state that no turn is left for."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    async with agent.client() as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model=agent.model, messages=messages, tools=[ADD])
            message = reply.choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            for call in message.get("tool_calls") or ():
                call["id"] = "mine"
                messages.append({"role": "tool", "tool_call_id": "mine", "content": "5"})
        messages[0] = {"role": "user", "content": f"{task['question']}b"}
        await client.chat.completions.create(model=agent.model, messages=messages[:1], tools=[ADD])
    await agent.state("late")
    return 1.0


async def looking(task: dict[str, Any], agent: Any) -> float:
    """Shows two pictures, then others of the same size."""
    from PIL import Image

    async with agent.client() as client:
        for red in (0, 255):
            file = io.BytesIO()
            Image.new("RGB", (64, 48), (red, 0, 0)).save(file, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            picture = {"type": "image_url", "image_url": {"url": url}}
            messages: Any = [{"role": "user", "content": [picture, picture, {"type": "text", "text": "Look."}]}]
            await client.chat.completions.create(model=agent.model, messages=messages)
    return 1.0


def leaves_a_thread(task: dict[str, Any], agent: Any) -> float:
    threading.Thread(target=threading.Event().wait, daemon=True, name="asker").start()
    with agent.client() as client:
        client.chat.completions.create(model=agent.model, messages=[{"role": "user", "content": "a"}])
    return 1.0
