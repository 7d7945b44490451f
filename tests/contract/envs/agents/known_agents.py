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
from verl_turnkey.plugins.gateway.rehearsal import Rehearsal, rehearse
from verl_turnkey.plugins.gateway.stand_in import Script

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
NAMES = (*TOOLS, "pydantic_ai")


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
    subprocess.run([ROOT / "examples/agents/install.sh", folder, name], check=True)
    if name == "pydantic_ai":
        sys.path += [] if (site := str(folder / "site")) in sys.path else [site]  # the agent's process gets the same
        settings: dict[str, Any] = {"agent": {"run": f"{ROOT}/examples/agents/sums_with_pydantic_ai.py:play"}}
        return asyncio.run(rehearse(settings, SUM, Script(replies)))
    os.environ["PATH"] = f"{folder}/npm/bin:{folder}/bin:/usr/local/bin:/usr/bin:/bin"
    settings = yaml.safe_load((ROOT / f"recipe/config/turnkey/agent/{name}.yaml").read_text())
    settings["agent"] |= {"sandbox": "bwrap", "timeout": 240.0}
    task = {"env_id": "harbor", "seed": 0, "kwargs": {"path": str(MEDIAN)}}
    return asyncio.run(rehearse(settings, task, Script([*SIDE_CALLS.get(name, ()), *replies])))
