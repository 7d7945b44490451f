"""The header's lines about the rollout: environment, sampling, episodes and rows, rewards, validation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_turnkey.envs.prompting.actions import instruction_of
from verl_turnkey.envs.prompting.examples import Examples
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.plugins.checks.files import last_step, shared_tasks, task_environments, tasks
from verl_turnkey.plugins.checks.header_run import Lines, changed, plural
from verl_turnkey.plugins.checks.run import AGENT, OURS, Run
from verl_turnkey.plugins.config.examples import load_examples
from verl_turnkey.plugins.credit.rows import VERLS_LOOPS
from verl_turnkey.plugins.rollout.strategies import read_strategy


def _agent_loops(run: Run) -> str:
    default = str(run.rollout.agent.default_agent_loop)
    source = "" if run.loops == [default] else "by the column agent_name of the data: "
    return source + "; ".join(_agent_loop(loop, run) for loop in run.loops)


def _agent_loop(loop: str, run: Run) -> str:
    if loop == OURS:
        return f"{loop}: a row per {'conversation' if run.turnkey.rollout.rows_hold_turns else 'step'}"
    if loop == AGENT:
        rows = "a row per conversation" if run.turnkey.rollout.rows_hold_turns else "a row per turn"
        return f"{loop}: {rows} of the agent {_run(run)}, at most {plural(run.turnkey.rollout.max_turns, 'turn')}"
    if loop in VERLS_LOOPS:
        return f"{loop} (verl's): a row per episode, with turns separated by the response mask"
    return f"{loop} (your own): rows as in its records"


def _run(run: Run) -> str:
    agent = run.turnkey.agent.run
    return agent if isinstance(agent, str) else " ".join(agent or ())


def _environment(run: Run) -> str:
    if OURS not in run.loops:
        return ""
    env, counts = run.turnkey.env, task_environments(run.config)
    ids = ", ".join(f"{name} ({plural(number, 'task')})" for name, number in counts.most_common(5))
    more = f" and {len(counts) - 5} more" if len(counts) > 5 else ""
    source = f"{ids}{more}" if counts else str(env.id or "named by each task")
    kwargs = f"; default kwargs {json.dumps(env.kwargs)}" if env.kwargs else ""
    return f"{source}{kwargs}; at most {plural(run.turnkey.rollout.max_turns, 'turn')} (turnkey.rollout.max_turns)"


def _sampling(run: Run) -> str:
    return _sampled(run.rollout.temperature, run.rollout.top_p, run.rollout.top_k)


def _sampled(temperature: float, top_p: float, top_k: int) -> str:
    if temperature == 0:
        return "greedy (temperature 0)"
    parts = [f"temperature {temperature}"]
    parts += [f"top_p {top_p}"] if top_p != 1 else []
    return ", ".join([*parts, f"top_k {top_k}"] if top_k not in (-1, 0) else parts)


def _strategy(run: Run) -> str:
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


def _per_step(run: Run) -> str:
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


def _filter(run: Run) -> str:
    options = run.config.algorithm.get("filter_groups") or {}
    if not options.get("enable"):
        return ""
    return f"replaces groups with the same {options.get('metric')} in all episodes (algorithm.filter_groups)"


def _kept(run: Run) -> str:
    groups, size = run.turnkey.groups, run.sizes
    if not run.our_trainer or groups.keep >= 1:
        return ""
    share = f"{groups.keep:.0%} of the {'groups' if groups.keep_by == 'groups' else 'spread of rewards'}"
    number = f"{size.trained_groups} of {size.tasks} groups"
    return f"{number}, those whose rewards differ most: {share} (turnkey.groups.keep)"


def _stored(run: Run) -> str:
    groups = run.turnkey.groups
    if not run.our_trainer or not groups.stores:
        return ""
    most = f"at most {plural(run.sizes.stored, 'stored episode')} per step"
    if groups.replay:
        return f"{most}, {groups.replay} for each group in which all ended alike (turnkey.groups.replay)"
    groups_joining = run.sizes.trained_groups.most - run.sizes.tasks
    return f"{most}, in at most {plural(groups_joining, 'stored group')} (turnkey.groups.buffer)"


def _examples(run: Run) -> str:
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


def _hints(run: Run) -> str:
    low, high = run.turnkey.groups.hint_low, run.turnkey.groups.hint_high
    return f"{low} to {high} of the hint of tasks that nobody solved" if high else ""


def _reward(run: Run) -> str:
    rows_own = "from the rows: records of the loop, or verl's reward per token"
    if not run.our_loops:
        return rows_own
    text = " + ".join(_weighted(entry) for entry in run.turnkey.rewards if not entry.get("column"))
    penalty = run.turnkey.rollout.invalid_action_penalty
    if penalty and run.estimator is not None:  # verl's estimators never see it
        text += f", -{penalty} per invalid action"
    return text if {*run.loops} <= {OURS, AGENT} else f"{OURS}: {text}; other loops: {rows_own}"


def _columns(run: Run) -> str:
    entries = [entry for entry in run.turnkey.rewards if entry.get("column")] if OURS in run.loops else []
    return ", ".join(f"{entry['column']} = {_weighted(entry)}" for entry in entries)


def _weighted(entry: Mapping[str, Any]) -> str:
    """A component of ``turnkey.rewards``, by its label."""
    return f"{float(entry.get('weight', 1))} x {entry.get('label') or entry['name'].rpartition(':')[2]}"


def _validation(run: Run) -> str:
    trainer, kwargs = run.config.trainer, run.rollout.val_kwargs
    first, every = trainer.get("val_before_train", True) or trainer.get("val_only"), trainer.get("test_freq") or -1
    between = "" if every < 0 or every >= (last_step(run.config) or math.inf) else f"every {plural(every, 'step')}"
    often = [*filter(None, ("before the first step" if first else "", between, "at the end" if every > 0 else ""))]
    if not often:
        return "none"
    number = tasks(run.config, "val_files")
    total = "all tasks" if number is None else plural(number, "task")
    shared, known = shared_tasks(run.config)
    both = f" ({shared} of them also in training)" if known else ""
    sampled = _sampled(kwargs.temperature, kwargs.top_p, kwargs.top_k)
    return f"{' and '.join(often)}: {total}{both} x {plural(kwargs.n, 'episode')}, {sampled}"


ROLLOUT: Lines = (
    ("agent loop", _agent_loops),
    ("environment", _environment),
    ("examples", _examples),
    ("sampling", _sampling),
    ("strategy", _strategy),
    ("per step", _per_step),
    ("filter", _filter),
    ("trained", _kept),
    ("replay", _stored),
    ("hints", _hints),
    ("reward", _reward),
    ("columns", _columns),
    ("validation", _validation),
)
