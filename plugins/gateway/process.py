"""What the agent loops of one worker process share: the agent's runner, the codec of the model, places, state keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.envs.agents.base import AgentHandle, Runner
from verl_turnkey.envs.agents.command import CommandRunner
from verl_turnkey.envs.agents.folders import WorkspaceState, working_folder
from verl_turnkey.envs.agents.function import (
    FunctionRunner,
    InProcessFunctionRunner,
    RemoteRunner,
    address_towards,
    is_url,
)
from verl_turnkey.envs.agents.harbor import HarborRunner
from verl_turnkey.envs.agents.sandboxes import Bubblewrap, Sandbox
from verl_turnkey.plugins.config.agent import ANYWHERE, OWN_REWARD, sandbox_of
from verl_turnkey.plugins.config.schema import TurnkeyConfig, reward_entries, turnkey_config
from verl_turnkey.plugins.gateway.codec import Codec, TurnCodec
from verl_turnkey.plugins.gateway.episode import StepOptions
from verl_turnkey.plugins.gateway.messages import Request
from verl_turnkey.plugins.gateway.models import Models
from verl_turnkey.plugins.gateway.server import Gateway, bound, calls_of
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.states import StateKey, View, state_key
from verl_turnkey.plugins.gateway.turns import Generate, Limits


class AgentProcess:
    """Built before the first rollout of a worker process."""

    def __init__(self, config: DictConfig, codec: TurnCodec) -> None:
        self.turnkey: TurnkeyConfig = turnkey_config(config)
        agent = self.turnkey.agent
        self.codec = codec
        self.limits = limits_of(config)
        self.models = Models(agent.endpoints(), agent.model) if agent.models else None
        self.runner: Runner = runner_of(self.turnkey)
        state = self.turnkey.agent.state
        self._state: StateKey = state_key("history" if state == "workspace" else state)
        self.places = asyncio.Semaphore(agent.places)
        paid = [entry["name"] for entry in reward_entries(config, self.turnkey) if entry.get("column") is None]
        self._components = any(name != OWN_REWARD for name in paid)

    def session(self, generate: Generate, sampling: Mapping[str, Any]) -> Session:
        return Session(self.codec, generate, sampling, self.limits, self.turnkey.agent.model, models=self.models)

    @property
    def _sandbox(self) -> Sandbox | None:
        """What an episode's own processes run in; None: there are none."""
        return self.runner.sandbox if isinstance(self.runner, CommandRunner | FunctionRunner) else None

    @contextmanager
    def workspace(self, session: Session) -> Iterator[Path | None]:
        """The folder that the agent works in; None: the runner makes one."""
        agent = self.turnkey.agent
        shows_files = ":" in agent.state and agent.cwd is None and self._sandbox is not None
        if agent.state != "workspace" and not shows_files:
            yield None if agent.cwd is None else Path(agent.cwd)
            return
        with working_folder() as folder:
            files, lock = WorkspaceState(folder), Lock()

            def read(call: Callable[..., Any], *arguments: Any) -> Any:
                with lock:  # requests of an episode may come at the same time
                    return call(*arguments)

            if shows_files:
                session.files = partial(read, files.digests)
            else:
                session.observe = lambda request: read(files.key, _last_call(request))
            yield folder

    def scoring_seconds(self, task: Mapping[str, Any]) -> float:
        """How long the runner may score an episode once its agent has ended."""
        return self.runner.scoring_seconds(task) if isinstance(self.runner, HarborRunner) else 0.0

    async def handle(self, server: Gateway, session: Session, workspace: Path | None) -> AgentHandle:
        """The session as the agent sees it."""
        host = self.turnkey.agent.listen
        if isinstance(self.runner, RemoteRunner) and host in ANYWHERE:
            host = await asyncio.to_thread(address_towards, self.runner.url, host == "::")
        walled = self._sandbox is not None and self._sandbox.name != "none"
        socket = await server.unix_socket() if walled else None
        return AgentHandle(server.url(session.secret, host), session.secret, session.model, workspace, socket)

    def step_options(self, recorded: Any) -> StepOptions:
        """``recorded``: what the method reads of records, as ``keep_texts`` and ``before``."""
        return StepOptions(
            state=self._state,
            penalty=self.turnkey.rollout.invalid_action_penalty,
            texts=recorded.keep_texts,
            before=recorded.before,
            components=self._components,
            turns=self.limits.turns,
        )


def _last_call(request: Request) -> str | None:
    """The name of the model's last call, if its last turn has one."""
    last = View(request.messages).last
    return last.calls[-1].name if last is not None and last.calls else None


def runner_of(turnkey: TurnkeyConfig) -> Runner:
    """The runner of ``turnkey.agent.run``."""
    agent = turnkey.agent
    assert agent.run is not None
    if not isinstance(agent.run, str):
        return HarborRunner(
            agent.run,
            reward_key=agent.reward_key,
            timeout=agent.timeout,
            sandbox=sandbox_of(agent),
            env=agent.env,
            files=agent.files,
            reward="exit_code" if agent.reward == "exit_code" else "result",
            inherit=agent.inherit,
            limits=agent.limits,
        )
    if is_url(agent.run):
        return RemoteRunner(agent.run, timeout=agent.timeout, most_threads=agent.places)
    if agent.in_process:
        return InProcessFunctionRunner(agent.run, timeout=agent.timeout)
    sandbox = sandbox_of(agent)
    return FunctionRunner(
        agent.run,
        timeout=agent.timeout,
        env=agent.env,
        inherit=agent.inherit,
        sandbox=sandbox if isinstance(sandbox, Bubblewrap) else None,
        limits=agent.limits,
        fresh=agent.fresh_process,
        calls=calls_of,
    )


def limits_of(config: DictConfig) -> Limits:
    """What an episode may use."""
    turnkey, verl_rollout = turnkey_config(config), config.actor_rollout_ref.rollout
    whole = verl_rollout.prompt_length + verl_rollout.response_length
    return Limits(
        room=min(whole, verl_rollout.max_model_len or whole),
        turn=turnkey.rollout.max_tokens_per_turn or verl_rollout.response_length,
        turns=turnkey.rollout.max_turns,
        thinking=turnkey.agent.thinking,
        stop=tuple(turnkey.rollout.stop),
        unsupported=turnkey.agent.unsupported,
        leave_out=turnkey.agent.leave_out,
        discarded=turnkey.agent.discarded,
    )


def codec_of(config: DictConfig, tokenizer: Any, builder: Any) -> Codec:
    """The codec of the model."""
    tool_format = config.actor_rollout_ref.rollout.multi_turn.format
    return Codec(tokenizer, builder, tool_format, turnkey_config(config).rollout.stop_token_ids)


_process: AgentProcess | None = None


def shared(config: DictConfig, tokenizer: Any, builder: Any) -> AgentProcess:
    global _process
    if _process is None:
        _process = AgentProcess(config, codec_of(config, tokenizer, builder))
    return _process


def prepare(worker: Any) -> None:
    """Run inside an agent-loop worker before training: a setting that cannot work stops the run here.

    Raises:
        ConfigError: there is no such tool parser, verl's builder does not suit the tokenizer, or the node does not have
            the address at which the gateway should listen.
        ModuleImportError: the agent's function cannot be imported.
    """
    from verl_turnkey.plugins.verl_api import builders

    if not hasattr(worker, "tokenizer") or not hasattr(worker, "config"):  # a worker of a user's own manager
        return
    builder = builders.builder_of(worker.config, worker.tokenizer, worker.processor, builders.model_type(worker))
    bound(shared(worker.config, worker.tokenizer, builder).turnkey.agent.listen).close()
