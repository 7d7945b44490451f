"""Commands that look at what runs left behind. They need no verl and no GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.advantage.text_files import whole_file, write_text
from verl_turnkey.plugins.cli.packages import require_pandas
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.view.join import NoLog, find_log, load
from verl_turnkey.plugins.view.runs import read

app = typer.Typer()
FILTERS = ("step", "split", "outcome", "kind", "task", "turns", "credit", "q")
"""keys of --filter, without pandas"""
EPISODES = 4
"""episodes that --text shows"""


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="runs, several seeds per method; or evaluations against opponents"),
    ],
    metric: Annotated[str | None, typer.Option(help="val success, success, or the name of a metric")] = None,
    level: Annotated[float | None, typer.Option(help="also the steps (or --x) to reach this value")] = None,
    by: Annotated[list[str] | None, typer.Option(help="method, loss, env, model or a key: groups by it alone")] = None,
    x: Annotated[str, typer.Option("--x", help="step, interactions (turns played), tokens or seconds")] = "step",
    baseline: Annotated[str | None, typer.Option(help="name of the group that the others are compared with")] = None,
    across_panels: Annotated[bool, typer.Option(help="compare runs that validate on different panels, too")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for comparison.json and .png")] = None,
) -> None:
    """Compare runs. Groups the seeds of a configuration; curves, intervals, steps to a level, time by part.

    For evaluations against opponents: Elo ratings of the players.
    """
    from verl_turnkey.plugins.view import compare
    from verl_turnkey.plugins.view.compare import compare as numbers

    evaluations = [folder for folder in runs if (folder / compare.RESULT).is_file()]
    if len(evaluations) == len(runs):
        if metric or level is not None or by or baseline or x != "step":
            raise typer.BadParameter("--metric, --level, --by, --x and --baseline are for runs, not for evaluations")
        comparison = compare.ratings(evaluations)
        compare.print_tables(comparison)
        if out is not None:
            write_text(out / "comparison.json", json.dumps(comparison, indent=1) + "\n")
            typer.echo(f"comparison.json in {out}")
        return
    logged = []
    for folder in runs:  # runs/* may hold other things
        try:
            if folder in evaluations:
                raise FileNotFoundError(f"expected the folder of a run, found an evaluation: {folder}")
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
    out: Annotated[Path | None, typer.Option(help="the page to write", show_default="view.html")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="serve it to this machine instead; follows runs")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port for --serve; 0: any free one")] = 0,
    max_mb: Annotated[float, typer.Option(min=1, help="size of the page; --serve has no limit")] = 60,
    open_it: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
    text: Annotated[bool, typer.Option("--text", help="print episodes here instead")] = False,
    export: Annotated[Path | None, typer.Option(help="the .jsonl to write instead, an episode per line")] = None,
    conditions: Annotated[
        list[str] | None,
        typer.Option("--filter", metavar="KEY=VALUE", help=f"episodes of --text and --export: {', '.join(FILTERS)}"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="most episodes per run; default for --text: 4")] = None,
) -> None:
    """Show runs: in a browser, or episodes on the terminal. Curves, what is wrong, each turn with its credit.

    --text shows the best and the worst of the last step; --filter chooses others, and may be repeated.

    turnkey view runs/errands --text --filter outcome=failed --filter step=12

    Other viewers read traces: turnkey export RUN --otlp URL|FILE.
    """
    if (text or export) and (serve or out or open_it):
        raise typer.BadParameter("--text and --export write no page: leave out --out, --serve and --open")
    if (conditions or limit) and not (text or export):
        raise typer.BadParameter("--filter and --limit go with --text or --export; the page has filters of its own")
    require_pandas("view")
    if text or export:
        return _episodes(runs, text, export, conditions, limit)
    return _page(runs, out or Path("view.html"), port if serve else None, max_mb, open_it)


def _episodes(
    runs: Sequence[Path], text: bool, export: Path | None, conditions: Sequence[str] | None, limit: int | None
) -> None:
    from verl_turnkey.plugins.cli.packages import console
    from verl_turnkey.plugins.view import conversations, terminal

    loaded = [load(folder) for folder in runs]
    chosen = [conversations.matching(run, conditions or ()) for run in loaded]
    if conditions and not any(map(len, chosen)):
        raise ConfigError(f"no episode fits --filter {' --filter '.join(conditions)}")
    if text:
        for run, rows in zip(loaded, chosen, strict=True):
            rows = rows if conditions else conversations.last_step(run)
            terminal.show(run, rows, limit or EPISODES, console(markup=False, highlight=False))
    else:
        for note in [note for run in loaded for note in run.notes]:
            typer.echo(note, err=True)
    if export is None:
        return
    number = without = 0
    with whole_file(export) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for run, rows in zip(loaded, chosen, strict=True):
            rows = rows if limit is None else conversations.extremes(run, rows, limit)
            for talk in conversations.conversations(run, rows):
                file.write(conversations.line(run, talk) + "\n")
                number, without = number + 1, without + (not talk.has_texts)
    typer.echo(f"{number} episode{'' if number == 1 else 's'} in {export}", err=text or not export.is_file())
    if without:
        typer.echo(f"{without} of them without messages: the log has not all of their texts", err=True)


def _page(runs: Sequence[Path], out: Path, port: int | None, max_mb: float, open_it: bool) -> None:
    import webbrowser

    from verl_turnkey.plugins.view import page

    if port is not None:
        made, address = page.server(page.Data(runs), port)
        typer.echo(f"{address}\nfor this machine only; Ctrl-C ends it")
        if open_it:
            webbrowser.open(address)
        with made, suppress(KeyboardInterrupt):
            made.serve_forever()
        return
    loaded = [load(folder) for folder in runs]
    html = page.html(page.blocks(loaded, max_mb), live=False)
    write_text(out, html)
    typer.echo(f"{sum(len(run.episodes) for run in loaded)} episodes in {out.resolve()} ({len(html) / 1e6:.1f} MB)")
    if open_it and not webbrowser.open(address := out.resolve().as_uri()):
        typer.echo(f"no browser could be started here: open {address}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, or its turnkey_log folder")],
    otlp: Annotated[
        str, typer.Option(metavar="URL|FILE", help="OTLP/HTTP receiver (no path: /v1/traces), or .jsonl file")
    ],
    conditions: Annotated[
        list[str] | None, typer.Option("--filter", metavar="KEY=VALUE", help=f"as for view: {', '.join(FILTERS)}")
    ] = None,
    content: Annotated[bool, typer.Option(help="include the texts of model, environment and tasks")] = True,
) -> None:
    """Export episodes as OpenTelemetry traces. Turns, calls, rewards and credit.

    Reads OTEL_EXPORTER_OTLP_HEADERS and the exporter's other variables.

    turnkey export runs/errands --otlp http://127.0.0.1:4318 --filter outcome=failed
    """
    require_pandas("export")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as error:
        package = "opentelemetry-exporter-otlp-proto-http"
        raise ImportError(f"turnkey export needs OpenTelemetry's exporter: pip install {package}") from error
    from verl_turnkey.plugins.view.conversations import matching
    from verl_turnkey.plugins.view.traces import endpoint, send, traces, write_file

    if is_address := "://" in otlp or re.fullmatch(r"[\w.-]+:\d+(/\S*)?", otlp) is not None:
        endpoint(otlp)
    loaded = load(run)
    for note in loaded.notes:
        typer.echo(note, err=True)
    if not len(rows := matching(loaded, conditions or ())):
        raise ConfigError(f"no episode of {run} fits --filter {' --filter '.join(conditions or ())}")
    spans = traces(loaded, rows, content)
    counts = send(otlp, spans, len(rows)) if is_address else write_file(Path(otlp), spans)
    typer.echo(f"{counts[0]} episodes, {counts[1]} spans: {masked(otlp)}")
