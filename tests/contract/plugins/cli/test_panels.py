"""Every shipped panel, made anew with other file orders, hash seeds, locales and time zones; and played."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import gymnasium
import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_turnkey.envs import make
from verl_turnkey.envs.hosting.host import EnvHost
from verl_turnkey.envs.tasks import HELD_OUT_SPLITS, Panel, Task, make_panel, panel_of
from verl_turnkey.plugins.checks.data import check_starts, validation_panel
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.panel import differences, find, published
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.playing import words
from verl_turnkey.plugins.trainer.logging import about

NAMES = sorted(file.stem for file in published().glob("*.json"))
SLOW = ("textworld-48",)
"""48 games to compile"""
SHUFFLED = """
import glob, os, random, pathlib
rng, listdir, scandir = random.Random(7), os.listdir, os.scandir
def shuffled(entries):
    entries = list(entries)
    rng.shuffle(entries)
    return entries
class Entries:
    def __init__(self, entries): self.rest = iter(entries)
    def __iter__(self): return self
    def __next__(self): return next(self.rest)
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def close(self): pass
os.listdir = lambda *a, **k: shuffled(listdir(*a, **k))
os.scandir = lambda *a, **k: Entries(shuffled(scandir(*a, **k)))
unshuffled = glob.iglob
glob.iglob = lambda *a, **k: iter(shuffled(unshuffled(*a, **k)))
glob.glob = lambda *a, **k: list(glob.iglob(*a, **k))
for name in ("glob", "rglob"):
    original = getattr(pathlib.Path, name)
    setattr(pathlib.Path, name, lambda self, *a, original=original, **k: iter(shuffled(original(self, *a, **k))))
"""
REMADE = """
import sys
from verl_turnkey.plugins.cli.panel import find, remade
sys.stdout.write("PANEL" + remade(find(sys.argv[1]), [], True)[0].text())
"""
MACHINES = (
    {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "UTC", "OMP_NUM_THREADS": "1"},
    {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8", "TZ": "Asia/Kathmandu", "OMP_NUM_THREADS": "4"},
)


def machine(folder: Path, settings: dict[str, str], shuffle: bool) -> dict[str, str]:
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(SHUFFLED if shuffle else "")
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths), "TURNKEY_CACHE": str(folder / "cache")}


@pytest.mark.parametrize(
    "listing",
    [
        "os.listdir(d)",
        "[e.name for e in os.scandir(d)]",
        "[os.path.basename(p) for p in glob.glob(d + '/*')]",
        "[os.path.basename(p) for p in glob.iglob(d + '/**', recursive=True) if os.path.isfile(p)]",
        "[p.name for p in pathlib.Path(d).glob('*')]",
        "[p.name for p in pathlib.Path(d).rglob('*')]",
        "next(os.walk(d))[2]",
    ],
)
def test_the_other_machine_lists_files_in_another_order(listing, tmp_path):
    (tmp_path / "files").mkdir()
    names = [f"{number:02}" for number in range(30)]
    for name in names:
        (tmp_path / "files" / name).touch()
    code = f"import glob, os, pathlib, sys; d = sys.argv[1]; print(*{listing})"
    orders = []
    for shuffle in (False, True):
        env = machine(tmp_path / str(shuffle), {}, shuffle)
        command = [sys.executable, "-c", code, tmp_path / "files"]
        orders.append(subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout.split())
    assert sorted(orders[0]) == sorted(orders[1]) == names
    assert orders[1] not in (orders[0], names)


def remade(name: str, folder: Path, settings: dict[str, str], shuffle: bool) -> subprocess.CompletedProcess[str]:
    env = machine(folder, settings, shuffle)
    command = [sys.executable, "-c", REMADE, name]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in SLOW else n for n in NAMES])
def test_a_panel_is_the_same_on_every_machine(name, tmp_path):
    for number, settings in enumerate(MACHINES):
        done = remade(name, tmp_path / str(number), settings, shuffle=number == 1)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.partition("PANEL")[2] == (published() / f"{name}.json").read_text()


def test_another_start_is_reported_and_refused(tmp_path, monkeypatch):
    lake = find("frozenlake-48")
    monkeypatch.setattr("verl_turnkey.envs.tasks.held_out_seeds", lambda n: list(range(n)))
    done = CliRunner().invoke(app, ["panel", "frozenlake-48", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "48 of 48 are not chosen here" in done.output
    tasks = [Task(task.env_id, task.seed + 1, task.kwargs) for task in lake.tasks({})]
    with pytest.raises(Exception, match="48 of 48 tasks start in another state here") as refused:
        check_starts(lake, tasks, {})
    assert getattr(refused.value, "id", None) == "panel-start-differs"


def test_a_panel_of_your_own_takes_the_settings_of_the_line(tmp_path):
    line = ["panel", "mine", "frozenlake", "turnkey.env.kwargs.size=5", "--tasks", "3", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, line, catch_exceptions=False).exit_code == 0
    panel = panel_of(tmp_path / "mine.parquet")
    assert panel == find(str(tmp_path / "mine.json"))
    assert panel is not None
    assert panel.content["environment"]["kwargs"]["size"] == 5
    changed = CliRunner().invoke(app, ["panel", "frozenlake-48", "turnkey.env.kwargs.size=5", "--out", str(tmp_path)])
    assert "turnkey.env.kwargs.size: 5, not 4" in str(changed.exception)
    files = f"data.val_files={tmp_path / 'mine.parquet'}"
    config = composed(["+turnkey=gigpo", "+turnkey/env=frozenlake", *words(panel), files])
    assert validation_panel(config) == panel.mark == about(config)["panel"]
    OmegaConf.update(config, "turnkey.rollout.history", 7)
    assert validation_panel(config) is None
    assert about(config)["panel"] is None


def test_a_panel_of_your_own_environment_is_made_anew(tmp_path):
    file, out = tmp_path / "my lake.py", ["--out", str(tmp_path)]
    file.write_text(
        "import gymnasium\nfrom verl_turnkey.envs.adapters.toytext import FrozenLakeText\n"
        "gymnasium.register('test/MyLake-v0', entry_point=FrozenLakeText)\n"
    )
    made = CliRunner().invoke(app, ["panel", "mine", str(file), "--tasks", "2", *out], catch_exceptions=False)
    assert made.exit_code == 0
    del gymnasium.registry["test/MyLake-v0"]
    other = file.rename(tmp_path / "elsewhere.py")
    again = ["panel", str(tmp_path / "mine.json"), *out]
    unknown = CliRunner().invoke(app, again)
    assert "needs test/MyLake-v0, which is not registered here: add turnkey.modules=[FILE]" in str(unknown.exception)
    assert CliRunner().invoke(app, [*again, f'turnkey.modules=["{other}"]'], catch_exceptions=False).exit_code == 0
    second = CliRunner().invoke(app, ["panel", str(tmp_path / "mine.json"), str(other)])
    assert "names a panel: leave out" in str(second.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine", "frozenlake", "--tasks", "many"], "--tasks: expected a positive integer or all, got 'many'"),
        (["mine", "frozenlake", "--tasks", "0"], "--tasks: expected a positive integer or all, got '0'"),
        (["mine", "frozenlake", "--returns", "[1, 0]"], "--returns: expected the lowest and highest return, like"),
        (["mine", "frozenlake", "--returns", "x"], "--returns: expected the lowest and highest return, like [0, 1]"),
        (["babyai-48", "frozenlake"], "'babyai-48' names a panel: leave out frozenlake, or choose another"),
    ],
)
def test_a_new_panel_says_what_it_expects(tmp_path, words, message):
    refused = CliRunner().invoke(app, ["panel", *words, "--out", str(tmp_path)])
    assert message in str(refused.exception)
    assert not any(tmp_path.iterdir())


def test_the_split_is_that_of_the_arguments(monkeypatch, tmp_path):
    monkeypatch.setitem(HELD_OUT_SPLITS, "turnkey/FrozenLake-v0", {"test": {"size": 6}})
    for further, split in (([], "6"), (["turnkey.env.kwargs.size=5"], "5"), (["--split", "large"], "large")):
        line = ["panel", "mine", "frozenlake", *further, "--tasks", "1", "--out", str(tmp_path)]
        assert CliRunner().invoke(app, line, catch_exceptions=False).exit_code == 0
        assert find(str(tmp_path / "mine.json")).content["split"] == split


def test_other_seeds_of_the_same_tasks_are_reported():
    lake = find("frozenlake-48")
    first, *rest = lake.content["tasks"]
    made = Panel({**lake.content, "tasks": [{**first, "seed": 7}, *rest]})
    assert differences(lake, lake) == []
    assert differences(lake, made) == [f"tasks: the seed of {first['id']} is 7, published {first['seed']}"]


# --- playing ----------------------------------------------------------------------------------------------------------


def action(task: Task, step: int, admissible: Sequence[str] | None) -> str:
    """Drawn at random, the same for the same task and step."""
    rng = random.Random(f"{task.seed} {step}")
    return rng.choice(admissible or ["up", "look", "search: the capital", "1", "[1 2 3 4]"])


def seen_here(task: Task) -> list[tuple[str, str]]:
    env = make(task.env_id, task.kwargs)
    observation, info = env.reset(seed=task.seed)
    seen = [(observation, str(info["state_key"]))]
    for step in range(5):
        observation, _, over, cut, info = env.step(action(task, step, info["admissible"]))
        seen.append((observation, str(info["state_key"])))
        if over or cut:
            break
    env.close()
    return seen


async def seen_by_host(tasks: Sequence[Task], workers: int) -> list[list[tuple[str, str]]]:
    """What ``workers`` episodes at once see, in threads or processes as the environment declares."""
    host, room = EnvHost(places=workers, calls=workers), asyncio.Semaphore(workers)

    async def play(number: int, task: Task) -> list[tuple[str, str]]:
        async with room:
            name = str(number)
            observation, info, _ = await host.start(name, task.env_id, task.kwargs, task.seed, 120.0)
            seen = [(observation, str(info["state_key"]))]
            for step in range(5):
                result = await host.step(name, action(task, step, info["admissible"]), 60.0)
                observation, _, over, cut, info = result
                seen.append((observation, str(info["state_key"])))
                if over or cut:
                    break
            await host.close(name)
            return seen

    try:
        return await asyncio.gather(*(play(number, task) for number, task in enumerate(tasks)))
    finally:
        await host.shutdown()


PLAYED = ("errands-48", "service-48", "babyai-48", "frozenlake-48", "search-48", "sokoban-48", "textarena-48")


@pytest.mark.parametrize("name", PLAYED)
def test_a_panel_is_seen_alike_by_any_number_of_workers(name):
    panel = find(name)
    tasks = list(islice(panel.tasks({}), 12))
    expected = [seen_here(task) for task in tasks]
    assert len({str(seen) for seen in expected}) > 9
    for workers in (1, 4):
        assert asyncio.run(seen_by_host(tasks, workers)) == expected
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(seen_here, tasks)) == expected


def test_games_of_textworld_are_generated_alike(tmp_path, monkeypatch):
    made = []
    for cache in ("a", "b"):
        monkeypatch.setenv("TURNKEY_CACHE", str(tmp_path / cache))
        made.append(make_panel("t", "turnkey/TextWorld-v0", {"challenge": "coin_collector"}, {}, number=2).text())
    assert made[0] == made[1]
    published_tasks = find("textworld-48").content["tasks"]
    assert [task["seed"] for task in published_tasks[:2]] == [task["seed"] for task in json.loads(made[0])["tasks"]]
