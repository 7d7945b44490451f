"""Checks of ``turnkey.rollout.strategy``, by which episodes fork."""

from __future__ import annotations

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import (
    FILTER,
    KL,
    LOG_PROBS,
    ROLLOUT,
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
    needs_our_loop("branching-agent-loop", run, strategy=spec.name)
    if method is None:
        refuse("branching-estimator", strategy=spec.name, method=run.shown("algorithm.adv_estimator"))
    if method is not None and method.independent:
        refuse("branching-independent", strategy=spec.name, method=method.name)
    if spec.log_probs:
        needs_on("branching-log-probs", run, LOG_PROBS, strategy=spec.name)
    total = getattr(strategy, "trajectories", None)
    if total is not None and total <= rollout.n:
        refuse("branching-trajectories", total=total, n=rollout.n)
    turn = options.max_tokens_per_turn or rollout.response_length
    least, unit = turn, f"branch: one turn may take {turn} tokens"
    if not spec.clones:
        least = getattr(strategy, "tokens", 1)
        unit = f"answer: one may take {least} tokens"
        _check_room(run, least)
    if options.branch_tokens is not None and options.branch_tokens < least:
        refuse("branching-tokens", branch_tokens=options.branch_tokens, unit=unit)
    if spec.scores:
        _check_scores(run, setting)
    columns = (*BRANCH_COLUMNS, *spec.gives)
    if clash := sorted({*columns} & {*reward_columns}):
        refuse("branching-column-clash", strategy=spec.name, column=clash[0])
    if spec.trains:  # branches by their own outcome
        needs_off("branching-filter-groups", run, FILTER, strategy=spec.name)
    if spec.trains and run.get(KL):
        refuse("branching-kl-in-reward", strategy=spec.name)
    if spec.clones:
        _warn_budget(options, turn, getattr(strategy, "turns", None))
    if method is None:
        return columns
    read = {*run.columns, *method.before}
    if spec.gives and not {f"extra.{name}" for name in spec.gives} & read:
        warn("branching-unread", strategy=spec.name, gives=", ".join(spec.gives), method=method.name)
    if spec.trains and "extra.parent" not in read:
        warn("branching-parent-unread", strategy=spec.name, method=method.name)
    return columns


def _check_room(run: Run, tokens: int) -> None:
    """Refuse answers so long that no prompt fits before them: every query would fail."""
    rollout = run.rollout
    room, keys = rollout.prompt_length + rollout.response_length, "data.max_prompt_length + data.max_response_length"
    if rollout.max_model_len is not None and rollout.max_model_len < room:
        room, keys = rollout.max_model_len, f"{ROLLOUT}.max_model_len"
    if tokens >= room:
        refuse("branching-no-room", tokens=tokens, keys=keys, room=room)


def _check_scores(run: Run, setting: str) -> None:
    """Refuse trainers and servers that return no log-probabilities of a given text."""
    server = str(run.rollout.name)
    if run.mode != "turnkey_sync":
        refuse("branching-scores-trainer", setting=setting, mode=run.mode)
    if server not in SCORING_SERVERS:
        refuse("branching-scores-server", setting=setting, server=server)


def _warn_budget(options: RolloutConfig, turn: int, turns: int | None) -> None:
    """Warn of a budget that is too small for a branch from the first turns."""
    longest = min(options.max_turns, turns or options.max_turns)
    for key, limit, per_turn in (
        ("branch_tokens", options.branch_tokens, turn),
        ("branch_steps", options.branch_steps, 1),
    ):
        if limit is not None and limit < longest * per_turn:
            before = options.max_turns - limit // per_turn
            warn(
                "branching-budget",
                key=key,
                limit=limit,
                before=before,
                needed=longest * per_turn,
                turns=longest,
                per_turn=per_turn,
            )
