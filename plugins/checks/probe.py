"""Plays the first task for a few steps before Ray starts, to find errors in seconds instead of GPU-minutes.

The environment runs in a process like those of the hosts, under the same rules, so what passes here can be played
there, and a crash does not end the driver.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.answers import Answer, Info
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.host import CLOSE_SECONDS, RESET_KEY, STEP_KEY, fingerprint
from verl_turnkey.envs.hosting.workers import ProcessWorker
from verl_turnkey.envs.prompting.actions import CALLS, TOOLS, instruction_of
from verl_turnkey.envs.prompting.prompts import (
    Examples,
    Memory,
    PromptHistory,
    build_messages,
    fit_prompt,
    load_template,
)
from verl_turnkey.envs.rewards import RewardError, RewardStep, right_answers
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.envs.tools import random_call
from verl_turnkey.envs.users import PROBE, with_policy
from verl_turnkey.plugins.checks.data import without_tasks
from verl_turnkey.plugins.checks.files import columns, local_parquet, rows
from verl_turnkey.plugins.checks.findings import Refusal, refusal, refuse
from verl_turnkey.plugins.checks.resources import PROCESSORS, check_takes_images
from verl_turnkey.plugins.config.playing import several_roles, shares_memory
from verl_turnkey.plugins.config.schema import (
    EnvConfig,
    TurnkeyConfig,
    credit_modify,
    estimator_of,
    load_examples,
    turnkey_config,
)
from verl_turnkey.plugins.rollout.columns import countable
from verl_turnkey.plugins.rollout.strategies import read_strategy

STEPS = 5


def task_file(config: DictConfig) -> str | None:
    """The first training file with tasks that can be read here; None when there is none."""
    return next((file for file in local_parquet(config) if COLUMN in columns(file)), None)


def first_task(file: str) -> Task:
    """The first task of a local data file."""
    if COLUMN not in (file_columns := columns(file)):
        raise without_tasks(file, file_columns)
    for (text,) in rows(file, [COLUMN]):
        if text is not None:  # a row of another agent loop
            return Task.from_json(text)
    raise refusal("data-file-empty", file=file)


def probe(config: DictConfig, turnkey: TurnkeyConfig, file: str) -> set[str] | None:
    """Play the first task for a few steps, in a process like a host's, and measure its first prompt.

    Returns:
        The names that ``info["extra"]`` has in every step that the environment accepted: before the step for columns of
        the state before a step, after it for all others. None if it refused all of the random actions.
    """
    task, spec = _configured(first_task(file), turnkey), estimator_of(config)
    strategy = read_strategy(turnkey.rollout.strategy)
    forks = strategy is not None and strategy[0].clones
    try:
        before = () if spec is None else spec.names_before(credit_modify(config, turnkey))
        observation, info, columns_given = asyncio.run(play(turnkey, task, before, forks))
    except EnvironmentFailure as failure:
        raise _refusal(task, failure) from None
    if strategy is not None and getattr(strategy[1], "needs_answer", False):
        _check_answer(file, strategy[0].name, RewardStep(observation, None, extra=info.get("extra") or {}))
    if turnkey.rollout.action_format == TOOLS and not info.get("tools"):
        multi_turn = config.actor_rollout_ref.rollout.multi_turn
        if not any(multi_turn.get(key) for key in ("tool_config_path", "function_tool_path")):
            refuse("tools-missing", env_id=task.env_id)
    if info.get("images"):  # the agent loop measures the prompt: it has the processor
        check_takes_images(config)
    else:
        _measure(config, turnkey, observation, info)
    return columns_given


def probe_nodes(turnkey: TurnkeyConfig, file: str) -> None:
    """Play the first task once on every node of the Ray cluster: data, packages or a mount may be missing on one."""
    import ray
    from ray.exceptions import RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = _configured(first_task(file), turnkey)
    player = ray.remote(num_cpus=0, max_retries=0)(_play_here)
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    playing = [player.options(scheduling_strategy=place).remote(turnkey, task) for place in places]
    for node, played in zip(nodes, playing, strict=True):
        try:
            ray.get(played)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, EnvironmentFailure) else error
            raise _refusal(task, cause, f" on node {node['NodeManagerAddress']} ({node['NodeName']})") from None


def _play_here(turnkey: TurnkeyConfig, task: Task) -> None:
    asyncio.run(play(turnkey, task))


def _configured(task: Task, turnkey: TurnkeyConfig) -> Task:
    env_id = task.env_id or turnkey.env.id
    if not env_id:
        raise refusal("probe-without-environment")
    return Task(env_id, task.seed, with_policy({**turnkey.env.kwargs, **task.kwargs}, PROBE))


def _refusal(task: Task, error: Exception, where: str = "") -> Refusal:
    cause = f" ({error.kind}): {error.message}" if isinstance(error, EnvironmentFailure) else f": {error}"
    return refusal("environment-unplayable", env_id=task.env_id, seed=task.seed, where=where, cause=cause)


def _check_answer(file: str, strategy: str, first: RewardStep) -> None:
    """Refuse a first task without a right answer: if none has one, no value is ever measured."""
    field = "reward_model"
    row = {field: next(rows(file, [field]))[0]} if field in columns(file) else {}
    try:
        right_answers(replace(first, row=row))
    except RewardError as error:
        refuse("answer-missing", strategy=strategy, file=file, error=error)


async def play(
    turnkey: TurnkeyConfig, task: Task, before: Collection[str] = (), forks: bool = False
) -> tuple[str, Info, set[str] | None]:
    """Begin ``task`` and take up to ``STEPS`` random steps, as a host does; ``before``: see ``countable``.

    ``forks``: whether episodes will be cloned; then each step is taken in a copy first, or the steps are replayed where
    the environment cannot copy itself.

    Returns:
        First observation and info, and the columns of the steps, as :func:`probe` returns them.
    """
    env, rng = turnkey.env, random.Random(task.seed)
    common: set[str] | None = None
    process = await ProcessWorker.spawn(turnkey.modules)
    try:
        load = f"import of {task.env_id}"
        declared = await process.call("load", (task.env_id,), env.reset_timeout, load, RESET_KEY)
        copies = forks and declared is not None and declared.copies
        start = (task.env_id, dict(task.kwargs), task.seed)
        first = await process.call("start", start, env.reset_timeout, "its reset", RESET_KEY)
        observation, info = first
        tools = info.get("tools")
        actions_taken, states = [], [first]
        for _ in range(STEPS):
            actions = info["admissible"] if info["admissible"] is not None else observation.split()[:50]
            action = rng.choice(actions) if actions else "look"
            if tools:
                action = random_call(tools, rng)
            if copies:
                copied = await process.call(
                    "step_clone", (action,), env.step_timeout, f"clone before {action!r}", STEP_KEY
                )
            step = await process.call("step", (action,), env.step_timeout, f"step({action!r})", STEP_KEY)
            previous_info, (observation, _, terminated, truncated, info) = info, step
            if copies and fingerprint(*copied) != fingerprint(observation, info):
                raise _another_state(len(actions_taken) + 1, "in a copy of it")
            actions_taken.append(action)
            states.append((observation, info))
            if not info["invalid"]:
                columns = countable(previous_info.get("extra") or {}, info.get("extra") or {}, before)
                common = {*columns} if common is None else common & columns.keys()
            if terminated or truncated:
                break
        if forks and not copies:
            await _replay(process, env, start, actions_taken, states)
    finally:
        await process.retire(CLOSE_SECONDS)
    _check_roles(turnkey, [Answer(*state) for state in (states[:-1] if terminated or truncated else states)])
    if turnkey.rollout.action_format == TOOLS:
        first[1]["tools"] = await with_servers(turnkey, task, tools or [])
    return *first, common


def _check_roles(turnkey: TurnkeyConfig, states: list[Answer]) -> None:
    """Refuse states of several roles, which are prompted, with prompts that have one memory."""
    roles = [state.role for state in states if state.role is not None]
    other = next((role for role in roles if role != roles[0]), None)
    if other is not None and shares_memory(turnkey, load_template(turnkey.rollout.template)):
        reason = several_roles(roles[0], other)
        refuse("roles-share-memory", reason=reason)


async def _replay(
    process: ProcessWorker, env: EnvConfig, start: Any, actions: list[str], states: list[tuple[str, Info]]
) -> None:
    """Play the same actions after the same reset."""
    if start[2] is None:
        raise EnvironmentFailure("clone", "an episode that was started without a seed cannot be replayed")
    replayed = [await process.call("start", start, env.reset_timeout, "its reset", RESET_KEY)]
    for action in actions:
        observation, *_, info = await process.call("step", (action,), env.step_timeout, f"step({action!r})", STEP_KEY)
        replayed.append((observation, info))
    for n, (again, first_time) in enumerate(zip(replayed, states, strict=True)):
        if fingerprint(*again) != fingerprint(*first_time):
            raise _another_state(
                n, "when they were replayed: not all of its randomness comes from the seed of its reset"
            )


def _another_state(actions: int, how: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        "clone", f"it reached another state after {actions} actions {how}: turnkey.rollout.strategy cannot fork it"
    )


def preview(config: DictConfig) -> str:
    """The first prompt of the first task as the model gets it, and its tokens; or why it cannot be shown here."""
    turnkey, file = turnkey_config(config), task_file(config)
    if file is None:
        return "no prompt to show: there is no training file with tasks on this machine"
    observation, info, _ = asyncio.run(play(turnkey, _configured(first_task(file), turnkey)))
    measured = _measure(config, turnkey, observation, info)
    if measured is None:
        return f"no prompt to show: {config.actor_rollout_ref.model.path} is not a folder with a plain tokenizer"
    text, number = measured
    limit = config.actor_rollout_ref.rollout.prompt_length
    return f"the first prompt, {number} of {limit} tokens (data.max_prompt_length):\n{text}"


def _measure(config: DictConfig, turnkey: TurnkeyConfig, observation: str, info: Info) -> tuple[str, int] | None:
    """The first prompt as text, and its number of tokens; None if the tokenizer is not a plain local one."""
    model = config.actor_rollout_ref.model
    path = Path(model.path).expanduser()
    special = any(model.get(key) for key in ("tokenizer_path", "trust_remote_code", "custom_chat_template"))
    if not path.is_dir() or special:
        return None  # not a plain local tokenizer: the agent loop measures each prompt anyway
    from transformers import AutoTokenizer

    from verl_turnkey.plugins.rollout.token_spans import check_spaces

    tokenizer = AutoTokenizer.from_pretrained(path)
    check_spaces(tokenizer)
    kwargs = dict(config.data.get("apply_chat_template_kwargs") or {})
    tools, fmt = None, turnkey.rollout.action_format
    if fmt in CALLS:
        from verl_turnkey.plugins.rollout.action_reader import ACT, check_tool_template

        check_tool_template(tokenizer, fmt, **kwargs)
        tools = info.get("tools") if fmt == TOOLS else [ACT]
    # With images the workers check, which have a processor.
    if not any((path / name).is_file() for name in PROCESSORS):
        from verl_turnkey.plugins.rollout.turn_tail import learn
        from verl_turnkey.plugins.verl_api.builders import builder_of

        model_type = json.loads(read_text(path / "config.json", only_utf8=True)).get("model_type")
        builder = builder_of(config, tokenizer, None, model_type)
        if turnkey.rollout.prompt == "conversation":
            learn(builder, tokenizer, tools, turnkey.rollout.observation_role)

    template, goal = load_template(turnkey.rollout.template), info["task"]
    instruction = instruction_of(fmt)
    turns = load_examples(turnkey.rollout.examples)
    examples = Examples(turns, fmt, template, instruction, turnkey.rollout.prompt == "conversation")
    system = [{"role": "system", "content": turnkey.rollout.system}] if turnkey.rollout.system else []

    def encode(past: PromptHistory) -> list[int]:
        now = build_messages(
            system=None,
            template=template,
            task=goal,
            history=past.turns,
            observation=observation,
            admissible=info["admissible"],
            instruction=instruction,
            examples=examples.text,
        )
        messages = [*system, *examples.messages(goal), *now]
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, tools=tools, **kwargs
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids, _ = fit_prompt(encode, Memory(0), config.actor_rollout_ref.rollout.prompt_length)
    return tokenizer.decode(ids, skip_special_tokens=False), len(ids)


async def with_servers(turnkey: TurnkeyConfig, task: Task, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tools of the first episode: ``own``, its environment's, and those of MCP servers, which start for it."""
    from verl_turnkey.plugins.rollout.tool_calls import tools_of

    servers = turnkey.mcp.opened(turnkey.env.reset_timeout, turnkey.env.step_timeout)
    if servers is None:
        return own
    try:
        episode = await servers.episode(task, [tool["function"]["name"] for tool in own])
        await episode.close()
    finally:
        await servers.close()
    return [*own, *tools_of(episode.schemas).schemas]
