"""``turnkey agent``: let an agent play one task without a GPU, and show what training would get of it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.agents.function import is_url
from verl_turnkey.plugins.cli.packages import require_verl
from verl_turnkey.plugins.cli.tasks import json_object
from verl_turnkey.plugins.config.overrides import override, read

if TYPE_CHECKING:
    from verl_turnkey.plugins.gateway.rehearsal import Rehearsal, RehearsedTurn

app = typer.Typer()

FAKE = "fake"
FUNCTION = re.compile(r"[^\s\[]+:\w+")
REPLY_WIDTH = 100


@app.command()
def agent(
    run: Annotated[
        str, typer.Argument(help="module:function, file.py:function, the URL of a service, or a command in quotes")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="keys as on a launch line: turnkey.agent.key=1")] = None,
    task: Annotated[str, typer.Option(help="the task as JSON, or a .json file with it")] = "{}",
    model: Annotated[str, typer.Option(help="fake: scripted replies; or an OpenAI-compatible server's URL")] = FAKE,
    model_name: Annotated[str, typer.Option(help="name of the model on the server")] = "",
    api_key_env: Annotated[str | None, typer.Option(help="variable with the server's API key")] = None,
    replies: Annotated[Path | None, typer.Option(help="of the fake model: a JSON or YAML list")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Let your agent play one task. Shows its requests, which of them make a row, states and reward; exit 1 on failure.

    The fake model gives the replies of --replies, then calls the first tool once and answers "ok".

    turnkey agent my_agent.py:play --task '{"question": "2 + 3"}' turnkey.agent.state=call
    """
    require_verl("agent")
    if model != FAKE and replies is not None:
        raise typer.BadParameter("--replies goes with --model fake")
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # verl and the agent print, too
        from verl_turnkey.plugins.gateway.rehearsal import Script, Server, read_replies, rehearse

        script = Script(read_replies(replies) if replies else ())
        stand_in = script if model == FAKE else Server(model, model_name, api_key_env)
        text = read_text(task) if task.endswith(".json") else task
        settings = _settings(overrides or ())
        settings.setdefault("agent", {})["run"] = run if is_url(run) or FUNCTION.fullmatch(run) else shlex.split(run)
        episode = asyncio.run(rehearse(settings, json_object(text, "--task"), stand_in))
        report = "\n".join(lines(episode, settings["agent"]["run"]))
    typer.echo(json.dumps(asdict(episode), default=str) if as_json else report)
    raise typer.Exit(0 if episode.failure is None else 1)


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """The node ``turnkey`` that overrides set."""
    settings: dict[str, Any] = {}
    for word in words:
        key, value = read(word)
        first, *path = key.split(".")
        if first != "turnkey" or not path:
            raise ConfigError(f"{word}: turnkey agent takes keys that begin with turnkey.")
        node = settings
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return settings


def lines(episode: Rehearsal, run: str | list[str]) -> Iterator[str]:
    """The report of an episode."""
    from verl_turnkey.plugins.gateway.rehearsal import WHY

    for number, turn in enumerate(episode.turns):
        yield f"turn {number}  {f'{turn.role}, ' * bool(turn.role)}{_place(turn, number)}"
        reply = " ".join(turn.reply.split())
        yield f"        reply  {reply[:REPLY_WIDTH]}{'...' * (len(reply) > REPLY_WIDTH)}"
        if turn.trained:
            yield f"        state  {turn.state}  reward  {turn.reward:g}"
        else:
            side_call = f"a side call (model {turn.model!r}, {turn.tools} tools)"
            yield f"        not trained: {side_call if turn.side_call else 'the episode failed'}"
    trained = sum(turn.trained for turn in episode.turns)
    yield f"{_number(len(episode.turns), 'turn')}, {trained} of them trained, in {_number(episode.rows, 'row')}"
    for reason in sorted({turn.broke for turn in episode.turns if turn.broke}):
        yield f"new row, {reason}: {WHY.get(reason, reason)}"
    for name, count in sorted(episode.overruled.items()):
        yield f"ignored: {name}, in {_number(count, 'request')}"
    for name, count in sorted(episode.other_models.items()):
        yield f"answered by the model {name}: {_number(count, 'request')}"
    if episode.refused:
        yield f"refused: {_number(episode.refused, 'request')}; the last answer: {episode.last_refusal}"
    if episode.leaves is not None:
        yield f"a process for each episode: the agent {episode.leaves}"
    if episode.failure is not None:
        yield f"failed: {episode.failure}"
        return
    yield f"return {sum(turn.reward or 0.0 for turn in episode.turns):g}, success {episode.success}"
    yield f"on a launch line: {shlex.quote(override('turnkey.agent.run', run))}"


def _place(turn: RehearsedTurn, number: int) -> str:
    place = f"{_number(turn.messages, 'message')}, {_number(turn.tools, 'tool')}"
    if turn.after is not None:
        place += f", {turn.new} new after turn {turn.after}"
    starts_row = number > 0 if turn.after is None else turn.broke
    return f"{place}, a new row ({turn.broke})" if starts_row else place


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
