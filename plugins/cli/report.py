"""A run as a report that others can repeat it from, and a repeat held against it. Needs no verl and no GPU."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text, write_text
from verl_turnkey.plugins.cli.packages import require_pandas
from verl_turnkey.plugins.cli.run_folder import METRICS, MISSING, RunFolder
from verl_turnkey.plugins.config.overrides import literal, override, read
from verl_turnkey.plugins.log.masking import MASK, masked
from verl_turnkey.plugins.view.groups import OUTPUTS, SEED
from verl_turnkey.plugins.view.starts import rebased

app = typer.Typer()
MAIN = "python -m verl.trainer.main_ppo"
FOLDERS = {
    "trainer.default_local_dir": "checkpoints",
    "turnkey.log.trajectories": "turnkey_log",
    "hydra.run.dir": "hydra",
}
"""key -> folder of a run that ``turnkey report`` reads and that a repeat must not share"""
INPUTS = ("data.train_files=", "data.val_files=", "actor_rollout_ref.model.path=", "critic.model.path=")
DROPPED = ("ray_kwargs.ray_init._temp_dir", "hydra.mode")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, with its trajectory log")],
    out: Annotated[Path | None, typer.Option(help="folder for both files; default: RUN")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report instead")] = False,
) -> None:
    """Write all that it takes to repeat a run.

    turnkey report runs/babyai

    Launch line, configuration, versions, commit, panel, seeds, hardware, curves, results with intervals. Secrets are
    masked, your home folder is ~.
    """
    content, figure = described(run)
    if as_json:
        typer.echo(json.dumps(content, indent=1))
        return
    from verl_turnkey.plugins.view.reproduction import page

    out = out or run
    write_text(out / "report.json", json.dumps(content, indent=1) + "\n")
    write_text(out / "report.html", page(content, figure))
    typer.echo(f"report.json, report.html in {out}")


@app.command()
def repeat(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="report.json")],
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="folder of the finished repeat")] = None,
    out: Annotated[Path, typer.Option(help="folder that the repeat writes to")] = Path("runs/repeat"),
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Print the line that repeats a report; judge the repeat. Exit 1 where it differs.

    turnkey repeat report.json --out runs/again      the line, and what differs on this machine

    turnkey repeat report.json runs/again            whether its results lie within the report's
    """
    original = _read(report)
    if run is None:
        words, differences = line(original, out.absolute()), differing(original)
        if as_json:
            typer.echo(json.dumps({"launch": words, "differs": differences}))
            return
        typer.echo(f"{MAIN} {shlex.join(words)}")
        for difference in differences:
            typer.echo(f"differs here: {difference}", err=True)
        return
    from verl_turnkey.plugins.view.reproduction import held_against

    compared = held_against(original, described(run)[0])
    if as_json:
        typer.echo(json.dumps(compared))
    for result in [] if as_json else compared:
        ends = result["difference"]
        verdict = "within the interval" if result["within"] else "lower" if ends["value"] < 0 else "higher"
        typer.echo(
            f"{result['what']}: {result['repeat']:.3f}, reported {result['report']:.3f}; difference "
            f"{ends['value']:+.3f} ({ends['low']:+.3f} to {ends['high']:+.3f}): {verdict}"
        )
    raise typer.Exit(0 if compared and all(result["within"] for result in compared) else 1)


def described(folder: Path) -> tuple[dict[str, Any], str]:
    """The report of a run, and its curve as HTML."""
    require_pandas("report")
    from verl_turnkey.plugins.log.segments import read_segments
    from verl_turnkey.plugins.view import compare, report, runs
    from verl_turnkey.plugins.view.join import load
    from verl_turnkey.plugins.view.reproduction import OF_ONE_RUN, SCHEMA, results

    trained = RunFolder.of(folder)
    if trained is None:
        raise ConfigError(f"expected the folder of a run, with Hydra's .hydra in it, got {folder}")
    logged, log = runs.read(folder), load(folder)
    starts = list(read_segments(log.folder).values())
    start: Mapping[str, Any] = starts[-1] if starts else {}
    measured = [name for name in logged.metrics if compare.VALIDATION.fullmatch(name) or name == compare.TRAINING]
    numbers = [compare.compare([logged], metric=name) for name in measured]
    own = {comparison["metric"]: comparison["groups"][0]["runs"][0] for comparison in numbers}
    curves = {name: {"step": curve["x"], "value": curve["value"]} for name, curve in own.items()}
    notes = [OF_ONE_RUN]
    if len({json.dumps(segment.get("versions"), sort_keys=True) for segment in starts}) > 1:
        notes.append("the versions changed between the starts of this run; those of the last one are listed")
    if "hardware" not in start:
        notes.append("the log has no hardware and no hashes of the task files: an earlier verl-turnkey wrote it")
    content = {
        "schema": SCHEMA,
        "run": folder.resolve().name,
        "method": log.about.get("method"),
        "panel": log.about.get("panel"),
        "launch": [_masked_word(word) for word in trained.launch()[1]],
        "config": masked(dict(trained.config)),
        "differences": masked(_from_defaults(trained.config)),
        "versions": start.get("versions", {}),
        "code": {"commit": start.get("commit"), "changed": start.get("changed")},
        "modules": trained.modules,
        "seeds": {key: value for key, value in trained.config.items() if SEED.search(key)},
        "hardware": start.get("hardware", {}),
        "files": rebased(start.get("files", {}), trained.last.moved),
        "starts": len(starts),
        "curves": curves,
        "seconds_per_step": numbers[0]["groups"][0]["seconds_per_step"] if numbers else {},
        "results": results(log),
        "notes": notes,
    }
    return rebased(content, [(str(Path.home()), "~")]), "\n".join(map(report.curves, numbers[:1]))


def line(original: Mapping[str, Any], out: Path) -> list[str]:
    """The words after ``python -m verl.trainer.main_ppo`` that repeat a report, with ``out`` as the run's folder."""
    words, own = [], dict(FOLDERS)
    for word in _at_home(original["launch"]):
        key = word.lstrip("+").partition("=")[0]
        if key in DROPPED:
            continue
        name = own.pop(key, "metrics" if METRICS in word else None)
        words.append(override(word.partition("=")[0], out / name) if name else word)
    return words + [override(key, out / name) for key, name in own.items()]


def differing(original: Mapping[str, Any]) -> list[str]:
    """Differences between this machine and the report's, one line each."""
    from verl_turnkey.plugins.config.machine import git, hardware, versions

    here, machine = versions(), hardware()
    lines = [
        f"{name} {here.get(name) or 'is not installed'}, the report has {value}"
        for name, value in original["versions"].items()
        if here.get(name) != value
    ]
    lines += [
        f"{name.replace('_', ' ')}: {machine[name]}, the report has {value}"
        for name, value in original["hardware"].items()
        if name in machine and machine[name] != value
    ]
    lines += [f"module {name} is missing" for name in _at_home(original["modules"]) if not _exists(name)]
    commit, changed = original["code"]["commit"], original["code"]["changed"]
    if commit and (changed or git("rev-parse", "HEAD") != commit):
        lines.append(f"the working folder was at commit {commit}{', with uncommitted changes' if changed else ''}")
    lines += _files(original)
    return lines + [f"{word}: fill in your own secret for {MASK}" for word in original["launch"] if MASK in word]


def _files(original: Mapping[str, Any]) -> list[str]:
    from verl_turnkey.plugins.log.segments import sha256

    digests: dict[str, str] = _at_home(original["files"])
    words = [read(word) for word in _at_home(original["launch"]) if word.startswith(INPUTS)]
    lines = []
    for key, values in words:
        for path in values if isinstance(values, list) else [values]:
            if not (key.startswith("data.") or path.startswith(("/", "./", "../"))) or "*" in path:
                continue
            if not Path(path).exists():
                lines.append(f"{key}: {path} is missing; its sha256 is {digests.get(path, 'not recorded')}")
            elif path in digests and sha256(Path(path)) != digests[path]:
                lines.append(f"{key}: {path} differs; the report's sha256 is {digests[path]}")
            digests.pop(path, None)
    for path, digest in digests.items():  # of agents, servers, templates and whatever else the run read
        if not Path(path).exists():
            lines.append(f"{path} is missing; its sha256 is {digest}")
        elif sha256(Path(path)) != digest:
            lines.append(f"{path} differs; the report's sha256 is {digest}")
    return lines


def _from_defaults(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Key -> value of the run, verl's default, where they differ; None without verl."""
    if find_spec("verl") is None:
        return None
    from omegaconf import OmegaConf

    from verl_turnkey.plugins.config.composing import composed
    from verl_turnkey.plugins.view.starts import flat

    defaults = dict(flat(OmegaConf.to_container(composed([]), resolve=False)))
    pairs = {key: (value, defaults.get(key, MISSING)) for key, value in config.items() if not OUTPUTS.search(key)}
    return {
        key: (value, None if default is MISSING else default)
        for key, (value, default) in pairs.items()
        if value != default
    }


def _masked_word(word: str) -> str:
    """An override without its secrets."""
    try:
        key, value = read(word)
    except ConfigError:
        return masked(word)
    clean = masked({key: value})[key]
    return word if clean == value else f"{word.partition('=')[0]}={literal(clean)}"


def _at_home(value: Any) -> Any:
    return rebased(value, [("~", str(Path.home()))])


def _read(path: Path) -> dict[str, Any]:
    from verl_turnkey.plugins.view.reproduction import SCHEMA

    try:
        content = json.loads(read_text(path))
        if content["schema"] == SCHEMA and {"launch", "results"} <= content.keys():
            return content
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ConfigError(f"expected a report.json of turnkey report, got {path}")


def _exists(module: str) -> bool:
    try:
        return Path(module).exists() if module.endswith(".py") else find_spec(module) is not None
    except ModuleNotFoundError:
        return False
