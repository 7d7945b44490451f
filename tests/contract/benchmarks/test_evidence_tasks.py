"""The evidence's tasks can be won by their experts, their prompts fit, and their files hold what they say."""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from verl_turnkey.envs import make
from verl_turnkey.envs.tasks import Task as EnvTask

ROOT = Path(__file__).parents[3]
SCRIPTS = (ROOT / "benchmarks" / "evidence", ROOT / "examples" / "quickstart")
NAMES = ("tasks", "experts", "warm_start", "demos", "model", "play", "teaching", "training")


@pytest.fixture(scope="module")
def scripts():
    """The scripts' modules, imported the way the scripts do and forgotten afterwards: their names are common words."""
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        for folder in reversed(SCRIPTS):
            patch.syspath_prepend(str(folder))
        yield importlib.import_module
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def warm_start(scripts) -> ModuleType:
    return scripts("warm_start")


@pytest.fixture(scope="module", params=["rooms", "kitchen"])
def demonstrated(request, warm_start):
    """A task, how it is taught, and demonstrations of two of its games: one perfect player, one with detours."""
    task = warm_start.TASKS[request.param]
    teaching = dataclasses.replace(warm_start.TEACHING[task.name], games=2, rounds=4, quality=((0.5, 0.0), (0.5, 0.2)))
    demos, _ = warm_start.demonstrate(task, teaching, seed=0)
    return task, teaching, demos


def test_the_expert_wins_with_and_without_detours(demonstrated):
    _, _, demos = demonstrated
    assert demos.won == [1.0, 1.0]
    assert len(demos.steps) >= 8 * 8  # no game is over after a handful of turns


def test_the_rooms_planner_is_optimal_behind_doors(scripts):
    planner_of = scripts("experts").RoomsPlanner
    env = make("turnkey/MiniGrid-v0", {"level": "MiniGrid-MultiRoom-N2-S4-v0"})
    lengths = []
    for seed in range(3):
        env.reset(seed=seed)
        planner, steps, won = planner_of(env.unwrapped.grid_env), 0, False
        while not won:
            won, steps = env.step(planner.best()[0])[4]["success"], steps + 1
            assert steps < 20
        lengths.append(steps)
    assert lengths == [7, 10, 6]  # what breadth-first search over the environment itself finds


def test_prompts_and_actions_fit(demonstrated, warm_start, scripts):
    task, teaching, demos = demonstrated
    tokenizer = warm_start.tokenizer_of(task, teaching, demos)
    template = warm_start.load_template(task.template)
    prompts = [
        scripts("play").render(tokenizer, template, demo.task, demo.history, demo.observation, task.line)
        for demo in demos.steps
    ]
    assert max(map(len, prompts)) <= task.prompt_tokens
    assert any(len(demo.history) == task.history for demo in demos.steps)
    rng = random.Random(0)
    env = warm_start.environment(task)
    _, info = env.reset(seed=warm_start.split_seeds(teaching.games, 1, 10_000)[0][0])
    for _ in range(task.max_turns - 1):
        for action in info["admissible"]:
            ids = tokenizer(action).input_ids
            assert tokenizer.decode(ids) == action
            assert len(ids) < task.response_tokens, action  # one is left for the end of the turn
        *_, terminated, _, info = env.step(rng.choice(info["admissible"]))
        if terminated:
            break


@pytest.mark.parametrize("name", ["doorkey", "rooms", "kitchen"])
def test_the_seeds_of_training_and_validation_are_apart(warm_start, tmp_path, name):
    task = warm_start.TASKS[name]
    task.write(tmp_path, n_val=8, seed=3)
    train, val = (
        [EnvTask.from_json(text) for text in pd.read_parquet(tmp_path / f"{split}.parquet")["turnkey_task"]]
        for split in ("train", "val")
    )
    assert (len(train), len(val)) == (task.train_tasks, 8)
    assert all(entry.env_id == task.env_id and entry.kwargs == task.kwargs for entry in (*train, *val))
    assert not {entry.seed for entry in train} & {entry.seed for entry in val}
    task.write(tmp_path, n_val=8, seed=4)
    other = EnvTask.from_json(pd.read_parquet(tmp_path / "val.parquet")["turnkey_task"][0])
    assert (other == val[0]) == (task.task_seed is not None)


def starts(warm_start: ModuleType, name: str, train: int, val: int) -> tuple[list[str], list[str]]:
    """The states in which the first tasks of training and validation begin."""
    task = warm_start.TASKS[name]
    env = warm_start.environment(task)
    some = zip(task.seeds(val, seed=3), (train, val), strict=True)
    first, second = ([env.reset(seed=seed)[1]["state_key"] for seed in seeds[:n]] for seeds, n in some)
    return first, second


@pytest.mark.parametrize(("name", "train", "val"), [("rooms", 100, 50), ("kitchen", 3, 3)])
def test_games_of_training_and_validation_begin_differently(warm_start, name, train, val):
    first, second = starts(warm_start, name, train, val)
    assert len({*first, *second}) == train + val


def test_doorkeys_validation_begins_as_its_training_does(warm_start):
    """The pages say so: its success is not that of new games."""
    train, val = starts(warm_start, "doorkey", 1024, 128)
    assert len(set(train)) == 48
    assert set(val) <= set(train)


def test_the_same_seed_makes_the_same_model(demonstrated, warm_start, monkeypatch, tmp_path):
    task, teaching, _ = demonstrated
    monkeypatch.setattr(warm_start, "CHECKED", 1)
    short, small = dataclasses.replace(task, max_turns=8), dataclasses.replace(teaching, epochs=1, target=0.0)
    models = []
    for name in "ab":
        warm_start.make_model(short, small, tmp_path / name, seed=1)
        models.append((tmp_path / name / "model.safetensors").read_bytes())
    assert models[0] == models[1]
