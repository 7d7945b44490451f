"""env-check with the environment in a process of its own: the defects that show only there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import defective_envs
import pytest
from defective_envs import IN_PROCESSES

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

    names = ["Corridor", *(env.__name__ for env, *_ in IN_PROCESSES)]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(report, names), strict=True))


@pytest.mark.parametrize(
    ("env", "property", "status", "words"), IN_PROCESSES, ids=[env.__name__ for env, *_ in IN_PROCESSES]
)
def test_a_defect_that_shows_in_processes(in_processes, env, property, status, words):
    report = in_processes[env.__name__]
    assert judged(report) == {property: status}
    assert words in report[property].evidence


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
