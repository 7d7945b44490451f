"""What other frameworks call the things of this package; read by :func:`params.did_you_mean`.

An empty entry is a name that means something else: it is never taken for a misspelling of one of ours.
"""

from __future__ import annotations

ALIASES: dict[str, tuple[str, ...]] = {
    # parameters of estimators
    "mode": ("norm",),  # verl-agent
    "enable_similarity": ("similarity",),
    "similarity_thresh": ("similarity",),
    "length_weight_alpha": ("alpha",),
    "base_group": ("episode_level",),
    "compute_mean_std_cross_steps": ("scope",),
    "step_reward_weight": ("step_advantage_w",),  # ROLL
    "step_reward_gamma": ("gamma",),
    "whiten_advantages": ("whiten",),
    "high_level_gamma": ("gamma",),  # RAGEN
    "norm_adv_by_std_in_grpo": ("norm",),  # verl
    "scale_rewards": ("norm",),  # TRL
    "lam": ("lam", "lam_actor"),
    "lambda": ("lam", "lam_actor"),
    "gae_lambda": ("lam", "lam_actor"),
    "discount": ("gamma",),
    "omega": ("step_advantage_w",),
    "eps": ("epsilon",),
    # of the rollout
    "history_length": ("history",),
    "max_steps": ("max_turns",),
    "max_turn": ("max_turns",),
    "invalid_action_penalty_coef": ("invalid_action_penalty",),
    "use_invalid_action_penalty": ("invalid_action_penalty",),
    "format_penalty": ("invalid_action_penalty",),
    "env_name": ("id",),
    "env_type": ("id",),
    # methods (further names of papers: paper_names.py)
    "grpo": ("grpo_steps",),
    "gae": ("turn_gae",),
    "ppo": ("turn_gae",),
    "remax": (),
    "gdpo": (),
    "reinforce": (),
}
