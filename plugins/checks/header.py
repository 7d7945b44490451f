"""What a run will do, in a dozen lines before it starts; ``turnkey check`` prints the same and starts nothing."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.envs.prompting.actions import instruction_of
from verl_turnkey.envs.prompting.prompts import Examples, load_template
from verl_turnkey.losses.registry import weighs
from verl_turnkey.plugins.checks.files import last_step, shared_tasks, task_environments, tasks
from verl_turnkey.plugins.checks.keys import uses_us
from verl_turnkey.plugins.checks.run import (
    ACTOR,
    AGENT,
    MODEL,
    OURS,
    CheckedRun,
    heads_of,
    optimizer_steps,
    run_of,
    updates_of_a_step,
)
from verl_turnkey.plugins.config.checkpoint_files import resumed_step
from verl_turnkey.plugins.config.presets import names, read
from verl_turnkey.plugins.config.schema import RolloutConfig, load_examples
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.rollout.strategies import read_strategy
from verl_turnkey.plugins.verl_api.ledger import VERLS_LOOPS


def plural(number: int | str, noun: str) -> str:
    return f"{number} {noun}" + ("" if str(number) == "1" else "es" if noun.endswith("batch") else "s")


def changed(params: Any) -> str:
    """The parameters that differ from their defaults."""
    different = []
    for entry in fields(params):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if (value := getattr(params, entry.name)) != default:
            different.append(f"{entry.name}={value} (default {'none' if default is MISSING else default})")
    return ", ".join(different) or "all parameters at their defaults"


def _preset(run: CheckedRun) -> str:
    """The published settings that the run starts from, and those that it changes."""
    name = run.turnkey.preset.name
    if not name or name not in names():
        return name or ""  # the user's own file
    different = []
    for setting in read(name).settings:
        value = run.get(setting.key)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        if value != setting.value and not str(setting.value).startswith("${"):
            different.append(f"{setting.key}={value} (published {setting.value})")
    return f"{name}, except {', '.join(different)}" if different else f"{name}, all as published"


def _estimator(run: CheckedRun) -> str:
    name = run.config.algorithm.adv_estimator
    return f"{name} (verl's)" if run.estimator is None else f"{name}: {changed(run.params)}"


def _loss(run: CheckedRun) -> str:
    if run.loss is not None:
        return f"{run.loss_name}: {changed(run.loss_params)}"
    kind = run.get(f"{ACTOR}.policy_loss.rollout_correction.loss_type")
    return f"{run.loss_name} (verl's)" + (f": loss_type={kind}" if kind and run.loss_name == "bypass_mode" else "")


def _device(run: CheckedRun) -> str:
    """What ``+turnkey/device=cpu`` chose for the machine and the model."""
    if str(run.config.trainer.device) != "cpu":
        return ""
    threads = run.get("ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS") or 1
    precision = run.get(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype")
    return f"cpu: trains in {precision}, generates in {run.rollout.dtype}, {plural(threads, 'thread')}"


def _steps(run: CheckedRun) -> str:
    """The number of training steps, the one after which the run continues, and those that train only the critic."""
    config = run.config
    if not run.trains:
        return "none: one validation (trainer.val_only=true)"
    number, done = last_step(config), resumed_step(config.trainer)
    by_data = number != config.trainer.get("total_training_steps")
    most = "at most " if config.data.get("filter_overlong_prompts") and by_data else ""
    continues = f"continues after step {done}" if done else ""
    warm_up = config.trainer.get("critic_warmup") or 0
    critic_only = f"only the critic before step {warm_up} (trainer.critic_warmup)" if warm_up > 1 else ""
    return "; ".join(filter(None, (f"{most}{number}" if number else "", continues, critic_only)))


def _lora(run: CheckedRun) -> str:
    model = run.config.actor_rollout_ref.model
    if rank := model.get("lora_rank", 0):
        start = f", from {model.lora_adapter_path}" if model.get("lora_adapter_path") else ""
        return f"rank {rank}, alpha {model.lora_alpha}, on {model.target_modules}{start}"
    rank = run.get(f"{MODEL}.lora.rank")
    return f"rank {rank}, alpha {run.get(f'{MODEL}.lora.alpha')}" if rank else ""


def _agent_loops(run: CheckedRun) -> str:
    default = str(run.rollout.agent.default_agent_loop)
    source = "" if run.loops == [default] else "by the column agent_name of the data: "
    return source + "; ".join(_agent_loop(loop, run) for loop in run.loops)


def _agent_loop(loop: str, run: CheckedRun) -> str:
    if loop == OURS:
        return f"{loop}: a row per {'conversation' if run.turnkey.rollout.rows_hold_turns else 'step'}"
    if loop == AGENT:
        rows = "a row per conversation" if run.turnkey.rollout.rows_hold_turns else "a row per turn"
        command = run.turnkey.agent.run or ()
        agent = command if isinstance(command, str) else " ".join(command)
        return f"{loop}: {rows} of the agent {agent}, at most {plural(run.turnkey.rollout.max_turns, 'turn')}"
    if loop in VERLS_LOOPS:
        return f"{loop} (verl's): a row per episode, with turns separated by the response mask"
    return f"{loop} (your own): rows as in its records"


def _environment(run: CheckedRun) -> str:
    if OURS not in run.loops:
        return ""
    env, counts = run.turnkey.env, task_environments(run.config)
    ids = ", ".join(f"{name} ({plural(number, 'task')})" for name, number in counts.most_common(5))
    more = f" and {len(counts) - 5} more" if len(counts) > 5 else ""
    source = f"{ids}{more}" if counts else str(env.id or "named by each task")
    kwargs = f"; default kwargs {json.dumps(env.kwargs)}" if env.kwargs else ""
    return f"{source}{kwargs}; at most {plural(run.turnkey.rollout.max_turns, 'turn')} (turnkey.rollout.max_turns)"


def _sampling(options: Any) -> str:
    """``options``: verl's node of the training rollout, or of the validation."""
    if options.temperature == 0:
        return "greedy (temperature 0)"
    parts = [f"temperature {options.temperature}"]
    parts += [f"top_p {options.top_p}"] if options.top_p != 1 else []
    return ", ".join([*parts, f"top_k {options.top_k}"] if options.top_k not in (-1, 0) else parts)


def _strategy(run: CheckedRun) -> str:
    """How episodes fork, and the most that this adds to a step."""
    strategy = read_strategy(run.turnkey.rollout.strategy) if OURS in run.loops else None
    if strategy is None or not run.trains:
        return ""
    spec, params = strategy
    text = f"{spec.name}: {changed(params)}"
    size = run.sizes
    if spec.trains:
        number = size.trajectories.high
        most = "any number of" if number is None else f"at most {number - size.episodes.most}"
        text += f"; {most} trained branches per step"
    if not spec.trains or size.measured != 0:
        most = "any number of" if size.measured is None else f"at most {size.measured}"
        text += f"; {most} {'further rollouts' if spec.clones else 'queries'} per step, which are not trained"
    limits = {f"branch_{key}": getattr(run.turnkey.rollout, f"branch_{key}") for key in ("tokens", "steps")}
    return text + "".join(f"; {key}={limit}" for key, limit in limits.items() if limit is not None)


def _per_step(run: CheckedRun) -> str:
    if not run.trains:
        return ""
    size, groups = run.sizes, run.turnkey.groups
    by = f", by {groups.allocation}," if groups.allocation != "even" else ""
    if not by and size.rollouts.low != size.rollouts.high:
        by = ", by the column __rollout_n__,"
    trained = "rows as the loop makes them" if size.rows is None else f"{size.rows} rows"
    merged = {*run.loops} <= {OURS, AGENT} and run.turnkey.rollout.rows_hold_turns
    once = " (one per trajectory where all turns merge)" if merged else ""
    return f"{size.tasks} tasks x {size.rollouts}{by} = {size.episodes} episodes, {trained}{once}"


def _filter(run: CheckedRun) -> str:
    options = run.config.algorithm.get("filter_groups") or {}
    if not options.get("enable"):
        return ""
    return f"replaces groups with the same {options.get('metric')} in all episodes (algorithm.filter_groups)"


def _kept(run: CheckedRun) -> str:
    groups, size = run.turnkey.groups, run.sizes
    if not run.our_trainer or groups.keep >= 1:
        return ""
    share = f"{groups.keep:.0%} of the {'groups' if groups.keep_by == 'groups' else 'spread of rewards'}"
    number = f"{size.trained_groups} of {size.tasks} groups"
    return f"{number}, those whose rewards differ most: {share} (turnkey.groups.keep)"


def _stored(run: CheckedRun) -> str:
    groups = run.turnkey.groups
    if not run.our_trainer or not groups.stores:
        return ""
    most = f"at most {plural(run.sizes.stored, 'stored episode')} per step"
    if groups.replay:
        return f"{most}, {groups.replay} for each group in which all ended alike (turnkey.groups.replay)"
    groups_joining = run.sizes.trained_groups.most - run.sizes.tasks
    return f"{most}, in at most {plural(groups_joining, 'stored group')} (turnkey.groups.buffer)"


def _examples(run: CheckedRun) -> str:
    """Number of example turns in the prompts, and about how many tokens they have if the tokenizer is a local file."""
    options = run.turnkey.rollout
    turns = load_examples(options.examples) if OURS in run.loops else ()
    if not turns:
        return ""
    conversation = options.prompt == "conversation"
    template, instruction = load_template(options.template), instruction_of(options.action_format)
    examples = Examples(turns, options.action_format, template, instruction, conversation)
    messages = [str(message["content"]) for message in examples.messages("")]
    file = Path(run.config.actor_rollout_ref.model.path).expanduser() / "tokenizer.json"
    tokens = ""
    if file.is_file():
        from tokenizers import Tokenizer

        text = "\n".join([*messages, examples.text])
        tokens = f", about {len(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids)} tokens"
    how = "messages" if messages else "text"
    return f"{plural(len(turns), 'turn')} in every prompt as {how}{tokens} (turnkey.rollout.examples)"


def _hints(run: CheckedRun) -> str:
    low, high = run.turnkey.groups.hint_low, run.turnkey.groups.hint_high
    return f"{low} to {high} of the hint of tasks that nobody solved" if high else ""


def _reward(run: CheckedRun) -> str:
    rows_own = "from the rows: records of the loop, or verl's reward per token"
    if not run.our_loops:
        return rows_own
    text = " + ".join(_weighted(entry) for entry in run.turnkey.rewards if not entry.get("column"))
    penalty = run.turnkey.rollout.invalid_action_penalty
    if penalty and run.estimator is not None:  # verl's estimators never see it
        text += f", -{penalty} per invalid action"
    return text if {*run.loops} <= {OURS, AGENT} else f"{OURS}: {text}; other loops: {rows_own}"


def _columns(run: CheckedRun) -> str:
    entries = [entry for entry in run.turnkey.rewards if entry.get("column")] if OURS in run.loops else []
    return ", ".join(f"{entry['column']} = {_weighted(entry)}" for entry in entries)


def _weighted(entry: Mapping[str, Any]) -> str:
    """A component of ``turnkey.rewards``, by its label."""
    return f"{float(entry.get('weight', 1))} x {entry.get('label') or entry['name'].rpartition(':')[2]}"


def _validation(run: CheckedRun) -> str:
    trainer, kwargs = run.config.trainer, run.rollout.val_kwargs
    first, every = trainer.get("val_before_train", True) or trainer.get("val_only"), trainer.get("test_freq") or -1
    between = "" if every < 0 or every >= (last_step(run.config) or math.inf) else f"every {plural(every, 'step')}"
    often = [*filter(None, ("before the first step" if first else "", between, "at the end" if every > 0 else ""))]
    if not often:
        return "none"
    number = tasks(run.config, "val_files")
    total = "all tasks" if number is None else plural(number, "task")
    shared, readable, compared = shared_tasks(run.config)
    also = f"{shared} of them also training tasks: same {compared}" if shared else "none of them a training task"
    held_out = f" ({also})" if readable else ""
    if len(often) > 2:
        often = [f"{', '.join(often[:-1])},", often[-1]]
    return f"{' and '.join(often)}: {total}{held_out} x {plural(kwargs.n, 'episode')}, {_sampling(kwargs)}"


MEANS = {
    "token-mean": "over tokens",
    "token-sum": "none: the sum over tokens, so that more tokens make a larger gradient",
    "seq-mean-token-sum": "over rows, of sums over tokens",
    "seq-mean-token-sum-norm": "over rows, of sums over tokens divided by {norm}",
    "seq-mean-token-mean": "over rows, of means over tokens",
}
"""verl's ``loss_agg_mode``"""
ROWS_THEMSELVES = ("geo_mean", "sapo")
"""verl's losses that average over rows under any of these modes"""


def _kl(run: CheckedRun) -> str:
    algorithm, actor = run.config.algorithm, run.actor
    parts = []
    if algorithm.get("use_kl_in_reward"):
        control = algorithm.kl_ctrl
        parts.append(f"{control.kl_coef} x {algorithm.kl_penalty} in the reward ({control.type})")
    if actor.use_kl_loss:
        parts.append(f"{actor.kl_loss_coef} x {actor.kl_loss_type} in the loss")
    if actor.get("entropy_coeff"):
        parts.append(f"entropy bonus {actor.entropy_coeff}")
    return ", ".join(parts)


def _correction(run: CheckedRun) -> str:
    correction = run.config.algorithm.get("rollout_correction") or {}
    keys = ("bypass_mode", "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    values = {key: correction.get(key) for key in keys}
    used = [key for key in keys if values[key] and values[key.removesuffix("_threshold")]]
    return ", ".join([*(f"{key}={values[key]}" for key in used), *_importance(run)])


def _importance(run: CheckedRun) -> list[str]:
    options = run.turnkey.update
    level, high = options.importance, options.importance_high
    if level is None:
        return []
    kind = "per token" if level == "token" else f"per {level} ({options.importance_ratio})"
    if options.importance_outside == "truncate":
        return [f"importance weight {kind}, at most {high}"]
    result = {"zero_weight": "weighs 0", "clear_mask": "is not trained"}[options.importance_outside]
    return [f"importance weight {kind}; a {level} outside [{options.importance_low or 0}, {high}] {result}"]


def _critic(run: CheckedRun) -> str:
    if not run.use_critic or not run.trains:
        return ""
    critic = run.config.critic
    path = f"{run.get('critic.model.path') or 'from the actor'}, lr {critic.optim.lr}"
    if heads := heads_of(run.config, run.turnkey):
        path += f", heads {', '.join(head.name for head in heads)}"
    return f"{path}; {_optimizer_steps(run, 'critic')}" if run.our_trainer else path


def _optimizer_steps(run: CheckedRun, role: str) -> str:
    update = optimizer_steps(run.config, run.turnkey, run.sizes, role)
    most = "" if update.exact else "at most "
    turns = role == "actor" and run.turnkey.update.order == "reverse_turns"
    parts = plural(update.mini_batches, "turn" if turns else "mini-batch")
    last = ", from the last turn to the first" if turns else ""
    per = "batch" if updates_of_a_step(run.config) == 1 else "update of a step"
    steps = f"{plural(update.steps, 'optimizer step')} per {per}"
    return f"{most}{parts} x {plural(update.epochs, 'epoch')} = {steps}{last}"


def _mean(run: CheckedRun) -> str:
    """Over what the losses of actor and critic are averaged."""
    if not run.our_trainer or not run.trains:
        return ""
    by, mode = run.turnkey.update.weight_by, str(run.actor.loss_agg_mode)
    if by != "token":
        heads = heads_of(run.config, run.turnkey)
        losses = "policy loss, entropy and KL" if heads else "policy loss, entropy, KL and the critic's loss"
        return f"over {by}s of the whole batch, for the {losses} (weight_by={by})"
    norm = run.actor.get("loss_scale_factor") or "the longest response of a micro-batch"
    mean = f"{MEANS[mode].format(norm=norm)} ({mode})"
    if run.loss_name in ROWS_THEMSELVES:
        return f"{mean}; {run.loss_name}: over rows"
    itself = run.loss is not None and weighs(run.loss, run.loss_params)
    return f"{mean}; {run.loss_name} weights the tokens itself" if itself else mean


def ignored(run: CheckedRun) -> Iterator[str]:
    """Settings that have no effect in this combination."""
    env = run.turnkey.env
    if OURS in run.loops and env.id and (task_ids := set(task_environments(run.config)) - {env.id}):
        yield f"turnkey.env.id={env.id} where the tasks name another ({', '.join(sorted(task_ids)[:3])})"
    if OURS not in run.loops:
        if env.id:
            yield f"turnkey.env.id={env.id}: {min(run.loops)} plays no environment of this package"
        if run.turnkey.rollout != RolloutConfig() and AGENT not in run.loops:
            yield f"turnkey.rollout.*: only {OURS} reads it"
    if run.our_trainer and run.turnkey.update.mini_batches is not None:
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        yield f"{run.setting(key)}: turnkey.update.mini_batches is set"


def _log(run: CheckedRun) -> str:
    """Where the trajectory log is."""
    if folder := run.turnkey.log.trajectories:
        live = f"; episodes also to {masked(run.turnkey.log.otlp)}" if run.turnkey.log.otlp else ""
        return f"each turn in {folder}{live}"
    return "turns are not logged; set turnkey.log.trajectories=FOLDER to use turnkey view"


LINES: tuple[tuple[str, Callable[[CheckedRun], str]], ...] = (
    ("preset", _preset),
    ("estimator", _estimator),
    ("modified by", lambda run: "; then ".join(f"{m.spec.name}: {changed(m.params)}" for m in run.modifiers)),
    ("loss", _loss),
    ("trainer", lambda run: run.mode if run.our_trainer else f"{run.mode} (verl's)"),
    ("device", _device),
    ("lora", _lora),
    ("steps", _steps),
    ("agent loop", _agent_loops),
    ("environment", _environment),
    ("opponent", lambda run: "; ".join(f"{opponent} ({key})" for key, opponent in run.turnkey.opponents.items())),
    ("examples", _examples),
    ("sampling", lambda run: _sampling(run.rollout)),
    ("strategy", _strategy),
    ("per step", _per_step),
    ("filter", _filter),
    ("trained", _kept),
    ("replay", _stored),
    ("hints", _hints),
    ("reward", _reward),
    ("columns", _columns),
    ("validation", _validation),
    ("kl", _kl),
    ("correction", _correction),
    ("critic", _critic),
    ("update", lambda run: _optimizer_steps(run, "actor") if run.our_trainer and run.trains else ""),
    ("loss mean", _mean),
    ("log", _log),
)
"""label and text; a line without text is left out"""


_WIDTH = 116
_WHOLE: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
"""so that keys and values can be copied"""


def header(config: DictConfig, notices: Sequence[str] = (), warnings: Sequence[str] = ()) -> list[str]:
    """The lines; none for a run of stock verl.

    Args:
        config: a whole configuration that has passed the checks.
        notices: keys that were set, shown at the end.
        warnings: of the checks, shown behind them.
    """
    if not uses_us(config):
        return []
    run = run_of(config)
    entries = [(label, text) for label, line in LINES if (text := line(run))]
    entries += [("ignored", text) for text in ignored(run)]
    entries += [("notice", text) for text in notices] + [("warning", text) for text in warnings]
    lines = [f"verl-turnkey {version('verl-turnkey')}: this run"]
    for label, text in entries:
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:<12} ", subsequent_indent=" " * 15, **_WHOLE)
    return lines
