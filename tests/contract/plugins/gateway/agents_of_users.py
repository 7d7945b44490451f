"""Agents as users bring them, by ``module:function``."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

KEPT: list[Any] = []


async def chat(task: dict[str, Any], agent: Any) -> Any:
    """So many turns; the task says how the episode ends."""
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
    return {"reward": task.get("reward", 1.0), "success": True, "turns": {0: 0.25}, "extra": {"found": 3}}


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
