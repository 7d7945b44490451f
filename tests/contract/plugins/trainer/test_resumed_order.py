"""A run that is stopped and resumed plays the tasks of one that never stopped: none is lost, no group trains twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from whole_runs import BATCH, STEPS, Killed, Runs, by_group, held
from whole_runs import runs as runs

from verl_turnkey.envs.tasks import Task

TASKS = 10
LEVEL = {"level": "MiniGrid-Empty-Random-6x6-v0"}
DIES_IN = 4
"""the step in which the broken run dies, after a checkpoint of step 2 and another whole step"""


def die(step: int) -> None:
    if step == DIES_IN:
        raise Killed


@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("colocate_async", "separate_async"))]
)
def test_a_run_that_died_plays_what_an_unbroken_one_plays(runs: Runs, tmp_path: Path, mode: str) -> None:
    """Asked for in the same order; the asynchronous trainers then train what is finished first."""
    runs.write([Task("turnkey/MiniGrid-v0", seed, LEVEL) for seed in range(TASKS)])
    unbroken = runs.start(mode, "unbroken")
    waiting = {"unbroken": set(held())}
    broken = runs.start(mode, "broken", on_update=die, held=0 if mode == "sync" else 2)  # sync waits for all groups
    resumed = runs.start(mode, "broken")
    waiting["broken"] = set(held())
    groups_of = {name: by_group(tmp_path / name / "log") for name in waiting}
    for name, groups in groups_of.items():
        trained = groups[groups["step"].notna()]
        assert trained["step"].value_counts().to_dict() == dict.fromkeys(range(1, STEPS + 1), BATCH)
        assert set(groups.index) == set(trained.index) | waiting[name], "a group was lost"
        assert not waiting[name] & set(trained.index)
    assert Counter(groups_of["broken"]["seed"]) == Counter(groups_of["unbroken"]["seed"])
    (saved,) = broken.saved
    before = broken.prompts[:saved]
    assert before + resumed.prompts == unbroken.prompts
    assert unbroken.prompts[:TASKS] != unbroken.prompts[TASKS : 2 * TASKS], "the order of an epoch"
    if mode == "sync":
        steps = [groups.groupby("step")["seed"].apply(sorted).to_list() for groups in groups_of.values()]
        batches = [sorted(unbroken.prompts[at : at + BATCH]) for at in range(0, BATCH * STEPS, BATCH)]
        assert steps == [batches, batches]
        assert not resumed.again
    else:
        assert resumed.again, "nothing was in flight in the checkpoint"
        order = iter(before)
        assert all(seed in order for seed in resumed.again), "in another order than they were asked for"
        assert len(waiting["broken"]) == BATCH
