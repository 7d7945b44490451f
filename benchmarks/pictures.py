"""The pictures of real runs in README and docs/: ``quickstart.png`` and every ``view-NAME.png``.

::

    python benchmarks/pictures.py run      # train missing runs (half an hour on 2 cores), then draw
    python benchmarks/pictures.py draw     # draw from finished runs
    python benchmarks/pictures.py draw --quickstart RUN --healthy RUN --collapsed RUN     # from runs elsewhere

``quickstart.png`` shows every seed that ``real_model.py`` keeps. A picture of the viewer stores its labels as
text in the PNG file; a test compares them with the viewer's labels. ``evidence/tables.py`` draws
evidence.png.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests/contract")]

from browser import Browser  # noqa: E402
from quickstart_runs import train_missing  # noqa: E402
from real_model import lines  # noqa: E402

from verl_turnkey.plugins.view.join import LoggedRun, load  # noqa: E402
from verl_turnkey.plugins.view.page import blocks, html  # noqa: E402

RUNS = ROOT / "runs" / "pictures"
DOCS = ROOT / "docs"
TOO_LARGE = "actor_rollout_ref.actor.optim.lr=2e-2"
LABELS = (
    ".bar nav a, .part-choice span, .filters label span, .facts dt, h2:not(.action), .said h3, .cost span, "
    ".evidence th[scope=col]"
)
VISIBLE = """
    return [...document.querySelectorAll(arguments[0])].filter((e) => {
        const box = e.getBoundingClientRect();
        return box.width > 0 && box.top >= 0 && box.bottom <= innerHeight;
    }).map((e) => e.textContent)
"""

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run() -> None:
    """Train the runs that are missing, then draw all pictures."""
    train_missing(RUNS / "quickstart", method="gigpo", seed=0, steps=10, options=("--model", "smollm2"))
    train_missing(RUNS / "healthy", method="gigpo", seed=0, steps=12)
    train_missing(RUNS / "collapsed", method="gigpo", seed=0, steps=12, options=("--override", TOO_LARGE))
    draw()


@app.command()
def draw(
    quickstart: Annotated[Path, typer.Option(help="a run of examples/quickstart.sh")] = RUNS / "quickstart",
    healthy: Annotated[Path, typer.Option(help="a run that learned")] = RUNS / "healthy",
    collapsed: Annotated[Path, typer.Option(help="a run that lost its success")] = RUNS / "collapsed",
    out: Annotated[Path, typer.Option(help="folder of the pictures")] = DOCS,
) -> None:
    """Draw the pictures whose runs are there."""
    with chromium() as browser:
        for path in of_runs(browser, quickstart, healthy, collapsed, out):
            typer.echo(path)


def of_runs(browser: Browser, quickstart: Path, healthy: Path, collapsed: Path, out: Path) -> Iterator[Path]:
    """Draw the seeds that are kept, and the pictures whose runs are there; yields their paths."""
    errands = [line for line in lines("run") if (line["game"], line["method"]) == ("errands", "gigpo")]
    yield learning_curves(errands, out / "quickstart.png")
    if (quickstart / "turnkey_log").is_dir():
        yield from credit(browser, quickstart, out)
    if (healthy / "turnkey_log").is_dir() and (collapsed / "turnkey_log").is_dir():
        yield side_by_side(browser, [collapsed, healthy], out / "view-collapse.png")


def learning_curves(runs: list[dict[str, Any]], path: Path) -> Path:
    """Plot success by number of updates, for each seed and their mean; ``runs``: lines of :mod:`real_model`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps, n_val = ({run[key] for run in runs} for key in ("steps", "n_val"))
    if len(steps) != 1 or len(n_val) != 1:
        raise ValueError(f"expected runs of one length and one validation, got {steps=} and {n_val=}")
    curves = np.array([run["curve"] for run in runs])  # (seeds, steps): step i plays with the policy after i updates
    updates, ends = np.arange(curves.shape[1]), [0, curves.shape[1]]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, run in enumerate(runs):
        axes.plot(updates, curves[i], color="tab:blue", alpha=0.45, linewidth=0.9, label="" if i else "one seed")
        label = "" if i else f"validation of one seed, {run['n_val']} episodes"
        validation = [run["success_before"], run["success_after"]]
        axes.plot(ends, validation, "o", color="black", markersize=5, alpha=0.7, clip_on=False, label=label)
    axes.plot(updates, curves.mean(0), color="tab:blue", linewidth=2.8, label=f"mean of {len(runs)} seeds")
    axes.set(
        xlabel="updates of the policy",
        ylabel="success rate",
        ylim=(0, 1),
        xlim=(-0.2, ends[1] + 0.2),
        title="Errands, SmolLM2-135M, +turnkey=gigpo: training episodes, 32 per point",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


@contextmanager
def chromium() -> Iterator[Browser]:
    browser = Browser()
    browser.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    try:
        yield browser
    finally:
        browser.close()


@contextmanager
def page(run: LoggedRun) -> Iterator[str]:
    """The address of the page that ``turnkey view`` writes of a run."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "page.html")
        path.write_text(html(blocks([run]), live=False), encoding="utf-8")
        yield path.as_uri()


def credit(browser: Browser, folder: Path, out: Path) -> Iterator[Path]:
    """``view-episode.png``, ``view-group.png``: the solved episode with the worst turn, of groups of mixed outcomes."""
    run = load(folder)
    mixed = run.episodes.groupby("group")["success"].transform(
        lambda won: len(won) > 7 and 0.3 < won.eq(True).mean() < 0.7
    )
    worst = run.turns.groupby("at")["advantage"].min()[run.episodes["success"].eq(True) & mixed]
    key, group = run.episodes.loc[worst.idxmin(), ["episode", "group"]]
    with page(run) as address:
        for name, height, where in (("episode", 860, f"episode/{key}"), ("group", 800, f"group/{group}")):
            picture, labels = screenshot(browser, address, f"#/{where}?theme=light", 1200, height)
            yield save(picture, labels, out / f"view-{name}.png")


def side_by_side(browser: Browser, folders: list[Path], path: Path, *, width: int = 680, height: int = 1000) -> Path:
    """The first pages of runs, from left to right."""
    whole, every = Image.new("RGB", (width * len(folders), height)), set()
    for i, folder in enumerate(folders):
        with page(load(folder)) as address:
            picture, labels = screenshot(browser, address, "#/run?theme=light", width, height)
        whole.paste(picture, (i * width, 0))
        every |= labels
    return save(whole, every, path)


def screenshot(browser: Browser, address: str, fragment: str, width: int, height: int) -> tuple[Image.Image, set[str]]:
    """A picture of a page, and the labels in it: the words before a label's first number."""
    browser.size(width, height)
    browser.open(address, fragment)
    labels = {re.split(r"[\d–−=]", text)[0].strip() for text in browser.run(VISIBLE, LABELS)}
    return Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB"), labels - {""}


def save(picture: Image.Image, labels: set[str], path: Path) -> Path:
    text = PngInfo()
    text.add_text("labels", json.dumps(sorted(labels)))
    picture.quantize(128, dither=Image.Dither.NONE).save(path, pnginfo=text, optimize=True)
    return path


def labels_in(path: Path) -> set[str]:
    """The labels of a picture; none unless :func:`save` wrote it."""
    with Image.open(path) as picture:
        return set(json.loads(picture.info.get("labels", "[]")))


if __name__ == "__main__":
    app()
