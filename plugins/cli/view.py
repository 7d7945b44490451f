"""Commands that look at what runs left behind. They need no verl and no GPU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.plugins.cli.packages import require_pandas
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.view.join import NoLog, find_log, load
from verl_turnkey.plugins.view.runs import read
from verl_turnkey.plugins.view.traces import OUTCOMES, chosen, endpoint, send, traces, write_file

SPLITS = ("training", "validation")

app = typer.Typer()


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs, several seeds of each method")],
    metric: Annotated[str | None, typer.Option(help="val success, success, or the name of a metric")] = None,
    level: Annotated[float | None, typer.Option(help="also what it takes to reach this value")] = None,
    by: Annotated[list[str] | None, typer.Option(help="method, loss, env, model or a key: groups by it alone")] = None,
    x: Annotated[str, typer.Option("--x", help="step, interactions (turns played), tokens or seconds")] = "step",
    baseline: Annotated[str | None, typer.Option(help="name of the group that the others are held against")] = None,
    across_panels: Annotated[bool, typer.Option(help="compare runs that validate on different panels, too")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for comparison.json and .png")] = None,
) -> None:
    """Compare runs. Groups the seeds of a configuration; curves, intervals, steps to a level, time by part."""
    from verl_turnkey.plugins.view import compare
    from verl_turnkey.plugins.view.compare import compare as numbers

    logged = []
    for folder in runs:  # runs/* may hold other things
        try:
            logged.append(read(folder))
        except FileNotFoundError as error:
            if folder == runs[-1] and not logged:
                raise
            typer.echo(f"left out: {error}", err=True)
    if not across_panels:
        refuse_other_panels([run.folder for run in logged])
    comparison = numbers(logged, metric=metric, level=level, by=by or (), x=x, baseline=baseline)
    compare.print_tables(comparison)
    if out is None:
        return
    write_text(out / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    written = ["comparison.json"]
    if find_spec("matplotlib"):
        compare.draw([comparison], out / "comparison.png")
        written.append("comparison.png")
    else:
        typer.echo('no picture: pip install "verl-turnkey[viz]"', err=True)
    typer.echo(f"{', '.join(written)} in {out}")


def refuse_other_panels(folders: Sequence[Path]) -> None:
    """Refuse runs that validate on different panels; those without a panel are compared with any."""
    first: dict[str, tuple[Path, str]] = {}
    for folder in folders:
        try:
            info = json.loads((find_log(folder) / "run.json").read_text(encoding="utf-8"))
        except (NoLog, FileNotFoundError):
            continue
        if panel := info.get("panel"):
            first.setdefault(panel["sha256"], (folder, panel["name"]))
    if len(first) > 1:
        (run, name), (other_run, other_name) = list(first.values())[:2]
        hashes = " and ".join(sha256[:16] for sha256 in first)
        raise ConfigError(
            f"{run} validates on the panel {name}, {other_run} on {other_name} (sha256 {hashes}): their validation "
            "results are not comparable. Compare runs of one panel, or add --across-panels"
        )


@app.command()
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs, or their turnkey_log folders")],
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("view.html"),
    serve: Annotated[bool, typer.Option("--serve", help="serve it to this machine instead; follows runs")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of --serve; 0: any that is free")] = 0,
    max_mb: Annotated[float, typer.Option(min=1, help="size of the page; --serve has no limit")] = 60,
    open_it: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
) -> None:
    """Show runs in a browser. Curves, what is wrong, each turn with its credit; one file that loads nothing.

    Other viewers read traces: turnkey export RUN --otlp URL|FILE.
    """
    import webbrowser

    require_pandas("view")
    from verl_turnkey.plugins.view import page

    if serve:
        made, address = page.server(page.Data(runs), port)
        typer.echo(f"{address}\nfor this machine only; Ctrl-C ends it")
        if open_it:
            webbrowser.open(address)
        with made, suppress(KeyboardInterrupt):
            made.serve_forever()
        return
    loaded = [load(folder) for folder in runs]
    text = page.html(page.blocks(loaded, max_mb), live=False)
    write_text(out, text)
    typer.echo(f"{sum(len(run.episodes) for run in loaded)} episodes in {out.resolve()} ({len(text) / 1e6:.1f} MB)")
    if open_it and not webbrowser.open(address := out.resolve().as_uri()):
        typer.echo(f"no browser could be started here: open {address}")


@app.command(hidden=True)  # a door of `view`, which names it
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, or its turnkey_log folder")],
    otlp: Annotated[
        str, typer.Option(metavar="URL|FILE", help="OTLP/HTTP receiver (no path: /v1/traces), or .jsonl file")
    ],
    steps: Annotated[str | None, typer.Option(help="steps in which episodes began: 3, 1-10, 20- or 1-3,7")] = None,
    split: Annotated[str | None, typer.Option(help="training or validation")] = None,
    outcome: Annotated[str | None, typer.Option(help="won, lost or failed")] = None,
    search: Annotated[str | None, typer.Option(help="part of the task, seed, key or environment")] = None,
    content: Annotated[bool, typer.Option(help="with the texts of model, environment and tasks")] = True,
) -> None:
    """Export episodes as OpenTelemetry traces. Turns, calls, rewards and credit.

    Reads OTEL_EXPORTER_OTLP_HEADERS and the exporter's other variables.

    turnkey export runs/errands --otlp http://127.0.0.1:4318 --outcome failed
    """
    require_pandas("export")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as error:
        package = "opentelemetry-exporter-otlp-proto-http"
        raise ImportError(f"turnkey export needs OpenTelemetry's exporter: pip install {package}") from error
    for name, value, values in (("--split", split, SPLITS), ("--outcome", outcome, OUTCOMES)):
        if value not in (None, *values):
            raise typer.BadParameter(f"expected one of {', '.join(values)}, got {value!r}", param_hint=name)
    if is_address := "://" in otlp or re.fullmatch(r"[\w.-]+:\d+(/\S*)?", otlp) is not None:
        endpoint(otlp)
    loaded = load(run)
    for note in loaded.notes:
        typer.echo(note, err=True)
    keep = chosen(loaded, steps=_ranges(steps), split=split, outcome=outcome, search=search)
    if not keep.any():
        raise ValueError(f"none of the {len(keep)} episodes of {run} passes the filters: widen --steps, --split, ...")
    spans = traces(loaded, keep, content)
    counts = send(otlp, spans, int(keep.sum())) if is_address else write_file(Path(otlp), spans)
    typer.echo(f"{counts[0]} episodes, {counts[1]} spans: {masked(otlp)}")


def _ranges(steps: str | None) -> list[range]:
    """``1-3,7-`` as ranges."""
    ranges = []
    for text in steps.split(",") if steps is not None else ():
        if not (match := re.fullmatch(r"(\d+)(?:(-)(\d*))?", text.strip())):
            message = f"expected 3, 1-10, 20- or 1-3,7, for example, got {steps!r}"
            raise typer.BadParameter(message, param_hint="--steps")
        first, dash, last = match.groups()
        ranges.append(range(int(first), int(last or (sys.maxsize - 1 if dash else first)) + 1))
    return ranges
