"""``turnkey agent``: let an agent play a task without a GPU, and show what training would get from it."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.agents.function import is_url
from verl_turnkey.plugins.cli.packages import require_verl
from verl_turnkey.plugins.cli.tasks import json_object
from verl_turnkey.plugins.config.overrides import override

if TYPE_CHECKING:
    from verl_turnkey.plugins.gateway.rehearsal import Rehearsal, RehearsedTurn

app = typer.Typer()

SCRIPTED = "scripted"
FUNCTION = re.compile(r"[^\s\[]+:\w+")
REPLY_WIDTH = 100
TINY = 1e-6
"""credit and differences of rewards below it are rounding errors"""


@app.command()
def agent(
    run: Annotated[
        str, typer.Argument(help="module:function, file.py:function, the URL of a service, or a command in quotes")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="launch-line keys: turnkey.agent.state=call")] = None,
    task: Annotated[str, typer.Option(help="the task as JSON, or a .json file with it")] = "{}",
    model: Annotated[str, typer.Option(help="scripted, or the URL of an OpenAI-compatible server")] = SCRIPTED,
    model_name: Annotated[str, typer.Option(help="name of the model on the server")] = "",
    api_key_env: Annotated[str | None, typer.Option(help="variable with the server's API key")] = None,
    replies: Annotated[Path | None, typer.Option(help="replies of the scripted model: a JSON or YAML list")] = None,
    times: Annotated[int, typer.Option(min=1, help="episodes of the task; 2 or more also show each turn's credit")] = 1,
    at_once: Annotated[int, typer.Option(min=1, help="episodes that run at the same time")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Let your agent play one task. Shows its requests, which of them make a row, states and reward; exit 1 on failure.

    The scripted model gives the replies of --replies, then calls the first tool once and answers "ok". With
    actor_rollout_ref.model.path=MODEL, that model's tokenizer, template and tool parser make the prompts and turns.

    turnkey agent my_agent.py:play --task '{"question": "2 + 3"}' turnkey.agent.state=call --times 8 --at-once 4
    """
    require_verl("agent")
    if model != SCRIPTED and replies is not None:
        raise typer.BadParameter("--replies goes with --model scripted")
    if model != SCRIPTED and not is_url(model):
        raise typer.BadParameter(
            f"--model: expected scripted, or the URL of a server such as http://host:8000/v1, got {model!r}: name "
            "its model with --model-name"
        )
    command = run if is_url(run) or FUNCTION.fullmatch(run) else shlex.split(run)
    _check_file(run)
    others = [word for word in overrides or () if not re.match(r"\+{0,2}turnkey\.agent\.run=", word)]
    line = [override("turnkey.agent.run", command), *others]
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # verl and the agent print, too
        from verl_turnkey.plugins.checks.agent_loop import check_isolation
        from verl_turnkey.plugins.checks.findings import collecting
        from verl_turnkey.plugins.config.schema import turnkey_config
        from verl_turnkey.plugins.gateway.models import Script, Server, read_replies
        from verl_turnkey.plugins.gateway.rehearsal import configuration, rehearse

        scripted = read_replies(replies) if replies else ()
        server = None if model == SCRIPTED else Server(model, model_name, api_key_env)
        text = read_text(task) if task.endswith(".json") else task
        config = configuration(line)
        with collecting(config):
            check_isolation(turnkey_config(config).agent)
        slow = times > 1 and server is None
        played = rehearse(config, json_object(text, "--task"), lambda: server or Script(scripted), times, at_once, slow)
        episodes = asyncio.run(played)
        report = [*(lines(episodes[0]) if times == 1 else group_lines(episodes, config.algorithm.adv_estimator))]
        trainable = [episode.failure is None and episode.method_error is None for episode in episodes]
        if any(trainable):
            report.append(f"on a launch line: {' '.join(map(shlex.quote, line))}")
    plain = [asdict(episode) for episode in episodes]
    typer.echo(json.dumps(plain[0] if times == 1 else plain, default=str) if as_json else "\n".join(report))
    raise typer.Exit(0 if all(trainable) else 1)


def _check_file(run: str) -> None:
    """Refuse a Python file that is given without a function and that no shell would start."""
    if not re.fullmatch(r"\S+\.py", run) or is_url(run) or shutil.which(run):
        return
    path, functions = Path(run), list[str]()
    with suppress(SyntaxError):
        for node in ast.parse(read_text(path)).body if path.is_file() else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                names = node.args.posonlyargs + node.args.args
                takes_two = len(names) - len(node.args.defaults) <= 2 and (len(names) >= 2 or node.args.vararg)
                functions += [f"{run}:{node.name}"] if takes_two else []
    there = "which has no function that takes (task, agent)" if path.is_file() else "and there is no such file"
    what = f"the file {run}" if functions else f"the file {run}, {there}"
    raise ConfigError(
        f"RUN: expected a function, a URL or a command, got {what}: write {' or '.join(functions) or f'{run}:FUNCTION'}"
    )


def lines(episode: Rehearsal) -> Iterator[str]:
    """The report of an episode."""
    for number, turn in enumerate(episode.turns):
        yield f"turn {number}  {f'{turn.role}, ' * bool(turn.role)}{_place(turn, number)}"
        reply = " ".join(turn.reply.split())
        if turn.differs:
            yield f"        differs from the turn before at {turn.differs}"
        yield f"        reply  {reply[:REPLY_WIDTH]}{'...' * (len(reply) > REPLY_WIDTH)}"
        if turn.trained:
            yield f"        state  {turn.state}  reward  {_reward(turn)}"
        else:
            side_call = f"a side call (model {turn.model!r}, {turn.tools} tools)"
            why = "its reply was not used" if episode.failure is None else "the episode failed"
            yield f"        not trained: {side_call if turn.side_call else why}"
    trained = sum(turn.trained for turn in episode.turns)
    yield f"{_number(len(episode.turns), 'turn')}, {trained} of them trained, in {_number(episode.rows, 'row')}"
    yield from dict.fromkeys(episode.warnings)
    if episode.unrewarded:
        whose = "their" if len(episode.unrewarded) > 1 else "its"
        yield f"{_turns(episode.unrewarded)} got no reward of {whose} own; intended?"
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
    yield f"return {_return(episode)}{_over_roles(episode)}, success {episode.success}"


def group_lines(episodes: Sequence[Rehearsal], method: str) -> Iterator[str]:
    """The report on episodes of one task: what went wrong, in how many, and the worst one with its turns' credit."""
    played = [(number, episode) for number, episode in enumerate(episodes) if episode.failure is None]
    solved = sum(bool(episode.success) for _, episode in played)
    yield f"{len(episodes)} episodes, {len(episodes) - len(played)} failed, {solved} solved"
    failures = Counter(episode.failure for episode in episodes if episode.failure is not None)
    for failure, count in failures.most_common():
        yield f"failed, {_number(count, 'episode')}: {failure}"
    refusals = Counter(episode.last_refusal for episode in episodes if episode.last_refusal)
    for refusal, count in refusals.most_common():
        yield f"refused, {_number(count, 'episode')}: {refusal}"
    for leaves in {episode.leaves for episode in episodes if episode.leaves is not None}:
        yield f"a process for each episode: the agent {leaves}"
    warnings = Counter(warning for episode in episodes for warning in dict.fromkeys(episode.warnings))
    for warning, count in warnings.most_common():
        yield f"{_number(count, 'episode')}: {warning}"
    unrewarded = [(number, episode.unrewarded) for number, episode in enumerate(episodes) if episode.unrewarded]
    for number, numbers in unrewarded[:1]:
        example = f"{_turns(numbers)} of episode {number}"
        yield f"{_number(len(unrewarded), 'episode')}: some turns got no reward of their own ({example}); intended?"
    departures = ((n, t, turn) for n, e in enumerate(episodes) for t, turn in enumerate(e.turns) if turn.differs)
    for number, t, turn in [*departures][:1]:
        yield f"for example, turn {t} of episode {number} differs from the turn before at {turn.differs}"
    for error in {episode.method_error for episode in episodes if episode.method_error is not None}:
        yield f"training would stop: {error}"
    if not played:
        return
    states = [[turn.state for turn in episode.turns if turn.trained] for _, episode in played]
    starts = {first for first, *_ in states}
    if not starts.intersection(*states):  # of parallel first calls, any may be answered first
        yield f"the episodes start in {len(starts)} different states: look for a date or a folder in the first prompt"
    turns, rows = (sum(numbers) for numbers in zip(*((len(e.turns), e.rows) for _, e in played), strict=True))
    totals, outcomes = zip(*(_totals(episode) for _, episode in played), strict=True)
    totals_of = f"{min(totals):g} to {max(totals):g}"
    if any(abs(own - outcome) > TINY for own, outcome in zip(totals, outcomes, strict=True)):
        totals_of += f", composed {min(outcomes):g} to {max(outcomes):g}"
    totals_of += _over_roles(*(episode for _, episode in played))
    yield f"return {totals_of}; {_number(turns, 'turn')} in {_number(rows, 'row')}"
    number, worst = min(played, key=lambda entry: (_totals(entry[1])[1], -len(entry[1].warnings)))
    credits = [turn.credit for _, episode in played for turn in episode.turns if turn.credit is not None]
    if credits and len(played) > 1 and max(map(abs, credits)) < TINY and max(outcomes) - min(outcomes) < TINY:
        yield "all outcomes are equal, so every credit is 0: vary the reward to see credit"
    yield f"the worst, episode {number}: return {_return(worst)}{f', credit by {method}' * bool(credits)}"
    yield from _turns_with_credit(worst)


def _turns_with_credit(episode: Rehearsal) -> Iterator[str]:
    for number, turn in enumerate(episode.turns):
        if turn.trained:
            place = f"{turn.role}, " * bool(turn.role)
            place += "" if turn.follows is None else f"after turn {turn.follows}, "
            credit = "" if turn.credit is None else f", credit {turn.credit:.3g}"
            yield f"turn {number}  {place}reward {_reward(turn)}{credit}  {' '.join(turn.reply.split())[:REPLY_WIDTH]}"


def _totals(episode: Rehearsal) -> tuple[float, float]:
    """The sum of the agent's own rewards, and of what ``turnkey.rewards`` make of them."""
    rewards = [(turn.reward or 0.0, turn.composed_reward or 0.0) for turn in episode.turns]
    return sum(own for own, _ in rewards), sum(composed for _, composed in rewards)


def _return(episode: Rehearsal) -> str:
    own, composed = _totals(episode)
    return f"{own:g}, composed {composed:g}" if abs(own - composed) > TINY else f"{own:g}"


def _over_roles(*episodes: Rehearsal) -> str:
    several = any(len({turn.role for turn in episode.turns if turn.trained}) > 1 for episode in episodes)
    return " (summed over roles)" if several else ""


def _turns(numbers: Sequence[int]) -> str:
    """The turns by number, at most five of them."""
    words = [*map(str, numbers[:5]), *([f"{len(numbers) - 5} more"] if len(numbers) > 5 else [])]
    return f"turns {', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else f"turn {words[0]}"


def _reward(turn: RehearsedTurn) -> str:
    """The agent's own reward, and the composed one if it differs."""
    composed = "" if turn.composed_reward in (None, turn.reward) else f", composed {turn.composed_reward:g}"
    return f"{turn.reward:g}{composed}"


def _place(turn: RehearsedTurn, number: int) -> str:
    place = f"{_number(turn.messages, 'message')}, {_number(turn.tools, 'tool')}"
    if turn.after is not None:
        place += f", {turn.new} new after turn {turn.after}"
    for picture, count in Counter(turn.images).items():
        place += f", {picture}" if count == 1 else f", {count} x {picture}"
    starts_row = number > 0 if turn.after is None else turn.broke
    return f"{place}, a new row ({turn.broke or 'prefix'})" if starts_row else place


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
