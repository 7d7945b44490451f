"""The command ``turnkey``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from verl_turnkey.plugins.cli import agent, env_checks, evaluate, listing, panel, prm, report, tasks, train, view
from verl_turnkey.plugins.cli.errors import sentence
from verl_turnkey.plugins.cli.launch import environment
from verl_turnkey.plugins.cli.new import KINDS, own_file
from verl_turnkey.plugins.cli.packages import require_verl
from verl_turnkey.plugins.cli.tasks import json_object
from verl_turnkey.plugins.config import machine

SECTIONS = {
    "Train": ("train", "resume", "check", "recipe", "list"),
    "Tasks and environments": ("tasks", "panel", "env-check", "agent"),
    "Results": ("eval", "compare", "view", "export", "report", "prm"),
    "Installation, parts of your own": ("doctor", "new"),
}
"""heading of ``--help`` -> commands, in this order"""


class Commands(TyperGroup):
    """The commands under the headings of :data:`SECTIONS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in SECTIONS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str(60)) for name in names])


HELP = {"help_option_names": ["--help", "-h"]}
app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, context_settings=HELP)
app.add_typer(listing.app, name="list")
app.add_typer(report.app, name="report")
app.add_typer(prm.app, name="prm")
for part in (tasks, panel, view, train, evaluate, agent):
    app.add_typer(part.app)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"verl-turnkey {version('verl-turnkey')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    """Turn-level credit for LLM agents on stock verl."""


@app.command()
def doctor(
    ray: Annotated[bool, typer.Option(help="look inside a Ray worker too")] = True,
    address: Annotated[str | None, typer.Option(help="a running Ray cluster; default: start one here")] = None,
    clean: Annotated[bool, typer.Option("--clean", help="list what ended runs left on this machine, instead")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="with --clean: remove it")] = False,
    verl: Annotated[bool, typer.Option("--verl", help="list the parts of verl that changed, instead")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Check the installation, here and in a Ray worker. Shows versions and what is registered; exit 1 on a problem."""
    if yes and not clean:
        raise typer.BadParameter("--yes goes with --clean")
    if clean:
        from verl_turnkey.plugins.cli.doctor import clean as clean_up

        raise typer.Exit(clean_up(remove=yes))
    from verl_turnkey.plugins.cli.doctor import run, run_verl

    if verl:
        raise typer.Exit(run_verl())
    raise typer.Exit(run(in_ray=ray, address=address, as_json=as_json))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def check(context: typer.Context) -> None:
    """Check a launch line or script without starting Ray. Takes main_ppo's arguments; exit 1 on an error.

    Prints what the run would do, all errors with the key to change, and warnings.

    --rules prints the rules instead, with their ids for turnkey.ignore; --rules --json the same for scripts.

    --prompt shows the first prompt of the first task.

    --gpu h100:8 (or 80GB:8) estimates the memory of each GPU, by phase; with --json only that, for scripts.

    turnkey check +turnkey=gigpo +turnkey/env=babyai data.train_files=tasks/train.parquet ...

    turnkey check python -m verl.trainer.main_ppo +turnkey=gigpo ...    # a whole command, as you would run it

    turnkey check 'cd verl && bash -c "..."'    # in quotes: bash reads it, in a sandbox

    turnkey check launch.sh    # runs the script in a sandbox up to main_ppo; extra arguments override the script's

    TURNKEY_CHECK=1 bash launch.sh    # runs it as it is, and ends after the checks
    """
    if context.args in ([], ["--help"], ["-h"]):
        typer.echo(context.get_help())
        raise typer.Exit(0 if context.args else 2)
    require_verl("check")
    if "--rules" in context.args:
        if unknown := {*context.args} - {"--rules", "--json"}:
            raise typer.BadParameter(f"--rules goes with --json alone, not with {' '.join(sorted(unknown))}")
        from verl_turnkey.plugins.checks import rules

        typer.echo(rules.as_json() if "--json" in context.args else rules.as_text())
        return
    from verl_turnkey.plugins.cli.check import quick_run

    words, gpu = _without_gpu(context.args)
    if gpu is not None:
        os.environ[machine.GPU] = gpu
    prompt, as_json = "--prompt" in words, "--json" in words
    words = [word for word in words if word not in ("--prompt", "--json")]
    from verl_turnkey.plugins.cli import script

    words, notes = script.arguments(words)
    for line in notes:
        typer.echo(line, err=as_json)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        raise typer.Exit(quick_run(words, prompt=prompt, as_json=as_json))


def _without_gpu(words: list[str]) -> tuple[list[str], str | None]:
    """The words without ``--gpu NAME``, and the name."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--gpu=") else [word])]
    if "--gpu" not in words:
        return words, None
    at = words.index("--gpu")
    name = words[at + 1] if at + 1 < len(words) else ""
    machine.Gpu.parse(name)
    return [*words[:at], *words[at + 2 :]], name


@app.command()
def env_check(
    env: Annotated[str | None, typer.Argument(help="short name (babyai), gymnasium id, or my_env.py[:ID]")] = None,
    kwargs: Annotated[str, typer.Option(help="arguments of the environment, as JSON")] = "{}",
    module: Annotated[list[str] | None, typer.Option(help="module that registers the id")] = None,
    action: Annotated[
        list[str] | None, typer.Option(help="a valid action, if the environment lists none (repeatable)")
    ] = None,
    seeds: Annotated[int, typer.Option(help="number of seeds")] = 3,
    rollouts: Annotated[int, typer.Option(help="episodes per seed")] = 8,
    seconds: Annotated[float | None, typer.Option(help="play episodes for this long instead of --rollouts")] = None,
    steps: Annotated[int, typer.Option(help="steps per episode at most")] = 20,
    processes: Annotated[int, typer.Option(help="extra processes that must replay the same; 0: play in this one")] = 3,
    step_timeout: Annotated[float, typer.Option(help="seconds, as turnkey.env.step_timeout")] = 30.0,
    reset_timeout: Annotated[float, typer.Option(help="seconds, as turnkey.env.reset_timeout")] = 120.0,
    all_installed: Annotated[bool, typer.Option(help="a table of all our environments that are installed")] = False,
    harbor: Annotated[Path | None, typer.Option(help="a Harbor task, or a folder of them, instead")] = None,
    mcp: Annotated[str | None, typer.Option(help="a file with mcpServers, instead: lists the servers' tools")] = None,
    ignore_dockerfile: Annotated[bool, typer.Option(help="Harbor tasks run on this machine's programs")] = False,
    inherit: Annotated[list[str] | None, typer.Option(help="environment variable that Harbor tasks may read")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Look for faults in an environment. Plays it; exit 1 when it lacks a property that training needs."""
    if (env is not None) + all_installed + (harbor is not None) + (mcp is not None) != 1:
        raise typer.BadParameter("give either an environment, --all-installed, --harbor or --mcp")
    if mcp is not None:
        right = env_checks.show_tools(mcp, start_timeout=reset_timeout, as_json=as_json, write=typer.echo)
        raise typer.Exit(0 if right else 1)
    if harbor is not None:
        options: dict[str, Any] = {"ignore_dockerfile": ignore_dockerfile, "as_json": as_json, "inherit": inherit or ()}
        raise typer.Exit(0 if env_checks.check_tasks(harbor, write=typer.echo, **options) else 1)
    from verl_turnkey.envs.checking.report import check, check_installed, table

    budget: dict[str, Any] = {"seeds": seeds, "rollouts": rollouts, "steps": steps, "processes": processes}
    budget |= {"seconds": seconds, "step_timeout": step_timeout, "reset_timeout": reset_timeout}
    budget["actions"] = action or ()
    if env is not None:
        played = environment(env, module or [])
        modules = [*(module or ()), *([str(played.module)] if played.module else ())]
        report = check(played.id, {**played.kwargs, **json_object(kwargs)}, modules=modules, **budget)
        typer.echo(json.dumps(report.to_dict()) if as_json else "\n".join(report.lines()))
        raise typer.Exit(0 if report.ok else 1)
    reports, left_out = check_installed(lambda line: typer.echo(line, err=True), modules=module or [], **budget)
    typer.echo(json.dumps([report.to_dict() for report in reports]) if as_json else table(reports))
    for line in left_out:
        typer.echo(f"not checked: {line}", err=True)
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)


@app.command()
def recipe(
    method: Annotated[str, typer.Argument(help="+turnkey=<method>, or base")],
    further: Annotated[
        list[str] | None, typer.Argument(help="more words of a launch line: +turnkey/env=babyai key=1")
    ] = None,
) -> None:
    """Print what a recipe sets, and where each value is from."""
    require_verl("recipe")
    from verl_turnkey.plugins.cli.check import show

    typer.echo(show([f"+turnkey={method}", *(further or ())]), nl=False)


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="estimator, modifier, loss, reward or env")],
    name: Annotated[str, typer.Argument(help="name of the new part, in snake case")],
    out: Annotated[Path | None, typer.Option(help="the file to write; default: NAME.py")] = None,
    summary: Annotated[str | None, typer.Option(help="what it does, in one line for the tables")] = None,
) -> None:
    """Write a part of your own that works. One file: estimator, modifier, loss, reward or environment."""
    if kind not in KINDS:
        raise typer.BadParameter(f"expected one of {', '.join(KINDS)}, got {kind!r}")
    typer.echo("\n".join(own_file(kind, name, out or Path(f"{name}.py"), summary)))


def main() -> None:
    """Entry point of the console script: errors of the user's input in one line, not in a traceback."""
    for stream in (sys.stdout, sys.stderr):  # texts of environments and models go to any terminal
        getattr(stream, "reconfigure", dict)(errors="backslashreplace")
    try:
        if not getattr(sys.flags, "safe_path", False) and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does: modules in the current folder, for us as for verl
        app()
    except (ValueError, LookupError, ImportError, TypeError, OSError) as error:
        typer.echo(f"turnkey: {sentence(error)}", err=True)
        raise SystemExit(2) from None
    except RuntimeError as error:
        if not type(error).__module__.startswith("verl_turnkey."):  # ours say what to do: a server is down
            raise
        typer.echo(f"turnkey: {error}", err=True)
        raise SystemExit(2) from None
