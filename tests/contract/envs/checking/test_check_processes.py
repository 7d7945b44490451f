"""env-check with the environment in a process of its own: the defects that show only there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import defective_envs
import pytest
from defective_envs import IN_PROCESSES
from live_processes import dead_soon

from verl_turnkey.envs import UnknownEnvironmentError
from verl_turnkey.envs.checking.report import Report, check

DEFECTIVE = defective_envs.__file__
SMALL = {"seeds": 2, "rollouts": 4, "steps": 12}


def judged(report: Report) -> dict[str, str]:
    return {finding.property: finding.status for finding in report.findings if finding.status in ("fail", "warn")}


@pytest.fixture(scope="module")
def in_processes() -> dict[str, Report]:
    """All at the same time: they mostly wait for processes to start, or to time out."""

    def report(name: str) -> Report:
        return check(f"defect/{name}-v0", modules=[DEFECTIVE], processes=1, step_timeout=6, **SMALL)

    names = ["Corridor", "StaysTired", *(env.__name__ for env, *_ in IN_PROCESSES)]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(report, names), strict=True))


@pytest.mark.parametrize(
    ("env", "property", "status", "words"), IN_PROCESSES, ids=[env.__name__ for env, *_ in IN_PROCESSES]
)
def test_a_defect_that_shows_in_processes(in_processes, env, property, status, words):
    report = in_processes[env.__name__]
    assert judged(report) == {property: status}
    assert words in report[property].evidence


def test_what_an_instance_keeps_is_blamed_on_the_instance(in_processes):
    evidence = in_processes["StaysTired"]["reuse"].evidence
    assert evidence.startswith("an instance that had played before")
    assert "then 'You are tired.'" in evidence


def test_the_healthy_one_in_processes(in_processes):
    report = in_processes["Corridor"]
    assert judged(report) == {}
    assert {f.property for f in report.findings if f.status == "skip"} == {"threads"}
    assert report["clone"].evidence.startswith("by a reset and a replay in another process: 1 made, ")
    assert report["oracle"].evidence == "solved 2 of 2 episodes in 4 to 5 steps"
    measures = report.measures
    assert 0.3 < measures.anchor_rate <= 1.0
    assert 20 < measures.memory_mb < 500
    assert measures.steps_per_second > 100
    assert 0 < measures.reset_ms <= measures.reset_ms_max


def test_an_unknown_name_is_an_error_and_no_finding():
    with pytest.raises(UnknownEnvironmentError, match="did you mean 'defect/Corridor-v0'"):
        check("defect/Coridor-v0", modules=[DEFECTIVE], processes=1)


STARTS_A_SERVER = """
import os, subprocess
from pathlib import Path
import gymnasium

class Serving(gymnasium.Env):
    def __init__(self):
        server = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with Path(__file__).with_suffix(".pids").open("a") as file:
            print(server.pid, os.environ["CUDA_VISIBLE_DEVICES"] or "none", file=file)
    def reset(self, *, seed=None, options=None):
        return "here", {}
    def step(self, action):
        return "over", 0.0, True, False, {}

gymnasium.register("test/Serving-v0", entry_point=Serving)
"""


def test_it_runs_as_in_a_host_and_what_it_starts_ends_with_the_check(tmp_path: Path, monkeypatch):
    """Without a device, and whatever session a server of its own is in."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    path = tmp_path / "serving.py"
    path.write_text(STARTS_A_SERVER)
    report = check("test/Serving-v0", modules=[str(path)], processes=1, **SMALL)
    assert report["runs"].status == report["processes"].status == "pass"
    lines = path.with_suffix(".pids").read_text().splitlines()
    pids, devices = zip(*(line.split() for line in lines), strict=True)
    assert len(pids) > 4
    assert set(devices) == {"none"}
    assert dead_soon(*map(int, pids))
