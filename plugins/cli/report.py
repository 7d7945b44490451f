"""A run as a report that others can repeat it from, and the line that repeats it. Needs no verl and no GPU."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text, write_text
from verl_turnkey.plugins.cli.packages import require_pandas
from verl_turnkey.plugins.cli.run_folder import METRICS, MISSING, RunFolder
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.machine import git, hardware, versions
from verl_turnkey.plugins.config.overrides import literal, override, read
from verl_turnkey.plugins.log.masking import MASK, masked
from verl_turnkey.plugins.log.sources import changes
from verl_turnkey.plugins.log.writer import read_segments, sha256
from verl_turnkey.plugins.view import runs, stats
from verl_turnkey.plugins.view.join import LoggedRun, flag, load
from verl_turnkey.plugins.view.runs import OUTPUTS, SEED, flat, rebased

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(help="Write everything needed to repeat a run; repeat one.", no_args_is_help=True)
MAIN = "python -m verl.trainer.main_ppo"
FOLDERS = {
    "trainer.default_local_dir": "checkpoints",
    "turnkey.log.trajectories": "turnkey_log",
    "hydra.run.dir": "hydra",
}
"""key -> folder of a run that ``turnkey report write`` reads and that a repeat must not share"""
INPUTS = ("data.train_files=", "data.val_files=", "actor_rollout_ref.model.path=", "critic.model.path=")
SCHEMA = 1
LAST_STEPS = 5
"""training steps whose mean is the final training success"""
VALIDATION, TRAINING = "validation success", "training success"
OF_ONE_RUN = (
    "the intervals are over tasks and samples of one training run; runs with other seeds differ more: turnkey compare"
)
DROPPED = ("ray_kwargs.ray_init._temp_dir", "hydra.mode")


@app.command()
def write(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, with its trajectory log")],
    out: Annotated[Path | None, typer.Option(help="folder for report.json; default: RUN")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report instead")] = False,
) -> None:
    """Write everything needed to repeat a run.

    turnkey report write runs/babyai

    Launch line, configuration, versions, commit, panel, seeds, hardware, curves, results with intervals. Secrets are
    masked, your home folder is ~.
    """
    content = json.dumps(described(run), indent=1)
    if as_json:
        typer.echo(content)
        return
    write_text((out or run) / "report.json", content + "\n")
    typer.echo(f"report.json in {out or run}")


@app.command()
def repeat(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="report.json")],
    out: Annotated[Path, typer.Option(help="folder that the repeat writes to")] = Path("runs/repeat"),
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Print the line that repeats a report. On stderr, what differs on this machine.

    turnkey report repeat report.json --out runs/again
    """
    original = _read(report)
    words, differences = line(original, out.absolute()), differing(original)
    if as_json:
        typer.echo(json.dumps({"launch": words, "differs": differences}))
        return
    typer.echo(f"{MAIN} {shlex.join(words)}")
    for difference in differences:
        typer.echo(f"differs here: {difference}", err=True)


def described(folder: Path) -> dict[str, Any]:
    """The report of a run."""
    require_pandas("report")
    from verl_turnkey.plugins.view import compare

    trained = RunFolder.of(folder)
    if trained is None:
        raise ConfigError(f"expected the folder of a run, with Hydra's .hydra in it, got {folder}")
    logged, log = runs.read(folder), load(folder)
    starts = list(read_segments(log.folder).values())
    start: Mapping[str, Any] = starts[-1] if starts else {}
    measured = [name for name in logged.metrics if compare.VALIDATION.fullmatch(name) or name == compare.TRAINING]
    numbers = [compare.compare([logged], metric=name) for name in measured]
    curve_of = {comparison["metric"]: comparison["groups"][0]["runs"][0] for comparison in numbers}
    curves = {name: {"step": curve["x"], "value": curve["value"]} for name, curve in curve_of.items()}
    notes = [OF_ONE_RUN]
    if len({json.dumps(segment.get("versions"), sort_keys=True) for segment in starts}) > 1:
        notes.append("the versions changed between the starts of this run; those of the last one are listed")
    if "hardware" not in start:
        notes.append("the log has no hardware and no hashes of the task files: an earlier verl-turnkey wrote it")
    changed, recorded = changes(starts), start.get("sources", {})
    facts = [fact for of_key in recorded.values() for fact in of_key.values() if "path" in fact]
    read_files = {fact["path"]: fact["sha256"] for fact in facts}
    notes += [_change(change) for change in changed]
    content = {
        "schema": SCHEMA,
        "run": folder.resolve().name,
        "method": log.about.get("method"),
        "panel": log.about.get("panel"),
        "launch": [_masked_word(word) for word in trained.launch()[1]],
        "config": masked(dict(trained.config)),
        "differences": masked(_from_defaults(trained.config)),
        "versions": start.get("versions", {}),
        "code": {
            "commit": start.get("commit"),
            "changed": start.get("changed"),
            "files": rebased(recorded, trained.last.moved),
            "changes": changed,
        },
        "modules": trained.modules,
        "seeds": {key: value for key, value in trained.config.items() if SEED.search(key) and value is not None},
        "hardware": start.get("hardware", {}),
        "files": rebased({**start.get("files", {}), **read_files}, trained.last.moved),
        "starts": len(starts),
        "curves": curves,
        "seconds_per_step": numbers[0]["groups"][0]["seconds_per_step"] if numbers else {},
        "results": results(log),
        "notes": notes,
    }
    return rebased(content, [(str(Path.home()), "~")])


def _change(change: Mapping[str, Any]) -> str:
    what = "was new" if change["before"] is None else "was no longer read" if change["after"] is None else "had changed"
    return f"{change['file']} {what} at start {change['start']}, which went on from step {change['resumed_from']}"


def results(run: LoggedRun) -> list[dict[str, Any]]:
    """Success at the last validation and in the last training steps, with 95% intervals, over finished episodes.

    Returns:
        ``what``, ``steps`` (first, last), ``value``, ``low``, ``high``, ``failed`` (episodes left out) and ``tasks``,
        id of a task -> solved, finished episodes.
    """
    episodes = run.episodes[run.whole & run.first_ways]
    validates = flag(episodes["validation"])
    measured = []
    for what, rows, number in ((VALIDATION, episodes[validates], 1), (TRAINING, episodes[~validates], LAST_STEPS)):
        steps = sorted(rows["global_step"].dropna().unique())[-number:]
        rows = rows[rows["global_step"].isin(steps)]
        ended = rows[rows["failed"].isna()]
        if len(ended):
            tasks = _by_task(ended)
            solved, finished = zip(*tasks.values(), strict=True)
            interval = stats.success(solved, finished)
            ends = [int(steps[0]), int(steps[-1])]
            measured.append(
                {"what": what, "steps": ends, **interval._asdict(), "failed": len(rows) - len(ended), "tasks": tasks}
            )
    return measured


def _by_task(episodes: pd.DataFrame) -> dict[str, tuple[int, int]]:
    names = episodes[["env", "kwargs", "seed", "task"]].astype(object)
    texts = names.where(names.notna(), None).to_numpy().tolist()
    ids = [hashlib.sha256(json.dumps(text, default=str).encode()).hexdigest()[:16] for text in texts]
    counts: dict[str, tuple[int, int]] = {}
    for task, solved in zip(ids, flag(episodes["success"]), strict=True):
        before = counts.get(task, (0, 0))
        counts[task] = (before[0] + int(solved), before[1] + 1)
    return counts


def line(original: Mapping[str, Any], out: Path) -> list[str]:
    """The words after ``python -m verl.trainer.main_ppo`` that repeat a report, with ``out`` as the run's folder."""
    words, folders = [], dict(FOLDERS)
    for word in _at_home(original["launch"]):
        key = word.lstrip("+").partition("=")[0]
        if key in DROPPED:
            continue
        name = folders.pop(key, "metrics" if METRICS in word else None)
        words.append(override(word.partition("=")[0], out / name) if name else word)
    return words + [override(key, out / name) for key, name in folders.items()]


def differing(original: Mapping[str, Any]) -> list[str]:
    """Differences between this machine and the report's, one line each."""
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
    """Differences of files, one line each: those of the launch line by their keys, then whatever else the run read."""
    digests: dict[str, str] = _at_home(original["files"])
    named = []
    for key, values in (read(word) for word in _at_home(original["launch"]) if word.startswith(INPUTS)):
        for path in values if isinstance(values, list) else [values]:
            if (key.startswith("data.") or path.startswith(("/", "./", "../"))) and "*" not in path:
                named.append((f"{key}: {path}", path, digests.get(path)))
    inputs = {path for _, path, _ in named}
    named += [(path, path, digest) for path, digest in digests.items() if path not in inputs]
    lines = []
    for what, path, digest in named:
        if not Path(path).exists():
            lines.append(f"{what} is missing; its sha256 is {digest or 'not recorded'}")
        elif digest is not None and sha256(Path(path)) != digest:
            lines.append(f"{what} differs; the report's sha256 is {digest}")
    return lines


def _from_defaults(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Key -> value of the run, verl's default, where they differ; None without verl."""
    if find_spec("verl") is None:
        return None
    defaults = dict(flat(OmegaConf.to_container(composed([]), resolve=False)))
    return {
        key: (value, defaults.get(key))
        for key, value in config.items()
        if not OUTPUTS.search(key) and value != defaults.get(key, MISSING)
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
    try:
        content = json.loads(read_text(path))
        if content["schema"] == SCHEMA and {"launch", "results"} <= content.keys():
            return content
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ConfigError(f"expected a report.json of turnkey report write, got {path}")


def _exists(module: str) -> bool:
    try:
        return Path(module).exists() if module.endswith(".py") else find_spec(module) is not None
    except ModuleNotFoundError:
        return False
