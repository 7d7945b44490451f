"""An evaluation (``turnkey eval``), from the words of a launch line to the result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.envs.panels import panel_of
from verl_turnkey.envs.tasks import COLUMN
from verl_turnkey.plugins.checks.run import AGENT
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.playing import differing
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.eval import checkpoint, server
from verl_turnkey.plugins.eval.identity import engine, file_digest, identity
from verl_turnkey.plugins.eval.samples import LOG, Samples
from verl_turnkey.plugins.eval.schedule import Job, finish, jobs, play_all, read_rows
from verl_turnkey.plugins.log.schema import SCHEMA_VERSION
from verl_turnkey.plugins.log.segments import private, write_json

Advance = Callable[["bool | None"], None]


@dataclass(frozen=True)
class EvalSettings:
    """What to evaluate.

    Args:
        words: of a launch line, as for training; its model folder is that of the tokenizer.
        tasks: file of tasks.
        weights: Hugging Face folder to serve here; None: the server at ``url`` has the model.
        name: of the model on the server.
        tag: the user's label for the weights behind that name.
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
    config = checked(settings.words, settings.tasks)
    agent = bool(config.turnkey.agent.run)
    rows = read_rows(settings.tasks, agent)
    of_file = None if agent else panel_of(settings.tasks)
    panel = of_file.mark if of_file is not None and not differing(of_file, config) else None
    model = {**settings.model, **({} if settings.weights is None else {"engine": engine(config)})}
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
                    failures = _play(
                        settings, config, player, kept, todo, lambda n: begin(n, len(rows) * settings.samples)
                    )
            return finish(kept, rows, settings.samples, failures, panel)


def _play(
    settings: EvalSettings,
    config: DictConfig,
    player: Any,
    kept: Samples,
    todo: Sequence[Job],
    begin: Callable[[int], Advance],
) -> list[dict[str, Any]]:
    from verl_turnkey.plugins.eval.completions import Completions

    async def play(completions: Completions, check: Callable[[], None]) -> list[dict[str, Any]]:
        player.server = completions
        await completions.check(*longest(config))
        advance = begin(len(kept.done))
        at_once = settings.concurrency
        try:
            return await play_all(todo, player.play, kept, concurrency=at_once, check=check, advance=advance)
        finally:
            await player.stop()

    at_once = settings.concurrency
    if settings.weights is None:
        theirs = Completions(settings.url, settings.name, concurrency=at_once, api_key_env=settings.api_key_env)
        return asyncio.run(play(theirs, lambda: None))
    with server.serve(settings.weights, config, settings.out / "server.log") as ours:
        completions = Completions(ours.url, server.NAME, concurrency=at_once, key=ours.key)
        return asyncio.run(play(completions, ours.check_alive))


def longest(config: DictConfig) -> tuple[int, int]:
    """Most tokens of a prompt, and of its continuation: a whole conversation, or else a turn."""
    rollout, options = config.actor_rollout_ref.rollout, turnkey_config(config).rollout
    of_turn = None if options.prompt == "conversation" else options.max_tokens_per_turn
    return rollout.prompt_length, of_turn or rollout.response_length


def checked(words: Sequence[str], tasks: Path) -> DictConfig:
    """The configuration for ``words``, after those checks of a training run that concern playing.

    Raises:
        ConfigError: names the key to change.
    """
    from verl_turnkey.envs.user_modules import import_modules
    from verl_turnkey.plugins.checks.agent_loop import check_agent, check_agent_loop
    from verl_turnkey.plugins.checks.data import check_harbor
    from verl_turnkey.plugins.checks.limits import check_turns
    from verl_turnkey.plugins.checks.rewards import check_rewards
    from verl_turnkey.plugins.checks.run import Run
    from verl_turnkey.plugins.config import resolve

    config = composed(words)
    resolve.absolute_paths(config)
    resolve.agent_loop(config, False)
    turnkey = turnkey_config(config)
    import_modules(turnkey.modules)
    loops = [AGENT if turnkey.agent.run else "turnkey_env"]
    run = Run(config, turnkey, loops, files=[str(tasks)])
    check_turns(run)
    columns = check_rewards(run).columns
    if turnkey.agent.run is None:
        check_agent_loop(run, columns)
        return config
    check_agent(run)
    for number, row in enumerate(read_rows(tasks, agent=True)):
        check_harbor(turnkey.agent, f"{tasks}, task {number}", row[COLUMN])
    return config


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
