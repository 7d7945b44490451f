"""Each capability at each door: what tests/data/doors.yaml says of the pair holds, and it says something of each.

The doors of :data:`HERE` are opened in this process, on the launch line of the capability.
"""

from __future__ import annotations

import pickle
import re
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_lines import filled, write_files
from omegaconf import OmegaConf
from test_rules import ids_of

from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.checks.rules import rules
from verl_turnkey.plugins.cli.run_folder import RunFolder
from verl_turnkey.plugins.config.composing import composed, verls_config_dir
from verl_turnkey.plugins.config.leaves import every, make_absolute, uses, value_of
from verl_turnkey.plugins.config.roles import Use

TESTS = Path(__file__).parents[3]
DOORS = yaml.safe_load((TESTS / "data" / "doors.yaml").read_text(encoding="utf-8"))
FILES, LINES, CELLS = DOORS["files"], DOORS["lines"], DOORS["cells"]
NAMES = tuple(CELLS["plain"])
ERRORS = frozenset(id for id, rule in rules().items() if rule.level == "error")
CELL = re.compile(r"here|plain|(?:refused )?(?P<file>\w+)::(?P<test>\w+)|refused (?P<rule>[a-z-]+)")


@pytest.fixture(scope="module")
def words(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """``words(capability)``: those of its launch line, whose files exist."""
    folder = tmp_path_factory.mktemp("doors")
    files = write_files(folder, model_dir)
    write_parquet(folder / "service.parquet", [Task("turnkey/Service-v0", seed) for seed in range(8)], "shop", "train")
    return lambda capability: [*shlex.split(filled(LINES[capability], files)), "turnkey.env.probe=false"]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[list[str]], RunFolder]:
    """``run(words)``: the folder that a run of this launch line leaves."""

    def left_by(words: list[str]) -> RunFolder:
        folder = tmp_path / "first"
        record = folder / "hydra" / ".hydra"
        record.mkdir(parents=True)
        line = [*words, f"trainer.default_local_dir={folder}/checkpoints", f"turnkey.log.trajectories={folder}/log"]
        OmegaConf.save(config_of(line), record / "config.yaml")
        sources = [{"path": str(verls_config_dir()), "schema": "file", "provider": "main"}]
        runtime = {"cwd": str(tmp_path), "config_sources": sources}
        job, overrides = {"config_name": "ppo_trainer"}, {"task": line, "hydra": [f"hydra.run.dir={folder}/hydra"]}
        hydra = {"hydra": {"overrides": overrides, "job": job, "runtime": runtime}}
        OmegaConf.save(OmegaConf.create(hydra), record / "hydra.yaml")
        read = RunFolder.of(folder)
        assert read is not None
        return read

    return left_by


@cache
def _composed(words: tuple[str, ...]) -> bytes:
    return pickle.dumps(composed(words))


def config_of(words: list[str]) -> Any:
    """Each line composed once: that takes most of the time."""
    return pickle.loads(_composed(tuple(words)))


def refusals(words: list[str]) -> set[str]:
    return ids_of(config_of(words)) & ERRORS


def check(words: list[str], **_: Any) -> None:
    """The checks let the line pass."""
    assert refusals(words) == set()


def two_nodes(words: list[str], **_: Any) -> None:
    """The checks let the line pass with two nodes, and no path depends on the folder of the driver."""
    assert refusals([*words, "trainer.nnodes=2"]) == set()
    config = config_of(words)
    make_absolute(config, Path.cwd())
    assert make_absolute(config, Path("/elsewhere")) == []


def another_user(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **_: Any) -> None:
    """The checks let the line pass for somebody with another home, and without a name or a cache."""
    for name in ("USER", "LOGNAME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    check(words)


def offline(words: list[str], monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    """The checks let the line pass where nothing can be reached."""

    def refuse(_: socket.socket, address: Any) -> None:
        raise OSError(f"no network: {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    check(words)


def resume(words: list[str], run: Callable[[list[str]], RunFolder], **_: Any) -> None:
    """The line that resumes the run is its own, and the checks let it pass."""
    _, line = run(words).launch()
    assert set(words) <= set(line)
    check([word for word in line if not word.startswith("hydra.")])


def resume_after_a_move(words: list[str], run: Callable[[list[str]], RunFolder], tmp_path: Path, **_: Any) -> None:
    """In a copy the line names nothing of the original, and the checks let it pass."""
    shutil.copytree(run(words).folder, tmp_path / "copy")
    copy = RunFolder.of(tmp_path / "copy")
    assert copy is not None
    _, line = copy.launch()
    assert not [word for word in line if f"{tmp_path}/first" in word]
    assert f"trainer.default_local_dir={tmp_path}/copy/checkpoints" in line
    check([word for word in line if not word.startswith("hydra.")])


def eval_of_the_run(words: list[str], run: Callable[[list[str]], RunFolder], **_: Any) -> None:
    """Whatever determines how an episode is played reaches the evaluation."""
    trained = run(words)
    switches = [word for word in words if word.startswith("+turnkey")]
    base = composed([*switches, *(f"{key}=null" for key in ("data.train_files", "data.val_files"))])
    played = composed([*switches, *trained.playing(base)])
    config = config_of(words)
    for leaf in uses(Use.PLAYED, Use.SAMPLED):
        assert value_of(played, leaf) == value_of(config, leaf), leaf.key


def report(words: list[str], run: Callable[[list[str]], RunFolder], **_: Any) -> None:
    """The configuration that a report is made of has every value of the line."""
    trained, config = run(words), config_of(words)
    for key, leaf in every().items():
        value = value_of(config, leaf)
        if not isinstance(value, dict | list) and key in trained.config and "${" not in str(trained.config[key]):
            assert trained.config[key] == value or key == "turnkey.log.trajectories", key


HERE: dict[str, Callable[..., None]] = {
    "check": check,
    "report": report,
    "resume": resume,
    "resume after a move": resume_after_a_move,
    "eval of the run": eval_of_the_run,
    "offline": offline,
    "another user": another_user,
    "two nodes": two_nodes,
}


@cache
def names_in(file: str) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def test_(\w+)\(", (TESTS / FILES[file]).read_text(), re.MULTILINE))


def pairs(*kinds: str) -> Iterator[Any]:
    for capability, cells in CELLS.items():
        for door, cell in cells.items():
            if (cell == "here") == ("here" in kinds):
                yield pytest.param(capability, door, id=f"{capability}-{door}")


def test_no_cell_is_empty():
    assert CELLS.keys() == LINES.keys()
    assert all(tuple(cells) == NAMES for cells in CELLS.values())
    matches = [CELL.match(cell) for row in CELLS.values() for cell in row.values()]
    assert set(FILES) == {match["file"] for match in matches if match} - {None}


@pytest.mark.parametrize(("capability", "door"), [*pairs()])
def test_what_shows_a_cell_exists(capability: str, door: str):
    match = CELL.fullmatch(CELLS[capability][door])
    assert match is not None
    if match["file"]:
        assert match["test"] in names_in(match["file"])
    elif match["rule"]:
        assert match["rule"] in rules()
    else:
        assert CELLS["plain"][door] not in ("plain", *HERE), "no run shows this door"


@pytest.mark.parametrize(("capability", "door"), [*pairs("here")])
def test_a_door_that_is_opened_here(capability: str, door: str, words, run, monkeypatch, tmp_path):
    HERE[door](words(capability), run=run, monkeypatch=monkeypatch, tmp_path=tmp_path)
