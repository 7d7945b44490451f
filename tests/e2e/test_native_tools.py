"""``turnkey_env`` with tools of an environment and of an MCP server: calls, results, masks, credit of real training."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import naive
import pytest
from launch import Run, data, train
from tool_corridor import CALLS
from transformers import AutoTokenizer

from verl_turnkey.envs.tasks import Task, write_parquet

CORRIDOR = Path(__file__).with_name("tool_corridor.py")
PAD = Path(__file__).parents[1] / "contract/envs/mcp_servers/notes_server.py"
STEPS = 2
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | map(attribute='function.name') | join(' ') + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


@pytest.fixture(scope="module")
def model_with_tools(model: Path, out: Path) -> Path:
    """The quickstart's model with a chat template that shows the names of tools."""
    copied = shutil.copytree(model, out / "model")
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(copied)
    return copied


@pytest.fixture(scope="module")
def run(model_with_tools: Path, out: Path) -> Run:
    for split, seeds in (("train", range(8)), ("val", range(8, 12))):
        write_parquet(out / f"{split}.parquet", [Task("e2e/Corridor-v0", s) for s in seeds], "corridor", split)
    (out / "mcp.json").write_text(json.dumps({"mcpServers": {"pad": {"command": sys.executable, "args": [str(PAD)]}}}))
    return train(
        out,
        model_with_tools,
        "+turnkey=gigpo",
        "turnkey.env.id=e2e/Corridor-v0",
        "turnkey.rollout.action_format=tools",
        f"actor_rollout_ref.rollout.multi_turn.format={CORRIDOR}:WordCalls",
        f"turnkey.mcp.servers={out}/mcp.json",
        "turnkey.mcp.tools=[note]",
        "turnkey.rollout.prompt=conversation",
        "turnkey.rollout.max_tokens_per_turn=4",
        "turnkey.rollout.max_turns=6",
        "data.max_response_length=400",
        *data(out, batch=4),
        steps=STEPS,
        mini_batch=4,
        modules=(CORRIDOR,),
    )


def called(text: dict[str, Any]) -> list[str]:
    """The tools that the words of a turn call."""
    return [CALLS[word][0] for word in text["response"].split() if word in CALLS]


def test_the_log_has_the_calls_that_were_run_and_their_results(run: Run) -> None:
    numbers = set()
    for episode in run.episodes("train"):
        assert episode["failed"] is None
        notes = 0
        for step, text in zip(episode["steps"], episode["texts"], strict=True):
            names = called(text)
            ran = [name for name in names if name != "fly"]
            numbers.add(len(ran))
            action = json.loads(step["action"]) if step["action"] else {}
            assert [call["name"] for call in action.get("calls", ())] == ran
            assert step["valid"] == ("fly" not in names and bool(names))
            if "note" in ran:
                notes += ran.count("note")
                assert f"note: {notes} notes" in text["observation"]  # the server is the episode's own
    assert {1, 2} <= numbers


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_masks_cover_what_was_sampled_and_no_result(run: Run, model: Path, step: int) -> None:
    run.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))
    assert run.metrics[step]["training/rollout_probs_diff_max"] < 1e-4
    assert run.metrics[step]["rows/per_episode"] == 1
    tokenizer = AutoTokenizer.from_pretrained(model)
    seen = run.seen(step)
    results = {
        line.removeprefix("note: ")
        for episode in run.episodes("train")
        if episode["step"] == step
        for text in episode["texts"][:-1]
        if called(text)
        for line in text["observation"].splitlines()
        if line != "You are in a corridor."  # the state, which a tool of the server does not show
    }
    assert results
    rows = zip(seen["responses"], seen["mask"], strict=True)
    between = "\n".join(tokenizer.decode(response[~mask.bool()]) for response, mask in rows)
    assert [result for result in results if result not in between] == []


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_the_naive_twin(run: Run, step: int) -> None:
    run.agrees_with(naive.gigpo, step)


def test_calls_of_a_server_of_the_episode_s_own_change_the_state(run: Run) -> None:
    for episode in run.episodes("train"):
        for step, text in zip(episode["steps"], episode["texts"], strict=True):
            ran = [name for name in called(text) if name in ("walk", "note")]
            assert (step["next_anchor"] != step["anchor"]) == bool(ran)
