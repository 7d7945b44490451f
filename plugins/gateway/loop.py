"""The agent loop ``turnkey_agent``: an agent of the user's own plays the episode and asks the model over HTTP.

verl calls :meth:`UserAgentLoop.run` once per rollout. The agent gets the URL of a gateway in this process, which
records its calls of the model as turns. An agent that breaks down costs its episode: one masked row with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, Outcome, cut, without_secret
from verl_turnkey.envs.tasks import task_of
from verl_turnkey.plugins.credit.metrics import AGENT
from verl_turnkey.plugins.gateway import episode as episodes
from verl_turnkey.plugins.gateway.process import AgentProcess, shared
from verl_turnkey.plugins.gateway.server import gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import policy_turn
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.rollout import worker
from verl_turnkey.plugins.rollout.branching import FAILURES
from verl_turnkey.plugins.rollout.episode import Episode, RowBuilder
from verl_turnkey.plugins.rollout.generation import group_member
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
            order = episodes.played(session, outcome, self.agents.step_options(worker), episode)
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
        self.shared.times.append(episode.seconds)
        counts = {} if session is None else agent_counts(session, len(episode.steps))
        for output in outputs:
            output.extra_fields[AGENT] = counts
        self.shared.log.write(kwargs, None, episode, outputs, failed, self.tokenizer.decode)
        return outputs

    async def _play(self, session: Session, task: Mapping[str, Any], episode: Episode) -> Outcome:
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

    async def _run(self, session: Session, task: Mapping[str, Any], handle: AgentHandle) -> Outcome:
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
            late = f"the agent ran longer than turnkey.agent.timeout={options.timeout:g}"
            return Outcome() if session.finished.is_set() else Outcome(truncated=True, reason=late)
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
