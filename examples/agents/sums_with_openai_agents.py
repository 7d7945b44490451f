r"""An agent made with the OpenAI Agents SDK (0.24), which is trained as it is.

examples/agents/install.sh .venv-agents openai_agents
turnkey agent "$PWD/.venv-agents/openai_agents/bin/python $PWD/examples/agents/sums_with_openai_agents.py \
    responses {question} {answer}" \
    --task '{"question": "2 + 3?", "answer": "5"}' turnkey.agent.sandbox=none turnkey.agent.reward=exit_code

The first argument is the API: ``responses``, or ``chat_completions``, which it streams.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(api: str, question: str) -> str:
    """The answer. The client finds the gateway in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``."""
    set_tracing_disabled(True)  # traces go to OpenAI
    set_default_openai_api(api)
    agent = Agent(name="adder", model=os.environ["OPENAI_MODEL"], tools=[add])
    question = f"{question} Answer with a number."
    if api == "responses":
        return str((await Runner.run(agent, question)).final_output)
    result = Runner.run_streamed(agent, question)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


if __name__ == "__main__":
    sys.exit(asyncio.run(play(*sys.argv[1:3])).strip() != sys.argv[3])
