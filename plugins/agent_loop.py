"""The agent loop ``turnkey_env``: one episode in a text environment, one row per step, one record per row.

verl calls :meth:`EnvAgentLoop.run` once per rollout. Prompts are built and measured here, generation goes through
verl's own client (ids in, ids out), the environment lives in a host process. Whatever happens to the environment,
the loop returns rows: an episode that dies is exactly one masked row that carries the reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.envs import EnvironmentFailure, PromptTooLongError, TaskFormatError
from verl_turnkey.envs.actions import ParsedAction, parse_action
from verl_turnkey.envs.hosts import HostPool
from verl_turnkey.envs.prompts import Turn, build_messages, fit_prompt, load_template
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins import registration
from verl_turnkey.plugins.config import TurnkeyConfig, turnkey_config
from verl_turnkey.plugins.trajectory_log import TrajectoryLog


class _Process:
    """What all loops of one worker process share; built before the first rollout."""

    def __init__(self, config: DictConfig) -> None:
        import ray

        self.turnkey: TurnkeyConfig = turnkey_config(config)
        env, rollout = self.turnkey.env, self.turnkey.rollout
        self.template = load_template(rollout.template)
        self.log = TrajectoryLog(self.turnkey.log.trajectories)
        self.pool = HostPool(
            hosts=1 if env.hosts == "auto" else env.hosts,
            # Hosts are shared by the rollouts of one worker: with its process dies its episodes' owner.
            namespace_tag=ray.get_runtime_context().get_actor_id() or uuid4().hex,
            max_instances=env.instances_per_host,
            step_timeout=env.step_timeout,
            reset_timeout=env.reset_timeout,
            modules=self.turnkey.modules,
        )


_process: _Process | None = None
_keep_texts = False  # whether records carry the observation's text: the trainer knows the method, and says so once


def _shared(config: DictConfig) -> _Process:
    global _process
    if _process is None:
        _process = _Process(config)
    return _process


def prepare(worker: Any, keep_texts: bool) -> None:
    """Run inside an agent-loop worker before training starts: what cannot work stops the run, not its episodes.

    ``keep_texts``: whether the method compares observations as text, so that the records have to carry them.

    Raises:
        RuntimeError: the plugin is not loaded in this worker.
    """
    global _keep_texts
    registration.verify(("agent_loop",), ("turnkey_env",))
    _keep_texts = keep_texts
    if worker.config.actor_rollout_ref.rollout.agent.default_agent_loop == "turnkey_env":
        _shared(worker.config)


@dataclass
class _Step:
    """One step while its episode is running."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float] | None
    generated: dict[str, Any]
    text: str
    record: dict[str, Any]
    observation: str
    seconds: tuple[float, float]
    num_preempted: int


@dataclass
class _Episode:
    steps: list[_Step] = field(default_factory=list)
    success: bool = False

    def info(self) -> dict[str, float]:
        """verl's ``reward_extra_info``: the same keys as floats on every row, or verl drops the whole group."""
        records = [step.record for step in self.steps]
        return {
            "acc": float(self.success),
            "episode_return": float(sum(record["reward"] for record in records)),
            "episode_length": float(len(records)),
            "invalid_rate": sum(not record["valid"] for record in records) / max(1, len(records)),
        }


class EnvAgentLoop(AgentLoopBase):
    """Plays one task of the column ``turnkey_task`` (environment id, seed, kwargs)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = _shared(self.config)
        self.options = self.shared.turnkey.rollout

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Play one episode.

        Args:
            sampling_params: verl's, for this rollout.
            **kwargs: the fields of the data row, with ``uid``, ``session_id`` and ``global_steps``.

        Returns:
            One output per step, or the one masked output of a failed episode.
        """
        episode = _Episode()
        failed = None
        try:
            await self._play(episode, sampling_params, self._task(kwargs))
            info = episode.info()
            outputs = [self._row(t, step, info) for t, step in enumerate(episode.steps)]
        except (EnvironmentFailure, PromptTooLongError, TaskFormatError) as error:
            failed = f"{type(error).__name__}: {error}"
            outputs = [self._failed_row(failed, kwargs)]
        self.shared.log.write(kwargs, outputs, [(s.observation, s.text) for s in episode.steps], failed)
        return outputs

    def _task(self, kwargs: dict[str, Any]) -> Task:
        """The task of a data row, over the environment of the configuration."""
        if COLUMN not in kwargs:
            raise TaskFormatError(
                f"the data has no column {COLUMN!r}, which says what to play; `turnkey tasks` writes such files"
            )
        task = Task.from_json(kwargs[COLUMN])
        env = self.shared.turnkey.env
        return Task(task.env_id or env.id or "", task.seed, {**env.kwargs, **task.kwargs})

    async def _play(self, episode: _Episode, sampling_params: dict[str, Any], task: Task) -> None:
        options = self.options
        sampling_params = dict(sampling_params)
        sampling_params["max_tokens"] = options.max_tokens_per_turn or self.rollout_config.response_length
        if options.stop:
            sampling_params["stop"] = options.stop
        if options.stop_token_ids:
            sampling_params["stop_token_ids"] = options.stop_token_ids

        running = await self.shared.pool.start(task.env_id, task.kwargs, task.seed)
        try:
            observation, info, goal = running.observation, running.info, running.info["task"]
            request_id, history = uuid4().hex, []
            for t in range(options.max_turns):
                try:
                    prompt_ids = await self._prompt(goal, history, observation, info["admissible"], t)
                except PromptTooLongError:
                    if t == 0:
                        raise
                    episode.steps[-1].record["truncated"] = True
                    break
                started = perf_counter()
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=prompt_ids, sampling_params=dict(sampling_params)
                )
                generated = perf_counter()
                response_ids = list(output.token_ids)
                text = self.tokenizer.decode(response_ids, skip_special_tokens=True)
                parsed = parse_action(text, options.action_format, info["admissible"])
                anchor = info["state_key"] if info["state_key"] is not None else observation
                seen = observation
                reward, terminated, truncated = 0.0, False, False
                if parsed.valid:
                    step = await running.step(parsed.action)
                    observation, info = step.observation, step.info
                    reward, terminated, truncated = step.reward, step.terminated, step.truncated
                valid = parsed.valid and not info["invalid"]
                episode.steps.append(
                    _Step(
                        prompt_ids=prompt_ids,
                        response_ids=response_ids,
                        log_probs=list(output.log_probs) if output.log_probs is not None else None,
                        generated=dict(output.extra_fields),
                        text=text,
                        record=make_step(
                            step=t,
                            reward=reward,
                            anchor=anchor,
                            action=parsed.action,
                            valid=valid,
                            penalty=0.0 if valid else options.invalid_action_penalty,
                            terminated=terminated,
                            truncated=truncated or (not terminated and t + 1 == options.max_turns),
                            extra={"text": seen} if _keep_texts else None,
                        ),
                        observation=seen,
                        seconds=(generated - started, perf_counter() - generated),
                        num_preempted=-1 if output.num_preempted is None else output.num_preempted,
                    )
                )
                history.append(Turn(seen, _said(parsed, text)))
                if terminated or truncated:
                    break
        finally:
            running.close()
        last = episode.steps[-1].record
        # An environment that does not say whether it was won counts as won when it ended with a positive reward.
        episode.success = bool(info["won"]) if info["won"] is not None else last["terminated"] and last["reward"] > 0
        for step in episode.steps:
            step.record["success"] = episode.success

    async def _prompt(
        self, goal: str, history: list[Turn], observation: str, admissible: list[str] | None, t: int
    ) -> list[int]:
        """Token ids of the prompt, measured here: verl would cut a long one from the left, task first."""

        def encode(shown: int) -> list[int]:
            messages = build_messages(
                system=self.options.system,
                template=self.shared.template,
                task=goal,
                history=history[len(history) - shown :],
                observation=observation,
                admissible=admissible,
                step=t + 1,
            )
            return list(self.continuous_token_builder.build_initial_tokens(messages))

        shown = min(self.options.history, len(history))
        budget = self.rollout_config.prompt_length
        ids, _ = await asyncio.get_running_loop().run_in_executor(None, fit_prompt, encode, shown, budget)
        return ids

    # --- rows: one constructor, every field always set; a field that one row lacks is lost for the whole batch ------

    def _row(self, t: int, step: _Step, info: dict[str, float]) -> AgentLoopOutput:
        return self._output(
            prompt_ids=step.prompt_ids,
            response_ids=step.response_ids,
            response_mask=[1] * len(step.response_ids),
            log_probs=step.log_probs,
            score=info["episode_return"],
            num_turns=2 * (t + 1),
            metrics=AgentLoopMetrics(
                generate_sequences=step.seconds[0], tool_calls=step.seconds[1], num_preempted=step.num_preempted
            ),
            extra_fields={
                **step.generated,
                "turnkey": make_record([step.record]),
                "reward_extra_info": dict(info),
            },
        )

    def _failed_row(self, reason: str, kwargs: dict[str, Any]) -> AgentLoopOutput:
        return self._output(
            prompt_ids=[],
            response_ids=[],
            response_mask=[],
            log_probs=None,
            score=0.0,
            num_turns=0,
            metrics=AgentLoopMetrics(),
            extra_fields={
                # verl takes these two for the age of the row and cannot do without.
                "min_global_steps": kwargs["global_steps"],
                "max_global_steps": kwargs["global_steps"],
                "turnkey": make_record([], failed=reason),
                "reward_extra_info": _Episode().info(),
            },
        )

    def _output(
        self,
        *,
        prompt_ids: list[int],
        response_ids: list[int],
        response_mask: list[int],
        log_probs: list[float] | None,
        score: float,
        num_turns: int,
        metrics: AgentLoopMetrics,
        extra_fields: dict[str, Any],
    ) -> AgentLoopOutput:
        if not response_ids:  # verl cannot hold an empty response: one masked token stands for it
            eos = self.tokenizer.eos_token_id or 0
            prompt_ids, response_ids, response_mask, log_probs = prompt_ids or [eos], [eos], [0], [0.0]
        fields: dict[str, Any] = {}
        if self.rollout_config.calculate_log_probs:
            if log_probs is None:
                raise RuntimeError(
                    "the server returned no log-probabilities although actor_rollout_ref.rollout.calculate_log_probs "
                    "is true: set it to false for a server that cannot"
                )
            fields["response_logprobs"] = log_probs
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=response_mask,
            reward_score=score,
            num_turns=num_turns,
            metrics=metrics,
            extra_fields={**extra_fields, "turn_scores": [], "tool_rewards": []},
            **fields,
        )


def _said(parsed: ParsedAction, text: str) -> str:
    """How a past turn reads in later prompts: the action, or the start of what was written in its place."""
    return parsed.action if parsed.action is not None else " ".join(text.split())[:80] or "(nothing)"
