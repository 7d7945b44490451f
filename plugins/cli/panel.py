"""``turnkey panel``: published sets of tasks, made anew here and compared with what was published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.advantage.text_files import read_text, write_text
from verl_turnkey.envs.errors import UnknownEnvironmentError
from verl_turnkey.envs.tasks import HELD_OUT_SPLITS, Panel, make_panel
from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.cli.packages import require_verl
from verl_turnkey.plugins.config import playing
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.config.recipe_files import config_dir
from verl_turnkey.plugins.config.schema import turnkey_config

Made = tuple[Panel, dict[str, Any]]
"""a panel, and the arguments that say where its environment is here"""
app = typer.Typer()
PROMPT = 2048
"""``data.max_prompt_length`` of a new panel"""
RESPONSE = {"template": 512, "conversation": 8192}
"""its ``data.max_response_length``, by ``turnkey.rollout.prompt``: of a turn, and of a whole conversation"""


@app.command()
def panel(
    name: Annotated[str | None, typer.Argument(help="a published panel, or a name for a new one")] = None,
    environment: Annotated[str | None, typer.Argument(help="new panel: short name, id, or my_env.py[:ID]")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="keys as on a launch line: key=value")] = None,
    tasks: Annotated[str, typer.Option(help="new panel: number of tasks, or all")] = "48",
    samples: Annotated[int, typer.Option(min=1, help="new panel: samples per task")] = 4,
    split: Annotated[str | None, typer.Option(help="new panel: name of the split of its tasks")] = None,
    returns: Annotated[str, typer.Option(help="new panel: lowest and highest return, as [0, 1]")] = "null",
    starts: Annotated[bool, typer.Option(help="reset the environment and look at the start of each task")] = True,
    out: Annotated[Path, typer.Option(help="folder for NAME.json and NAME.parquet")] = Path(),
) -> None:
    """Write a panel: tasks, prompt, limits and hashes. A published one is made anew here; exit 1 if it differs.

    Without arguments the command lists the published panels.

    turnkey panel babyai-48

    turnkey panel my-rooms babyai turnkey.env.kwargs.level=BabyAI-GoToDoor-v0 --tasks 100
    """
    if name is None:
        for file in sorted(published().glob("*.json")):
            shipped = find(file.stem)
            number = len(shipped.content["tasks"])
            typer.echo(f"{shipped.name:24} {number:5} tasks  {shipped.env_id:26} {shipped.sha256[:16]}")
        return
    require_verl("panel")
    lines: list[str] = []
    if environment is None or "=" in environment:
        there = find(name)
        made, here = remade(there, [*([environment] if environment else []), *(overrides or ())], starts)
        lines = differences(there, made)
    else:
        if name.endswith(".json") or name in _published_names():
            raise ConfigError(f"{name!r} names a panel: leave out {environment}, or choose another name")
        options = {"samples": samples, "split": split, "returns": _returns(returns), "with_starts": starts}
        there, here = new(name, environment, overrides or (), number=_number(tasks), **options)
    write_text(out / f"{there.name}.json", there.text())
    there.write_parquet(out / f"{there.name}.parquet", there.tasks(here))
    different = len({task["start"] for task in there.content["tasks"]} - {None})
    typer.echo(f"{there.name}: {len(there.content['tasks'])} tasks, {different or 'unknown'} different starts")
    typer.echo(f"sha256 {there.sha256}; {there.name}.json and {there.name}.parquet in {out}")
    for line in lines:
        typer.echo(f"differs here: {line}", err=True)
    raise typer.Exit(1 if lines else 0)


def _number(tasks: str) -> int | None:
    """The value of ``--tasks``; None: all."""
    if tasks != "all" and not (tasks.isdecimal() and int(tasks)):
        raise ConfigError(f"--tasks: expected a positive integer or all, got {tasks!r}")
    return None if tasks == "all" else int(tasks)


def _returns(text: str) -> list[float] | None:
    """The value of ``--returns``."""
    try:
        value = json.loads(text)
        if value is None or (len(value) == 2 and float(value[0]) <= float(value[1])):
            return value
    except (LookupError, TypeError, ValueError):
        pass
    raise ConfigError(f"--returns: expected the lowest and highest return, like [0, 1], got {text!r}")


def _published_names() -> list[str]:
    return [file.stem for file in sorted(published().glob("*.json"))]


def published() -> Path:
    """The folder of the panels that this package ships."""
    return config_dir().parent / "panels"


def find(name: str) -> Panel:
    """A published panel by its name, or one of a file."""
    names = _published_names()
    file = published() / f"{name}.json" if name in names else Path(name).expanduser()
    if not file.is_file():
        hint = did_you_mean(name, names) or "."
        raise ConfigError(
            f"there is no panel {name!r}{hint} Give the path of a .json file, or one of {', '.join(names)}; "
            "`turnkey panel NAME ENVIRONMENT` makes one"
        )
    return Panel.read(read_text(file), str(file))


def new(name: str, environment: str, overrides: Sequence[str], **options: Any) -> Made:
    """A panel of an environment with the settings of its recipe; ``options``: as of ``make_panel``."""
    played = launch.resolve(environment, overrides)
    line = [*_switches(played), f"data.max_prompt_length={PROMPT}"]
    kind = turnkey_config(composed([*line, *overrides])).rollout.prompt
    config = composed([*line, f"data.max_response_length={RESPONSE[kind]}", *overrides])
    kwargs = {**turnkey_config(config).env.kwargs, **played.held_out("test")}
    of_split = HELD_OUT_SPLITS.get(played.id, {}).get("test", {})
    options["split"] = options["split"] or next((str(kwargs[name]) for name in of_split if name in kwargs), None)
    return make_panel(name, played.id, kwargs, playing.settings(config), **options), playing.places(config)


def remade(panel: Panel, overrides: Sequence[str], starts: bool) -> Made:
    """The panel made anew on this machine; ``overrides`` say where its environment is."""
    try:
        played = launch.resolve(panel.env_id, overrides)
    except UnknownEnvironmentError:
        raise ConfigError(
            f"panel {panel.name} needs {panel.env_id}, which is not registered here: add "
            "turnkey.modules=[FILE] with the file that registers it"
        ) from None
    config = composed([*_switches(played), *playing.words(panel), *overrides])
    check_unchanged(panel, config)
    content = panel.content
    made = make_panel(
        panel.name,
        panel.env_id,
        turnkey_config(config).env.kwargs,
        playing.settings(config),
        number=len(content["tasks"]),
        with_starts=starts and content["tasks"][0]["start"] is not None,
        **{name: content[name] for name in ("samples", "split", "returns")},
    )
    return made, playing.places(config)


def _switches(played: launch.Played) -> list[str]:
    env = f"+turnkey/env={played.recipe}" if played.recipe else override("turnkey.env.id", played.id)
    modules = [override("turnkey.modules", [played.module])] if played.module else []
    return ["+turnkey=base", env, *modules]


def check_unchanged(panel: Panel, config: Any) -> None:
    """Refuse a configuration that plays the tasks of the panel in another way."""
    if lines := playing.differing(panel, config):
        raise ConfigError(
            f"panel {panel.name} fixes what these overrides change:\n  "
            + "\n  ".join(lines)
            + "\nLeave them out, or make a panel of your own: turnkey panel NAME ENVIRONMENT key=value"
        )


def differences(panel: Panel, made: Panel) -> list[str]:
    """In words, what is different in ``made``, the panel as this machine makes it."""
    there, here = panel.content, made.content
    lines = [
        f"{name}: {here[name]!r}, published {there[name]!r}"
        for name in there
        if name != "tasks" and here[name] != there[name]
    ]
    ids = [[task["id"] for task in content["tasks"]] for content in (there, here)]
    if ids[0] != ids[1]:
        return [*lines, f"tasks: {len(set(ids[0]) - set(ids[1]))} of {len(ids[0])} are not chosen here"]
    pairs = list(zip(there["tasks"], here["tasks"], strict=True))
    for a, b in [pair for pair in pairs if pair[0]["seed"] != pair[1]["seed"]][:1]:
        lines.append(f"tasks: the seed of {a['id']} is {b['seed']}, published {a['seed']}")
    other = [a["id"] for a, b in pairs if a["start"] and b["start"] and a["start"] != b["start"]]
    start = f"tasks: {len(other)} of {len(pairs)} start in another state, such as "
    return [*lines, start + other[0]] if other else lines
