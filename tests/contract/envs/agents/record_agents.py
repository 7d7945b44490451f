r"""Record what published agents send, for tests that need none of them: ``tests/data/agents/NAME.jsonl``.

    python tests/contract/envs/agents/record_agents.py mini_swe pi codex qwen_code opencode pydantic_ai \
        openai_agents openai_agents_chat langgraph smolagents aider

Each agent is installed if it is not there yet, and plays one task; the model's turns are a script. A file has a line
per request, with the turn that answered it and what the gateway made of it. Long texts are cut to their beginning and a
hash, so that equal ones stay equal; what a request repeats of the one before is named and left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.gateway import rehearsal
from verl_turnkey.plugins.gateway.codec import Parsed
from verl_turnkey.plugins.gateway.messages import Dialect, ToolCall
from verl_turnkey.plugins.gateway.models import Script
from verl_turnkey.plugins.gateway.rehearsal import Rehearsal, configuration, rehearse
from verl_turnkey.plugins.gateway.server import Gateway
from verl_turnkey.plugins.gateway.session import Session

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
"""agent -> the package it needs, where the names differ"""
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
        return played(SUM, replies, run=f"{ROOT}/examples/agents/sums_with_pydantic_ai.py:play")
    if name in COMMANDS:
        python, program, *arguments = COMMANDS[name]
        run = [python.format(python=folder.absolute() / package / "bin/python"), str(ROOT / program), *arguments]
        return played(SUM, replies, run=run, sandbox="none", reward="exit_code", timeout=240.0)
    os.environ["PATH"] = f"{folder}/npm/bin:{folder}/bin:{folder}/{name}/bin:/usr/local/bin:/usr/bin:/bin"
    task = {"env_id": "harbor", "seed": 0, "kwargs": {"path": str(MEDIAN)}}
    replies = [*SIDE_CALLS.get(name, ()), *replies]
    return played(task, replies, f"+turnkey/agent={name}", sandbox="bwrap", timeout=240.0)


def played(task: dict[str, Any], replies: Sequence[Parsed], *words: str, **agent: Any) -> Rehearsal:
    """An episode with scripted replies; ``agent``: keys of ``turnkey.agent``."""
    config = configuration([*words, *(override(f"turnkey.agent.{key}", value) for key, value in agent.items())])
    (episode,) = asyncio.run(rehearse(config, task, lambda: Script(replies)))
    return episode


DATA = ROOT / "tests/data/agents"
HEADERS = ("user-agent", "x-stainless-retry-count")
"""the headers that are kept: none of them is a secret"""
LONGEST = 100
"""characters of a text that is kept whole"""
KEPT_WHOLE = ("arguments",)
"""texts that hold JSON"""
MACHINE = {
    r"[A-Z][a-z]{2,8},? [A-Z][a-z]{2,8} \d{1,2},? \d{4}": "DATE",
    r"\d{4}-\d{2}-\d{2}(T[\d:.]+Z?)?": "DATE",
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b": "UUID",
    r"Linux[^\n\"]{0,200}GNU/Linux": "LINUX",
    r"\d+\.\d+\.\d+-[\w.+-]*(?:generic|cloud|amd64|gcp|aws|azure)\w*": "KERNEL",
    r"127\.0\.0\.1:\d+": "GATEWAY",
}
"""what differs between machines and days"""


class Recorder(Gateway):
    """A gateway that keeps the calls of the model."""

    calls: list[dict[str, Any]]
    sessions: list[Session]

    def __init__(self) -> None:
        super().__init__()
        Recorder.calls, Recorder.sessions = [], []

    def add(self, session: Session) -> None:
        Recorder.sessions.append(session)
        super().add(session)

    async def _answer(
        self, session: Session, dialect: Dialect, headers: Mapping[str, str], path: str, *more: Any
    ) -> None:
        await super()._answer(session, dialect, headers, path, *more)
        kept = {name: headers[name] for name in HEADERS if name in headers}
        Recorder.calls.append({"path": dialect.path, "headers": kept, "body": json.loads(more[0])})


def script(name: str) -> list[Parsed]:
    """Three turns, the first of them with thoughts; mini_swe also forgets to call its tool once.

    The first edit of aider fits no line, and its last turn is the message of the commit.
    """
    if name == "aider":
        body = (MEDIAN / "environment/middle.py").read_text().rpartition('"""\n')[2]
        solved = (MEDIAN / "solution/solve.sh").read_text().rpartition('"""\n')[2].removesuffix("END\n")
        edits = [Parsed(edit("sort()\n", "sorted()\n")), Parsed(edit(body, solved))]
        return [Parsed("I need middle.py.", (), "Where is it?\n"), *edits, Parsed("fix: sort a copy")]
    if name not in TOOLS:
        calls = (ToolCall("add", {"a": 2, "b": 3.0}, ""), ToolCall("add", {"b": 0, "a": 5}, ""))
        last = Parsed("", (ToolCall("final_answer", {"answer": "5"}, ""),)) if name == "smolagents" else Parsed("5")
        return [Parsed("I add.", calls, "Two numbers. "), Parsed("", (ToolCall("add", {"a": 1}, ""),)), last]
    solution = (MEDIAN / "solution/solve.sh").read_text()
    looks = shell(name, "ls  ; cat middle.py", "I look.\n", "Where is it?\n")
    forgets = [Parsed("I know what is wrong.")] if name == "mini_swe" else []
    return [looks, *forgets, shell(name, solution), end(name)]


def edit(before: str, after: str) -> str:
    """An edit of the task's file as aider reads it."""
    return f"middle.py\n```python\n<<<<<<< SEARCH\n{before}=======\n{after}>>>>>>> REPLACE\n```"


def record(name: str) -> list[dict[str, Any]]:
    """What the agent ``name`` sent, request by request, and what was made of it."""
    rehearsal.Gateway = Recorder
    episode = play(name, script(name))
    assert episode.failure is None, episode
    (session,) = Recorder.sessions
    requests, before = [], {}
    for call, turn, recorded in zip(Recorder.calls, session.turns, episode.turns, strict=True):
        text = json.dumps(call["body"], ensure_ascii=False).replace(session.secret, "SECRET")
        body = json.loads(text.replace(session.tag, "episode0"))
        reply = turn.reply
        calls = [[call.name, call.arguments, call.id.replace(session.tag, "episode0")] for call in reply.calls]
        requests.append(
            {
                "path": call["path"],
                "headers": call["headers"],
                "body": {key: short(value, key) for key, value in body.items() if before.get(key) != value},
                "repeated": sorted(key for key, value in body.items() if before.get(key) == value),
                "reply": {
                    "id": reply.id.replace(session.tag, "episode0"),
                    "text": short(reply.text),
                    "calls": calls,
                    "reasoning": reply.reasoning,
                },
                "after": recorded.after,
                "new": recorded.new,
                "broke": recorded.broke,
                "trained": recorded.trained,
                "ignored": sorted(turn.request.overruled),
            }
        )
        before = body
    return requests


def short(value: Any, key: str = "") -> Any:
    """``value`` without what differs between machines, and with the beginnings of long texts alone."""
    if isinstance(value, Mapping):
        return {name: short(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [short(part, key) for part in value]
    if not isinstance(value, str) or key in KEPT_WHOLE:
        return value
    for pattern, name in MACHINE.items():
        value = re.sub(pattern, name, value)
    if len(value) <= LONGEST:
        return value
    return f"{value[:LONGEST]}... {len(value)} characters {blake2b(value.encode(), digest_size=6).hexdigest()}"


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for agent in sys.argv[1:] or NAMES:
        file = DATA / f"{agent}.jsonl"
        lines = [json.dumps(request, ensure_ascii=False) for request in record(agent)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size} bytes")
