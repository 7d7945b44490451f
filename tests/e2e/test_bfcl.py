"""Training on BFCL's tasks whose tools ls and find, or tail and cat, are missing in the first of the user's turns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import naive
import pytest
from launch import Run, data, train
from test_native_tools import model_with_tools as model_with_tools
from transformers import AutoTokenizer
from word_calls import CALLS

from verl_turnkey.envs.adapters.bfcl import NEW_TOOLS
from verl_turnkey.envs.tasks import Task, write_parquet

PARSER = Path(__file__).with_name("word_calls.py")
STEPS = 2
WITHOUT_LS, WITH_LS = 3, 9
"""seeds of miss_func_3 and miss_func_13, whose first turn needs no call"""


@pytest.fixture(scope="module")
def run(model_with_tools: Path, out: Path) -> Run:
    for split, seeds in (("train", [WITHOUT_LS, WITH_LS] * 4), ("val", [WITHOUT_LS, WITH_LS])):
        write_parquet(out / f"{split}.parquet", [Task("turnkey/BFCL-v0", seed) for seed in seeds], "bfcl", split)
    return train(
        out,
        model_with_tools,
        "+turnkey=gigpo",
        "+turnkey/env=bfcl",
        "turnkey.env.kwargs.categories=[miss_func]",
        "turnkey.env.kwargs.turn_reward=0.5",
        f"actor_rollout_ref.rollout.multi_turn.format={PARSER}:BfclCalls",
        "turnkey.rollout.max_tokens_per_turn=4",
        "turnkey.rollout.max_turns=6",
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
        *data(out, batch=4),
        steps=STEPS,
        mini_batch=4,
    )


def test_calls_run_from_the_turn_on_in_which_their_tool_is_there(run: Run) -> None:
    changes, kinds = 0, set()
    for episode in run.episodes("train"):
        assert episode["failed"] is None
        has_ls = episode["seed"] == WITH_LS
        for step, text in zip(episode["steps"], episode["texts"], strict=True):
            if NEW_TOOLS in text["observation"]:
                changes, has_ls = changes + 1, True
            names = [CALLS[word][0] for word in re.findall(r"\w+", text["response"]) if word in CALLS]
            ran = [name for name in names if name != "ls" or has_ls]
            action = json.loads(step["action"]) if step["action"] else {}
            assert [call["name"] for call in action.get("calls", ())] == ran
            assert not names or step["valid"] == (ran == names)
            kinds |= {(name, name in ran) for name in names}
    assert changes
    assert ("pwd", True) in kinds


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_new_tools_begin_a_row_and_each_turn_is_trained_once(run: Run, model: Path, step: int) -> None:
    run.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))
    # Of a policy as it began: a trained one may go on calling and never end the turn after which the tools come.
    assert run.metrics[1]["rows/break/tools"] > 0
    assert run.metrics[step]["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_the_naive_twin(run: Run, step: int) -> None:
    run.agrees_with(naive.gigpo, step)
