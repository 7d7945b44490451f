"""Published agents as their recipes run them, in bubblewrap on a Harbor task; the model's part is a script."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_turnkey.plugins.gateway.rehearsal import Rehearsal, rehearse
from verl_turnkey.plugins.gateway.stand_in import Script, read_replies

ROOT = Path(__file__).parents[4]
MEDIAN = ROOT / "examples/harbor/median"
FOLDER = ROOT / ".venv-agents"
SOLUTION = (MEDIAN / "solution/solve.sh").read_text()
FIX = SOLUTION + "\n[ $(pwd) = /app ] && ! (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null && echo repaired"

CALLS: dict[str, Any] = {
    "mini_swe": {"name": "bash", "arguments": {"command": FIX}},
    "pi": {"name": "bash", "arguments": {"command": FIX}},
    "codex": {"name": "exec_command", "arguments": {"cmd": FIX}},
    "qwen_code": {"name": "run_shell_command", "arguments": {"command": FIX, "is_background": False}},
    "opencode": {"name": "bash", "arguments": {"command": FIX, "description": "repair"}},
}
ENDS: dict[str, Any] = {
    "mini_swe": {"calls": [{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}]}
}
SIDE_CALLS = {"opencode": ["A title."]}


def play(name: str, replies: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """The episode of the agent ``name``, which is installed if it is not there yet."""
    subprocess.run([ROOT / "examples/agents/install.sh", FOLDER, name], check=True)
    monkeypatch.setenv("PATH", f"{FOLDER}/npm/bin:{FOLDER}/bin:/usr/local/bin:/usr/bin:/bin")
    (tmp_path / "replies.json").write_text(yaml.safe_dump(replies))
    settings = yaml.safe_load((ROOT / f"recipe/config/turnkey/agent/{name}.yaml").read_text())
    settings["agent"] |= {"sandbox": "bwrap", "timeout": 240.0}
    task = {"env_id": "harbor", "seed": 0, "kwargs": {"path": str(MEDIAN)}}
    return asyncio.run(rehearse(settings, task, Script(read_replies(tmp_path / "replies.json"))))


@pytest.mark.parametrize(
    "name",
    ["mini_swe", "pi", *(pytest.param(name, marks=pytest.mark.long) for name in ("codex", "qwen_code", "opencode"))],
)
def test_it_repairs_a_task(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [*SIDE_CALLS.get(name, ()), {"calls": [CALLS[name]]}, ENDS.get(name, "It is repaired.")]
    episode = play(name, replies, tmp_path, monkeypatch)
    assert episode.failure is None, episode
    assert (episode.success, episode.rows, episode.refused) == (True, 1, 0), episode
    assert episode.extra["exit_code"] == 0
    trained = [turn for turn in episode.turns if turn.trained]
    assert [turn.reward for turn in trained] == [0.0, 1.0]
    assert trained[0].state != trained[1].state
    assert trained[1].new == 1, "the second request goes on where the first one ended"
    assert len(episode.turns) - len(trained) == len(SIDE_CALLS.get(name, ()))


def test_one_that_gives_up_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = play("mini_swe", [ENDS["mini_swe"]], tmp_path, monkeypatch)
    assert episode.success is False
    assert [turn.reward for turn in episode.turns] == [0.0]
