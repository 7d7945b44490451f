"""An evaluation (``turnkey eval``), from the words of a launch line to the result.

It finds the missing samples, plays them concurrently, and writes the result.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.envs.prompting.actions import CALLS
from verl_turnkey.envs.tasks import COLUMN, Task, open_parquet, panel_of, task_of
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins.checks.run import AGENT, CheckedRun
from verl_turnkey.plugins.config import resolve
from verl_turnkey.plugins.config.agent import SELF
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.playing import differing
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.eval import checkpoint, server
from verl_turnkey.plugins.eval.result import (
    LOG,
    RESULT,
    Samples,
    engine,
    file_digest,
    identity,
    result,
    without_secrets,
)
from verl_turnkey.plugins.log.schema import SCHEMA_VERSION
from verl_turnkey.plugins.log.writer import private, write_json

Advance = Callable[["bool | None"], None]


@dataclass(frozen=True)
class EvalSettings:
    """What to evaluate.

    Args:
        words: of a launch line, as for training; its model folder is that of the tokenizer.
        tasks: file of tasks.
        weights: Hugging Face folder to serve here; None: the server at ``url`` has the model.
        name: of the model on the server.
        tag: the user's label for the weights.
        player: what the model is called in ratings.
    """

    words: Sequence[str]
    tasks: Path
    out: Path
    samples: int
    concurrency: int
    weights: Path | None = None
    url: str = ""
    name: str = ""
    tag: str | None = None
    player: str = ""
    api_key_env: str | None = None
    new: bool = False

    @property
    def model(self) -> dict[str, Any]:
        """The model in the identity of the evaluation."""
        if self.weights is None:
            return {"name": self.name, "tag": self.tag}
        return {"sha256": file_digest([self.weights / "config.json", *checkpoint.weights(self.weights)])}


def evaluate(
    settings: EvalSettings, *, begin: Callable[[int, int], Advance] = lambda done, all: lambda success: None
) -> dict[str, Any]:
    """Play the samples that are missing in ``settings.out``.

    Args:
        begin: called before the first sample with the numbers of finished and of all samples; returns a function that
            is called after each sample with its success, or None if it failed.

    Returns:
        The content of ``result.json`` (:func:`verl_turnkey.plugins.eval.result.result`), also after Ctrl-C.

    Raises:
        ConfigError: words, tasks, model or server cannot be used, or ``out`` holds another evaluation.
    """
    config, pictured = checked(settings.words, settings.tasks)
    if pictured:
        _check_pictured(config, settings)
    agent = bool(config.turnkey.agent.run)
    rows = read_rows(settings.tasks, agent)
    panel_of_file = None if agent else panel_of(settings.tasks)
    panel = panel_of_file.mark if panel_of_file is not None and not differing(panel_of_file, config) else None
    model = {
        **settings.model,
        **({"by": "messages"} if pictured else {}),
        **({} if settings.weights is None else {"engine": engine(config)}),
    }
    with nullcontext() if agent else hosts():
        from verl_turnkey.plugins.eval.player import Player, for_evaluation

        with (
            closing(Player(for_evaluation(config))) as player,
            closing(Samples(settings.out, identity(config, model, player.chat_template, panel), settings.new)) as kept,
        ):
            if panel:
                write_json(private(settings.out / LOG) / "run.json", {"schema": SCHEMA_VERSION, "panel": panel})
            failures: list[dict[str, Any]] = []
            todo = jobs(rows, settings.samples, kept)
            with suppress(KeyboardInterrupt):
                if todo:
                    remote = _remote(settings, player.tokenizer if pictured else None)
                    failures = _play(
                        settings, config, player, kept, todo, lambda n: begin(n, len(rows) * settings.samples), remote
                    )
            opponent = turnkey_config(config).opponent_of(True)
            names = {"policy": settings.player, "opponent": getattr(opponent, "model", opponent)}
            players = None if opponent == SELF else names
            return finish(kept, rows, settings.samples, failures, panel, players)


def _play(
    settings: EvalSettings,
    config: DictConfig,
    player: Any,
    kept: Samples,
    todo: Sequence[Job],
    begin: Callable[[int], Advance],
    remote: Any,
) -> list[dict[str, Any]]:
    from verl_turnkey.plugins.eval.player import Completions

    at_once = settings.concurrency

    async def play(completions: Any, check: Callable[[], None]) -> list[dict[str, Any]]:
        player.server = completions
        await completions.check(*longest(config))
        advance = begin(len(kept.done))
        try:
            return await play_all(todo, player.play, kept, concurrency=at_once, check=check, advance=advance)
        finally:
            await player.stop()

    if settings.weights is None:
        return asyncio.run(play(remote, lambda: None))
    with server.serve(settings.weights, config, settings.out / "server.log") as local:
        completions = Completions(local.url, server.NAME, concurrency=at_once, key=local.key)
        return asyncio.run(play(completions, local.check_alive))


def _remote(settings: EvalSettings, tokenizer: Any) -> Any:
    """The server at ``settings.url``; with a ``tokenizer`` it gets messages with images. None: a server of our own."""
    from verl_turnkey.plugins.eval.player import ChatCompletions, Completions

    if settings.weights is not None:
        return None
    options: dict[str, Any] = {"concurrency": settings.concurrency, "api_key_env": settings.api_key_env}
    if tokenizer is not None:
        return ChatCompletions(settings.url, settings.name, tokenizer, **options)
    return Completions(settings.url, settings.name, **options)


def _check_pictured(config: DictConfig, settings: EvalSettings) -> None:
    """Refuse an evaluation with images whose prompts cannot go to the server as messages."""
    rollout = config.turnkey.rollout
    if settings.weights is not None:
        raise ConfigError(
            f"the environment gives images, and the server that --checkpoint starts gets token ids alone: serve "
            f"{settings.weights} with vLLM yourself, and name it with --server URL --model NAME"
        )
    if rollout.prompt == "conversation" or rollout.action_format in CALLS:
        key = "prompt" if rollout.prompt == "conversation" else "action_format"
        raise ConfigError(
            f"the environment gives images, which go to the server in messages; turnkey.rollout.{key}={rollout[key]} "
            "works with token ids alone: set turnkey.rollout.prompt=template and a text format, such as "
            "turnkey.rollout.action_format=tags"
        )


def longest(config: DictConfig) -> tuple[int, int]:
    """Most tokens of a prompt, and of its continuation: a whole conversation, or else a turn."""
    rollout, options = config.actor_rollout_ref.rollout, turnkey_config(config).rollout
    of_turn = None if options.prompt == "conversation" else options.max_tokens_per_turn
    return rollout.prompt_length, of_turn or rollout.response_length


def checked(words: Sequence[str], tasks: Path) -> tuple[DictConfig, bool]:
    """The configuration for ``words``, after those checks of a training run that concern playing, and whether the first
    task gives images.

    Raises:
        ConfigError: names the key to change.
    """
    from verl_turnkey.plugins.checks.agent_loop import check_agent, check_agent_loop, check_opponents
    from verl_turnkey.plugins.checks.data import check_harbor
    from verl_turnkey.plugins.checks.limits import check_turns
    from verl_turnkey.plugins.checks.rewards import check_rewards

    config = composed(words)
    resolve.absolute_paths(config)
    resolve.agent_loop(config, False)
    resolve.evaluated_opponent(config)
    turnkey = turnkey_config(config)
    import_modules(turnkey.modules)
    loops = [AGENT if turnkey.agent.run else "turnkey_env"]
    run = CheckedRun(config, turnkey, loops, files=[str(tasks)])
    check_turns(run)
    check_opponents(run)
    columns = check_rewards(run).columns
    if turnkey.agent.run is None:
        pictured: list[bool] = []
        check_agent_loop(run, columns, takes_images=lambda *_: pictured.append(True))
        return config, bool(pictured)
    check_agent(run)
    for number, row in enumerate(read_rows(tasks, agent=True)):
        check_harbor(turnkey.agent, f"{tasks}, task {number}", row[COLUMN])
    return config, False


@contextmanager
def hosts() -> Iterator[None]:
    """A local Ray for the hosts of environments, unless Ray has been started already."""
    import ray

    if ray.is_initialized():
        yield
        return
    store = 100 * 2**20  # bytes; only observations and actions pass through it
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=store,
    )
    try:
        yield
    finally:
        ray.shutdown()


ATTEMPTS = 3
"""most episodes for a sample whose episodes fail"""
Play = Callable[[str, Mapping[str, Any]], Awaitable["dict[str, Any] | str"]]


@dataclass(frozen=True)
class Job:
    """A sample to play."""

    key: str
    task: int
    """index of the task"""
    number: int
    """index of the sample among those of its task"""
    row: Mapping[str, Any]
    """the data row for the agent loop"""


def read_rows(file: Path, agent: bool = False) -> list[dict[str, Any]]:
    """The rows of a file of tasks, as verl's data set passes them to the agent loop, without repeated tasks.

    Args:
        agent: the tasks are for the user's own agent; a task without a text is described by what the agent gets.

    Raises:
        ConfigError, TaskFormatError: the file holds something else.
    """
    table = open_parquet(file).read()
    if COLUMN not in table.column_names and not agent:
        raise ConfigError(f"{file} has no column {COLUMN!r}: `turnkey tasks` writes files of tasks")
    rows: dict[str, dict[str, Any]] = {}
    for row in table.to_pylist():
        row["raw_prompt"] = row.pop("prompt", [])
        if agent:
            row[COLUMN] = json.dumps(task_of(row), sort_keys=True)
        else:
            Task.from_json(row[COLUMN])
        rows.setdefault(row[COLUMN], row)
    return list(rows.values())


def jobs(rows: Sequence[Mapping[str, Any]], samples: int, kept: Samples) -> list[Job]:
    """The unfinished samples, beginning with the first sample of every task."""
    missing = []
    for number in range(samples):
        for place, row in enumerate(rows):
            key = kept.key(row[COLUMN], number)
            if key not in kept.done:
                names = {"uid": f"{kept.id}-{place}", "session_id": number}
                missing.append(Job(key, place, number, {**row, **names}))
    return missing


async def play_all(
    todo: Sequence[Job],
    play: Play,
    kept: Samples,
    *,
    concurrency: int,
    check: Callable[[], None] = lambda: None,
    advance: Callable[[bool | None], None] = lambda success: None,
) -> list[dict[str, Any]]:
    """Play ``todo``; each finished sample is stored immediately.

    Args:
        play: see :meth:`verl_turnkey.plugins.eval.player.Player.play`.
        check: called after a failure; raises if no further sample can succeed.
        advance: called after each sample with its success, or None if it failed.

    Returns:
        The samples that failed in all attempts, with the last reason.
    """
    waiting, failures = iter(todo), []

    async def work() -> None:
        for job in waiting:
            for attempt in range(ATTEMPTS):
                # The trajectory log has an episode for each attempt.
                again = {"session_id": f"{job.number}-{attempt}"} if attempt else {}
                outcome = await play(job.key, {**job.row, **again})
                if not isinstance(outcome, str):
                    break
                check()
            named = {"task": job.task, "sample": job.number, "seed": json.loads(job.row[COLUMN]).get("seed")}
            if isinstance(outcome, str):
                failures.append({"key": job.key, **named, "reason": outcome})
            else:
                kept.add(job.key, {**named, **outcome})
            advance(None if isinstance(outcome, str) else outcome["success"])

    workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, len(todo)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return failures


def finish(
    kept: Samples,
    rows: Sequence[Mapping[str, Any]],
    samples: int,
    failures: Sequence[Mapping[str, Any]],
    panel: Mapping[str, str] | None = None,
    players: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the result of the finished samples to ``result.json`` and return it.

    Args:
        panel: its name and hash.
        players: names of ``policy`` and ``opponent``, if an opponent plays some roles.
    """
    finished = {
        place: [kept.done[key] for number in range(samples) if (key := kept.key(row[COLUMN], number)) in kept.done]
        for place, row in enumerate(rows)
    }
    tasks = [without_secrets(json.loads(row[COLUMN])) for row in rows]
    named = {} if players is None else {"players": dict(players)}
    summary = {
        "eval_id": kept.id,
        "panel": panel,
        **named,
        **result(finished, failures, tasks=tasks, samples_per_task=samples),
    }
    write_text(kept.folder / RESULT, json.dumps(summary, indent=1) + "\n")
    return summary
