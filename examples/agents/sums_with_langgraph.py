r"""An agent made with LangChain on LangGraph (1.2).

examples/agents/install.sh .venv-agents langgraph
turnkey agent "$PWD/.venv-agents/langgraph/bin/python $PWD/examples/agents/sums_with_langgraph.py \
    {question} {answer}" \
    --task '{"question": "2 + 3?", "answer": "5"}' turnkey.agent.sandbox=none turnkey.agent.reward=exit_code
"""

from __future__ import annotations

import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def play(question: str) -> str:
    """The answer. The client finds the gateway in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``."""
    model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], temperature=0)
    agent = create_agent(model, [add], system_prompt="You add.")
    result = agent.invoke({"messages": [{"role": "user", "content": f"{question} Answer with a number."}]})
    return str(result["messages"][-1].content)


if __name__ == "__main__":
    sys.exit(play(sys.argv[1]).strip() != sys.argv[2])
