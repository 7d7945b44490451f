"""The agent loops that ask the model over HTTP: ``turnkey_agent``, and ``turnkey_env`` where the policy plays the user.

verl calls :meth:`UserAgentLoop.run` once per rollout. An agent of the user's own gets the URL of a gateway in this
process, which records its calls of the model as turns. An agent that breaks down costs its episode: one masked row with
the reason.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, AgentResult, cut, ran_too_long, without_secret
from verl_turnkey.envs.tasks import Task, task_of
from verl_turnkey.envs.users import asks_policy, with_policy
from verl_turnkey.plugins.credit.metrics import AGENT
from verl_turnkey.plugins.gateway import episode as episodes
from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.gateway.process import AgentProcess, codec_of, limits_of, shared
from verl_turnkey.plugins.gateway.server import gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import Aborted, Limits, policy_turn
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.rollout import worker
from verl_turnkey.plugins.rollout.agent_loop import EnvAgentLoop
from verl_turnkey.plugins.rollout.branching import FAILURES
from verl_turnkey.plugins.rollout.episode import Episode, Generated, RowBuilder
from verl_turnkey.plugins.rollout.generation import group_member
from verl_turnkey.plugins.rollout.worker import WorkerProcess
from verl_turnkey.plugins.verl_api import builders


class UserAgentLoop(AgentLoopBase):
    """Lets an agent play the task of a data row."""

    tokenizer: Any  # verl annotates it with transformers' factory, which has none of its methods

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = worker.shared(self.config)
        self.agents: AgentProcess = shared(self.config, self.tokenizer, builders.builder_of_loop(self))
        merged = self.shared.turnkey.rollout.layout == "merged"
        # No budget for what follows the first prompt: prompts and turns together fit into what a row may have.
        labels = self.shared.rewards.labels
        self.rows = RowBuilder(self.tokenizer.eos_token_id or 0, self.shared.log_probs, labels, merged)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Let the agent play one episode.

        Args:
            sampling_params: verl's, for this rollout; those that the agent asks for are ignored.
            **kwargs: the fields of the data row, with ``uid``, ``session_id`` and ``global_steps``.

        Returns:
            One output per conversation of the agent, more where its messages do not extend each other, or the one
            masked output of a failed episode.
        """
        episode, failed, session = Episode(), None, None
        member = group_member(self.shared, kwargs)  # before the first await: the rollouts of a task begin together
        try:
            task = task_of(kwargs)
            session = self.agents.session(partial(policy_turn, self), sampling_params)
            outcome = await self._play(session, task, episode)
            options = self.agents.step_options(worker)
            order = await asyncio.to_thread(episodes.played, session, outcome, options, episode)
            await episode.apply_rewards(self.shared.rewards, kwargs, member)
            outputs = self.rows.played(episodes.in_rows(episode, order))
        except FAILURES as error:
            cause = (session and session.failed) or error  # an agent may break down because a call failed
            failed = masked(without_secret(f"{type(cause).__name__}: {cause}", session.secret if session else ""))
            self.shared.failures.add(failed)
            outputs = self.rows.failed(failed, kwargs["global_steps"])
        finally:
            if member is not None:
                member.leave()
        episode.other_calls = [] if session is None else [{**call} for call in session.other_calls]
        self.shared.times.append(episode.seconds)
        counts = {} if session is None else await asyncio.to_thread(agent_counts, session, len(episode.steps))
        for output in outputs:
            output.extra_fields[AGENT] = counts
        self.shared.log.write(kwargs, None, episode, outputs, failed, self.tokenizer.decode)
        return outputs

    async def _play(self, session: Session, task: Mapping[str, Any], episode: Episode) -> AgentResult:
        """Run the agent to its end; afterwards nothing of it reaches the model any more."""
        options, waiting = self.shared.turnkey.agent, perf_counter()
        async with self.agents.places:
            episode.seconds_waiting = perf_counter() - waiting
            server = await gateway(options.listen)
            server.add(session)
            try:
                with self.agents.workspace(session) as workspace:
                    return await self._run(session, task, await self.agents.handle(server, session, workspace))
            finally:
                server.remove(session)
                await session.close(options.grace)

    async def _run(self, session: Session, task: Mapping[str, Any], handle: AgentHandle) -> AgentResult:
        """The agent's outcome; one that says ``/finish`` has ``grace`` seconds to return."""
        options, scoring = self.shared.turnkey.agent, self.agents.scoring_seconds(task)
        run = asyncio.ensure_future(self.agents.runner.run(task, handle))
        finished = asyncio.ensure_future(session.finished.wait())
        try:
            # Runners keep the limit themselves; one that does not must not hold the step.
            longest = options.timeout + 60 + scoring
            await asyncio.wait({run, finished}, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                await asyncio.wait({run}, timeout=options.grace + scoring)
            if run.done():
                return run.result()
            if session.finished.is_set():
                return AgentResult()
            return AgentResult(truncated=True, reason=ran_too_long(options.timeout))
        except FAILURES:
            raise
        except Exception as error:  # of a runner
            raise AgentFailure(cut(f"{type(error).__name__}: {error}")) from error
        finally:
            for future in (run, finished):
                if not future.done():
                    future.cancel()
            await asyncio.gather(run, finished, return_exceptions=True)


def agent_counts(session: Session, steps: int) -> dict[str, float]:
    """What the metrics ``agent/...`` are means of."""
    calls = float(len(session.turns))
    left_out = calls - len(episodes.trained(session)) if session.turns else 0.0
    return {"calls": calls, "left_out": left_out, **{name: float(number) for name, number in session.counts.items()}}


TURNS = 10_000
"""upper bound of answers; the limits of the environment end the episode first"""

_models: WeakKeyDictionary[WorkerProcess, tuple[Codec, Limits]] = WeakKeyDictionary()
"""for each process, made by its first episode: what does not depend on the episode"""
_free: list[str] = []
"""secrets of episodes that have ended; with them again, environments of equal arguments are reused"""


class PolicyUserLoop(EnvAgentLoop):
    """The agent loop ``turnkey_env``: plays, and answers as the user of tasks that name the policy."""

    async def _with_policy(self, task: Task, sampling_params: dict[str, Any], users: AsyncExitStack) -> Task:
        if not asks_policy(task.kwargs):
            return task
        url = self.user_url = await users.enter_async_context(address(self, sampling_params))
        return replace(task, kwargs=with_policy(task.kwargs, url, 0.8 * self.shared.turnkey.env.step_timeout))


async def _turn(loop: EnvAgentLoop, *call: Any) -> Generated:
    """The policy's turn. A server that drops it, as while weights change, is asked again until the episode ends."""
    while True:
        try:
            return await policy_turn(loop, *call)
        except Aborted:
            await asyncio.sleep(0.5)


@asynccontextmanager
async def address(loop: EnvAgentLoop, sampling: Mapping[str, Any]) -> AsyncIterator[str]:
    """The base URL at which the policy answers one episode's environment; it is sampled with ``sampling``."""
    tokenizer, agent = loop.tokenizer, loop.shared.turnkey.agent
    if loop.shared not in _models:
        codec = codec_of(loop.config, tokenizer, builders.builder_of_loop(loop))
        _models[loop.shared] = codec, replace(limits_of(loop.config), turns=TURNS)
    codec, limits = _models[loop.shared]
    session = Session(
        codec, partial(_turn, loop), sampling, limits, secret=_free.pop() if _free else secrets.token_urlsafe(18)
    )
    server = await gateway(agent.listen)
    server.add(session)
    try:
        yield server.url(session.secret, agent.listen)
    finally:
        server.remove(session)
        await session.close(agent.grace)
        _free.append(session.secret)
