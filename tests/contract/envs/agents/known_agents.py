"""Published agents as their recipes run them, in bubblewrap on a Harbor task; the model's part is a script."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from verl_turnkey.plugins.gateway.codec import Parsed
from verl_turnkey.plugins.gateway.messages import ToolCall
from verl_turnkey.plugins.gateway.rehearsal import Rehearsal, Script, rehearse

ROOT = Path(__file__).parents[4]
MEDIAN = ROOT / "examples/harbor/median"
FOLDER = ROOT / ".venv-agents"
SUM = {"question": "2 + 3?", "answer": "5"}

TOOLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mini_swe": ("bash", "command", {}),
    "pi": ("bash", "command", {}),
    "codex": ("exec_command", "cmd", {}),
    "qwen_code": ("run_shell_command", "command", {"is_background": False}),
    "opencode": ("bash", "command", {"description": "repair"}),
}
"""the shell of each agent: tool, name of the command, further arguments"""
SIDE_CALLS = {"opencode": [Parsed("A title.")]}
WITHOUT_TOOLS = ("aider",)
"""agents of a Harbor task that write their edits as text"""
EXAMPLES = "examples/agents/sums_with"
COMMANDS = {
    "openai_agents": ["{python}", f"{EXAMPLES}_openai_agents.py", "responses", "{question}", "{answer}"],
    "openai_agents_chat": ["{python}", f"{EXAMPLES}_openai_agents.py", "chat_completions", "{question}", "{answer}"],
    "langgraph": ["{python}", f"{EXAMPLES}_langgraph.py", "{question}", "{answer}"],
    "smolagents": ["{python}", f"{EXAMPLES}_smolagents.py", "{question}", "{answer}"],
}
"""agents that are programs with an environment of their own: how each is started"""
PACKAGES = {"openai_agents_chat": "openai_agents"}
"""agent -> what is installed for it, where that has another name"""
NAMES = (*TOOLS, *WITHOUT_TOOLS, "pydantic_ai", *COMMANDS)


def shell(name: str, command: str, text: str = "", reasoning: str | None = None) -> Parsed:
    """A turn in which the agent ``name`` shall run ``command``."""
    tool, argument, more = TOOLS[name]
    return Parsed(text, (ToolCall(tool, {argument: command, **more}, ""),), reasoning)


def end(name: str) -> Parsed:
    """The turn after which the agent ends."""
    if name == "mini_swe":
        return shell(name, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    return Parsed("It is repaired.")


def play(name: str, replies: Sequence[Parsed]) -> Rehearsal:
    """The episode of the agent ``name``, which is installed if it is not there yet."""
    folder = Path(os.environ.get("TURNKEY_AGENTS") or FOLDER)
    package = PACKAGES.get(name, name)
    subprocess.run([ROOT / "examples/agents/install.sh", folder, package], check=True)
    if name == "pydantic_ai":
        sys.path += [] if (site := str(folder / "site")) in sys.path else [site]  # the agent's process gets the same
        settings: dict[str, Any] = {"agent": {"run": f"{ROOT}/examples/agents/sums_with_pydantic_ai.py:play"}}
        return asyncio.run(rehearse(settings, SUM, Script(replies)))
    if name in COMMANDS:
        python, program, *arguments = COMMANDS[name]
        run = [python.format(python=folder.absolute() / package / "bin/python"), str(ROOT / program), *arguments]
        settings = {"agent": {"run": run, "sandbox": "none", "reward": "exit_code", "timeout": 240.0}}
        return asyncio.run(rehearse(settings, SUM, Script(replies)))
    os.environ["PATH"] = f"{folder}/npm/bin:{folder}/bin:{folder}/{name}/bin:/usr/local/bin:/usr/bin:/bin"
    settings = yaml.safe_load((ROOT / f"recipe/config/turnkey/agent/{name}.yaml").read_text())
    settings["agent"] |= {"sandbox": "bwrap", "timeout": 240.0}
    task = {"env_id": "harbor", "seed": 0, "kwargs": {"path": str(MEDIAN)}}
    return asyncio.run(rehearse(settings, task, Script([*SIDE_CALLS.get(name, ()), *replies])))
