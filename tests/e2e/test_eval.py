"""``turnkey eval`` plays what the trainer's own validation plays: greedy, the same weights, tasks and sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import minigrid, train

from verl_turnkey.plugins.view.join import read

pytestmark = pytest.mark.long

LEVEL = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 20}
TASKS = 12
COMMAND = [sys.executable, "-c", "from verl_turnkey.plugins.cli.main import main; main()", "eval", "babyai"]


def responses(log: Path) -> dict[str, list[str]]:
    """What the model wrote, turn by turn, for each task of a log."""
    tasks = dict(read(log, "episodes")[["episode", "task"]].itertuples(index=False))
    texts = read(log, "texts").sort_values(["episode", "turn"])
    return {tasks[key]: list(rows["response"]) for key, rows in texts.groupby("episode")}


def test_a_greedy_evaluation_is_the_trainers_validation(model: Path, tmp_path: Path) -> None:
    """One episode at a time on both sides: what is computed together changes logits in their last digits."""
    trained, evaluated = tmp_path / "trained", tmp_path / "evaluated"
    sizes = minigrid(tmp_path, LEVEL, val=TASKS, seed=0)
    validated = train(
        trained,
        model,
        "+turnkey=gigpo",
        *sizes,
        "data.val_batch_size=1",
        "trainer.val_before_train=true",
        "trainer.val_only=true",
        rollouts=8,
    )
    words = [word for word in sizes if word.startswith("turnkey.")]
    options = ["--checkpoint", str(model), "--tasks", str(tmp_path / "val.parquet"), "--greedy", "--concurrency", "1"]
    sizes_of_launch = ["data.max_prompt_length=256", "data.max_response_length=8"]
    subprocess.run([*COMMAND, *options, "--out", evaluated, *words, *sizes_of_launch], check=True, timeout=1500)

    theirs, ours = responses(trained / "episodes"), responses(evaluated / "turnkey_log")
    assert len(theirs) == TASKS
    differing = [task for task in theirs if theirs[task] != ours.get(task)]
    assert not differing, f"{len(differing)} of {TASKS} tasks differ: {differing}"
    assert len({json.dumps(texts) for texts in ours.values()}) > 1, "the tasks are different ones"

    result = json.loads((evaluated / "result.json").read_text())
    name = "val-core/doorkey/acc/mean@1"
    assert result["success"]["value"] == pytest.approx(validated.metrics[0][name])
