"""Commands that look at what runs left behind. They need no verl and no GPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs, several seeds of each method")],
    metric: Annotated[str | None, typer.Option(help="val success, success, or the name of a metric")] = None,
    level: Annotated[float | None, typer.Option(help="also what it takes to reach this value")] = None,
    by: Annotated[list[str] | None, typer.Option(help="method, loss, env, model or a key: groups by it alone")] = None,
    x: Annotated[str, typer.Option("--x", help="step, interactions (turns played), tokens or seconds")] = "step",
    baseline: Annotated[str | None, typer.Option(help="name of the group that the others are held against")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for comparison.json, .html and .png")] = None,
) -> None:
    """Compare runs. Groups the seeds of a configuration; curves, intervals, steps to a level, time by part."""
    from verl_turnkey.plugins.seeing import report
    from verl_turnkey.plugins.seeing.compare import compare as numbers
    from verl_turnkey.plugins.seeing.runs import read

    found = numbers([read(folder) for folder in runs], metric=metric, level=level, by=by or (), x=x, baseline=baseline)
    report.print_tables(found)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "comparison.html").write_text(report.page(found), encoding="utf-8")
    written = ["comparison.json", "comparison.html"]
    if find_spec("matplotlib"):
        report.draw([found], out / "comparison.png")
        written.append("comparison.png")
    else:
        typer.echo('no picture: pip install "verl-turnkey[viz]"', err=True)
    typer.echo(f"{', '.join(written)} in {out}")
