"""Plays the first task for a few steps before Ray starts, to find errors in seconds instead of GPU-minutes.

The environment runs in a process like those of the hosts, under the same rules, so what passes here can be played
there, and a crash does not end the driver.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.envs.answers import Answer, Info
from verl_turnkey.envs.errors import EnvironmentFailure, JudgeError
from verl_turnkey.envs.hosting.host import CLOSE_SECONDS, RESET_KEY, STEP_KEY, fingerprint
from verl_turnkey.envs.hosting.workers import ProcessWorker
from verl_turnkey.envs.http import chat_endpoint
from verl_turnkey.envs.prompting.actions import TOOLS
from verl_turnkey.envs.rewards import RewardStep
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.tools import random_call, tool_names
from verl_turnkey.envs.users import PROBE, with_policy
from verl_turnkey.plugins.checks.data import check_answer, first_task, task_file
from verl_turnkey.plugins.checks.findings import Refusal, refusal, refuse, warn
from verl_turnkey.plugins.checks.first_prompt import measure
from verl_turnkey.plugins.checks.images import TakesImages, check_images
from verl_turnkey.plugins.config.agent import RANDOM, SELF
from verl_turnkey.plugins.config.schema import EnvConfig, TurnkeyConfig, credit_modify, estimator_of, turnkey_config
from verl_turnkey.plugins.rollout.columns import countable
from verl_turnkey.plugins.rollout.strategies import Strategy, StrategySpec, read_strategy

STEPS = 5


def probe(
    config: DictConfig, turnkey: TurnkeyConfig, file: str, takes_images: TakesImages = check_images
) -> set[str] | None:
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
    _check_opponents(config, turnkey, task, info)
    if len(roles := info.get("roles", ())) > 1 and turnkey.opponent_of(False) == SELF:
        _warn_of_mixed_roles(config, roles)
        _refuse_branches(strategy, roles)
    if strategy is not None and getattr(strategy[1], "needs_answer", False):
        check_answer(file, strategy[0].name, RewardStep(observation, None, extra=info.get("extra") or {}))
    if turnkey.rollout.action_format == TOOLS and not info.get("tools"):
        multi_turn = config.actor_rollout_ref.rollout.multi_turn
        if not any(multi_turn.get(key) for key in ("tool_config_path", "function_tool_path")):
            refuse("tools-missing", env_id=task.env_id)
    if info.get("images"):  # the agent loop measures the prompt: it has the processor
        takes_images(config, turnkey, [*info["images"]])
    else:
        measure(config, turnkey, observation, info)
    return columns_given


def _check_opponents(config: DictConfig, turnkey: TurnkeyConfig, task: Task, info: Info) -> None:
    """Refuse opponents that have no role or no legal actions in the first task, and those that do not answer now."""
    for key, opponent in turnkey.opponents.items():
        if len(info.get("roles", ())) < 2:
            refuse("opponent-without-roles", key=key, opponent=opponent, env_id=task.env_id)
        elif opponent == RANDOM and not info["admissible"]:
            refuse("opponent-random", key=key, env_id=task.env_id)
        if isinstance(opponent, str):
            continue
        if info.get("images"):
            refuse("opponent-images", key=key, env_id=task.env_id)
            continue
        tokens = turnkey.rollout.max_tokens_per_turn or config.actor_rollout_ref.rollout.response_length
        question = {"messages": [{"role": "user", "content": "Answer with one word."}], **opponent.limit(tokens)}
        try:
            asyncio.run(chat_endpoint(replace(opponent, retries=0), "the opponent").ask(question))
        except JudgeError as error:
            refuse("opponent-unanswered", key=key, error=error)


def _warn_of_mixed_roles(config: DictConfig, roles: Sequence[str]) -> None:
    """Warn of what takes all ``roles`` of an episode for one player: in a game, what one wins another loses."""
    spec, algorithm = estimator_of(config), config.algorithm
    mixing: dict[str, str] = {}
    if spec is None or spec.needs == ("extra.parent",):
        key = f"algorithm.adv_estimator={algorithm.adv_estimator}"
        mixing[key] = "take +turnkey=marshal or +turnkey=gigpo"
    if (algorithm.get("filter_groups") or {}).get("enable"):
        mixing["algorithm.filter_groups.enable=true"] = "set algorithm.filter_groups.enable=false"
    for key, instead in mixing.items():
        warn("roles-mixed", key=key, roles=", ".join(roles), instead=instead)


def _refuse_branches(strategy: tuple[StrategySpec, Strategy] | None, roles: Sequence[str]) -> None:
    """A branch trains its own turns: a role that does not move in it again would lose what the branch pays it.

    Candidates for one turn are compared by what it gives the role that takes it.
    """
    if strategy is not None and strategy[0].trains and not hasattr(strategy[1], "choose"):
        refuse("roles-branches", strategy=strategy[0].name, roles=", ".join(roles))


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
    for node, answer in zip(nodes, playing, strict=True):
        try:
            ray.get(answer)
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
                doing = f"clone before {action!r}"
                copied = await process.call("step_clone", (action,), env.step_timeout, doing, STEP_KEY)
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
    answers = [Answer(*state) for state in (states[:-1] if terminated or truncated else states)]
    prompted = dict.fromkeys([*first[1].get("roles", ()), *(answer.role for answer in answers)])
    system = turnkey.rollout.system
    if isinstance(system, dict) and (without := [role for role in prompted if role not in system]):
        refuse("role-without-system", role=repr(without[0]), roles=", ".join(map(repr, system)))
    if turnkey.rollout.action_format == TOOLS:
        first[1]["tools"] = await with_servers(turnkey, task, tools or [])
    return *first, common


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
    how = "when they were replayed: not all of its randomness comes from the seed of its reset"
    for n, (again, first_time) in enumerate(zip(replayed, states, strict=True)):
        if fingerprint(*again) != fingerprint(*first_time):
            raise _another_state(n, how)


def _another_state(actions: int, how: str) -> EnvironmentFailure:
    reached = f"it reached another state after {actions} actions {how}"
    return EnvironmentFailure("clone", f"{reached}: turnkey.rollout.strategy cannot fork it")


def preview(config: DictConfig) -> str:
    """The first prompt of the first task as the model gets it, and its tokens; or why it cannot be shown here."""
    turnkey, file = turnkey_config(config), task_file(config)
    if file is None:
        return "no prompt to show: there is no training file with tasks on this machine"
    observation, info, _ = asyncio.run(play(turnkey, _configured(first_task(file), turnkey)))
    measured = measure(config, turnkey, observation, info)
    if measured is None:
        return f"no prompt to show: {config.actor_rollout_ref.model.path} is not a folder with a plain tokenizer"
    text, number = measured
    limit = config.actor_rollout_ref.rollout.prompt_length
    return f"the first prompt, {number} of {limit} tokens (data.max_prompt_length):\n{text}"


async def with_servers(turnkey: TurnkeyConfig, task: Task, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tools of the first episode: ``tools``, its environment's, and those of MCP servers, which start for it."""
    from verl_turnkey.plugins.rollout.tool_calls import tools_of

    servers = turnkey.mcp.opened(turnkey.env.reset_timeout, turnkey.env.step_timeout)
    if servers is None:
        return tools
    try:
        episode = await servers.episode(task, tool_names(tools))
        await episode.close()
    finally:
        await servers.close()
    return [*tools, *tools_of(episode.schemas).schemas]
