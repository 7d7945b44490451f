"""A folder belongs to one process; what ended runs left is found and removed, and nothing else."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.shutdown import run_files
from verl_turnkey.plugins.shutdown.driver import guarded
from verl_turnkey.plugins.shutdown.run_files import OF_CHECKPOINTS, own_folder

OTHER = """
import sys
from verl_turnkey.plugins.shutdown.run_files import own_folder
with own_folder({"default_local_dir": sys.argv[1], "save_freq": 1}):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_one_runs_until_its_process_ends(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    mine: dict[str, Any] = {"default_local_dir": str(folder), "save_freq": 10}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "holds\n"
        message = rf"default_local_dir={folder}: .*\(process {other.pid} on .*experiment_name"
        with pytest.raises(ConfigError, match=message), own_folder(mine):
            pytest.fail("began")
        with pytest.raises(ConfigError, match=message):
            guarded(lambda *_, **__: pytest.fail("began"))({"trainer": mine}, None)
        for free in ({"save_freq": -1}, {"default_local_dir": str(tmp_path / "another")}):  # the first writes nothing
            with own_folder(mine | free):
                pass
        other.kill()
    with own_folder(mine):
        assert (folder / OF_CHECKPOINTS).read_text().startswith(f"process {os.getpid()} on ")
    with own_folder(mine):  # the next run of the same process
        pass


def test_a_folder_that_cannot_be_made_is_left_to_another_check_and_a_program_may_lack_the_keys(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    for trainer in ({"default_local_dir": str(tmp_path / "file" / "checkpoints"), "save_freq": 1}, {}):
        with own_folder(trainer):
            pass


LONG_AGO = 2 * run_files.QUIET_SECONDS
SESSION = "session_2026-01-02_03-04-05_678901_234"
SOCKET = "0a1b2c3d-0000-4000-8000-0123456789ab"
LEFT = (
    "shm/psm_0123abcd",
    f"shm/verl_weights_{'0' * 32}",
    "tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock",
    f"tmp/{SOCKET}",
    f"tmp/vllm_dist_{'a' * 32}",
    "tmp/ckpt_0123abcd.lock",
    f"tmp/ray/{SESSION}",
    "tmp/turnkey-agent-0abc_def",
    "tmp/turnkey-gw-0abc_def",
)
FOLDERS = (SESSION, "turnkey-agent-0abc_def", "turnkey-gw-0abc_def", "turnkey-agent-mine")
OTHERS = (
    *("shm/psm_mine", "shm/sem.loky-1-x", f"tmp/{SOCKET}0", "tmp/ckpt_0123abcd.lock2", "tmp/ray/notes", "tmp/tk0"),
    *("tmp/turnkey-agent-mine", "tmp/turnkey-agent-afilexxx"),
)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``shm`` and ``tmp`` of a machine on which a run was killed long ago."""
    place = tmp_path_factory.mktemp("m", numbered=True)
    monkeypatch.chdir(place)  # the path of a socket has at most 107 bytes
    for name in (*LEFT, *OTHERS):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name in FOLDERS:
            path.mkdir()
            (path / "raylet.out").write_bytes(b"." * 5000)
            age(path / "raylet.out")
            if path.name == SESSION:
                (path.parent / "session_latest").symlink_to(path.name)
        elif path.suffix == ".sock" or path.name == SOCKET:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(name)
        else:
            path.write_bytes(b"." * 10)
        age(path)
    monkeypatch.setattr(run_files, "SHM", place / "shm")
    monkeypatch.setattr(run_files, "_processes", children)
    monkeypatch.setattr(run_files.tempfile, "gettempdir", lambda: str(place / "tmp"))
    return place


every = run_files._processes


def children() -> dict[int, run_files._Process]:
    """The processes of this machine, as far as they are of a test: runs may go on beside it."""
    return {pid: process for pid, process in every().items() if process.parent == os.getpid()}


def age(path: Path) -> None:
    when = time.time() - LONG_AGO
    os.utime(path, (when, when))


def names(place: Path) -> set[str]:
    return {str(leftover.path.relative_to(place)) for leftover in run_files.find()}


@pytest.fixture
def process(place: Path) -> Iterator[Callable[[str, str], subprocess.Popen]]:
    """``process(code, command)``: a process that has done ``code`` and waits."""
    started = []

    def start(code: str, command: str = "") -> subprocess.Popen:
        words = [sys.executable, "-c", f"{code}\nprint(flush=True)\nimport time; time.sleep(600)", command]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, cwd=place))
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_nobody_uses_is_found_and_nothing_else(place: Path):
    assert names(place) == set(LEFT)
    size = {leftover.path.name: leftover.bytes for leftover in run_files.find()}
    assert size[SESSION] >= 5000
    os.utime(place / LEFT[6] / "raylet.out")  # a session whose logs are written
    assert names(place) == set(LEFT) - {LEFT[6]}


def test_what_is_new_may_not_be_open_yet(place: Path):
    for name in LEFT:
        os.utime(name)
        assert name not in names(place)
    assert names(place) == set()


LISTENS = "import socket; held = socket.socket(socket.AF_UNIX); held.bind('{}'); held.listen()"


@pytest.mark.parametrize(
    ("used", "code", "word"),
    [
        (LEFT[0], "held = open('{}')", ""),
        (LEFT[0], "import mmap, os; f = open('{}', 'rb+'); held = mmap.mmap(f.fileno(), 0); os.closerange(3, 64)", ""),
        (LEFT[6], "held = open('{}/raylet.out')", ""),
        (LEFT[3], LISTENS, ""),
        (LEFT[8], LISTENS.replace("{}", "{}/s"), ""),  # a gateway
        (LEFT[6], "pass", "--log-dir={}/logs"),  # a Ray whose processes name its folder
        (LEFT[7], "import os; os.chdir('{}')", ""),  # an agent in the folder of its episode
    ],
)
def test_what_a_process_uses_stays(place: Path, process, used: str, code: str, word: str):
    path = place / used
    if code == LISTENS:
        path.unlink()
    running = process(code.format(path), word.format(path))
    for changed in (path / "s", path):
        if changed.exists():
            age(changed)
    assert names(place) == set(LEFT) - {used}
    running.kill()
    running.wait()
    assert names(place) == set(LEFT)


@pytest.mark.parametrize("command", ["ray::AgentLoopWorker", "/usr/bin/turnkey eval"])
def test_the_folder_of_an_episode_stays_while_a_run_is_there_that_is_older(place: Path, process, monkeypatch, command):
    process("pass", command)
    assert names(place) == set(LEFT)
    older = {pid: process._replace(began=time.time() - 2 * LONG_AGO) for pid, process in children().items()}
    monkeypatch.setattr(run_files, "_processes", lambda: older)
    assert LEFT[7] not in names(place)


def test_what_is_used_without_being_open_stays_while_a_run_is_there_that_is_older(place: Path, process, monkeypatch):
    process("pass", "VLLM::EngineCore")
    assert names(place) == set(LEFT), "the files are older than this run"
    begun = time.time() - run_files.QUIET_SECONDS
    later = set(LEFT[4:6])
    for name in later:
        os.utime(name, (begun, begun))
    assert names(place) == set(LEFT)
    older = {pid: process._replace(began=begun - 1) for pid, process in children().items()}
    assert any("VLLM::EngineCore" in process.command for process in older.values())
    monkeypatch.setattr(run_files, "_processes", lambda: older)
    assert names(place) == set(LEFT) - later


def test_doctor_shows_and_removes_on_demand(place: Path):
    result = CliRunner().invoke(app, ["doctor", "--clean"])
    assert result.exit_code == 0, result.output
    assert "weights on their way to vLLM" in result.output
    assert "turnkey doctor --clean --yes removes them" in result.output
    assert names(place) == set(LEFT)
    assert "9 removed" in CliRunner().invoke(app, ["doctor", "--clean", "--yes"]).output
    assert not any(os.path.lexists(name) for name in (*LEFT, "tmp/ray/session_latest"))
    assert all(os.path.lexists(name) for name in OTHERS)
    assert "nothing is left" in CliRunner().invoke(app, ["doctor", "--clean", "--yes"]).output
    assert CliRunner().invoke(app, ["doctor", "--yes"]).exit_code == 2


def test_nothing_is_removed_where_the_files_of_a_process_cannot_be_seen(place: Path, monkeypatch):
    monkeypatch.setattr(run_files, "_hidden", lambda processes: ["process 7 (python)"])
    result = CliRunner().invoke(app, ["doctor", "--clean", "--yes"])
    assert result.exit_code == 1
    assert "process 7 (python) cannot be seen" in " ".join(result.output.split())
    assert all(os.path.lexists(name) for name in LEFT)


def test_what_was_made_anew_since_is_not_removed(place: Path):
    seen = {leftover.path: leftover.identity for leftover in run_files.find()}
    path = place / LEFT[0]
    path.rename(place / "shm" / "kept")  # or its number might be given again
    path.write_bytes(b"another's")
    assert run_files.remove(seen) == []
    assert {name for name in LEFT if os.path.lexists(name)} == {LEFT[0]}


def test_a_run_removes_what_its_processes_held_when_they_are_dead(place: Path, process):
    made = [place / "shm" / f"psm_{i:08x}" for i in range(3)]
    theirs = place / "tmp" / "0a1b2c3d-0000-4000-8000-00000000000f"
    files = run_files.RunFiles()
    with files:
        for path in (*made, theirs):
            path.write_bytes(b".")
        held = [*made[:2], theirs, place / LEFT[0]]
        of_run = process("; ".join(f"held{i} = open({str(path)!r})" for i, path in enumerate(held)))
        files.look()
        of_run.kill()
        of_run.wait()
        other = process(f"held = open({str(made[1])!r})")  # of another run by now
    files.clean(seconds=0.3)
    assert not made[0].exists()
    assert made[1].exists(), "held by another process"
    assert made[2].exists(), "never held by this run"
    assert theirs.exists(), "a file of the user's"
    assert (place / LEFT[0]).exists(), "older than the run"
    assert other.poll() is None


def test_cleaning_can_be_cut_short(place: Path, process):
    files = run_files.RunFiles()
    with files:
        path = place / "shm" / "psm_00000000"
        path.write_bytes(b".")
        process(f"held = open({str(path)!r})")
        files.look()
    files.stop_cleaning()
    began = time.monotonic()
    files.clean(seconds=60)
    assert time.monotonic() - began < 30
    assert path.exists()
