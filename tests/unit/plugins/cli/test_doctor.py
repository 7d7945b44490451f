"""What ``turnkey doctor`` makes of what it found; the looking itself is a contract test."""

import json

from rich.console import Console

from verl_turnkey.plugins.cli import doctor
from verl_turnkey.plugins.cli.doctor import Report, _show, one_per_name


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
        plugins=[point("plugin of verl", "theirs", "failed"), point("own package", "ours", "loaded")],
        seams=["verl.x.y is gone (used for: z)"],
        broken_imports={"verl.a": "..."},
    )
    assert report.problems == [
        "loss psft is missing",
        "plugin of verl theirs failed to load",
        "verl changed: verl.x.y is gone",
        "verl.a cannot be imported",
    ]


def test_it_fits_a_screen_of_80_columns_and_names_what_is_wrong(capsys):
    names = [f"method_{i}" for i in range(40)]
    points = [point("estimator", name, "registered") for name in names]
    points += [point("loss", "psft", "failed") | {"detail": "Traceback\nImportError: no"}, *POINTS[2:3]]
    _show(Console(width=80), Report("a place", points=points))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "40 registered" in text
    assert all(name in text for name in names)
    assert "loss psft: failed. ImportError: no" in text
    assert "estimator salt: clash." in text


def test_json_is_for_scripts(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "inspect_process", lambda place: Report(place, points=POINTS))
    assert doctor.run(in_ray=False, address=None, as_json=True) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == ["this process: loss psft is missing"]
    assert {row["package"] for row in result["versions"]} >= {"verl", "torch"}
    assert result["places"][0]["points"] == POINTS
