"""Agents as users bring them, by ``module:function``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any


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
