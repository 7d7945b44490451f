r"""An agent made with smolagents (1.26), which is trained as it is.

examples/agents/install.sh .venv-agents smolagents
turnkey agent "$PWD/.venv-agents/smolagents/bin/python $PWD/examples/agents/sums_with_smolagents.py \
    {question} {answer}" \
    --task '{"question": "2 + 3?", "answer": "5"}' turnkey.agent.sandbox=none turnkey.agent.reward=exit_code
"""

from __future__ import annotations

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


def play(question: str) -> str:
    """The answer. The client finds the gateway in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``."""
    model = OpenAIModel(os.environ["OPENAI_MODEL"])
    agent = ToolCallingAgent([add], model, max_tool_threads=1, max_steps=5)
    return str(agent.run(f"{question} Answer with a number."))


if __name__ == "__main__":
    sys.exit(play(sys.argv[1]).strip() != sys.argv[2])
