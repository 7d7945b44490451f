"""Signals to a driver that waits for Ray, each in a process and a Ray of its own; and what it says when it ends."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("driver_program.py")


def run(
    tmp_path: Path, what: str, *signals: signal.Signals, grace: float = 300, send: Callable[..., None] = os.kill
) -> tuple[int, str]:
    """Exit status and stderr of a driver whose actor does ``what``; each signal is sent when the last was noticed."""
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        command = [sys.executable, DRIVER, what, str(grace), "trainer.resume_mode=resume_path", "a=b c"]
        process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        for number, sent in enumerate(signals):
            wait_for(log, "waiting" if number == 0 else f"verl-turnkey: {signals[0].name}", process)
            time.sleep(1.5 * (number > 0))  # a signal right after the first counts as its echo
            send(process.pid, sent)
        process.wait(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, log.read_text()


def wait_for(log: Path, text: str, process: subprocess.Popen) -> None:
    for _ in range(3000):
        if text in log.read_text():
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    pytest.fail(f"no {text!r} in {log.read_text()}")


@pytest.mark.parametrize(("number", "send"), [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)])
def test_a_signal_reaches_the_actor_and_the_driver_says_how_to_resume(tmp_path: Path, number, send):
    """A terminal sends the SIGINT of Ctrl-C to the group, in which Ray's processes are, too."""
    code, output = run(tmp_path, "listens", number, send=send)
    assert code == 75
    assert f"verl-turnkey: {number.name}: the run stops after this step, with a checkpoint" in output
    assert f"verl-turnkey: {number.name}: stopped after step 3. To resume:\n{sys.executable} {DRIVER} listens" in output
    assert output.rstrip().endswith("trainer.resume_mode=resume_path 'a=b c' trainer.resume_mode=auto")
    assert "Traceback" not in output


def test_a_second_signal_stops_at_once(tmp_path: Path):
    code, output = run(tmp_path, "sleeps", signal.SIGTERM, signal.SIGINT)
    assert code == 128 + signal.SIGINT
    assert "SIGINT: stopped at once by a second signal, without a new checkpoint. To resume:" in output
    # What may be in the folder is another run's.
    assert output.rstrip().endswith("trainer.resume_mode=resume_path 'a=b c'")


def test_before_the_first_step_the_first_signal_stops_at_once(tmp_path: Path):
    """As where verl waits for CPUs that Ray has not."""
    code, output = run(tmp_path, "loads", signal.SIGINT, send=os.killpg)
    assert code == 128 + signal.SIGINT
    assert "verl-turnkey: SIGINT: stopped before the first step, so there is nothing to save. To resume:" in output
    assert "stops after this step" not in output


def test_the_grace_ends(tmp_path: Path):
    code, output = run(tmp_path, "sleeps", signal.SIGTERM, grace=1)
    assert code == 128 + signal.SIGTERM
    assert "the step did not end within 1 s (turnkey.stop.grace): stopped without a new checkpoint" in output


@pytest.mark.parametrize("when", ["reports", "validates"])
def test_word_of_dead_processes_ends_the_waiting(tmp_path: Path, when):
    """After the first step has begun, and before it."""
    code, output = run(tmp_path, when)
    assert code == 69
    assert "verl-turnkey: a process died: inference server 0. To resume:" in output


def test_a_dead_process_ends_the_run_with_the_traceback_and_the_way_on(tmp_path: Path):
    code, output = run(tmp_path, "dies")
    assert code == 69
    assert "Traceback" in output
    last = output.rsplit("verl-turnkey: ", 1)[1]
    assert last.startswith("a process of the run is dead: The actor died")
    assert "class_name: Worker" in last.split("To resume:")[0]


def test_another_error_is_left_alone_and_shared_memory_of_the_run_is_not(tmp_path: Path, monkeypatch):
    of_run, of_nobody = (Path(f"/dev/shm/psm_{secrets.token_hex(4)}") for _ in range(2))
    of_nobody.touch()
    monkeypatch.setenv("SEGMENT", str(of_run))
    code, output = run(tmp_path, "fails")
    assert of_nobody.exists()
    of_nobody.unlink()
    assert not of_run.exists()
    assert code == 1
    assert "ValueError: as it was" in output
    assert "To resume" not in output


def test_a_process_that_ray_kills_where_memory_runs_out_is_a_dead_one(tmp_path: Path, monkeypatch):
    """Ray's own monitor, for which this machine has hardly any memory."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    code, output = run(tmp_path, "sleeps")
    assert code == 69
    last = output.rsplit("verl-turnkey: ", 1)[1]
    assert last.startswith("a process of the run is dead: ")
    assert "were killed due to the node running low on memory" in last
    assert last.rstrip().endswith("trainer.resume_mode=resume_path 'a=b c'")
