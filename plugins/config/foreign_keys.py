"""Keys of other frameworks that a launch line may still contain, and their names here.

verl accepts most of them with a plus but never reads them, so they would have no effect.
"""

from __future__ import annotations

_PENALTY = "turnkey.rollout.invalid_action_penalty (0: none)"
_SIMILARITY = "turnkey.credit.similarity (a number in (0, 1); null: equal states only)"

_PARAMETERS = "turnkey.credit, the parameters of the method"
_WIDTH = "turnkey.groups.keep, the share of the groups whose rewards differ most"
_HOW_MANY = "`turnkey tasks --env`, a file per environment; data.train_files takes a list"
_NOTHING = "nothing, leave it out: only what the model wrote is trained"

# For a key and all keys below it; the first match counts, so deeper keys come first.
FOREIGN: dict[str, str] = {
    # verl-agent
    "algorithm.gigpo.step_advantage_w": "turnkey.credit.step_advantage_w",
    "algorithm.gigpo.mode": "turnkey.credit.norm (mean_std or mean)",
    "algorithm.gigpo.enable_similarity": _SIMILARITY,
    "algorithm.gigpo.similarity_thresh": _SIMILARITY,
    "algorithm.gigpo": _PARAMETERS,
    "algorithm.hgpo.mode": "turnkey.credit.norm (mean_std or mean)",
    "algorithm.hgpo.length_weight_alpha": "turnkey.credit.alpha",
    "algorithm.hgpo.base_group": "turnkey.credit.episode_level",
    "algorithm.hgpo.weight_type": "turnkey.credit.weights (paper or code)",
    "algorithm.hgpo": _PARAMETERS,
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
    "agent_proxy.max_context_window": "turnkey.rollout.history",
    "agent_proxy.max_actions_per_turn": "nothing, leave it out: a turn is one action, which an environment may split",
    "agent_proxy.action_sep": "nothing, leave it out: a turn is one action, which an environment may split",
    "agent_proxy.enable_think": "turnkey.rollout.template, the prompt that asks for thoughts or does not",
    "agent_proxy.use_turn_scores": "nothing, leave it out: methods read the rewards of turns",
    "agent_proxy.reward_normalization.method": "turnkey.credit.norm (mean_std or mean)",
    "agent_proxy.reward_normalization": "+turnkey=<method>, which says what is compared",
    "agent_proxy": "turnkey.rollout",
    "es_manager.format_penalty": "turnkey.rollout.invalid_action_penalty, a positive number",
    "es_manager.train.env_groups": "data.train_batch_size",
    "es_manager.train.group_size": "actor_rollout_ref.rollout.n",
    "es_manager.train.env_configs": _HOW_MANY,
    "es_manager.val.group_size": "actor_rollout_ref.rollout.val_kwargs.n",
    "es_manager.val": "data.val_files, the tasks of a validation",
    "es_manager": "turnkey.env, and the tasks that `turnkey tasks` writes",
    "ctx_manager": "actor_rollout_ref.rollout",
    "actor_rollout_ref.rollout.rollout_filter_ratio": _WIDTH,
    "actor_rollout_ref.rollout.rollout_filter_value": _WIDTH,
    "actor_rollout_ref.rollout.rollout_filter_strategy": "turnkey.groups.keep_by (groups; spread for top_p)",
    "actor_rollout_ref.rollout.rollout_filter_type": _WIDTH,
    "actor_rollout_ref.rollout.rollout_filter_metric": _WIDTH,
    "actor_rollout_ref.rollout.rollout_filter_include_zero": _WIDTH,
    "actor_rollout_ref.rollout.rollout_filter_top_p_prob_mode": _WIDTH,
    "enable_response_mask": _NOTHING,
    "system.CUDA_VISIBLE_DEVICES": "the environment variable CUDA_VISIBLE_DEVICES",
    # ROLL
    "step_reward_weight": "turnkey.credit.step_advantage_w",
    "episode_reward_weight": "turnkey.credit.step_advantage_w, the weight of the steps where the episode's is 1",
    "step_reward_gamma": "turnkey.credit.gamma",
    "reward_normalization": "turnkey.credit.norm (mean_std or mean)",
    "max_actions_per_traj": "turnkey.rollout.max_turns",
    "train_env_manager.num_env_groups": "data.train_batch_size",
    "train_env_manager.group_size": "actor_rollout_ref.rollout.n",
    "train_env_manager": _HOW_MANY,
    "val_env_manager": "data.val_files, the tasks of a validation",
    "custom_envs": "turnkey.env.id and turnkey.env.kwargs, or the tasks' own arguments (`turnkey tasks --kwargs`)",
    # VAGEN
    "rollout_manager.max_turns": "turnkey.rollout.max_turns",
    "rollout_manager.window_size": "turnkey.rollout.history",
    "rollout_manager.n_trajectory": "actor_rollout_ref.rollout.n",
    "rollout_manager.max_trajectory_length": "data.max_prompt_length and data.max_response_length",
    "rollout_manager.use_loss_mask": _NOTHING,
    "rollout_manager.use_gae_mask": _NOTHING,
    "rollout_manager": "turnkey.rollout and turnkey.env",
    # Search-R1
    "actor_rollout_ref.rollout.n_agent": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.state_masking": _NOTHING,
    "algorithm.no_think_rl": "nothing, leave it out",
    "data.max_start_length": "data.max_prompt_length, of a conversation the budget of its first prompt",
    "data.max_obs_length": "data.max_response_length, the budget of all turns and observations of a conversation",
    "retriever.url": "turnkey.env.kwargs.url with +turnkey/env=search",
    "retriever.topk": "turnkey.env.kwargs.topk with +turnkey/env=search",
    "do_search": "+turnkey/env=search",
    # verl before 0.5
    "ray_init": "ray_kwargs.ray_init",
}

# Likewise, but only without a plus: with one it may be a key of the user's own code.
BARE = {"max_turns": "turnkey.rollout.max_turns", "model_path": "actor_rollout_ref.model.path"}

# What means something else in launch lines of verl-agent, although the keys are verl's.
MORE = """
What else differs from verl-agent, whose published settings are presets (`turnkey list presets`):
  actor_rollout_ref.actor.ppo_mini_batch_size counts rows there and tasks here: set turnkey.update.mini_batches
  a success in ALFWorld and WebShop is worth 10 there and 1 here: 'turnkey.rewards=[{name: step, weight: 10}]'"""
_VERL_AGENT = ("env.", "algorithm.gigpo", "algorithm.hgpo", "actor_rollout_ref.actor.use_invalid")

# verl's estimators and losses, for the message when one is given as ours; a test compares them with its registries.
VERLS_ESTIMATORS = (
    *("gae", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized"),
    "tir_optimal_token_baseline",
)
VERLS_LOSSES = (
    *("bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo"),
    "vanilla",
)

# Inputs that verl's V1 trainers do not provide to these: they end a run after its first rollout.
WITHOUT_INPUT = {
    "gdpo": "the rewards of several functions",
    "optimal_token_baseline": "sums of squared probabilities",
    "remax": "the rewards of greedy rollouts",
    "tir_optimal_token_baseline": "sums of squared probabilities",
}


def foreign(key: str) -> str | None:
    """The name of ``key`` here, or None if it does not belong to another framework."""
    return next((our_name for other, our_name in FOREIGN.items() if f"{key}.".startswith(f"{other}.")), None)


def refusal(settings: list[tuple[str, str]]) -> str:
    """The message for settings of other frameworks, each with its name here."""
    rows = "".join(f"\n  {text}: {our_name}" for text, our_name in settings)
    differences = MORE if any(text.lstrip("+").startswith(_VERL_AGENT) for text, _ in settings) else ""
    return f"verl has no such key and would not read it; here it is{rows}{differences}"
