"""``turnkey eval``: evaluate a checkpoint or a server on tasks of an environment."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import whole_file
from verl_turnkey.envs import make
from verl_turnkey.envs.tasks import (
    HELD_OUT,
    HELD_OUT_SPLITS,
    PLACES,
    Panel,
    Task,
    held_out_seeds,
    task_of,
    write_parquet,
)
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins.checks.files import columns, shared_tasks
from verl_turnkey.plugins.checks.files import rows as parquet_rows
from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.cli import panel as panels
from verl_turnkey.plugins.cli.console import LINE_EVERY
from verl_turnkey.plugins.cli.packages import require_verl
from verl_turnkey.plugins.cli.run_folder import RunFolder
from verl_turnkey.plugins.config import playing
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.overrides import override, values
from verl_turnkey.plugins.eval import checkpoint as checkpoints
from verl_turnkey.plugins.eval.result import remarks, rows
from verl_turnkey.plugins.shutdown.run_files import locked

if TYPE_CHECKING:
    from omegaconf import DictConfig

app = typer.Typer()

METHOD = "+turnkey="
CREDIT = "turnkey.credit."
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Model:
    """What is evaluated: a checkpoint, or a model behind a server."""

    checkpoint: Path | None
    server: str | None
    name: str | None
    """of the model on the server"""
    tokenizer: str | None
    tag: str | None
    api_key_env: str | None

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.server is not None:
            raise typer.BadParameter("give either --checkpoint or --server, not both")
        of_server = {"--model": self.name, "--api-key-env": self.api_key_env}
        if self.server is None and (options := [option for option, value in of_server.items() if value is not None]):
            raise typer.BadParameter(f"{' and '.join(options)} go with --server; other weights: --checkpoint")
        if self.checkpoint is None and self.name is None:
            raise typer.BadParameter("--server needs --model, the name of the model there")

    @property
    def short_name(self) -> str:
        """For the folder of the evaluation."""
        if self.checkpoint is not None:
            return checkpoints.name(self.checkpoint)
        return (self.name or "").rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class Evaluation:
    """A model on the tasks of an environment, a run or a panel."""

    environment: launch.Played
    method: str
    folder: Path
    device: str
    gpus: int
    model: Model
    run: RunFolder | None
    """the run that trained the model, whose settings are taken"""
    panel: Panel | None
    further: Sequence[str]
    """overrides, the last ones win"""

    def words(self, weights: Path | None = None) -> list[str]:
        """The whole launch line; without ``weights`` with the model that has the tokenizer."""
        lines = launch.overrides(
            self.environment,
            model=str(weights or self.model.tokenizer or self.model.name or self.model.checkpoint),
            method=self.method,
            device=self.device,
            gpus=max(1, self.gpus),
            steps=1,
            tasks=self.folder,
            out=self.folder,
            sizes="gpu" if self.model.server else None,  # the model runs there, whatever this machine has
            further=[override("turnkey.log.trajectories", self.folder / "turnkey_log"), *self.further],
        )
        return [word for line in lines for word in line]

    def with_settings_of_run(self, environment: str) -> Evaluation:
        """With the run's rollout settings before the overrides, if it trained on the same environment."""
        run, played = self.run, self.environment
        if run is None:
            return self
        if run.env_id != played.id:
            of_run, of_line = run.env_id or f"the agent {run.agent}", played.id or f"the agent {played.agent}"
            typer.echo(f"the run trained on {of_run}, not on {of_line}: its settings are ignored", err=True)
            return self
        plain = composed(replace(self, further=()).words())
        settings = run.playing(plain, HELD_OUT_SPLITS.get(played.id, {}).get("test", {}))
        for line in run.differing(self.further):
            typer.echo(f"differs from the run: {line}", err=True)
        if self.panel is not None:  # its own arguments of the environment, in the run's place
            kwargs = "++turnkey.env.kwargs."
            kept = tuple(f"{kwargs}{name}=" for name in PLACES)
            settings = [word for word in settings if not word.startswith(kwargs) or word.startswith(kept)]
        further = [*settings, *self.further]
        return replace(self, further=further, environment=launch.played(environment, further))

    def checked(self) -> DictConfig:
        """The configuration. A misspelt key and a wrong folder are refused before anything is written or merged."""
        config = composed(self.words())
        if self.panel is not None:
            panels.check_unchanged(self.panel, config)
        if self.model.checkpoint is not None:
            checkpoints.find(self.model.checkpoint)
        return config

    def weights(self, config: DictConfig, new: bool) -> Path | None:
        """The Hugging Face folder of the checkpoint; None for a model on a server."""
        if self.model.checkpoint is None:
            return None
        if not new:
            checkpoints.check_shards(self.model.checkpoint, self.folder)
        trusted = bool(config.actor_rollout_ref.model.get("trust_remote_code"))
        return checkpoints.resolve(self.model.checkpoint, self.folder, trusted)

    def tasks(self, tasks: str | None, config: DictConfig) -> Path:
        """The file of tasks: the panel's, or those that ``tasks`` asks for."""
        if self.panel is not None:
            return panel_file(self.panel, config, self.folder)
        files = values(self.further, "data.val_files")[-1:] or (self.run.task_files("val") if self.run else [])
        files = files[0] if files and isinstance(files[0], list) else files
        return task_file(tasks or "128", self.environment, self.folder, files)


@app.command("eval")
def evaluate(
    environment: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ENVIRONMENT|turnkey.agent.run=AGENT",
            help="folder of a run, short name, gymnasium id, or my_env.py[:ID]; for an agent, its key on a launch line",
        ),
    ] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="keys as on a launch line: key=value")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="a Hugging Face or verl checkpoint folder, or a hub name; default: the run's newest"),
    ] = None,
    server: Annotated[str | None, typer.Option(help="or an OpenAI-compatible server: http://host:8000/v1")] = None,
    model_name: Annotated[str | None, typer.Option("--model", help="name of the model on the server")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="its folder or hub name; default: that of --model")] = None,
    tag: Annotated[str | None, typer.Option(help="your label for the weights, also used in ratings")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="variable with the server's API key")] = None,
    panel_name: Annotated[
        str | None, typer.Option("--panel", help="play a published panel, or NAME.json: turnkey panel")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="number of tasks, or a parquet file of them; default 128")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="samples per task; default: the panel's, or 1")] = None,
    greedy: Annotated[bool, typer.Option(help="always take the most likely token")] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help="default: that of training")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="episodes at once")] = 16,
    out: Annotated[Path | None, typer.Option(help="default: evals/<environment>-<model>")] = None,
    new: Annotated[bool, typer.Option(help="delete earlier results in the folder; default: resume")] = False,
) -> None:
    """Evaluate a run or a model: success, pass@k and intervals. Resumes after a stop; exit 1 if incomplete.

    A run, or a checkpoint that a run saved, is evaluated with the run's own configuration: prompts, action format,
    limits, rewards, environment, modules. Overrides on the command line take precedence; those that differ are printed.

    turnkey eval runs/babyai --tasks 100 --samples 8

    turnkey eval runs/babyai --panel babyai-48
    """
    require_verl("eval")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    from verl_turnkey.plugins.eval.run import EvalSettings
    from verl_turnkey.plugins.eval.run import evaluate as play

    environment, further, panel = _played_by(environment, overrides or (), panel_name, fixed=bool(tasks or samples))
    if panel is not None:
        samples = 1 if greedy or temperature == 0 else panel.samples
    samples = samples or 1
    run = RunFolder.of(Path(environment)) if environment else None
    name = "" if run is None else run.folder.name
    if run is not None:
        agent = [override("turnkey.agent.run", run.agent)] if run.agent else []
        environment, further = run.env_id, [*agent, *further]
        checkpoint = run.checkpoints if checkpoint is None and server is None else checkpoint
    saved_by = (RunFolder.of(checkpoint) or run) if checkpoint is not None else None
    run = run or saved_by
    if environment and launch.agent_of(further):
        raise typer.BadParameter(f"either {environment} is played, or the agent of turnkey.agent.run: leave out one")
    if checkpoint is None and server is None:
        no_run = f"{environment} is not the folder of a run: " if environment else ""
        raise typer.BadParameter(f"{no_run}give a RUN, or either --checkpoint or --server")
    model = Model(checkpoint, server, model_name, tokenizer, tag, api_key_env)
    method, overridden, ignored = _method(further)
    if ignored:
        typer.echo(f"ignored, since credit does not affect an evaluation: {' '.join(ignored)}", err=True)
    further = [*_sampling(greedy, temperature, samples), *overridden]
    if run is not None:
        import_modules(run.modules, "turnkey.modules of the run")
    played = launch.played(environment, further)
    if panel is not None:
        if played.id != panel.env_id:
            raise typer.BadParameter(f"the panel {panel.name} is of {panel.env_id}, not of {played.id or 'an agent'}")
        further = [*playing.words(panel), *further]
    folder = (out or Path("evals") / f"{name or played.name}-{model.short_name}").absolute()
    player = tag or (f"{saved_by.folder.name}-" if saved_by is not None else "") + model.short_name
    device, gpus = launch.device_here()
    if device == "cpu":
        os.environ["TURNKEY_DEVICE"] = "cpu"  # before verl is imported
    if model.checkpoint is not None:
        model = replace(model, checkpoint=checkpoints.downloaded(model.checkpoint))
    evaluation = Evaluation(played, method, folder, device, gpus, model, run, panel, further)
    evaluation = evaluation.with_settings_of_run(environment)
    config = evaluation.checked()
    for text in _header(config, model.checkpoint, run):
        typer.echo(text, err=True)
    taken = f"{folder}: another turnkey eval is writing there"
    with locked(folder, taken, "; choose another --out"), _progress() as begin:
        weights = evaluation.weights(config, new)
        file = evaluation.tasks(tasks, config)
        typer.echo(counted(config, file, run, samples), err=True)
        settings = EvalSettings(
            words=evaluation.words(weights),
            tasks=file,
            out=folder,
            samples=samples,
            concurrency=concurrency,
            weights=weights,
            url=(server or "").rstrip("/"),
            name=model_name or "",
            tag=tag,
            player=player,
            api_key_env=api_key_env,
            new=new,
        )
        result = play(settings, begin=begin)
    _print(result, folder)
    raise typer.Exit(0 if result["complete"] else 1)


def _played_by(
    environment: str, overrides: Sequence[str], panel_name: str | None, *, fixed: bool
) -> tuple[str, list[str], Panel | None]:
    """What is played: the first argument, the overrides, and the panel. ``fixed``: tasks or samples are chosen."""
    further = list(overrides)
    if "=" in environment and not Path(environment).exists():
        further, environment = [environment, *further], ""
    panel = panels.find(panel_name) if panel_name else None
    if panel is not None and fixed:
        raise typer.BadParameter("--panel fixes tasks and samples: leave out --tasks and --samples")
    if panel is None and not environment and not further:
        raise typer.BadParameter("give a RUN, an ENVIRONMENT, an agent or --panel")
    return environment or (panel.env_id if panel is not None else ""), further, panel


def _header(config: DictConfig, checkpoint: Path | None, run: RunFolder | None) -> Iterator[str]:
    """Weights, settings, sampling and limits of the evaluation."""
    if checkpoint is not None:
        yield f"weights   {checkpoints.locate(checkpoint)}"
    if run is not None:
        yield f"settings  of the run in {run.folder}, except for the overrides"
    if (agent := config.turnkey.agent.run) is not None:
        yield f"agent     {agent if isinstance(agent, str) else shlex.join(agent)}"
    rollout = config.actor_rollout_ref.rollout
    temperature = float(rollout.temperature)
    yield "sampling  " + ("greedy" if temperature == 0 else f"temperature {temperature:g}, top_p {rollout.top_p:g}")
    prompt, response = (int(config.data[f"max_{name}_length"]) for name in ("prompt", "response"))
    yield f"limits    prompt {prompt} tokens (data.max_prompt_length), response {response} (data.max_response_length)"


def _method(overrides: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The method among the overrides (``+turnkey=gigpo``), the other overrides, and those to ignore.

    The method does not affect an evaluation, but it defines the valid keys of ``turnkey.credit``. Without one those
    keys are ignored: the launch line may come from ``turnkey train --method``.
    """
    chosen = [entry.partition("=")[2] for entry in overrides if entry.startswith(METHOD)]
    others = [entry for entry in overrides if not entry.startswith(METHOD)]
    ignored = [] if chosen else [entry for entry in others if entry.lstrip("+~").startswith(CREDIT)]
    return (chosen or ["base"])[-1], [entry for entry in others if entry not in ignored], ignored


def _sampling(greedy: bool, temperature: float | None, samples: int) -> list[str]:
    """The sampling options as overrides; none: sample as in training."""
    if greedy and temperature is not None:
        raise typer.BadParameter("--greedy and --temperature exclude each other")
    if samples > 1 and (greedy or temperature == 0):
        option = "--greedy" if greedy else "--temperature 0"
        raise typer.BadParameter(f"{option} gives the same sample each time: leave out --samples {samples}")
    if greedy:
        return [f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.top_p=1.0", f"{ROLLOUT}.top_k=-1"]
    return [] if temperature is None else [override(f"{ROLLOUT}.temperature", temperature)]


class _progress:
    """A bar on stderr from the first sample on, or without a terminal a line a minute.

    Entered it is the function ``begin`` of an evaluation.
    """

    def __enter__(self) -> Callable[[int, int], Callable[[bool | None], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console)
        self._counts = [0, 0, 0]  # solved, played, failed
        self._printed = time.monotonic()
        return self._begin

    def _begin(self, done: int, total: int) -> Callable[[bool | None], None]:
        task = self._bar.add_task("samples", total=total, completed=done)
        if self._console.is_terminal:
            self._bar.start()

        def advance(success: bool | None) -> None:
            self._counts[2 if success is None else 1] += 1
            self._counts[0] += bool(success)
            solved, played, failed = self._counts
            description = f"success {solved / max(1, played):.2f}" + (f", {failed} failed" if failed else "")
            self._bar.update(task, advance=1, description=description)
            if not self._console.is_terminal and time.monotonic() - self._printed > LINE_EVERY:
                self._printed = time.monotonic()
                typer.echo(f"{done + played + failed} of {total} samples, {description}", err=True)

        return advance

    def __exit__(self, *_: Any) -> None:
        if self._console.is_terminal:
            self._bar.stop()


def _print(result: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "mean", "95% interval", title=f"{len(result['tasks'])} tasks, {result['samples']} samples")
    for line in rows(result):
        table.add_row(*line)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for line in remarks(result):
        console.print(line)
    console.print(f"{folder / 'result.json'}", soft_wrap=True)


def task_file(tasks: str, played: launch.Played, folder: Path, val_files: Sequence[str] = ()) -> Path:
    """The file of tasks. A number of them is written to ``folder``.

    Those of an environment get seeds that no training task has; those of an agent are the first of ``val_files``.
    """
    from verl_turnkey.plugins.checks.data import first_task  # imports torch

    if not tasks.isdecimal():
        file = Path(tasks).expanduser().absolute()
        if not file.is_file():
            raise ConfigError(f"--tasks {tasks}: expected a number of tasks or an existing parquet file")
        if not played.agent and (env_id := first_task(str(file)).env_id) != played.id:
            raise ConfigError(f"{file} holds tasks of {env_id!r}, not of {played.id!r}")
        return file
    if not 1 <= int(tasks) <= HELD_OUT:
        raise ConfigError(f"--tasks {tasks}: expected 1 to {HELD_OUT} tasks, or a parquet file")
    file = folder / "tasks.parquet"
    if played.agent:
        _write_first(int(tasks), val_files, file)
        return file
    held_out = played.held_out("test")
    make(played.id, {**played.kwargs, **held_out}).close()
    write_parquet(file, [Task(played.id, seed, held_out) for seed in held_out_seeds(int(tasks))], played.name, "test")
    return file


def panel_file(panel: Panel, config: DictConfig, folder: Path) -> Path:
    """Write the tasks of ``panel`` to ``folder``, after a look at the start of each."""
    from verl_turnkey.plugins.checks.data import check_starts
    from verl_turnkey.plugins.checks.findings import collecting

    places = playing.places(config)
    tasks = panel.tasks(places)
    with collecting(config):
        check_starts(panel, tasks, places)
    panel.write_parquet(folder / "tasks.parquet", tasks)
    return folder / "tasks.parquet"


def _write_first(number: int, val_files: Sequence[str], file: Path) -> None:
    """Write the first ``number`` rows of ``val_files``, patterns as verl reads them, or all if there are fewer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(islice(_rows(val_files), number))
    if not rows:
        raise ConfigError(
            f"--tasks {number}: the tasks of an agent are the first of data.val_files, and there are none in "
            f"{', '.join(val_files) or 'it'}: give --tasks FILE, or data.val_files=FILE"
        )
    with whole_file(file) as part:
        pq.write_table(pa.Table.from_pylist(rows), part)


def _rows(patterns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of those files that are on this machine."""
    for file in (file for pattern in patterns for file in sorted(glob(pattern, recursive=True))):
        names = columns(file)
        yield from (dict(zip(names, cells, strict=True)) for cells in parquet_rows(file, names))


def counted(config: DictConfig, tasks: Path, run: RunFolder | None, samples: int) -> str:
    """The number of tasks, and how many of them match one that the run trained on."""
    from verl_turnkey.plugins.eval.run import read_rows

    of_training = run.task_files("train") if run else []
    if config.turnkey.agent.run:
        trained = [task_of(row) for row in _rows(of_training)]
        played = read_rows(tasks, agent=True)
        shared, total, compared = sum(task_of(row) in trained for row in played), len(played), "content"
    else:
        files = {"train_files": of_training, "val_files": [str(tasks)]}
        shared, total, compared = shared_tasks(
            OmegaConf.create({"data": files, "turnkey": {"env": config.turnkey.env}})
        )
    of_run = f"; {shared or 'none'} with the same {compared} as a task that the run trained on" if run else ""
    return f"tasks     {total}, {samples} sample{'s' * (samples > 1)} per task ({tasks}){of_run}"
