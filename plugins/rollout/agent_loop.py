"""The agent loop ``turnkey_env``: one episode in a text environment, one row per step, one record per row.

verl calls :meth:`EnvAgentLoop.run` once per rollout. Prompts are built and measured here, generation goes through
verl's own client (ids in, ids out), the environment lives in a host process. Whatever happens to the environment,
the loop returns rows: an episode that dies is exactly one masked row that carries the reason.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from verl_turnkey.advantage import make_step
from verl_turnkey.envs import EnvironmentFailure, PromptTooLongError, TaskFormatError
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.hosting.pool import HostPool
from verl_turnkey.envs.prompting.actions import TOOL_CALL, ParsedAction
from verl_turnkey.envs.prompting.memory import Memory, PromptHistory, PromptTurn, SummaryError
from verl_turnkey.envs.prompting.prompts import build_messages, fit_prompt, load_template
from verl_turnkey.envs.rewards import RewardError, compose
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.envs.user_modules import import_modules, load_function
from verl_turnkey.plugins.config.schema import TurnkeyConfig, reward_entries, turnkey_config
from verl_turnkey.plugins.notices import Failures
from verl_turnkey.plugins.rollout.action_reader import action_reader, check_tool_template
from verl_turnkey.plugins.rollout.episode import Episode, Generated, PlayedStep, Prompt, RowBuilder, countable, extras
from verl_turnkey.plugins.rollout.trajectory_log import TrajectoryLog
from verl_turnkey.plugins.verl_api import ledger

FINISH_SECONDS = 10.0
"""that the trajectory log is waited for in the end"""


class _Process:
    """What all loops of one worker process share; built before the first rollout."""

    def __init__(self, config: DictConfig) -> None:
        import ray

        self.turnkey: TurnkeyConfig = turnkey_config(config)
        env, rollout = self.turnkey.env, self.turnkey.rollout
        self.template = load_template(rollout.template)
        self.summarize = load_function(rollout.summary, "turnkey.rollout.summary") if rollout.summary else None
        import_modules(self.turnkey.modules)  # they may hold reward components
        self.rewards = compose(reward_entries(config, self.turnkey))
        self.failures = Failures()
        self.log = TrajectoryLog(self.turnkey.log.trajectories)
        self.pool = HostPool(
            hosts=env.hosts,
            # Hosts are shared by the rollouts of one worker: with its process dies its episodes' owner.
            namespace_tag=ray.get_runtime_context().get_actor_id() or uuid4().hex,
            places=env.instances_per_host,
            calls=env.calls_per_host,
            sharers=_workers_per_node(config),
            restarts=env.restarts,
            step_timeout=env.step_timeout,
            reset_timeout=env.reset_timeout,
            modules=self.turnkey.modules,
        )


def _workers_per_node(config: DictConfig) -> int:
    """How many agent-loop workers share the CPUs and the memory of a node: verl deals them out in turn."""
    import ray

    nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    return -(-config.actor_rollout_ref.rollout.agent.num_workers // max(1, nodes))


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
        ConfigError: the action is a tool call, and the model's chat template shows no tools.
    """
    global _keep_texts
    ledger.verify(("agent_loop",), ("turnkey_env",))
    _keep_texts = keep_texts
    if worker.config.actor_rollout_ref.rollout.agent.default_agent_loop == "turnkey_env":
        shared = _shared(worker.config)
        if shared.turnkey.rollout.action_format == TOOL_CALL:
            check_tool_template(worker.tokenizer, **worker.config.data.get("apply_chat_template_kwargs", {}))


def latest_failures(worker: Any) -> list[str]:
    """Run inside an agent-loop worker: why episodes failed there, the latest reason of each kind."""
    return [] if _process is None else list(_process.failures.latest.values())


def finish(worker: Any) -> None:
    """Run inside an agent-loop worker when training is over: with the worker ends the thread that writes the log."""
    if _process is not None:
        _process.log.drain(FINISH_SECONDS)


class EnvAgentLoop(AgentLoopBase):
    """Plays one task of the column ``turnkey_task`` (environment id, seed, kwargs)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = _shared(self.config)
        self.options = self.shared.turnkey.rollout
        self.reader = action_reader(self.options.action_format, self.rollout_config.multi_turn.format, self.tokenizer)
        self.rows = RowBuilder(
            self.tokenizer.eos_token_id or 0, self.rollout_config.calculate_log_probs, self.shared.rewards.labels
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Play one episode.

        Args:
            sampling_params: verl's, for this rollout.
            **kwargs: the fields of the data row, with ``uid``, ``session_id`` and ``global_steps``.

        Returns:
            One output per step, or the one masked output of a failed episode.
        """
        episode, task, failed = Episode(), None, None
        try:
            task = self._task(kwargs)
            await self._play(episode, self._sampling(sampling_params), task)
            await episode.apply_rewards(self.shared.rewards, kwargs)
            outputs = self.rows.played(episode)
        except (EnvironmentFailure, PromptTooLongError, RewardError, SummaryError, TaskFormatError) as error:
            failed = f"{type(error).__name__}: {error}"
            self.shared.failures.add(failed)
            outputs = self.rows.failed(failed, kwargs["global_steps"])
        self.shared.log.write(kwargs, task, outputs, [step.for_log() for step in episode.steps], failed)
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

    def _sampling(self, params: dict[str, Any]) -> dict[str, Any]:
        """verl's sampling parameters with what ends a turn."""
        params = dict(params)
        params["max_tokens"] = self.options.max_tokens_per_turn or self.rollout_config.response_length
        if self.options.stop:
            params["stop"] = self.options.stop
        if stop := [*self.options.stop_token_ids, *self.reader.stop_token_ids]:
            params["stop_token_ids"] = stop
        return params

    async def _play(self, episode: Episode, sampling_params: dict[str, Any], task: Task) -> None:
        """Step by step, until the environment, the number of turns or the prompt's budget ends it."""
        running = await self.shared.pool.start(task.env_id, task.kwargs, task.seed)
        try:
            seen = Answer(running.observation, running.info)
            episode.task = seen.info["task"]
            request_id, memory = uuid4().hex, Memory(self.options.history, self.shared.summarize)
            for t in range(self.options.max_turns):
                try:
                    prompt = await self._prompt(episode.task, memory, seen)
                except PromptTooLongError:
                    if t == 0:
                        raise
                    episode.steps[-1].record["truncated"] = True
                    break
                turn = await self._generate(request_id, prompt, sampling_params)
                parsed = await self.reader.read(turn.ids, turn.text, seen.info["admissible"])
                started = perf_counter()
                # What is no action does not reach the environment: nothing changes.
                answer = (
                    await running.step(parsed.action)
                    if parsed.action is not None
                    else Answer(seen.observation, seen.info)
                )
                seconds = perf_counter() - started
                episode.steps.append(self._played(t, prompt, turn, parsed, seen, answer, seconds))
                memory.add(PromptTurn(seen.observation, _said(parsed, turn.text, self.options.keep_thinking)))
                seen = answer
                if answer.terminated or answer.truncated:
                    break
        finally:
            running.close()
        episode.end(seen.info["success"])

    def _played(
        self,
        t: int,
        prompt: Prompt,
        turn: Generated,
        parsed: ParsedAction,
        seen: Answer,
        answer: Answer,
        seconds: float,
    ) -> PlayedStep:
        """Step ``t``, which led from what was ``seen`` to the ``answer``; whether it solved the task comes later."""
        valid = parsed.valid and not answer.info["invalid"]
        extra, next_extra = extras(seen.info, answer.info)
        # The last record has no next one to say where its step led.
        columns = {"next_anchor": str(self._anchor(answer)), **countable(extra, next_extra)}
        record = make_step(
            step=t,
            reward=answer.reward,
            anchor=self._anchor(seen),
            action=parsed.action,
            valid=valid,
            penalty=0.0 if valid else self.options.invalid_action_penalty,
            terminated=answer.terminated,
            truncated=answer.truncated or (not answer.terminated and t + 1 == self.options.max_turns),
            extra=columns | ({"text": seen.observation} if _keep_texts else {}),
        )
        return PlayedStep(
            prompt=prompt,
            turn=turn,
            record=record,
            observation=seen.observation,
            invalid=None if valid else parsed.reason or "the environment refused the action",
            unparsed=not parsed.valid and parsed.kind == "format",
            seconds=seconds,
            extra=extra,
            next_extra=next_extra,
        )

    def _anchor(self, state: Answer) -> str | int:
        """By what methods tell a state apart."""
        key = state.info["state_key"] if self.options.anchor == "state_key" else None
        return state.observation if key is None else key

    async def _prompt(self, goal: str, memory: Memory, seen: Answer) -> Prompt:
        """The prompt of the next step, measured here: verl would cut a long one from the left, task first."""
        images = await self._images(seen.info.get("images") or [])

        def encode(past: PromptHistory) -> list[int]:
            messages = build_messages(
                system=self.options.system,
                template=self.shared.template,
                task=goal,
                history=past.turns,
                summary=past.summary,
                line=self.options.history_line,
                observation=seen.observation,
                admissible=seen.info["admissible"],
                instruction=self.reader.instruction,
                step=len(memory.turns) + 1,
                images=images or (),
            )
            tokens = self.continuous_token_builder.build_initial_tokens(
                messages, tools=self.reader.tools, images=images
            )
            return list(tokens)

        budget = self.rollout_config.prompt_length
        ids, _ = await asyncio.get_running_loop().run_in_executor(None, fit_prompt, encode, memory, budget)
        return Prompt(ids, images)

    async def _images(self, arrays: list[Any]) -> list[Any] | None:
        """The environment's images as verl's processor takes them; None for none."""
        if not arrays:
            return None
        from PIL import Image

        content = [{"type": "image", "image": Image.fromarray(array)} for array in arrays]
        try:
            self._assert_mm_supported(True)
            found = await self.process_multi_modal_info([{"role": "user", "content": content}])
        except Exception as error:  # of the model's own processor, which says best what it cannot take
            raise EnvironmentFailure(
                "images",
                f"the environment gives images, and this model cannot take them: {type(error).__name__}: {error}",
            ) from error
        return found["images"]

    async def _generate(self, request_id: str, prompt: Prompt, sampling_params: dict[str, Any]) -> Generated:
        seen = {"image_data": prompt.images, "mm_processor_kwargs": self._get_mm_processor_kwargs()}
        started = perf_counter()
        output = await self.server_manager.generate(
            request_id=request_id,
            prompt_ids=prompt.ids,
            sampling_params=dict(sampling_params),
            **(seen if prompt.images else {}),
        )
        seconds = perf_counter() - started
        ids = list(output.token_ids)
        return Generated(
            ids=ids,
            log_probs=list(output.log_probs) if output.log_probs is not None else None,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            extra_fields=dict(output.extra_fields),
            num_preempted=-1 if output.num_preempted is None else output.num_preempted,
            seconds=seconds,
        )


def _said(parsed: ParsedAction, text: str, whole: bool) -> str:
    """How a past turn reads in later prompts: as the action, or as the start of what was written in its place."""
    if whole or parsed.action is None:
        return (text.strip() if whole else " ".join(text.split())[:80]) or "(nothing)"
    return parsed.action
