"""``turnkey eval``: evaluate a checkpoint or a server on tasks of an environment."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_turnkey.plugins.cli.console import LINE_EVERY
from verl_turnkey.plugins.cli.packages import require_verl

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_turnkey.plugins.cli.run_folder import RunFolder

app = typer.Typer()

METHOD = "+turnkey="
CREDIT = "turnkey.credit."
ROLLOUT = "actor_rollout_ref.rollout"


@app.command("eval")
def evaluate(
    environment: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ENVIRONMENT|turnkey.agent.run=AGENT",
            help="folder of a run, recipe, gymnasium id, or your file; or, for an agent, its key on a launch line",
        ),
    ] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="keys as on a launch line: key=value")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="folder of Hugging Face or verl, or a hub name; default: the run's newest")
    ] = None,
    server: Annotated[str | None, typer.Option(help="or an OpenAI-compatible server: http://host:8000/v1")] = None,
    model: Annotated[str | None, typer.Option(help="name of the model on the server")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="its folder or hub name; default: that of --model")] = None,
    tag: Annotated[str | None, typer.Option(help="your label for the weights behind --model")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="variable with the server's API key")] = None,
    panel: Annotated[str | None, typer.Option(help="play a published panel, or NAME.json: turnkey panel")] = None,
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
    limits, rewards, environment, modules. Overrides on the command line win, and are printed if they differ from it.

    turnkey eval runs/babyai --tasks 100 --samples 8

    turnkey eval runs/babyai --panel babyai-48
    """
    require_verl("eval")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    from verl_turnkey.envs.panels import PLACES
    from verl_turnkey.envs.tasks import HELD_OUT_SPLITS
    from verl_turnkey.envs.user_modules import import_modules
    from verl_turnkey.plugins.cli import eval_tasks, launch
    from verl_turnkey.plugins.cli import panel as panels
    from verl_turnkey.plugins.cli.run_folder import RunFolder
    from verl_turnkey.plugins.config import playing
    from verl_turnkey.plugins.config.composing import composed
    from verl_turnkey.plugins.config.overrides import override, values
    from verl_turnkey.plugins.eval import checkpoint as checkpoints
    from verl_turnkey.plugins.eval.run import EvalSettings
    from verl_turnkey.plugins.eval.run import evaluate as play
    from verl_turnkey.plugins.shutdown.run_files import locked

    further = list(overrides or ())
    if "=" in environment and not Path(environment).exists():
        further, environment = [environment, *further], ""
    fixed = panels.find(panel) if panel else None
    if fixed is not None and (tasks or samples):
        raise typer.BadParameter("--panel fixes tasks and samples: leave out --tasks and --samples")
    if fixed is None and not environment and not further:
        raise typer.BadParameter("give a RUN, an ENVIRONMENT, an agent or --panel")
    if fixed is not None:
        environment = environment or fixed.env_id
        samples = 1 if greedy or temperature == 0 else fixed.samples
    samples = samples or 1
    trained = RunFolder.of(Path(environment)) if environment else None
    name = "" if trained is None else trained.folder.name
    if trained is not None:
        environment = trained.env_id
        further = [*([override("turnkey.agent.run", trained.agent)] if trained.agent else []), *further]
        checkpoint = trained.checkpoints if checkpoint is None and server is None else checkpoint
    elif checkpoint:
        trained = RunFolder.of(checkpoint)
    if environment and launch.agent_of(further):
        raise typer.BadParameter(f"either {environment} is played, or the agent of turnkey.agent.run: leave out one")
    if (checkpoint is None) == (server is None):
        raise typer.BadParameter("give a RUN, or either --checkpoint or --server")
    of_server = {"--model": model, "--tag": tag, "--api-key-env": api_key_env}
    if server is None and (names := [name for name, value in of_server.items() if value is not None]):
        raise typer.BadParameter(f"{' and '.join(names)} go with --server; other weights: --checkpoint")
    if checkpoint is None and model is None:
        raise typer.BadParameter("--server needs --model, the name of the model there")
    method, overridden, ignored = _method(further)
    if ignored:
        typer.echo(f"ignored, since credit does not affect an evaluation: {' '.join(ignored)}", err=True)
    further = [*_sampling(greedy, temperature, samples), *overridden]
    if trained is not None:
        import_modules(trained.modules, "turnkey.modules of the run")
    played = launch.played(environment, further)
    if fixed is not None:
        if played.id != fixed.env_id:
            raise typer.BadParameter(f"the panel {fixed.name} is of {fixed.env_id}, not of {played.id or 'an agent'}")
        further = [*playing.words(fixed), *further]
    weights_name = (model or "").rstrip("/").rpartition("/")[2] if checkpoint is None else checkpoints.name(checkpoint)
    folder = (out or Path("evals") / f"{name or played.name}-{weights_name}").absolute()
    here, gpus = launch.device_here()
    if here == "cpu":
        os.environ["TURNKEY_DEVICE"] = "cpu"  # before verl is imported

    def words(path: str, further: Sequence[str]) -> list[str]:
        log = override("turnkey.log.trajectories", folder / "turnkey_log")
        lines = launch.overrides(
            played,
            model=path,
            method=method,
            device=here,
            gpus=max(1, gpus),
            steps=1,
            tasks=folder,
            out=folder,
            sizes="gpu" if server else None,  # the model runs on the server, whatever this machine has
            further=[log, *further],
        )
        return [word for line in lines for word in line]

    if checkpoint is not None:
        checkpoint = checkpoints.downloaded(checkpoint)
    # A misspelt key and a wrong folder are refused before anything is written or merged.
    of_tokenizer = tokenizer or model or str(checkpoint)
    if trained is not None and trained.env_id == played.id:
        own = trained.playing(composed(words(of_tokenizer, ())), HELD_OUT_SPLITS.get(played.id, {}).get("test", {}))
        for line in trained.differing(further):
            typer.echo(f"differs from the run: {line}", err=True)
        if fixed is not None:  # its own arguments of the environment, in the run's place
            kept = [f"++turnkey.env.kwargs.{name}=" for name in PLACES]
            own = [word for word in own if not word.startswith("++turnkey.env.kwargs.") or word.startswith((*kept,))]
        further = [*own, *further]
        played = launch.played(environment, further)
    elif trained is not None:
        of_run, of_line = trained.env_id or f"the agent {trained.agent}", played.id or f"the agent {played.agent}"
        typer.echo(f"the run trained on {of_run}, not on {of_line}: its settings are ignored", err=True)
    config = composed(words(of_tokenizer, further))
    if fixed is not None:
        panels.check_unchanged(fixed, config)
    if checkpoint is not None:
        checkpoints.find(checkpoint)
    for line in _header(config, checkpoint, trained):
        typer.echo(line, err=True)
    taken = f"{folder}: another turnkey eval is writing there"
    with locked(folder, taken, "; choose another --out"), _progress() as begin:
        weights = None
        if checkpoint is not None:
            if not new:
                checkpoints.check_shards(checkpoint, folder)
            trusted = bool(config.actor_rollout_ref.model.get("trust_remote_code"))
            weights = checkpoints.resolve(checkpoint, folder, trusted)
        val_files = values(further, "data.val_files")[-1:] or (trained.task_files("val") if trained else [])
        val_files = val_files[0] if val_files and isinstance(val_files[0], list) else val_files
        if fixed is not None:
            task_file = eval_tasks.panel_file(fixed, config, folder)
        else:
            task_file = eval_tasks.task_file(tasks or "128", played, folder, val_files)
        typer.echo(eval_tasks.counted(config, task_file, trained, samples), err=True)
        settings = EvalSettings(
            words=words(str(weights or tokenizer or model), further),
            tasks=task_file,
            out=folder,
            samples=samples,
            concurrency=concurrency,
            weights=weights,
            url=(server or "").rstrip("/"),
            name=model or "",
            tag=tag,
            api_key_env=api_key_env,
            new=new,
        )
        result = play(settings, begin=begin)
    _print(result, folder)
    raise typer.Exit(0 if result["complete"] else 1)


def _header(config: DictConfig, checkpoint: Path | None, trained: RunFolder | None) -> Iterator[str]:
    """Weights, settings, sampling and limits of the evaluation."""
    from verl_turnkey.plugins.eval import checkpoint as checkpoints

    if checkpoint is not None:
        yield f"weights   {checkpoints.locate(checkpoint)}"
    if trained is not None:
        yield f"settings  of the run in {trained.folder}, except for the overrides"
    if (run := config.turnkey.agent.run) is not None:
        yield f"agent     {run if isinstance(run, str) else shlex.join(run)}"
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
    from verl_turnkey.plugins.config.overrides import override

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

    from verl_turnkey.plugins.eval.result import remarks, rows

    table = Table("", "mean", "95 % interval", title=_counted(result))
    for line in rows(result):
        table.add_row(*line)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for line in remarks(result):
        console.print(line)
    console.print(f"{folder / 'result.json'}", soft_wrap=True)


def _counted(result: dict[str, Any]) -> str:
    return f"{len(result['tasks'])} tasks, {result['samples']} samples"
