"""Checks in the driver of the strategy by which episodes fork."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.config.schema import RolloutConfig, TurnkeyConfig, credit_modify, credit_params, estimator_of
from verl_turnkey.plugins.rollout.strategies import BRANCH_COLUMNS, KEY, read_strategy

SCORING_SERVERS = ("vllm",)
"""those of verl's that answer the sampling parameters of such a call"""


def check_branching(
    config: DictConfig, turnkey: TurnkeyConfig, given: tuple[str, ...], loops: Collection[str]
) -> tuple[str, ...]:
    """Refuse a strategy that cannot do what it asks for; warn of one that measures what nothing reads.

    ``given``: the columns that reward components give; ``loops``: the agent loops of the training rows. Whether the
    environment can be cloned is the probe's to find.

    Returns:
        The columns that the strategy gives; none for independent episodes.

    Raises:
        ConfigError: names the key to change.
    """
    found = read_strategy(turnkey.rollout.strategy)
    if found is None:
        return ()
    (spec, strategy), options = found, turnkey.rollout
    rollout = config.actor_rollout_ref.rollout
    asked = f"{KEY}={spec.name}"
    if "turnkey_env" not in loops:
        refuse(
            "branching-agent-loop",
            f"{asked} has no effect with the agent loop {min(loops)}: only turnkey_env forks episodes",
        )
    method = estimator_of(config)
    if method is None:
        refuse(
            "branching-estimator",
            f"{asked} gives columns and branches, which verl's "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} does not read: it knows one score per rollout. "
            "Take a method of this package, or of your own",
        )
    if spec.log_probs and not rollout.calculate_log_probs:
        refuse(
            "branching-log-probs",
            f"{asked} reads the log-probabilities of turns: set actor_rollout_ref.rollout.calculate_log_probs=true",
        )
    total = getattr(strategy, "trajectories", None)
    if total is not None and total <= rollout.n:
        refuse(
            "branching-trajectories",
            f"{KEY}.trajectories={total} leaves no branch beside actor_rollout_ref.rollout.n={rollout.n} rollouts of a "
            "group: raise the one, or lower the other",
        )
    turn = options.max_tokens_per_turn or rollout.response_length
    if spec.clones:
        least, what = turn, f"branch: one turn may take {turn} tokens (turnkey.rollout.max_tokens_per_turn, or "
        what += "data.max_response_length)"
    else:
        least = getattr(strategy, "tokens", 1)
        what = f"answer: one may take {least} tokens ({KEY}.tokens)"
        _check_room(config, least)
    if options.branch_tokens is not None and options.branch_tokens < least:
        refuse("branching-tokens", f"turnkey.rollout.branch_tokens={options.branch_tokens} allows no {what}")
    if spec.scores:
        _check_scores(config, asked)
    columns = (*BRANCH_COLUMNS, *spec.gives)
    if clash := sorted({*columns} & {*given}):
        refuse(
            "branching-column-clash",
            f"{asked} gives the column {clash[0]}, and so does a component of turnkey.rewards: "
            "give that another column",
        )
    if spec.trains:
        _check_trained(config, asked)
    if spec.clones:
        _warn_budget(options, turn, getattr(strategy, "turns", None))
    if method is None:
        return columns
    read = {*method.columns(credit_params(config, turnkey), credit_modify(config, turnkey)), *method.before}
    if spec.gives and not {f"extra.{name}" for name in spec.gives} & read:
        warn(
            "branching-unread",
            f"{asked} measures {', '.join(spec.gives)}, and the method {method.name} reads none of it",
        )
    if spec.trains and "extra.parent" not in read:
        warn(
            "branching-parent-unread",
            f"{asked} trains branches, and the method {method.name} reads no extra.parent: it compares returns from a "
            "fork on with returns of whole episodes; +turnkey=tree compares branches with their siblings",
        )
    return columns


def _check_room(config: DictConfig, tokens: int) -> None:
    """Refuse answers that fit after no prompt: each would fail, and the run would learn nothing."""
    rollout = config.actor_rollout_ref.rollout
    room, keys = rollout.prompt_length + rollout.response_length, "data.max_prompt_length + data.max_response_length"
    if rollout.max_model_len is not None and rollout.max_model_len < room:
        room, keys = rollout.max_model_len, "actor_rollout_ref.rollout.max_model_len"
    if tokens >= room:
        refuse(
            "branching-no-room",
            f"{KEY}.tokens={tokens} leaves no room for a prompt: expected fewer than {keys} = {room}, which a prompt "
            "and an answer may have together",
        )


def _check_scores(config: DictConfig, asked: str) -> None:
    """Refuse what gives no log-probabilities of a text that is not sampled."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if mode != "turnkey_sync":
        refuse(
            "branching-scores-trainer",
            f"{asked} needs log-probabilities of a given text, which verl's client of trainer.v1.trainer_mode={mode} "
            f"drops: set it to turnkey_sync, or {KEY}=probe, which samples",
        )
    if (server := str(config.actor_rollout_ref.rollout.name)) not in SCORING_SERVERS:
        refuse(
            "branching-scores-server",
            f"{asked} needs log-probabilities of a given text, which actor_rollout_ref.rollout.name={server} does not "
            f"give: set it to {' or '.join(SCORING_SERVERS)}, or {KEY}=probe, which samples",
        )


def _check_trained(config: DictConfig, asked: str) -> None:
    """Refuse what would judge branches that are trained by something else than their own outcome."""
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        refuse(
            "branching-filter-groups",
            f"algorithm.filter_groups.enable=true sees one outcome per rollout, and {asked} trains several: set it to "
            "false",
        )
    if OmegaConf.select(config, "algorithm.use_kl_in_reward"):
        refuse(
            "branching-kl-in-reward",
            f"algorithm.use_kl_in_reward=true is not in the outcomes of the branches that {asked} trains: set it to "
            "false, and actor_rollout_ref.actor.use_kl_loss=true for a KL penalty",
        )


def _warn_budget(options: RolloutConfig, turn: int, turns: int | None) -> None:
    """Warn of a budget in which a branch from the first turns never fits."""
    longest = min(options.max_turns, turns or options.max_turns)
    for key, limit, each in (("branch_tokens", options.branch_tokens, turn), ("branch_steps", options.branch_steps, 1)):
        if limit is not None and limit < longest * each:
            warn(
                "branching-budget",
                f"turnkey.rollout.{key}={limit} has no room for a branch before turn "
                f"{options.max_turns - limit // each}: one may take {longest * each} (turnkey.rollout.max_turns="
                f"{options.max_turns}, each up to {each})",
            )
