"""Cells of data files: the checks refuse those at which verl's own data set fails, and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks.data import check_cells
from verl_turnkey.plugins.checks.files import columns
from verl_turnkey.plugins.checks.findings import Refusal
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.schema import turnkey_config

HELLO = [{"role": "user", "content": "Hello"}]
PICTURE = [{"role": "user", "content": "<image> What is it?"}]
OURS = "turnkey_env"


def rows(*last: Mapping[str, Any], count: int = 4, **cells: Any) -> list[dict[str, Any]]:
    """``count`` rows with a prompt and ``cells``, then ``last``."""
    return [{"prompt": HELLO, **cells} for _ in range(count - len(last))] + [
        {"prompt": HELLO, **cells, **row} for row in last
    ]


# rows, data settings, row at which verl fails (None: it does not), words of the message
CASES = [
    (rows(), [], None, ""),
    (rows({"prompt": None}), [], 3, "column 'prompt': expected a list of messages, got null"),
    (rows({"prompt": None}, {}, count=3), [], 1, "'prompt'"),
    (rows(prompt="Hello"), [], None, ""),
    (rows(prompt=["Hello"]), [], None, ""),
    (rows(prompt=7), [], 0, "'prompt'"),
    (rows(prompt=[]), [], None, ""),
    (rows(extra_info={"index": 1}), [], None, ""),
    (rows({"extra_info": None}, extra_info={"index": 1}), [], None, ""),
    (rows(extra_info='{"index": 1}'), [], 0, "column 'extra_info': expected a mapping, got a text"),
    (rows({"extra_info": "{}"}, extra_info=None), [], 3, "'extra_info'"),
    (rows(extra_info=[1]), [], 0, "got a list"),
    (rows(), ["+data.need_tools_kwargs=true"], 0, "row 0: extra_info.tools_kwargs is empty"),
    (rows(data_source="x"), ["+data.need_tools_kwargs=true"], None, ""),
    (rows(extra_info={"tools_kwargs": {"look": {"a": 1}}}), ["+data.need_tools_kwargs=true"], None, ""),
    (
        rows({"extra_info": {"need_tools_kwargs": True}}, extra_info={"need_tools_kwargs": False}),
        [],
        3,
        "tools_kwargs is empty",
    ),
    (rows(extra_info={"need_tools_kwargs": True}, data_source="x"), [], None, ""),
    (rows(prompt=PICTURE), [], None, ""),
    (rows(prompt=PICTURE, images=[]), [], None, ""),
    (rows({"images": [{"image": "a.png"}]}, prompt=HELLO, images=[]), [], 3, "'images': 1 entries"),
    (rows(prompt=PICTURE, images=[{"image": "a.png"}] * 2), [], 0, "2 entries, but 'prompt' has 1 times <image>"),
    (rows(prompt=PICTURE, images=[{"image": "a.png"}]), [], None, ""),
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(("data", "words", "fails", "message"), CASES)
def test_a_row_is_refused_where_verls_data_set_fails(tmp_path, model_dir, data, words, fails, message, suffix):
    file = write(tmp_path / f"train.{suffix}", data)
    config = composed(["+turnkey=gigpo", *words])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    dataset = RLHFDataset(str(file), tokenizer, config.data, processor=object())  # any: images are not opened here
    assert first_failure(dataset) == fails
    refusal = refused(config, file, [OURS])
    assert (refusal is None) == (fails is None)
    if refusal is not None:
        assert f"train_files={file}, row {fails}" in refusal
        assert message in refusal


@pytest.mark.parametrize(
    ("prompt", "loop", "fine"),
    [
        (HELLO, "single_turn_agent", True),
        ("Hello", "single_turn_agent", False),
        (["Hello"], "tool_agent", False),
        ("Hello", "mine", True),
    ],
)
def test_a_prompt_that_verls_loops_render_is_messages(tmp_path, prompt, loop, fine):
    file = write(tmp_path / "train.parquet", rows(prompt=prompt))
    assert (refused(composed(["+turnkey=gigpo"]), file, [loop]) is None) == fine


@pytest.mark.parametrize(
    ("loop", "words", "fine"),
    [(OURS, [], True), (OURS, ["turnkey.rewards=[{name: answer}]"], False), ("single_turn_agent", [], False)],
)
def test_a_truth_that_is_read_is_a_field(tmp_path, loop, words, fine):
    for cell, right in (('{"ground_truth": "7"}', fine), ({"ground_truth": "7"}, True)):
        file = write(tmp_path / "train.parquet", rows(reward_model=cell))
        assert (refused(composed(["+turnkey=gigpo", *words]), file, [loop]) is None) == right


def write(file: Path, data: Sequence[Mapping[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([dict(row) for row in data]), file, row_group_size=2)
    else:
        file.write_text("\n".join(map(json.dumps, data)) + "\n")
    return file


def first_failure(dataset: RLHFDataset) -> int | None:
    for number in range(len(dataset)):
        try:
            dataset[number]
        except Exception:
            return number
    return None


def refused(config: Any, file: Path, loops: Sequence[str]) -> str | None:
    try:
        check_cells(config, turnkey_config(config), "data.train_files", str(file), columns(str(file)), loops)
    except Refusal as refusal:
        return str(refusal)
    return None


# --- two columns are enough -------------------------------------------------------------------------------------------


def test_a_jsonl_file_with_a_prompt_and_a_task_is_enough(compose, tokenizer, tmp_path):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    tasks = [Task("turnkey/MiniGrid-v0", seed) for seed in range(4)]
    rows = [{"prompt": [{"role": "user", "content": "-"}], "turnkey_task": task.to_json()} for task in tasks]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    config = compose("+turnkey=gigpo")
    dataset = RLHFDataset(data_files=str(file), tokenizer=tokenizer, config=config.data)
    assert [Task.from_json(dataset[n]["turnkey_task"]) for n in range(4)] == tasks
