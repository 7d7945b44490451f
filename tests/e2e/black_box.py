"""An agent as users bring it: the openai client, a game of its own, its own loop. It knows nothing of this package."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai.resources.chat  # noqa: F401  which the client would import, before the deadline begins

TURNS = 6
ACTIONS = ("go forward", "turn left", "turn right")


class Corridor:
    """A corridor with a door at its end; turning changes the direction."""

    def __init__(self, seed: int) -> None:
        self.place, self.facing, self.goal = 0, random.Random(seed).choice((-1, 0, 1)), 2

    def text(self) -> str:
        faces = {0: "the door ahead", -1: "a wall; the door is on your right", 1: "a wall; the door is on your left"}
        return f"You see {faces[self.facing]}, {self.goal - self.place} steps away."

    def act(self, action: str) -> None:
        turn = {"turn left": -1, "turn right": 1}.get(action, 0)
        if turn:
            self.facing = max(-1, min(1, self.facing + turn))
        elif action == "go forward" and self.facing == 0:
            self.place += 1


async def play(task: dict[str, Any], agent: Any) -> dict[str, Any]:
    """One game; its reward is the distance covered."""
    if task.get("mood") == "broken":
        raise ValueError(f"this agent breaks down on seed {task['seed']}")
    game = Corridor(task["seed"])
    if task.get("mood") == "idle":
        return {"reward": 1.0}
    if task.get("mood") == "slow":
        await asyncio.sleep(3600)
    menu = f"Your admissible actions: {', '.join(ACTIONS)}"
    messages: list[Any] = [{"role": "user", "content": f"Reach the door.\n{game.text()}\n{menu}"}]
    async with agent.client() as client:
        for _ in range(TURNS):
            reply = await client.chat.completions.create(
                model=agent.model, messages=messages, max_tokens=8, temperature=0
            )
            text = reply.choices[0].message.content
            game.act(text.strip())
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{game.text()}\n{menu}"}]
            if game.place == game.goal:
                break
    return {"reward": game.place / game.goal + 0.01 * len(messages), "success": game.place == game.goal}
