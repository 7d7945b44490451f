"""An agent as users bring it, with the client of ``openai``."""

from __future__ import annotations

from typing import Any


async def guess(task: dict[str, Any], agent: Any) -> Any:
    """Two attempts at the answer; the task says how else the episode ends."""
    if task.get("ends") == "silent":
        return 1.0
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    async with agent.client(max_retries=0) as client:
        for attempt in range(2):
            reply = await client.chat.completions.create(model=agent.model, messages=messages, temperature=0)
            text = reply.choices[0].message.content
            if task.get("ends") == "raise":
                raise KeyError("lost")
            if text == "yes":
                return {"reward": 1.0 - 0.5 * attempt, "success": True}
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    return 0.0
