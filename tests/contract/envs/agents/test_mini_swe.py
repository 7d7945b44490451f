"""The real mini-SWE-agent repairs a Harbor task in a sandbox; the model's part is a script."""

from __future__ import annotations

import asyncio
import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from gateways import completion, gateway

from verl_turnkey.envs.agents.base import AgentHandle, Outcome
from verl_turnkey.envs.agents.bubblewrap import Bubblewrap
from verl_turnkey.envs.agents.harbor_runner import HarborRunner

ROOT = Path(__file__).parents[4]
MEDIAN = ROOT / "examples/harbor/median"
RECIPE = ROOT / "recipe/config/turnkey/agent/mini_swe.yaml"
END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture(scope="module")
def program() -> str:
    """The path of ``mini``, which is installed if it is not there yet."""
    folder = ROOT / ".venv-agents"
    subprocess.run([ROOT / "examples/agents/install.sh", folder], check=True)
    return str(folder / "bin/mini")


def play(program: str, script: list[str], handle_of: dict[str, Any], timeout: float = 240.0) -> Outcome:
    """The outcome of an episode in which the model calls bash with the lines of ``script`` one after another."""

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        handle_of.setdefault("requests", []).append((path, body))
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        arguments = json.dumps({"command": script[turn]})
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        return completion({"content": f"turn {turn}", "tool_calls": [call]})

    agent = yaml.safe_load(RECIPE.read_text())["agent"]
    with gateway(answer) as handle:
        workspace = handle_of.get("workspace")
        handle = AgentHandle(handle.base_url, handle.key, handle.model, workspace, handle.socket)
        runner = HarborRunner([program, *agent["run"][1:]], timeout=timeout, sandbox=Bubblewrap(), env=agent["env"])
        return asyncio.run(runner.run({"env_id": "harbor", "kwargs": {"path": str(MEDIAN)}}, handle))


def test_it_repairs_a_task(program: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = {"workspace": tmp_path}
    look = "pwd; ls; (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null || echo no network"
    outcome = play(program, [look, (MEDIAN / "solution/solve.sh").read_text(), END], seen)
    assert (outcome.reward, outcome.success, outcome.truncated) == (1.0, True, False), outcome
    assert outcome.extra["exit_code"] == 0
    requests = seen["requests"]
    assert [path for path, _ in requests] == ["/s3cret/v1/chat/completions"] * 3
    bodies = [body for _, body in requests]
    assert {body["model"] for body in bodies} == {"policy"}
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["bash"]
    assert (MEDIAN / "instruction.md").read_text().strip() in bodies[0]["messages"][1]["content"]
    result = json.loads(bodies[1]["messages"][-1]["content"])
    assert result["output"].splitlines() == ["/app", "middle.py", "no network"]
    for before, after in pairwise(bodies):  # each request goes on where the last one ended
        assert after["messages"][: len(before["messages"])] == before["messages"]
    assert "ordered = sorted(values)" in (tmp_path / "middle.py").read_text()


def test_one_that_gives_up_gets_nothing(program: str) -> None:
    outcome = play(program, [END], {})
    assert (outcome.reward, outcome.success) == (0.0, False)
