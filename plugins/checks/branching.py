"""Driver checks of ``turnkey.rollout.strategy``, by which episodes fork."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.config.schema import RolloutConfig, TurnkeyConfig, credit_modify, credit_params, estimator_of
from verl_turnkey.plugins.rollout.strategies import BRANCH_COLUMNS, KEY, read_strategy

SCORING_SERVERS = ("vllm",)
"""verl's servers that return log-probabilities of a given text"""


def check_branching(
    config: DictConfig, turnkey: TurnkeyConfig, reward_columns: tuple[str, ...], loops: Collection[str]
) -> tuple[str, ...]:
    """Refuse a strategy that cannot work; warn of one whose measurements nothing reads.

    ``reward_columns``: those that reward components add; ``loops``: the agent loops of the training rows. The probe
    checks whether the environment can be cloned.

    Returns:
        The columns that the strategy adds; none for independent episodes.

    Raises:
        ConfigError: names the key to change.
    """
    selected = read_strategy(turnkey.rollout.strategy)
    if selected is None:
        return ()
    (spec, strategy), options = selected, turnkey.rollout
    rollout = config.actor_rollout_ref.rollout
    setting = f"{KEY}={spec.name}"
    if "turnkey_env" not in loops:
        refuse(
            "branching-agent-loop",
            f"{setting} has no effect with the agent loop {min(loops)}: only turnkey_env forks episodes",
        )
    method = estimator_of(config)
    if method is None:
        refuse(
            "branching-estimator",
            f"{setting} adds columns and branches, which verl's "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} does not read: it knows one score per rollout. "
            "Use a method of this package, or of your own",
        )
    if spec.log_probs and not rollout.calculate_log_probs:
        refuse(
            "branching-log-probs",
            f"{setting} reads the log-probabilities of turns: set actor_rollout_ref.rollout.calculate_log_probs=true",
        )
    total = getattr(strategy, "trajectories", None)
    if total is not None and total <= rollout.n:
        refuse(
            "branching-trajectories",
            f"{KEY}.trajectories={total} leaves no branch besides the actor_rollout_ref.rollout.n={rollout.n} rollouts "
            "of a group: raise the one, or lower the other",
        )
    turn = options.max_tokens_per_turn or rollout.response_length
    if spec.clones:
        least, unit = turn, f"branch: one turn may take {turn} tokens (turnkey.rollout.max_tokens_per_turn, or "
        unit += "data.max_response_length)"
    else:
        least = getattr(strategy, "tokens", 1)
        unit = f"answer: one may take {least} tokens ({KEY}.tokens)"
        _check_room(config, least)
    if options.branch_tokens is not None and options.branch_tokens < least:
        refuse("branching-tokens", f"turnkey.rollout.branch_tokens={options.branch_tokens} allows no {unit}")
    if spec.scores:
        _check_scores(config, setting)
    columns = (*BRANCH_COLUMNS, *spec.gives)
    if clash := sorted({*columns} & {*reward_columns}):
        refuse(
            "branching-column-clash",
            f"{setting} adds the column {clash[0]}, and so does a component of turnkey.rewards: "
            "give the component another column",
        )
    if spec.trains:
        _check_trained(config, setting)
    if spec.clones:
        _warn_budget(options, turn, getattr(strategy, "turns", None))
    if method is None:
        return columns
    read = {*method.columns(credit_params(config, turnkey), credit_modify(config, turnkey)), *method.before}
    if spec.gives and not {f"extra.{name}" for name in spec.gives} & read:
        warn(
            "branching-unread",
            f"{setting} measures {', '.join(spec.gives)}, and the method {method.name} reads none of it",
        )
    if spec.trains and "extra.parent" not in read:
        warn(
            "branching-parent-unread",
            f"{setting} trains branches, and the method {method.name} reads no extra.parent: it compares returns from "
            "a fork on with returns of whole episodes; +turnkey=tree compares branches with their siblings",
        )
    return columns


def _check_room(config: DictConfig, tokens: int) -> None:
    """Refuse answers so long that no prompt fits before them: every query would fail."""
    rollout = config.actor_rollout_ref.rollout
    room, keys = rollout.prompt_length + rollout.response_length, "data.max_prompt_length + data.max_response_length"
    if rollout.max_model_len is not None and rollout.max_model_len < room:
        room, keys = rollout.max_model_len, "actor_rollout_ref.rollout.max_model_len"
    if tokens >= room:
        refuse(
            "branching-no-room",
            f"{KEY}.tokens={tokens} leaves no room for a prompt: expected fewer than {keys} = {room}, the limit for "
            "a prompt and its answer",
        )


def _check_scores(config: DictConfig, setting: str) -> None:
    """Refuse trainers and servers that return no log-probabilities of a given text."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if mode != "turnkey_sync":
        refuse(
            "branching-scores-trainer",
            f"{setting} needs log-probabilities of a given text, which verl's client of trainer.v1.trainer_mode={mode} "
            f"drops: set it to turnkey_sync, or {KEY}=probe, which samples",
        )
    if (server := str(config.actor_rollout_ref.rollout.name)) not in SCORING_SERVERS:
        refuse(
            "branching-scores-server",
            f"{setting} needs log-probabilities of a given text, which actor_rollout_ref.rollout.name={server} does "
            f"not give: set it to {' or '.join(SCORING_SERVERS)}, or {KEY}=probe, which samples",
        )


def _check_trained(config: DictConfig, setting: str) -> None:
    """Refuse settings that would judge trained branches by anything but their own outcome."""
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        refuse(
            "branching-filter-groups",
            f"algorithm.filter_groups.enable=true sees one outcome per rollout, and {setting} trains several: set it "
            "to false",
        )
    if OmegaConf.select(config, "algorithm.use_kl_in_reward"):
        refuse(
            "branching-kl-in-reward",
            f"algorithm.use_kl_in_reward=true does not reach the outcomes of the branches that {setting} trains: set "
            "it to false, and actor_rollout_ref.actor.use_kl_loss=true for a KL penalty",
        )


def _warn_budget(options: RolloutConfig, turn: int, turns: int | None) -> None:
    """Warn of a budget that is too small for a branch from the first turns."""
    longest = min(options.max_turns, turns or options.max_turns)
    for key, limit, per_turn in (
        ("branch_tokens", options.branch_tokens, turn),
        ("branch_steps", options.branch_steps, 1),
    ):
        if limit is not None and limit < longest * per_turn:
            warn(
                "branching-budget",
                f"turnkey.rollout.{key}={limit} has no room for a branch before turn "
                f"{options.max_turns - limit // per_turn}: one may take {longest * per_turn} "
                f"(turnkey.rollout.max_turns={options.max_turns}, each up to {per_turn})",
            )
