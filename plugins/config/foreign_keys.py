"""Keys of other frameworks that a launch line may still contain, and their names here.

verl accepts most of them with a plus but never reads them, so they would have no effect.
"""

from __future__ import annotations

_PENALTY = "turnkey.rollout.invalid_action_penalty (0: none)"
_SIMILARITY = "turnkey.credit.similarity (a number in (0, 1); null: equal states only)"

FOREIGN: dict[str, str] = {
    # verl-agent
    "algorithm.gigpo.step_advantage_w": "turnkey.credit.step_advantage_w",
    "algorithm.gigpo.mode": "turnkey.credit.norm (mean_std or mean)",
    "algorithm.gigpo.enable_similarity": _SIMILARITY,
    "algorithm.gigpo.similarity_thresh": _SIMILARITY,
    "algorithm.hgpo.mode": "turnkey.credit.norm (mean_std or mean)",
    "algorithm.hgpo.length_weight_alpha": "turnkey.credit.alpha",
    "algorithm.hgpo.base_group": "turnkey.credit.episode_level",
    "algorithm.hgpo.weight_type": "turnkey.credit.weights (paper or code)",
    "actor_rollout_ref.actor.use_invalid_action_penalty": _PENALTY,
    "actor_rollout_ref.actor.invalid_action_penalty_coef": _PENALTY,
    "env.env_name": "turnkey.env.id, or +turnkey/env=<name>",
    "env.seed": "`turnkey tasks --seed`, which draws the tasks' seeds",
    "env.max_steps": "turnkey.rollout.max_turns",
    "env.history_length": "turnkey.rollout.history",
    "env.rollout.n": "actor_rollout_ref.rollout.n",
    "env.resources_per_worker": "turnkey.env.hosts",
    # RAGEN
    "algorithm.bi_level_gae": "+turnkey=turn_gae",
    "algorithm.high_level_gamma": "turnkey.credit.gamma",
    "agent_proxy.max_turn": "turnkey.rollout.max_turns",
    "agent_proxy.reward_normalization.method": "turnkey.credit.norm (mean_std or mean)",
    "es_manager.format_penalty": "turnkey.rollout.invalid_action_penalty, a positive number",
    "es_manager.train.env_groups": "data.train_batch_size",
    "es_manager.train.group_size": "actor_rollout_ref.rollout.n",
    # ROLL
    "step_reward_weight": "turnkey.credit.step_advantage_w",
    "step_reward_gamma": "turnkey.credit.gamma",
    "max_actions_per_traj": "turnkey.rollout.max_turns",
    "train_env_manager.num_env_groups": "data.train_batch_size",
    "train_env_manager.group_size": "actor_rollout_ref.rollout.n",
}

# Estimators of verl, for the message about one of them given as a method; a test compares them with verl's registry.
VERLS_ESTIMATORS = (
    *("gae", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized"),
    "tir_optimal_token_baseline",
)

# Of these, what verl's V1 trainers do not hand to them: they end a run after its first rollout.
WITHOUT_INPUT = {
    "gdpo": "the rewards of several functions",
    "optimal_token_baseline": "sums of squared probabilities",
    "remax": "the rewards of greedy rollouts",
    "tir_optimal_token_baseline": "sums of squared probabilities",
}


def foreign(key: str) -> str | None:
    """The name of ``key`` here, or None if it does not belong to another framework."""
    return next((ours for other, ours in FOREIGN.items() if key == other or key.startswith(f"{other}.")), None)


def refusal(found: list[tuple[str, str]]) -> str:
    """The message for settings of other frameworks, each with what it is called here."""
    rows = "".join(f"\n  {text}: {ours}" for text, ours in found)
    return f"verl has no such key and nobody would read it; here it is{rows}"
