"""Checks of ``turnkey.rollout.strategy``, by which episodes fork."""

from __future__ import annotations

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import (
    FILTER,
    KL,
    LOG_PROBS,
    MODE,
    ROLLOUT,
    N,
    Run,
    needs_off,
    needs_on,
    needs_our_loop,
)
from verl_turnkey.plugins.config.schema import RolloutConfig
from verl_turnkey.plugins.rollout.strategies import BRANCH_COLUMNS, KEY, read_strategy

SCORING_SERVERS = ("vllm",)
"""verl's servers that return log-probabilities of a given text"""


def check_branching(run: Run, reward_columns: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a strategy that cannot work; warn of one whose measurements nothing reads.

    ``reward_columns``: those that reward components add. The probe checks whether the environment can be cloned.

    Returns:
        The columns that the strategy adds; none for independent episodes.
    """
    selected = read_strategy(run.turnkey.rollout.strategy)
    if selected is None:
        return ()
    (spec, strategy), options, rollout = selected, run.turnkey.rollout, run.rollout
    setting, method = f"{KEY}={spec.name}", run.estimator
    needs_our_loop("branching-agent-loop", run, setting, "forks episodes")
    if method is None:
        verls = run.setting("algorithm.adv_estimator")
        problem = (
            f"{setting} adds columns and branches, which verl's {verls} does not read: it knows one score per rollout"
        )
        refuse("branching-estimator", f"{problem}. Use a method of this package, or of your own")
    if method is not None and method.independent:
        problem = f"{setting} makes trajectories that share their first turns, and the method {method.name} takes them"
        refuse("branching-independent", f"{problem} for independent: use +turnkey=tree, or no strategy")
    if spec.log_probs:
        needs_on("branching-log-probs", run, LOG_PROBS, f"{setting} reads the log-probabilities of turns")
    total = getattr(strategy, "trajectories", None)
    if total is not None and total <= rollout.n:
        problem = f"{KEY}.trajectories={total} leaves no branch besides the {N}={rollout.n} rollouts of a group"
        refuse("branching-trajectories", f"{problem}: raise the one, or lower the other")
    turn = options.max_tokens_per_turn or rollout.response_length
    least, unit = turn, f"branch: one turn may take {turn} tokens"
    if not spec.clones:
        least = getattr(strategy, "tokens", 1)
        unit = f"answer: one may take {least} tokens"
        _check_room(run, least)
    if options.branch_tokens is not None and options.branch_tokens < least:
        refuse("branching-tokens", f"turnkey.rollout.branch_tokens={options.branch_tokens} allows no {unit}")
    if spec.scores:
        _check_scores(run, setting)
    columns = (*BRANCH_COLUMNS, *spec.gives)
    if clash := sorted({*columns} & {*reward_columns}):
        problem = f"{setting} adds the column {clash[0]}, and so does a component of turnkey.rewards"
        refuse("branching-column-clash", f"{problem}: give the component another column")
    if spec.trains:  # branches by their own outcome
        several = f"{FILTER}=true sees one outcome per rollout, and {setting} trains several"
        needs_off("branching-filter-groups", run, FILTER, several)
    if spec.trains and run.get(KL):
        problem = f"{KL}=true does not reach the outcomes of the branches that {setting} trains"
        fix = "set it to false, and actor_rollout_ref.actor.use_kl_loss=true for a KL penalty"
        refuse("branching-kl-in-reward", f"{problem}: {fix}")
    if spec.clones:
        _warn_budget(options, turn, getattr(strategy, "turns", None))
    if method is None:
        return columns
    read = {*run.columns, *method.before}
    if spec.gives and not {f"extra.{name}" for name in spec.gives} & read:
        unread = f"{setting} measures {', '.join(spec.gives)}, and the method {method.name} reads none of it"
        warn("branching-unread", unread)
    if spec.trains and "extra.parent" not in read:
        warn(
            "branching-parent-unread",
            f"{setting} trains branches, and the method {method.name} reads no extra.parent: it compares returns from "
            "a fork on with returns of whole episodes; +turnkey=tree compares branches with their siblings",
        )
    return columns


def _check_room(run: Run, tokens: int) -> None:
    """Refuse answers so long that no prompt fits before them: every query would fail."""
    rollout = run.rollout
    room, keys = rollout.prompt_length + rollout.response_length, "data.max_prompt_length + data.max_response_length"
    if rollout.max_model_len is not None and rollout.max_model_len < room:
        room, keys = rollout.max_model_len, f"{ROLLOUT}.max_model_len"
    if tokens >= room:
        problem = f"{KEY}.tokens={tokens} leaves no room for a prompt"
        refuse("branching-no-room", f"{problem}: expected fewer than {keys} = {room}, the limit for both")


def _check_scores(run: Run, setting: str) -> None:
    """Refuse trainers and servers that return no log-probabilities of a given text."""
    needs, server = f"{setting} needs log-probabilities of a given text", str(run.rollout.name)
    if run.mode != "turnkey_sync":
        problem = f"{needs}, which verl's client of {MODE}={run.mode} drops"
        refuse("branching-scores-trainer", f"{problem}: set it to turnkey_sync, or {KEY}=probe, which samples")
    if server not in SCORING_SERVERS:
        problem = f"{needs}, which {ROLLOUT}.name={server} does not give"
        refuse("branching-scores-server", f"{problem}: set it to vllm, or {KEY}=probe, which samples")


def _warn_budget(options: RolloutConfig, turn: int, turns: int | None) -> None:
    """Warn of a budget that is too small for a branch from the first turns."""
    longest = min(options.max_turns, turns or options.max_turns)
    for key, limit, per_turn in (
        ("branch_tokens", options.branch_tokens, turn),
        ("branch_steps", options.branch_steps, 1),
    ):
        if limit is not None and limit < longest * per_turn:
            before = options.max_turns - limit // per_turn
            problem = f"turnkey.rollout.{key}={limit} has no room for a branch before turn {before}"
            takes = f"one may take {longest * per_turn} ({longest} turns of up to {per_turn})"
            warn("branching-budget", f"{problem}: {takes}")
