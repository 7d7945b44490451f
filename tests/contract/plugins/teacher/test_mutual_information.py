"""The mutual-information proxy with verl's real workers, against transformers alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hinted
import numpy as np
import pytest
import torch
from contract_tools import EOS, read
from hinted import chat, log_probs, played, taught
from row_layouts import FIXED, PACKED, row

from verl_turnkey.plugins.rollout.merging import merge_rows
from verl_turnkey.plugins.teacher.column import PARTITION as FURTHER
from verl_turnkey.plugins.trainer.mutual_information import prompt_information

ON = ["turnkey.mutual_information.every=3", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=400"]
FIRST = {"a": "A", "b": "B!", "c": "CAB"}
"""first turn of each task's episodes"""
NAMES = {f"mutual_information/{name}" for name in prompt_information(np.zeros((2, 2)), np.ones(2))}
NAMES |= {"mutual_information/prompts", "mutual_information/seconds"}


@pytest.fixture(scope="module")
def reader_dir(model_dir: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(model_dir, tmp_path_factory.mktemp("reader"), tokenizer)


@pytest.fixture
def built(ready, reader_dir, tokenizer) -> Callable[..., Any]:
    def build(*overrides: str, world: int = 1, step: int = 3) -> Any:
        model = f"actor_rollout_ref.model.path={reader_dir}"
        made = ready(world, *ON, model, "critic.enable=false", *overrides, recipe="gigpo")
        made.tokenizer, made.global_steps = tokenizer, step
        return made

    return build


def prompt_of(tokenizer: Any, task: str) -> list[int]:
    """One with a hint, which the model reads: prompts of other tasks change its answers."""
    return chat(tokenizer, f"task {ord(task) - 97} hint {task.upper()}")


def batch(tokenizer: Any, tasks: str, layout: str = "steps", rows: int = 8, data: dict[str, Any] | None = None) -> Any:
    """Two episodes of each task with the same first turn, and a failed one."""
    episodes = {
        (task, session): played(tokenizer, prompt_of(tokenizer, task), [FIRST[task], "xy"], session == 0)
        for task in tasks
        for session in (0, 1)
    }
    episodes[tasks[0], 2] = [row([5, 6, EOS], [EOS], [0], [0.0], [])]
    outputs = {key: merge_rows(made) if layout == "merged" else made for key, made in episodes.items()}
    return hinted.batch(outputs, dict.fromkeys(tasks, data or {}), rows)


def scored(made: Any, rows: Any) -> dict[str, float]:
    metrics: dict[str, Any] = {}
    rows = made._compute_old_log_prob(rows, metrics)
    assert not FURTHER.tags(), "it is empty after each step"
    assert read(rows, "old_log_probs")
    return {name: value for name, value in metrics.items() if name.startswith("mutual_information/")}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("settings", [[], PACKED, FIXED], ids=["padded", "packed", "fixed"])
@pytest.mark.parametrize("layout", ["steps", "merged"])
def test_it_is_what_transformers_says(built, tokenizer, reader_dir, layout, settings, world):
    from transformers import Qwen3ForCausalLM

    made = built(*settings, world=world)
    with batch(tokenizer, "abc", layout, rows=16) as rows:
        metrics = scored(made, rows)
    model = Qwen3ForCausalLM.from_pretrained(reader_dir, dtype=torch.float32)
    turns = {task: tokenizer.encode(FIRST[task]) for task in "abc"}
    sums = [[log_probs(model, prompt_of(tokenizer, j), turns[i]).sum().item() for j in "abc"] for i in "abc"]
    expected = prompt_information(np.array(sums), np.array([len(turns[task]) for task in "abc"]))
    assert expected["sequence"] > 0.3, "the model reads its prompt"
    assert metrics.keys() == NAMES
    assert metrics["mutual_information/prompts"] == 3
    for name, value in expected.items():
        assert metrics[f"mutual_information/{name}"] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(("step", "computed"), [(1, True), (2, False), (3, True), (4, False), (6, True)])
def test_at_the_first_step_and_every_third(built, tokenizer, step, computed):
    with batch(tokenizer, "ab") as rows:
        assert bool(scored(built(step=step), rows)) == computed


def test_off_by_default_and_without_a_second_task(built, tokenizer):
    with batch(tokenizer, "ab") as rows:
        assert scored(built("turnkey.mutual_information.every=0"), rows) == {}
    with batch(tokenizer, "a") as rows:
        assert scored(built(), rows) == {}


def test_no_more_prompts_than_the_key_says_and_no_thoughts_where_there_are_none(built, tokenizer):
    with batch(tokenizer, "abc") as rows:
        assert scored(built("turnkey.mutual_information.prompts=2"), rows)["mutual_information/prompts"] == 2
    with batch(tokenizer, "abc") as rows:
        assert scored(built("turnkey.mutual_information.tokens=thoughts"), rows) == {}


def test_beside_a_teacher_both_are_computed(built, tokenizer):
    with batch(tokenizer, "ab", data={"skill": "B"}) as rows:
        made, metrics = built("turnkey.teacher.source=task_skill"), {}
        made._compute_old_log_prob(rows, metrics)
    assert metrics["teacher/rows_with_text"] > 0
    assert metrics["mutual_information/prompts"] == 2
