"""The script that draws the pictures of runs in README and docs/, on invented logs, and the labels that are there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import synthetic_run
from PIL import Image

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import pictures  # noqa: E402

DOCS = ROOT / "docs"
DRAWN = ("quickstart.png", "view-collapse.png", "view-episode.png", "view-group.png")
SHOTS = DRAWN[1:]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each picture by its name, of a run that learns and of one that loses its success at step 8."""
    folder = tmp_path_factory.mktemp("pictures")
    healthy, collapsed = folder / "healthy", folder / "collapsed"
    synthetic_run.write(healthy, episodes=240, turns=16, steps=12)
    synthetic_run.write(collapsed, episodes=240, turns=16, steps=12, lost=8)
    rates = [{"step": step, "data": {"episode/success_rate": 0.3 + step / 20}} for step in range(1, 11)]
    (healthy / "metrics-1.jsonl").write_text("\n".join(map(json.dumps, rates)))
    summary = {"validation": {"0": 0.3, "10": 0.9}, "n_val": 64, "method": "gigpo", "model": "tiny", "seed": 0}
    (healthy / "summary.json").write_text(json.dumps(summary))
    with pictures.chromium() as browser:
        paths = [*pictures.of_runs(browser, healthy, healthy, collapsed, folder)]
        assert browser.console() == []
    return {path.name: path for path in paths}


def test_all_pictures_are_drawn(drawn: dict[str, Path]) -> None:
    assert sorted(drawn) == sorted(DRAWN)
    sizes = {name: Image.open(path).size for name, path in drawn.items()}
    assert sizes["view-episode.png"] == (1200, 860)
    assert sizes["view-group.png"] == (1200, 800)
    assert sizes["view-collapse.png"] == (1360, 1000)
    for path in drawn.values():
        assert 10_000 < path.stat().st_size < 200_000


def test_a_picture_keeps_its_labels(drawn: dict[str, Path]) -> None:
    labels = {name: pictures.labels_in(drawn[name]) for name in SHOTS}
    assert {"Run", "Episodes", "Group", "Compare"} <= set.intersection(*labels.values())
    assert {"prompt", "response", "reward", "composed reward"} <= labels["view-episode.png"]
    assert {"Where winners and losers part", "states"} <= labels["view-group.png"]
    assert {"from step", "what changed"} <= labels["view-collapse.png"]


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("view-*.png")))
def test_the_pictures_of_the_documentation_show_the_labels_of_today(drawn: dict[str, Path], name: str) -> None:
    labels = pictures.labels_in(DOCS / name)
    assert labels, f"docs/{name} keeps no labels: draw it with benchmarks/pictures.py"
    assert labels <= pictures.labels_in(drawn[name]), f"draw docs/{name} anew with benchmarks/pictures.py"


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.png")))
def test_each_picture_is_on_a_page(name: str) -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "benchmarks/results").glob("*.md")]
    image = re.compile(rf"!\[[^\]]+\]\((?:[./]*docs/)?{name}\)")
    assert any(image.search(page.read_text(encoding="utf-8")) for page in pages)
