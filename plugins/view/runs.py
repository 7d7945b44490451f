"""Training runs on disk: their scalar metrics by step, their starts and configurations, and groups of seeds.

Files are recognised by content, in any subfolder: verl's metrics file (``trainer.logger=[file]``), else event files of
tensorboard, else a console log. Names and values are not trusted: callers escape them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.plugins.config.leaves import every, leaf_of, make_absolute
from verl_turnkey.plugins.config.roles import Use
from verl_turnkey.plugins.log.schema import current_metric
from verl_turnkey.plugins.log.sources import copies, digests
from verl_turnkey.plugins.log.writer import read_segments

Steps = dict[int, dict[str, float]]
"""step -> metric -> value"""

VALIDATION = re.compile(r"val-core/.+/acc/mean@\d+")
"""verl's mean success of a data source; beside it stand the best of several samples, and deviations"""
CONSOLE = re.compile(r"(?:^|\s)step:(\d+) - (\S.*)")
NUMBER = re.compile(r"(?:np|numpy)\.\w+\((.*)\)")
ENDINGS = (".log", ".txt", ".out")
LARGEST_LOG = 1 << 30
"""bytes of a text file that may be a console log"""


@dataclass(frozen=True)
class RunMetrics:
    """A run of which N steps were logged."""

    folder: Path
    source: str
    """where the metrics come from"""
    step: NDArray[np.int64]
    """(N,) increasing"""
    metrics: Mapping[str, NDArray[np.float64]]
    """current name -> (N,), NaN at steps without a value"""
    config: Mapping[str, Any]
    """dotted key -> value, as composed by Hydra; empty if the folder has no configuration"""
    files: Mapping[str, str] | None = None
    """name of each file of the user's -> its hash at the last start; None: not on record"""
    copies: Mapping[str, Path] = field(default_factory=dict)
    """name -> the copy in the log, of small text files"""

    def curve(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of a metric at the steps where it is finite.

        Raises:
            LookupError: the run has no such metric; the message has the closest names.
        """
        if name not in self.metrics:
            raise LookupError(f"{self.folder} has no metric {name!r}{nearest(name, self.metrics)}")
        values = self.metrics[name]
        there = np.isfinite(values)
        return self.step[there], values[there]

    def interactions(self) -> NDArray[np.float64] | None:
        """(N,) turns played in training up to each step, including branches; None if episodes were not counted."""
        episodes, length = self._finished_episodes(), "episode/length/mean"
        if episodes is None or length not in self.metrics:
            return None
        parts = (length, "branching/trained_steps", "branching/measured_steps")
        return np.cumsum(episodes * sum(map(self._logged, parts)))

    def tokens(self) -> NDArray[np.float64] | None:
        """(N,) tokens that the model wrote in training up to each step; None if they were not counted.

        Trained tokens, and tokens of branches that are only measured; failed episodes are not counted.
        """
        if "rows/trained_tokens" not in self.metrics:
            return None
        trained_tokens, episodes = self._logged("rows/trained_tokens"), self._finished_episodes()
        measured_tokens = 0.0 if episodes is None else episodes * self._logged("branching/measured_tokens")
        return np.cumsum(trained_tokens + measured_tokens)

    def _finished_episodes(self) -> NDArray[np.float64] | None:
        if not all(name in self.metrics for name in ("episode/count", "episode/failed")):
            return None
        return self._logged("episode/count") - self._logged("episode/failed")

    def _logged(self, name: str) -> NDArray[np.float64]:
        """(N,) a metric, 0 at steps without a value."""
        return np.nan_to_num(self.metrics.get(name, np.zeros(len(self.step))))

    def seconds(self) -> NDArray[np.float64] | None:
        """(N,) seconds of training up to each step (``timing_s/step``); None if they were not logged."""
        return np.cumsum(np.nan_to_num(self.metrics["timing_s/step"])) if "timing_s/step" in self.metrics else None


def read(folder: Path) -> RunMetrics:
    """Read the folder of a run.

    Raises:
        FileNotFoundError: there is no such folder, or no metrics below it.
        ValueError: a file of metrics has another format.
        ImportError: the folder has event files only, and tensorboard is not installed.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the folder of a run, found {'a file' if folder.exists() else 'no'} {folder}")
    for reader in (_metrics_files, _events, _console):
        steps: Steps = {}
        sources: dict[str, None] = {}
        for source, start in reader(folder):
            _go_on(steps, start)
            sources[source] = None
        if steps:
            files = _files(folder)
            return RunMetrics(folder, ", ".join(sources), *_table(steps), configuration(folder), *files)
    raise FileNotFoundError(
        f"{folder} holds no metrics: expected a .jsonl file of trainer.logger=[file], event files of tensorboard, or "
        f"the console output of verl in a file that ends in {', '.join(ENDINGS)}"
    )


def _files(folder: Path) -> tuple[dict[str, str] | None, dict[str, Path]]:
    starts = [(log, start) for log in (folder / "turnkey_log", folder) for start in read_segments(log).values()]
    if not starts or "sources" not in starts[-1][1]:
        return None, {}
    log, start = starts[-1]
    return digests(start["sources"]), copies(start["sources"], log)


def nearest(name: str, names: Mapping[str, Any]) -> str:
    """The end of an error message: the names that resemble ``name``, or contain a word of it."""
    from difflib import get_close_matches

    words = [word for word in re.split(r"\W+", name.lower()) if word]
    close = [*get_close_matches(name, names, 3, 0.7), *(n for n in names if any(word in n.lower() for word in words))]
    return f"; did you mean {', '.join(dict.fromkeys(close[:5]))}" if close else f"; it has {len(names)} others"


def _table(steps: Steps) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    order = sorted(steps)
    current = [{current_metric(name): value for name, value in steps[step].items()} for step in order]
    names = sorted({name for data in current for name in data})
    return np.array(order), {name: np.array([data.get(name, math.nan) for data in current]) for name in names}


def _go_on(steps: Steps, start: Steps) -> None:
    """Add a later start of the same run: its steps replace those that an earlier start had from there on."""
    if start:
        first = min(start)
        for step in [step for step in steps if step > first]:
            del steps[step]
        for step, data in start.items():
            steps.setdefault(step, {}).update(data)


def _metrics_files(folder: Path) -> Iterator[tuple[str, Steps]]:
    for path in sorted(folder.rglob("*.jsonl")):  # one per start, named by number or time
        if _is_metrics(path):
            yield str(path.relative_to(folder)), _of_lines(path)


def _is_metrics(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.readline(1 << 20)
    return head.startswith(b'{"step":') and b'"data":' in head


def _of_lines(path: Path) -> Steps:
    steps: Steps = {}
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            step, data = entry["step"], entry["data"]
            numbers = {name: float(value) for name, value in data.items() if isinstance(value, int | float)}
            steps.setdefault(int(step), {}).update(numbers)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            if number == len(lines):  # the run is writing this line, or died in the middle of it
                break
            start = line[:60].decode(errors="replace")
            raise ValueError(f'{path}:{number}: expected {{"step": ..., "data": {{...}}}}, got {start}') from None
    return steps


def _events(folder: Path) -> Iterator[tuple[str, Steps]]:
    folders = sorted({path.parent for path in folder.rglob("events.out.tfevents.*")})
    if not folders:
        return
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError:
        raise ImportError(f"{folder} holds event files only: pip install tensorboard") from None
    for subfolder in folders:
        events = EventAccumulator(str(subfolder), size_guidance={"scalars": 0})
        events.Reload()
        start: Steps = {}
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                start.setdefault(event.step, {})[name] = event.value
        yield "event files of tensorboard", start


def _console(folder: Path) -> Iterator[tuple[str, Steps]]:
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in ENDINGS and path.is_file())
    for path in paths:
        if path.stat().st_size <= LARGEST_LOG and (start := _of_console(path)):
            yield str(path.relative_to(folder)), start


def _of_console(path: Path) -> Steps:
    """Lines ``step:1 - a:0.1 - b:2``, with any prefix of Ray's; also numpy's numbers: ``a:np.float64(0.1)``."""
    steps: Steps = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := CONSOLE.search(line):
                step = int(match[1])
                if steps and step < max(steps):  # another start of the run in the same log
                    _go_on(steps, {step: {}})
                steps.setdefault(step, {}).update(console_metrics(match[2]))
    return {step: data for step, data in steps.items() if data}


def console_metrics(text: str) -> dict[str, float]:
    """The numbers in ``a:0.1 - b:2``, the part of verl's line after ``step:1 - ``."""
    metrics = {}
    for part in text.split(" - "):
        name, _, value = part.rpartition(":")
        wrapped = NUMBER.fullmatch(value.strip())
        try:
            metrics[name] = float(wrapped[1] if wrapped else value)
        except ValueError:
            continue
    return metrics


HOME = "trainer.default_local_dir"
OF_RUNS = ("checkpoints", "turnkey_log", "hydra", "metrics", "tasks")
"""folders that ``turnkey train`` makes"""


@dataclass(frozen=True)
class Start:
    """A start of a run, as Hydra wrote it down, with the paths of where its folder is now."""

    cwd: Path
    """the folder that it was started in; the current one where that is gone"""
    config: Mapping[str, Any]
    """dotted key -> value, interpolations unresolved"""
    hydra: Mapping[str, Any]
    """Hydra's own record, with the paths of then; empty without one"""
    moved: Sequence[tuple[str, str]]
    """where folders were then and are now; empty for a run that is where it was"""


def starts(folder: Path) -> list[Start]:
    """The starts of the runs in ``folder``, the last one last."""
    files = [path for path in folder.rglob(".hydra/config.yaml") if path.is_file()]
    return [_start(path, folder) for path in sorted(files, key=lambda path: (path.stat().st_mtime_ns, str(path)))]


def configuration(folder: Path) -> dict[str, Any]:
    """The configuration that Hydra wrote at the last start, with unresolved interpolations."""
    configs = [start.config for start in starts(folder)]
    homes = sorted({str(config[HOME]) for config in configs if HOME in config})
    if len(homes) > 1:  # all starts of a run share a folder of checkpoints
        raise ValueError(f"{folder} holds several runs ({HOME}: {', '.join(homes)}): name their folders one by one")
    return dict(configs[-1]) if configs else {}


def _start(path: Path, folder: Path) -> Start:
    record = path.with_name("hydra.yaml")
    hydra = (_load(record) or {}).get("hydra") or {} if record.is_file() else {}
    cwd, moved = _places(hydra, path.parents[1], folder)
    config = rebased(_load(path) or {}, moved)
    make_absolute(config, cwd)
    return Start(cwd, dict(flat(config)), hydra, moved)


def _places(hydra: Mapping[str, Any], output: Path, folder: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Where a run was started, and what was elsewhere then; ``output``: Hydra's folder in the run's ``folder``."""
    runtime = hydra.get("runtime") or {}
    words = [str(word) for word in (hydra.get("overrides") or {}).get("hydra") or ()]
    chosen = [word.partition("=")[2].strip("'\"") for word in words if word.startswith("hydra.run.dir=")]
    at = runtime.get("output_dir") or (chosen or [""])[-1]
    cwd, inside, here = Path(runtime.get("cwd") or Path.cwd()), output.relative_to(folder).parts, folder.absolute()
    then = Path(os.path.normpath(cwd / at))
    if not at or then.parts[len(then.parts) - len(inside) :] != inside:
        return cwd if cwd.is_dir() else Path.cwd(), []
    root = Path(*then.parts[: len(then.parts) - len(inside)])
    if root == here or (root.exists() and root.samefile(here)):
        return cwd if cwd.is_dir() else Path.cwd(), []
    moved = [(str(root), str(here))]
    if root.is_relative_to(cwd) and (below := root.relative_to(cwd).parts):
        moved.append((os.path.join(*below), str(here)))
        if not cwd.is_dir() and here.parts[-len(below) :] == below:  # the run was moved with what it lies in
            moved.append((str(cwd), str(Path(*here.parts[: -len(below)]))))
            cwd = Path(moved[-1][1])
    return cwd if cwd.is_dir() else Path.cwd(), moved


def rebased(value: Any, moved: Sequence[tuple[str, str]]) -> Any:
    """Plain data with paths in the first folder of each pair in its second one instead.

    A relative text may be anything else, such as the name of a model: it counts where the second folder holds its
    beginning, or a run does.
    """
    if isinstance(value, Mapping):
        return {rebased(name, moved): rebased(entry, moved) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rebased(entry, moved) for entry in value]
    for old, new in moved if isinstance(value, str) else ():
        pattern = rf"(?<![^=\[,'\": (]){re.escape(old)}(?:/(?P<name>[^/\]}}),'\"]*)|(?=$|[\]}}),'\"]))"

        def instead(match: re.Match[str], old: str = old, new: str = new) -> str:
            name = match["name"]
            is_path = old.startswith(("/", "~")) or name in OF_RUNS
            if not is_path and not (name and os.path.exists(os.path.join(new, name))):
                return match[0]
            return new if name is None else f"{new}/{name}"

        value = re.sub(pattern, instead, value)
    return value


def _load(path: Path) -> Any:
    import yaml

    try:
        return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{line}: expected the configuration that Hydra writes, in YAML") from None


def flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings; lists, empty mappings and those with names of users are values."""
    leaf = every().get(prefix)
    has_names_of_users = leaf is not None and leaf.secret is not None  # of files and variables, which may hold dots
    if isinstance(node, dict) and node and not has_names_of_users:
        for key, value in node.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, node


ALIASES = {
    "method": "algorithm.adv_estimator",
    "loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "env": "turnkey.env.id",
    "model": "actor_rollout_ref.model.path",
}
SEED = re.compile(r"(^|[._])seeds?$")
OUTPUTS = re.compile(
    r"(_local_dir|_data_dir|_temp_dir|save_path|experiment_name|project_name|trajectories|VERL_FILE_LOGGER_\w+)$"
    r"|^trainer\.(logger|resume_\w+|save_freq|max_\w+_ckpt_to_keep)$"
)
"""keys of where a run stores its outputs, and of how it resumes"""
ABSENT = "absent"
SHOWN = 3
"""most keys in the name of a group"""


@dataclass
class Group:
    """Runs that differ only in seed and paths, or that share the keys of ``--by``."""

    name: str
    runs: list[RunMetrics]
    config: dict[str, str] = field(default_factory=dict)
    """the keys in which the groups differ"""
    mixed: dict[str, list[str]] = field(default_factory=dict)
    """with ``--by``: further keys in which its runs differ"""


def seed_of(run: RunMetrics) -> str:
    """The seed of the data or of the rollout, else the name of the folder."""
    seeds = (run.config.get(key) for key in ("data.seed", "actor_rollout_ref.rollout.seed"))
    return next((str(seed) for seed in seeds if seed is not None), run.folder.name)


FILE = "file "
"""begins the name of a file among the keys that identify a configuration"""


def meaning(config: Mapping[str, Any], files: Mapping[str, str] | None = None) -> dict[str, str]:
    """The keys that identify a configuration, with values as texts: all but seeds, outputs and what decides nothing.

    Only the last part of an absolute path counts: each run has its own folder, but two models have two names. Of
    ``files``, hashes by name, each is a key.
    """
    telling = [key for key in config if not SEED.search(key) and not OUTPUTS.search(key)]
    apart = [key for key in telling if (leaf := leaf_of(key)) and leaf.use is Use.APART]
    of_files = {f"{FILE}{name}": digest for name, digest in (files or {}).items()}
    return {key: _text(config[key]) for key in telling if key not in apart} | of_files


def group_runs(runs: Sequence[RunMetrics], by: Sequence[str] = ()) -> list[Group]:
    """Group ``runs``; groups come in the order of their first runs. Files count if all runs have them on record.

    Runs without a configuration are grouped by the name of their folder, without a number at its end.

    Args:
        by: the only keys or aliases that distinguish groups.

    Raises:
        LookupError: a key of ``by`` is in no configuration.
    """
    keys = [ALIASES.get(key, key) for key in by]
    for key in keys:
        run_keys = {name: None for run in runs for name in run.config}
        if key not in run_keys:
            raise LookupError(f"--by {key}: no run has this key{nearest(key, run_keys)}")
    recorded = all(run.files is not None for run in runs)
    members: dict[str, tuple[dict[str, str], list[RunMetrics]]] = {}
    for run in runs:
        whole = meaning(run.config, run.files if recorded else None)
        same = {key: _text(run.config.get(key, ABSENT)) for key in keys} if keys else whole
        name = json.dumps(same, sort_keys=True) if same else re.sub(r"[-_.]?\d+$", "", run.folder.name)
        members.setdefault(name, (same, []))[1].append(run)
    groups = [Group(name, of_name) for name, (_, of_name) in members.items()]
    differ = _differing([same for same, _ in members.values()])
    for group, (same, _) in zip(groups, members.values(), strict=True):
        group.config = {key: same.get(key, ABSENT) for key in differ}
        if keys:
            within = [meaning(run.config, run.files if recorded else None) for run in group.runs]
            group.mixed = {key: [config.get(key, ABSENT) for config in within] for key in _differing(within)}
    _name(groups, keys)
    return groups


def _name(groups: Sequence[Group], by: Sequence[str]) -> None:
    """Name groups by the keys of ``by``, or method, loss and environment if they differ; equal names get more keys."""
    base = list(by) or [key for key in (ALIASES["method"], ALIASES["loss"], ALIASES["env"]) if key in groups[0].config]
    for group in groups:
        config = group.runs[0].config
        if config:
            words = [group.config.get(key) or _text(config.get(key, ABSENT)) for key in base or [ALIASES["method"]]]
            group.name = " ".join(words)
    for name in {group.name for group in groups}:
        same = [group for group in groups if group.name == name]
        if len(same) > 1:
            for number, group in enumerate(same, 1):
                keys = _differing([other.config for other in same])[:SHOWN]
                group.name += "".join(f" {_short(key)}={group.config[key]}" for key in keys) or f" {number}"
    used: dict[str, int] = {}
    for group in groups:  # they may differ in more keys than their names hold
        used[group.name] = number = used.get(group.name, 0) + 1
        group.name += f" ({number})" if number > 1 else ""


def _short(key: str) -> str:
    return key.removeprefix(FILE) if key.startswith(FILE) else key.rpartition(".")[2]


def _differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({config.get(key, ABSENT) for config in configs}) > 1]


def _text(value: Any) -> str:
    if isinstance(value, str):
        path = value.startswith(("/", "~", "file://"))
        return value.rstrip("/").rpartition("/")[2] if path else value
    if isinstance(value, list):
        return json.dumps([_text(entry) if isinstance(entry, str) else entry for entry in value], default=str)
    return json.dumps(value, default=str)
