"""The agent loop as verl makes it, with real environments in real hosts; only the language model is a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

import hydra
import pytest
from contract_tools import AWKWARD, TOOL_ENV, Compose
from scripted import BRANCH, Script, Served
from verl.experimental.agent_loop import agent_loop as verl_agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_turnkey.envs.hosting.pool import HostPool
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.eval.player import SeededTurns
from verl_turnkey.plugins.rollout import agent_loop
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.branching import Branching, Trajectory

TAGS = count()  # of the session: a tag used again would meet hosts of the last file that are about to end


@pytest.fixture(scope="module")
def hosts(ray_queue) -> Iterator[None]:
    """The tests of this file share host processes, and each still parses its own configuration."""
    real = loop_worker.HostPool

    @cache
    def pool(**options: Any) -> HostPool:
        return real(namespace_tag=f"contract{next(TAGS)}", **options)

    def shared(*, namespace_tag: str, modules: list[str], **options: Any) -> HostPool:
        return pool(modules=(AWKWARD, TOOL_ENV), **options)

    loop_worker.HostPool = shared
    yield
    loop_worker.HostPool = real


@pytest.fixture
def play(compose: Compose, tokenizer, hosts, monkeypatch):
    """``play(turns, task, *overrides)``: the rows of one episode, and the script that was asked for its turns.

    ``sessions``: of so many rollouts of the task, which play at the same time; then the rows of each. ``fresh``: in a
    new worker process, as it were. ``fields``: further ones of the data row. ``tools``: verl's. Other keywords replace
    the tokenizer and what else there is of the model. ``served``: by the client of an evaluation.
    """

    monkeypatch.setattr(loop_worker, "FINISH_SECONDS", 120.0)

    def run(
        turns: list[str] | Callable[[str], str],
        task: Task,
        *overrides: str,
        session: int = 0,
        sessions: int | None = None,
        fresh: bool = True,
        cached: int | None = None,
        fields: dict[str, Any] | None = None,
        tools: Sequence[Any] = (),
        served: bool = False,
        **model: Any,
    ) -> tuple[list[Any], Script]:
        model = {"tokenizer": tokenizer, "processor": None, "hf_model_type": "qwen3", **model}
        # An evaluation has no log-probabilities.
        off = ["actor_rollout_ref.rollout.calculate_log_probs=false"] if served else []
        config = compose("+turnkey=gigpo", "turnkey.env.step_timeout=20", *off, *overrides)
        if fresh:
            monkeypatch.setattr(loop_worker, "_process", None)
            for name in ("keep_texts", "before"):  # which a rollout settles for its process
                monkeypatch.setattr(loop_worker, name, getattr(loop_worker, name))
        script = Script(model["tokenizer"], turns)
        script.cached = cached

        async def episode(session: int) -> list[AgentLoopOutput]:
            loop = hydra.utils.instantiate(
                config=verl_agent_loop._agent_loop_registry["turnkey_env"],
                trainer_config=DictConfigWrap(config=config),
                server_manager=SeededTurns(Served(script), "k") if served else script,
                **{"dataset_cls": RLHFDataset, **model},
                data_config=DictConfigWrap(config.data),
                tools=ToolListWrap(tools),
            )
            assert isinstance(loop, agent_loop.EnvAgentLoop)
            row = {
                "uid": "u",
                "session_id": session,
                "global_steps": 7,
                "turnkey_task": task.to_json(),
                **(fields or {}),
            }
            return await loop.run({"temperature": 1.0, "logprobs": True}, **row)

        async def group() -> Any:
            return await asyncio.gather(*map(episode, range(sessions))) if sessions else await episode(session)

        outputs = asyncio.run(group())
        loop_worker.finish(None)
        return outputs, script

    return run


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Each branch knows which one it is (``BRANCH``): a script can let the branches of a state try everything."""
    begun: list[tuple[int, int, int]] = []
    inner = Branching._play

    async def play(self: Branching, branch: Trajectory, *args: Any) -> None:
        t = len(branch.episode.steps)
        begun.append((t, sum(before == t for before, _, _ in begun), branch.episode.branch))
        BRANCH.set(begun[-1])
        await inner(self, branch, *args)

    monkeypatch.setattr(Branching, "_play", play)
    return begun
