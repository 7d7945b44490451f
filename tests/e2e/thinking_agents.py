"""Agents that think in several conversations, as users bring them: samples for a judge, workers, a search, a summary.

Each numbers its replies, from 1 to 8. A reply pays its number in 64ths and some 16ths that its text is worth; the end
of an episode pays a whole number. So a test can tell from the rewards which reply is which, and from ``BEFORE`` which
one it goes on after.
"""

from __future__ import annotations

import asyncio
from typing import Any

WORKERS = 3
BEFORE = {
    # The draft that the judge likes best has number 1, and is improved twice.
    "best_of_three": {4: 1, 5: 4},
    # A plan begins three workers of two turns; the planner's own conversation goes on with its answer.
    "planner": {**{2 + 2 * w: 1 for w in range(WORKERS)}, **{3 + 2 * w: 2 + 2 * w for w in range(WORKERS)}, 8: 1},
    # Two samples of the root, two of each of these, and the first leaf goes on.
    "search": {3: 1, 4: 1, 5: 2, 6: 2, 7: 3},
    # One call at a time: each goes on after the one before, also where a summary begins the messages anew.
    "summarising": {2: 1, 3: 2, 4: 3, 5: 4},
}
"""by agent: the number of a reply -> the number of the one that it goes on after; the others begin a conversation"""


class Thinker:
    """The model at work on a task."""

    def __init__(self, client: Any, agent: Any) -> None:
        self.client, self.agent = client, agent
        self.rewards: dict[str, float] = {}

    async def ask(self, text: str, *past: Any, parent: Any = None) -> tuple[list[Any], Any]:
        """The messages of a request, and the reply to it. ``parent`` tells equal replies apart, and begins workers."""
        messages = [*past, {"role": "user", "content": text}]
        headers = {"X-Turnkey-Parent": parent.id} if parent else {}
        reply = await self.client.chat.completions.create(
            model=self.agent.model, messages=messages, extra_headers=headers
        )
        return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}], reply

    async def number(self, number: int, reply: Any, state: str) -> None:
        worth = sum(reply.choices[0].message.content.encode()) % 4
        self.rewards[reply.id] = number / 64 + 3 * worth / 16
        await self.agent.state(state, turn=reply.id)

    def ended(self, text: str) -> dict[str, Any]:
        return {"reward": float(sum(text.encode()) % 4), "turns": self.rewards}


async def best_of_three(work: Thinker, question: str) -> str:
    drafts = await asyncio.gather(*(work.ask(question) for _ in range(3)))

    async def grade(messages: list[Any]) -> float:
        messages_to_judge = [{"role": "user", "content": f"Grade this: {messages[-1]['content']}"}]
        reply = await work.client.chat.completions.create(model="judge", messages=messages_to_judge)
        return float(reply.choices[0].message.content)

    grades = await asyncio.gather(*(grade(messages) for messages, _ in drafts))
    best = max(range(3), key=grades.__getitem__)
    for number, index in enumerate(sorted(range(3), key=lambda index: index != best), start=1):
        await work.number(number, drafts[index][1], "draft")
    messages, reply = await work.ask("Improve it.", *drafts[best][0], parent=drafts[best][1])
    await work.number(4, reply, f"grade {grades[best]}")
    messages, reply = await work.ask("Once more.", *messages)
    await work.number(5, reply, "last")
    return messages[-1]["content"]


async def planner(work: Thinker, question: str) -> str:
    messages, plan = await work.ask(question)
    await work.number(1, plan, "plan")

    async def worker(index: int) -> str:
        past, reply = await work.ask(f"You are worker {index}. Do your part.", parent=plan)
        await work.number(2 + 2 * index, reply, f"worker {index}")
        past, reply = await work.ask("Report.", *past)
        await work.number(3 + 2 * index, reply, "report")
        return past[-1]["content"]

    reports = await asyncio.gather(*map(worker, range(WORKERS)))
    messages, reply = await work.ask(f"The reports: {'; '.join(reports)}. Answer.", *messages)
    await work.number(8, reply, "answer")
    return messages[-1]["content"]


async def search(work: Thinker, question: str) -> str:
    roots = await asyncio.gather(*(work.ask(question) for _ in range(2)))
    for number, (_, reply) in enumerate(roots, start=1):
        await work.number(number, reply, "root")
    nodes = await asyncio.gather(
        *(work.ask("Go on.", *messages, parent=reply) for messages, reply in roots for _ in range(2))
    )
    for number, (_, reply) in enumerate(nodes, start=3):
        await work.number(number, reply, f"below {(number - 1) // 2}")
    messages, reply = await work.ask("Conclude.", *nodes[0][0], parent=nodes[0][1])
    await work.number(7, reply, "leaf")
    return messages[-1]["content"]


async def summarising(work: Thinker, question: str) -> str:
    messages: list[Any] = []
    for number, text in enumerate((question, "Look.", "Summarise what you know."), start=1):
        messages, reply = await work.ask(text, *messages)
        await work.number(number, reply, f"turn {number}")
    messages, reply = await work.ask(f"{question} You know: {messages[-1]['content']}")
    await work.number(4, reply, "anew")
    messages, reply = await work.ask("Conclude.", *messages)
    await work.number(5, reply, "last")
    return messages[-1]["content"]


async def play(task: dict[str, Any], agent: Any) -> dict[str, Any]:
    async with agent.client() as client:
        work = Thinker(client, agent)
        kinds = {"best_of_three": best_of_three, "planner": planner, "search": search, "summarising": summarising}
        return work.ended(await kinds[task["kind"]](work, task["question"]))
