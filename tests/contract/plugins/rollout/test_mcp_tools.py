"""Episodes in which the model calls tools of MCP servers, beside those of the environment and in one without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from test_real_tokenizers import REAL
from test_tools import CONVERSATION, FORMAT, LENGTHS, LOOK, PUT, reason, shelf, written  # noqa: F401

from verl_turnkey.envs.tasks import Task

PAD = Path(__file__).parents[3] / "contract/envs/mcp_servers/notes_server.py"
NOTE, READ = ("note", {"text": "milk"}), ("read", {})
LOOKS = written("Qwen3", LOOK)
SECONDS = "turnkey.env.step_timeout=30"


def servers(folder: Path, **entry: Any) -> str:
    entry = entry or {"command": sys.executable, "args": [str(PAD)], "env": {"SEED": "${TURNKEY_SEED}"}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"pad": entry}}))
    return f"turnkey.mcp.servers={folder}/mcp.json"


def test_calls_of_both_kinds_in_one_turn(shelf, tmp_path):  # noqa: F811
    turns = [written("Qwen3", NOTE, PUT, ("note", {"times": 0}), READ), written("Qwen3", NOTE), LOOKS, "done"]
    steps, (row,), script = shelf("Qwen3", turns, servers(tmp_path), SECONDS)
    calls = [[call["name"] for call in json.loads(step["action"]).get("calls", ())] for step in steps]
    assert calls == [["note", "put", "read"], ["note"], ["look"], []]
    assert [(step["valid"], step["reward"]) for step in steps] == [(False, 2.0), (True, 0.0), (True, 0.0), (True, 0.0)]
    anchors = [step["anchor"] for step in steps]
    assert anchors[0] == ""  # the environment's own key, before the first call of the server
    assert len({*anchors}) == 3
    assert anchors[2] == anchors[3]  # a look changes neither
    assert [step["extra"]["next_anchor"] for step in steps[:-1]] == anchors[1:]
    answered = script.text(1)[len(script.text(0)) :]
    positions = [answered.find(text) for text in ("1 notes", "cup is there", "do not fit: ", ">\nmilk\n<")]
    assert sorted(positions) == positions
    assert positions[0] > 0
    assert '{"anyOf": [{"minimum": 1, "type": "integer"}, {"type": "null"}]' in script.text(0)
    sampled = [i for answer in script.answers for i in answer]
    assert [i for i, trained in zip(row.response_ids, row.response_mask, strict=True) if trained] == sampled


def test_an_environment_without_tools_gets_the_words(play, tmp_path):
    turns = [written("Qwen3", ("variables", {})), "win"]
    rows, script = play(
        turns,
        Task("contract/Awkward-v0", 3),
        FORMAT,
        *LENGTHS,
        *CONVERSATION,
        servers(tmp_path),
        SECONDS,
        "turnkey.mcp.tools=[variables]",
        tokenizer=REAL["Qwen3"].tokenizer(),
    )
    steps = [step for row in rows for step in row.extra_fields["turnkey"]["steps"]]
    assert [(step["valid"], step["reward"]) for step in steps] == [(True, 0.0), (True, 0.5)]
    assert "seed 3\n</tool_response>" in script.text(1)
    assert '"name": "note"' not in script.text(0)


def test_a_server_that_dies_fails_its_episode(shelf, tmp_path):  # noqa: F811
    _, rows, _ = shelf("Qwen3", [written("Qwen3", ("die", {})), "done"], servers(tmp_path), SECONDS)
    assert "MCP server pad: it broke down in die" in reason(rows)
    assert "(out of paper)" in reason(rows)


def test_a_server_that_does_not_start_fails_its_episode(shelf, tmp_path):  # noqa: F811
    _, rows, _ = shelf("Qwen3", ["done"], servers(tmp_path, command="false"), SECONDS)
    assert "MCP server pad: it did not start" in reason(rows)


def test_a_shared_server_is_part_of_no_state(shelf, tmp_path):  # noqa: F811
    steps, _, _ = shelf(
        "Qwen3", [written("Qwen3", READ), "done"], servers(tmp_path), "turnkey.mcp.shared=[pad]", SECONDS
    )
    assert [step["anchor"] for step in steps] == ["", ""]
