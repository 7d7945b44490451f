"""What a run will do, in a dozen lines before it starts; ``turnkey check`` prints the same and starts nothing."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import version
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.losses.registry import weighs
from verl_turnkey.plugins.checks.files import columns, local_parquet, rows, steps_until_data_end, training_loops
from verl_turnkey.plugins.checks.groups import updates_of_a_step
from verl_turnkey.plugins.checks.selection import uses_us
from verl_turnkey.plugins.config.groups import GroupsConfig
from verl_turnkey.plugins.config.presets import names, read
from verl_turnkey.plugins.config.schema import (
    RolloutConfig,
    TurnkeyConfig,
    credit_modify,
    credit_params,
    estimator_of,
    loss_of,
    loss_params,
    turnkey_config,
)
from verl_turnkey.plugins.credit.unrecorded import VERLS_LOOPS

OURS = "turnkey_env"

# What each of verl's means lets weigh alike, and its losses that take a mean over rows in any of them.
ALIKE = {
    "token-mean": "the tokens of a mini-batch alike",
    "token-sum": "tokens alike, and more tokens make a larger gradient",
    "seq-mean-token-sum": "tokens alike, divided by the number of rows",
    "seq-mean-token-sum-norm": "tokens alike, divided by the number of rows and {norm}",
    "seq-mean-token-mean": "the rows of a mini-batch alike",
}
ROWS_THEMSELVES = ("geo_mean", "sapo")
_WIDTH = 116
_WHOLE = {"break_on_hyphens": False, "break_long_words": False}
"""so that keys and values can be copied"""


def header(config: DictConfig, warnings: Sequence[str] = ()) -> list[str]:
    """The lines; none for a run of stock verl.

    Args:
        config: a whole configuration that has passed the checks.
        warnings: what these had to say, shown at the end.
    """
    if not uses_us(config):
        return []
    turnkey = turnkey_config(config)
    entries = [*_entries(config, turnkey), *(("warning", text) for text in warnings)]
    lines = [f"verl-turnkey {version('verl-turnkey')}: this run"]
    for label, text in entries:
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:<12} ", subsequent_indent=" " * 15, **_WHOLE)
    return lines


def _entries(config: DictConfig, turnkey: TurnkeyConfig) -> Iterator[tuple[str, str]]:
    mode = str(config.trainer.v1.trainer_mode)
    loops = sorted(training_loops(config))
    if turnkey.preset.name:
        yield "preset", _preset(config, turnkey.preset.name)
    yield "estimator", _estimator(config, turnkey)
    yield from _modified(config, turnkey)
    yield "loss", _loss(config, turnkey)
    yield "trainer", mode if mode.startswith("turnkey_") else f"{mode} (verl's)"
    yield "agent loop", _agent_loops(config, loops, turnkey.rollout)
    if OURS in loops:
        yield "environment", _environment(config, turnkey)
    episodes = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if config.trainer.get("val_only"):
        yield "validates", "once, and trains nothing (trainer.val_only=true)"
    elif steps := _steps(config):
        yield "steps", steps
    yield "per step", f"{_episodes(config, turnkey.groups)}, {_rows(loops, turnkey, episodes)}"
    if mode.startswith("turnkey_"):
        if turnkey.groups.keep < 1:
            yield "trained", _kept(turnkey.groups)
        yield "update", _update(config, turnkey)
        yield "weighs", _weighs(config, turnkey)
    yield "paid", _paid(loops, turnkey, estimator_of(config) is not None)
    if OURS in loops and (given := [entry for entry in turnkey.rewards if entry.get("column")]):
        yield "columns", ", ".join(f"{entry['column']}: {_weighted(entry)}" for entry in given)
    for text in _ignored(config, turnkey, loops, mode):
        yield "ignored", text


def _changed(params: Any) -> str:
    """The parameters that differ from their defaults."""
    changed = []
    for entry in fields(params):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if (value := getattr(params, entry.name)) != default:
            changed.append(f"{entry.name}={value} (default {'none' if default is MISSING else default})")
    return ", ".join(changed) or "all parameters at their defaults"


def _preset(config: DictConfig, name: str) -> str:
    """The published settings that the run starts from, and those that it does not keep."""
    if name not in names():
        return name  # the user's own file
    changed = []
    for setting in read(name).settings:
        value = OmegaConf.select(config, setting.key)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        if value != setting.value and not str(setting.value).startswith("${"):
            changed.append(f"{setting.key}={value} (published {setting.value})")
    return f"{name}, except {', '.join(changed)}" if changed else f"{name}, all as published"


def _estimator(config: DictConfig, turnkey: TurnkeyConfig) -> str:
    spec = estimator_of(config)
    if spec is None:
        return f"{config.algorithm.adv_estimator} (verl's)"
    return f"{config.algorithm.adv_estimator}: {_changed(credit_params(config, turnkey))}"


def _modified(config: DictConfig, turnkey: TurnkeyConfig) -> Iterator[tuple[str, str]]:
    """The modifiers of the estimator's credit, in order."""
    if found := credit_modify(config, turnkey):
        yield "modified by", "; then ".join(f"{one.spec.name}: {_changed(one.params)}" for one in found)


def _loss(config: DictConfig, turnkey: TurnkeyConfig) -> str:
    name = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if loss_of(config) is None:
        kind = OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type")
        return f"{name} (verl's)" + (f": loss_type={kind}" if kind and name == "bypass_mode" else "")
    return f"{name}: {_changed(loss_params(config, turnkey))}"


def _agent_loops(config: DictConfig, loops: Sequence[str], rollout: RolloutConfig) -> str:
    default = str(config.actor_rollout_ref.rollout.agent.default_agent_loop)
    said = "" if loops == [default] else "as the column agent_name of the data says, "
    return said + "; ".join(_agent_loop(loop, rollout) for loop in loops)


def _agent_loop(loop: str, rollout: RolloutConfig) -> str:
    if loop == OURS:
        return f"{loop}: a row per {'conversation' if rollout.rows_hold_turns else 'step'}"
    if loop in VERLS_LOOPS:
        return f"{loop} (verl's): a row per episode, its turns told apart by the response mask"
    return f"{loop} (your own): rows as its records say"


def task_environments(config: DictConfig) -> Counter[str]:
    """Environment ids in the local training files, with their number of tasks; empty when there are none to read."""
    counts: Counter[str] = Counter()
    own = str(turnkey_config(config).env.id)  # of tasks that name none
    for file in local_parquet(config):
        if COLUMN in columns(file):
            counts.update(Task.from_json(text).env_id or own for (text,) in rows(file, [COLUMN]) if text)
    return counts


def _environment(config: DictConfig, turnkey: TurnkeyConfig) -> str:
    counts = task_environments(config)
    if counts:
        ids = ", ".join(f"{name} ({number} tasks)" for name, number in counts.most_common(5))
        more = f" and {len(counts) - 5} more" if len(counts) > 5 else ""
        source = f"{ids}{more}, as the tasks say"
    else:
        source = f"{turnkey.env.id or 'unknown here'}, unless a task names another"
    kwargs = f"; {json.dumps(turnkey.env.kwargs)} under the tasks' own arguments" if turnkey.env.kwargs else ""
    return f"{source}{kwargs}; at most {turnkey.rollout.max_turns} turns"


def _steps(config: DictConfig) -> str:
    """How many there are, and how many of them are the critic's alone."""
    ends = (config.trainer.get("total_training_steps"), steps_until_data_end(config))
    number = min((end for end in ends if end is not None), default=None)
    most = "at most " if config.data.get("filter_overlong_prompts") and number != ends[0] else ""
    warm_up = config.trainer.get("critic_warmup") or 0
    alone = f"the critic alone before step {warm_up} (trainer.critic_warmup)" if warm_up > 1 else ""
    return "; ".join(filter(None, (f"{most}{number}" if number else "", alone)))


def _episodes(config: DictConfig, groups: GroupsConfig) -> str:
    tasks, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    if groups.allocation == "even":
        return f"{counted(tasks, 'task')} x {n} = {counted(tasks * n, 'episode')}"
    low, high = groups.bounds(n)
    return f"{counted(tasks, 'task')} x {low} to {high}, by {groups.allocation}, = {tasks * n} episodes"


def _rows(loops: Collection[str], turnkey: TurnkeyConfig, episodes: int) -> str:
    if {*loops} - {OURS, *VERLS_LOOPS}:
        return "rows as the loop makes them"
    return f"{episodes} to {episodes * turnkey.rollout.max_turns} rows" if OURS in loops else f"{episodes} rows"


def _kept(groups: GroupsConfig) -> str:
    of = "the groups" if groups.keep_by == "groups" else "the spread of rewards"
    return f"{groups.keep:.0%} of {of}, from the groups down whose rewards differ most (turnkey.groups.keep)"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 task``, ``2 tasks``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def _update(config: DictConfig, turnkey: TurnkeyConfig) -> str:
    actor = config.actor_rollout_ref.actor
    if turnkey.update.order == "reverse_turns":
        return f"one optimizer step per turn, the last first, x {counted(actor.ppo_epochs, 'epoch')}"
    number = turnkey.update.mini_batches
    if number is None:
        groups = config.data.train_batch_size / updates_of_a_step(config)
        groups = max(1, turnkey.groups.kept(groups)) if turnkey.groups.keep_by == "groups" else groups
        number = math.ceil(groups / actor.ppo_mini_batch_size)
    most = "" if turnkey.groups.keep_by == "groups" else "at most "
    epochs = actor.ppo_epochs
    batches = f"{most}{counted(number, 'mini-batch', 'mini-batches')} x {counted(epochs, 'epoch')} = "
    batches += counted(number * epochs, "optimizer step")
    return f"{batches} per {'batch' if updates_of_a_step(config) == 1 else 'update of a step'}"


def _weighs(config: DictConfig, turnkey: TurnkeyConfig) -> str:
    """What weighs alike in the means of the actor's and the critic's losses."""
    by, actor = turnkey.update.weight_by, config.actor_rollout_ref.actor
    if by != "token":
        return f"{by}s alike, over the whole batch, in the policy's loss, entropy, KL and the critic's loss"
    mode = str(actor.loss_agg_mode)
    own = str(actor.policy_loss.get("loss_mode", "vanilla"))
    norm = actor.get("loss_scale_factor") or "the longest response of a micro-batch"
    mean = f"{ALIKE[mode].format(norm=norm)} (loss_agg_mode={mode})"
    spec = loss_of(config)
    if own in ROWS_THEMSELVES:
        return f"{mean}; {own} itself the rows"
    if spec is not None and weighs(spec, loss_params(config, turnkey)):
        return f"{mean}; {own} by weights of its own"
    return mean


def _paid(loops: Collection[str], turnkey: TurnkeyConfig, penalises: bool) -> str:
    """``penalises``: the estimator is one of ours, since verl's never see the penalty."""
    carried = "what the rows carry: records of the loop, or verl's reward per token"
    if OURS not in loops:
        return carried
    parts = [_weighted(entry) for entry in turnkey.rewards if not entry.get("column")]
    penalty = turnkey.rollout.invalid_action_penalty if penalises else 0.0
    ours = " + ".join(parts) + (f", minus {penalty} for a turn without a valid action" if penalty else "")
    return ours if {*loops} == {OURS} else f"{OURS}: {ours}; the other rows: {carried}"


def _weighted(entry: Mapping[str, Any]) -> str:
    """A component of ``turnkey.rewards``, by its label."""
    return f"{entry.get('label') or entry['name'].rpartition(':')[2]} x {entry.get('weight', 1)}"


def _ignored(config: DictConfig, turnkey: TurnkeyConfig, loops: Sequence[str], mode: str) -> Iterator[str]:
    if OURS in loops and turnkey.env.id and (others := set(task_environments(config)) - {turnkey.env.id}):
        yield f"turnkey.env.id={turnkey.env.id} where the tasks name another ({', '.join(sorted(others)[:3])})"
    if OURS not in loops:
        if turnkey.env.id:
            yield f"turnkey.env.id={turnkey.env.id}: {loops[0]} plays no environment of this package"
        if turnkey.rollout != RolloutConfig():
            yield f"turnkey.rollout.*: only {OURS} reads it"
    if mode.startswith("turnkey_") and turnkey.update.mini_batches is not None:
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        yield f"{key}={OmegaConf.select(config, key)}: turnkey.update.mini_batches is set"
