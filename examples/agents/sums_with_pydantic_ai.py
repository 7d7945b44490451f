"""An agent made with PydanticAI (``pip install "pydantic-ai-slim[openai]"``, 2.68), which is trained as it is.

turnkey agent examples/agents/sums_with_pydantic_ai.py:play --task '{"question": "2 + 3?", "answer": "5"}'
"""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], agent: Any) -> float:
    """1 for the right answer."""
    async with agent.client() as client:
        model = OpenAIChatModel(agent.model, provider=OpenAIProvider(openai_client=client))
        result = await Agent(model, tools=[add]).run(f"{task['question']} Answer with a number.")
    return float(result.output.strip() == task["answer"])
