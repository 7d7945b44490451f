"""The agent loop ``turnkey_env``: one episode in a text environment, one record per row, a row for one step or several.

verl calls :meth:`EnvAgentLoop.run` once per rollout. The loop builds prompts within their budgets, generates through
verl's client (ids in, ids out) and plays the environment in a host process. It returns rows even if the environment
fails: a failed episode is exactly one masked row with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from verl_turnkey.advantage import make_step
from verl_turnkey.envs import EnvironmentFailure, PromptTooLongError, TaskFormatError
from verl_turnkey.envs.agents.base import without_secret
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import ParsedAction
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.rollout import worker
from verl_turnkey.plugins.rollout.action_reader import NO_TOOLS, ActionReader, ToolsReader, action_reader, read_summary
from verl_turnkey.plugins.rollout.branching import FAILURES, NOTHING, Branching, Budget, Cost, Trajectory
from verl_turnkey.plugins.rollout.columns import (
    ROLE,
    SUMMARY_OF,
    TURN_LIMIT,
    countable,
    extras,
    hint_line,
    skill_line,
    turn_limit,
)
from verl_turnkey.plugins.rollout.episode import Episode, Generated, Opening, OtherTurn, PlayedStep, Prompt, RowBuilder
from verl_turnkey.plugins.rollout.generation import Query, generate, group_member, was_cut
from verl_turnkey.plugins.rollout.prompts import (
    ConversationPrompts,
    Prompts,
    PromptSettings,
    RolePrompts,
    TemplatePrompts,
    guarded,
    processed,
    takes_messages,
)
from verl_turnkey.plugins.rollout.strategies import Ask
from verl_turnkey.plugins.rollout.token_spans import STREAM_FORMAT, stream_columns
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.rollout.turn_answer import VerlTools, WorkerTools, answer_turn, opponents_of
from verl_turnkey.plugins.rollout.turn_tail import end_tokens
from verl_turnkey.plugins.verl_api import builders


class EnvAgentLoop(AgentLoopBase):
    """Plays one task of the column ``turnkey_task`` (environment id, seed, kwargs)."""

    tokenizer: Any  # verl annotates it with transformers' factory, which has none of its methods

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.user_url = "http://nobody/-/v1"
        """where the policy answers as the user; holds the episode's secret"""
        self._verl_tools: list[Any] = getattr(kwargs.get("tools"), "tools", [])
        self.worker_tools: WorkerTools | None = None
        self.shared = worker.shared(self.config)
        self.options = self.shared.turnkey.rollout
        self.turn_limit: float = self.options.max_turns
        self.reader = action_reader(self.options.action_format, self.shared.tool_format, self.tokenizer)
        builder = builders.builder_of_loop(self)
        self.prompt_settings = PromptSettings(
            options=self.options,
            template=self.shared.template,
            summarize=self.shared.summarize,
            instruction=self.reader.instruction,
            examples=self.shared.examples(self.reader.instruction),
            tools=self.reader.tools,
            builder=builder,
            control=self.shared.control_tokens(self.tokenizer),
            prompt_length=self.shared.prompt_length,
            response_length=self.shared.response_length,
            marks_observations=self.shared.turnkey.update.observation_coefficient > 0,
            by_messages=takes_messages(self),
        )
        self.tail = self.shared.turn_tail(builder, self.tokenizer, self.reader.tools)
        self.stop_token_ids = [*self.options.stop_token_ids, *self.reader.stop_token_ids]
        self.ends = end_tokens(self.tokenizer, self.stop_token_ids, self.tail)
        self.rows = RowBuilder(
            self.tokenizer.eos_token_id or 0,
            self.shared.log_probs,
            self.shared.rewards.labels,
            self.options.layout == "merged",
            self.shared.response_length,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Play one episode.

        Args:
            sampling_params: verl's, for this rollout.
            **kwargs: the fields of the data row, with ``uid``, ``session_id`` and ``global_steps``.

        Returns:
            One output per step, fewer where steps extend each other (``turnkey.rollout.layout``), or the one masked
            output of a failed episode.
        """
        episode, task, failed = Episode(), None, None
        if isinstance(self.reader, ToolsReader):
            timeout = self.shared.turnkey.env.step_timeout
            verls = VerlTools(self._verl_tools, kwargs.get("tools_kwargs"), timeout)
            self.worker_tools = WorkerTools(verls, self.shared.mcp_servers)
        branching, episodes, users = self._branching(kwargs), [episode], AsyncExitStack()
        member = group_member(self.shared, kwargs)  # before the first await: the rollouts of a task begin together
        try:
            task = self._task(kwargs)
            with_policy = await self._with_policy(task, sampling_params, users)
            trajectory = await self._play(episode, self._sampling(sampling_params), with_policy, branching, kwargs)
            await episode.apply_rewards(self.shared.rewards, kwargs, member)
            if branching is not None:
                await branching.finished()
                episodes = branching.episodes(trajectory, str(kwargs["session_id"]))
            # The episode comes last: verl gives all rows of a rollout the score and the numbers of the last one.
            outputs = [row for branch in reversed(episodes) for row in self.rows.played(branch)]
        except FAILURES as error:
            failed = f"{type(error).__name__}: {error}".replace(self.user_url, "policy")
            failed = masked(without_secret(failed, self.user_url.split("/")[-2]))
            self.shared.failures.add(failed)
            outputs = self.rows.failed(failed, kwargs["global_steps"], {} if branching is None else NOTHING)
        finally:
            if member is not None:
                member.leave()
            async with users:
                if branching is not None:
                    await branching.close()
        self.shared.times.append(episode.seconds)
        for branch in episodes:
            self.shared.log.write(kwargs, task, branch, outputs, failed, self.tokenizer.decode)
        return outputs

    def _branching(self, row: dict[str, Any]) -> Branching | None:
        """What forks the episode of a data row; None: nothing does. Validation plays as the model is used."""
        if self.shared.strategy is None or row.get(VALIDATION):
            return None
        options = self.options
        return Branching(
            self.shared.strategy,
            Budget(options.branch_tokens, options.branch_steps, options.branches_at_once),
            self.shared.allowance(str(row["uid"])),
            self._walk,
            lambda episode: episode.apply_rewards(self.shared.rewards, row),
            lambda episode: episode.score(self.shared.rewards, row),
            lambda trajectory, ask: self._ask(trajectory, ask, row),
            self.shared.failed_branches.add,
        )

    def _task(self, kwargs: dict[str, Any]) -> Task:
        """The task of a data row; what it does not set is taken from ``turnkey.env``."""
        if COLUMN not in kwargs:
            raise TaskFormatError(
                f"the data has no column {COLUMN!r}, which says what to play; `turnkey tasks` writes such files"
            )
        task = Task.from_json(kwargs[COLUMN])
        env = self.shared.turnkey.env
        return Task(task.env_id or env.id or "", task.seed, {**env.kwargs, **task.kwargs})

    async def _with_policy(self, task: Task, sampling_params: dict[str, Any], users: AsyncExitStack) -> Task:
        """``task``, with this model as the user where it names the policy; ``users`` closes what that opens."""
        return task

    def _sampling(self, params: dict[str, Any]) -> dict[str, Any]:
        """verl's sampling parameters, with the number of tokens and the stops that end a turn."""
        params = dict(params)
        params["max_tokens"] = self.options.max_tokens_per_turn or self.shared.response_length
        if self.options.stop:
            params["stop"] = self.options.stop
        if self.stop_token_ids:
            params["stop_token_ids"] = self.stop_token_ids
        return params

    async def _play(
        self,
        episode: Episode,
        sampling_params: dict[str, Any],
        task: Task,
        branching: Branching | None,
        row: dict[str, Any],
    ) -> Trajectory:
        """Start the environment and play to the end of the episode; ``row``: the data row."""
        started, hint = perf_counter(), hint_line(row) + skill_line(row, self.options.skill)
        running = await self.shared.pool.start(task.env_id, task.kwargs, task.seed)
        episode.seconds_waiting = running.waited
        episode.seconds_start = perf_counter() - started - running.waited
        try:
            seen = Answer(running.observation, running.info)
            episode.task, episode.roles = seen.info["task"], seen.info.get("roles", ())
            reader = await self._reader(seen, task)
            validation = bool(row.get(VALIDATION))
            opponents = opponents_of(
                self.shared.opponents[validation],
                episode.roles,
                task.seed,
                f"{'' if validation else row['uid']}/{row['session_id']}",  # in validation the same moves each time
                settings=self.prompt_settings,
                reader=reader,
                tokenizer=self.tokenizer,
                task=episode.task,
                max_tokens=sampling_params["max_tokens"],
                max_turns=self.options.max_turns,
            )
            of_all = seen.info.get(TURN_LIMIT) if opponents is None else None  # it counts the turns of all roles
            self.turn_limit = turn_limit(self.options.max_turns, of_all)
            if opponents is not None:
                seen, turns = await opponents.play(running, seen)
                if seen.terminated or seen.truncated:
                    raise EnvironmentFailure("opponent", f"the episode ended before {opponents.seat!r} moved")
                episode.opening = Opening(turns, seen.paid, seen.info.pop("outcome", {}))
                seen.info.pop("rewards", None)
                episode.task = seen.info["task"] or episode.task

            def prompts_of(first: Answer, tools: list[dict[str, Any]] | None) -> Prompts:
                settings = replace(self.prompt_settings, role=first.role, tools=tools)
                arguments = settings, (first.info["task"] or episode.task) + hint
                return TemplatePrompts(*arguments) if self.tail is None else ConversationPrompts(*arguments, self.tail)

            prompts = RolePrompts(prompts_of, reader.tools)
            trajectory = Trajectory(
                episode, prompts, reader, seen, uuid4().hex, sampling_params, self.options.max_turns, running
            )
            trajectory.opponents = opponents
            await self._walk(trajectory, branching)
            return trajectory
        finally:
            running.close()
            if self.worker_tools is not None:
                await self.worker_tools.close()

    async def _walk(self, trajectory: Trajectory, branching: Branching | None) -> None:
        """Play until the environment, the number of turns or the prompt's budget ends the episode."""
        episode, forks = trajectory.episode, branching if trajectory.trained else None
        for t in range(len(episode.steps), trajectory.turns):
            try:
                prompt = trajectory.prompt = trajectory.prompt or await self._prompt(trajectory)
            except PromptTooLongError:
                if t == 0:
                    raise
                episode.steps[-1].record["truncated"] = True
                break
            if forks is not None:
                await forks.at(trajectory)
            turn = await self._generate(trajectory, prompt)
            if forks is not None:
                await forks.written(trajectory, turn)
            trajectory.prompt = None
            cut = was_cut(turn, trajectory.sampling, self.ends.issuperset(turn.ids[-1:]))
            if prompt.request is not None:
                await self._summarize(trajectory, prompt, turn, cut)
                continue
            admissible = trajectory.seen.info["admissible"]
            parsed = await trajectory.reader.read(turn.ids, turn.text, admissible, prompt.ids, cut)
            started = perf_counter()
            answer, others = await answer_turn(trajectory, parsed, self.worker_tools), []
            if trajectory.opponents is not None:
                answer, others = await trajectory.opponents.play(trajectory.environment, answer)
                if others and self.worker_tools is not None:
                    self.worker_tools.add_state(answer)
            seconds = perf_counter() - started
            tools = answer.info.pop("tools", None)
            trajectory.add(self._step(trajectory, prompt, turn, parsed, answer, seconds, others), answer)
            if not (answer.terminated or answer.truncated):
                await guarded(trajectory.prompts.heard, turn, parsed)
                if tools and isinstance(trajectory.reader, ToolsReader):
                    reader = self._reader_of(trajectory.reader, tools)
                    if reader.tools != trajectory.reader.tools:  # else the prompts stay as they are
                        trajectory.reader = reader
                        trajectory.prompts.take_tools(reader.tools)
            if forks is not None:
                await forks.chosen(trajectory)
            if trajectory.seen.terminated or trajectory.seen.truncated:
                break
        episode.end(trajectory.seen.info["success"])

    async def _summarize(self, trajectory: Trajectory, prompt: Prompt, turn: Generated, cut: bool) -> None:
        """Add a turn that summarizes its conversation: the state stays, and the turn before leads to it."""
        parsed = read_summary(self.tokenizer, turn.ids, prompt.ids, cut)
        seen = trajectory.seen
        unchanged = Answer(seen.observation, {**seen.info, "invalid": False})
        step = self._step(trajectory, prompt, turn, parsed, unchanged, 0.0)
        record, before = step.record, trajectory.episode.steps[-1].record
        record["anchor"] = f"{SUMMARY_OF}{record['anchor']}"
        if "images" in record["extra"]:  # methods that compare texts must not take it for a turn in this state
            record["extra"]["images"] = f"{SUMMARY_OF}{record['extra']['images']}"
        before["extra"] = {**before["extra"], "next_anchor": record["anchor"]}
        trajectory.add(replace(step, observation=prompt.request or "", images=()), seen)
        await guarded(trajectory.prompts.heard, turn, parsed)

    async def _prompt(self, trajectory: Trajectory) -> Prompt:
        """The prompt of the next turn."""
        images = await processed(self, trajectory.seen.info.get("images") or [])
        last = len(trajectory.episode.steps) + 1 >= trajectory.turns
        return await guarded(trajectory.prompts.next, trajectory.seen, images, last)

    async def _ask(self, trajectory: Trajectory, ask: Ask, row: dict[str, Any]) -> float:
        """Query the model at the end of ``trajectory`` without stepping the environment."""
        prompt = trajectory.prompt or await self._prompt(trajectory)
        return await ask.value(Query(trajectory, prompt, row, self.tokenizer, self._generate, self.shared.room))

    def _step(
        self,
        trajectory: Trajectory,
        prompt: Prompt,
        turn: Generated,
        parsed: ParsedAction,
        answer: Answer,
        seconds: float,
        others: Sequence[OtherTurn] = (),
    ) -> PlayedStep:
        """The step from the state of ``trajectory`` to the ``answer``; its ``success`` is set when the episode ends."""
        t, seen = len(trajectory.episode.steps), trajectory.seen
        valid = parsed.valid and not answer.info["invalid"]
        extra, next_extra = extras(seen.info, answer.info)
        # Written on every step, because the last one has no next record with the anchor of the state it led to.
        columns = {"next_anchor": str(self._anchor(answer)), **countable(extra, next_extra, {ROLE, *worker.before})}
        if TURN_LIMIT in worker.before:
            columns[TURN_LIMIT] = turn_limit(self.turn_limit, columns.get(TURN_LIMIT))
        if self.options.action_format == STREAM_FORMAT:
            columns |= stream_columns(turn.ids, turn.text, self.tokenizer)
        record = make_step(
            step=t,
            reward=answer.reward,
            anchor=self._anchor(seen),
            action=parsed.action,
            valid=valid,
            penalty=0.0 if valid else self.options.invalid_action_penalty,
            terminated=answer.terminated,
            truncated=answer.truncated or (not answer.terminated and t + 1 == trajectory.turns),
            version=turn.version,
            extra=columns | ({"text": seen.observation, "images": seen.images_key} if worker.keep_texts else {}),
        )
        invalid = None if valid else parsed.reason or "the environment refused the action"
        self.shared.invalid_actions.add(turn.text, invalid)
        return PlayedStep(
            prompt=prompt,
            turn=turn,
            record=record,
            observation=seen.text,
            images=seen.info.get("images", ()),
            answer=answer.text,
            invalid=invalid,
            unparsed=not parsed.valid and parsed.kind == "format",
            content=parsed.content,
            seconds=seconds,
            extra=extra,
            next_extra=next_extra,
            reward=answer.reward,
            pays=answer.paid,
            outcome=answer.info.get("outcome", {}),
            others=others,
        )

    def _anchor(self, state: Answer) -> str | int:
        """The key by which methods compare states."""
        return state.anchor if self.options.anchor == "state_key" else state.observation_key

    async def _reader(self, first: Answer, task: Task) -> ActionReader:
        """The reader of an episode, which knows its tools."""
        if not isinstance(self.reader, ToolsReader):
            return self.reader
        assert self.worker_tools is not None
        of_environment = first.info.pop("tools", None) or []  # what later answers have is new
        await self.worker_tools.open(of_environment, task)
        reader = self._reader_of(self.reader, of_environment)
        if not reader.tools:
            raise EnvironmentFailure("tools", f"{task.env_id} gives no info['tools']: {NO_TOOLS}")
        return reader

    def _reader_of(self, reader: ToolsReader, of_environment: list[dict[str, Any]]) -> ToolsReader:
        """The reader that knows the tools which the environment has now, and all others of the episode."""
        assert self.worker_tools is not None
        return reader.with_tools(self.worker_tools.with_others(of_environment), as_json=bool(of_environment))

    async def _generate(self, trajectory: Trajectory, prompt: Prompt) -> Generated:
        turn = await generate(self, trajectory.request_id, prompt, trajectory.sampling)
        trajectory.spent += Cost(tokens=len(turn.ids))
        return turn
