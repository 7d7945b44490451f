"""What ``turnkey doctor`` makes of what it found; the looking itself is a contract test."""

from __future__ import annotations

from verl_turnkey.plugins.cli.doctor import Report, one_per_name


def point(kind: str, name: str, status: str) -> dict[str, str]:
    return {"kind": kind, "name": name, "status": status, "detail": ""}


POINTS = [
    point("estimator", "gigpo", "registered"),
    point("estimator", "turnkey/gigpo", "registered"),
    point("estimator", "salt", "clash"),
    point("estimator", "turnkey/salt", "registered"),
    point("loss", "psft", "missing"),
    point("loss", "turnkey/psft", "missing"),
]


def test_one_row_per_name_and_one_more_where_the_second_name_fares_otherwise():
    assert [p["name"] for p in one_per_name(POINTS)] == ["gigpo", "salt", "turnkey/salt", "psft"]


def test_problems_are_named():
    report = Report(
        "here",
        points=POINTS,
        plugins=[{"name": "theirs", "status": "failed", "detail": ""}, {"name": "ours", "status": "loaded"}],
        seams=["verl.x.y is gone (used for: z)"],
        broken_imports={"verl.a": "..."},
    )
    assert report.problems == [
        "loss psft is missing",
        "verl's plugin theirs failed to load",
        "verl changed: verl.x.y is gone",
        "verl.a cannot be imported",
    ]
