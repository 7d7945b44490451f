"""Two agents on one model, each with an outcome of its own: a planner writes a sum down, an executor works it out.

turnkey agent examples/agents/planner_and_executor.py:play --task '{"numbers": [2, 3, 4]}'
"""

from __future__ import annotations

import re
from typing import Any

ROUNDS = 2
WORDY = 0.001
"""what each character of an agent's replies costs it"""


async def play(task: dict[str, Any], agent: Any) -> dict[str, Any]:
    """The planner is paid for the right answer, the executor for each answer that is what the plan adds up to."""
    numbers = task["numbers"]
    past: dict[str, list[Any]] = {"planner": [], "executor": []}

    async with agent.client() as client:

        async def ask(role: str, text: str) -> str:
            """The next turn of a role: its name follows the model's, and its messages are its own."""
            past[role].append({"role": "user", "content": text})
            reply = await client.chat.completions.create(model=f"{agent.model}/{role}", messages=past[role])
            past[role].append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            return past[role][-1]["content"]

        question = f"Write the sum of {', '.join(map(str, numbers))}, such as 1 + 2."
        total, followed = None, 0
        for _ in range(ROUNDS):
            plan = await ask("planner", question)
            answer = await ask("executor", f"What is {plan}? Answer with a number.")
            total = answer.strip()
            followed += total == str(sum(map(int, re.findall(r"\d+", plan))))
            question = f"The executor answers {total}. Write the sum again, in other words if it was misread."
    written = {role: sum(len(m["content"]) for m in past[role] if m["role"] == "assistant") for role in past}
    solved = total == str(sum(numbers))
    return {
        "success": solved,
        "outcome": {
            "planner": float(solved) - WORDY * written["planner"],
            "executor": followed / ROUNDS - WORDY * written["executor"],
        },
    }
