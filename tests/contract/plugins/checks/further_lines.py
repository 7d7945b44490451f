"""More lines of the kind of :mod:`launch_lines`: keys of other frameworks, keys that nobody reads, words that Hydra
answers with advice of no use. ``QUIET``: lines that are nearly such, with what nothing may be said of."""

from __future__ import annotations

_NOBODY = "verl has no such key"
_FIELD = "actor_rollout_ref.rollout"

# Under the start +turnkey=gigpo.
REFUSED = [
    # Keys of a dataclass, at which verl's workers fail.
    ("+actor_rollout_ref.model.lora_rnk=8", f"model.lora_rnk=8: {_NOBODY} | HFModelConfig | model.lora_rank?"),
    ("+actor_rollout_ref.actor.clip_ratio_hi=0.3", f"{_NOBODY} | FSDPActorConfig | actor.clip_ratio_high?"),
    (f"+{_FIELD}.multi_turn.max_turns=5", f"multi_turn.max_turns=5: {_NOBODY} | max_user_turns?"),
    (f"+{_FIELD}.agent.num_worker=5", f"agent.num_worker=5: {_NOBODY} | agent.num_workers?"),
    ("critic.enable=true +critic.rollout_m=1", f"critic.rollout_m=1: {_NOBODY} | FSDPCriticConfig"),
    (
        "actor_rollout_ref.actor.use_kl_loss=true +actor_rollout_ref.ref.param_ofload=true",
        f"ref.param_ofload | {_NOBODY}",
    ),
    # Keys of other frameworks.
    (f"+{_FIELD}.rollout_filter_ratio=0.25", "rollout_filter_ratio=0.25: turnkey.groups.keep"),
    (f"{_FIELD}.rollout_filter_strategy=top_p", "rollout_filter_strategy=top_p: turnkey.groups.keep_by"),
    ("+agent_proxy.max_context_window=3", "agent_proxy.max_context_window=3: turnkey.rollout.history"),
    ("+agent_proxy.anything.else=3", "agent_proxy.anything.else=3: turnkey.rollout"),
    ("+es_manager.train.env_configs.tags=[Bandit]", "env_configs.tags=[Bandit]: `turnkey tasks --env`"),
    ("+episode_reward_weight=0.5", "episode_reward_weight=0.5: turnkey.credit.step_advantage_w"),
    ("+reward_normalization.method=mean_std", "reward_normalization.method=mean_std: turnkey.credit.norm"),
    ("+custom_envs.Lake.env_type=frozen_lake", "custom_envs.Lake.env_type=frozen_lake: turnkey.env.id"),
    ("+rollout_manager.window_size=5", "rollout_manager.window_size=5: turnkey.rollout.history"),
    ("actor_rollout_ref.rollout.n_agent=5", "n_agent=5: actor_rollout_ref.rollout.n"),
    ("ray_init.num_cpus=96", "ray_init.num_cpus=96: ray_kwargs.ray_init"),
    (
        "env.max_steps=50 actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "env.max_steps=50: turnkey.rollout.max_turns | ppo_mini_batch_size counts rows there | turnkey.update."
        "mini_batches | turnkey.rewards=[{name: step, weight: 10}] | turnkey list presets",
    ),
    # Words.
    ("+turnkey.env=frozenlake", "+turnkey.env=frozenlake | write +turnkey/env=frozenlake"),
    ("turnkey.loss=psft", "turnkey.loss=psft | write +turnkey/loss=psft"),
    (
        "+turnkey/env=babyai +turnkey/env=frozenlake",
        "+turnkey/env=babyai and +turnkey/env=frozenlake | one environment",
    ),
    ("+turnkey/loss=psft +turnkey/loss=psft", "+turnkey/loss=psft and +turnkey/loss=psft | one loss at a time"),
    ("turnkey.env.kwargs.max_steps=20", "argument 'max_steps' | needs a plus: +turnkey.env.kwargs.max_steps=20"),
    ("+turnkey/env=frozenlake turnkey.env.kwargs.siez=5", "argument 'siez'; did you mean 'size'?"),
    ("'turnkey.env.kwargs={seize: 5}'", "argument 'seize' | needs a plus: +turnkey.env.kwargs.seize"),
    ("+turnkey/env=babyai turnkey.rollout=null", "turnkey.rollout=null drops what the recipes set"),
    (
        "turnkey.rewards=[{name:length,wieght:-0.1}]",
        "wieght | did you mean 'weight'",
    ),
    ("--config-name=ppo_trainer trainer.nnodes=1", "--config-name=ppo_trainer stands between overrides"),
]
# Without a method.
BARE = [
    ("+turnkey/loss=turn_ratio", "+turnkey=<method> in front of +turnkey/loss=turn_ratio"),
]

# Behind +turnkey=gigpo, as all of launch_lines.
WARNED = [
    ("+algorithm.rollout_is=token", f"{_NOBODY}; did you mean algorithm.rollout_correction.rollout_is?"),
    ("+data.max_prompt_len=512", f"data.max_prompt_len=512 | {_NOBODY}; did you mean data.max_prompt_length?"),
    ("+trainer.save_frequency=5", f"trainer.save_frequency=5 | {_NOBODY}; did you mean trainer.save_freq?"),
    ("+data.sampler.class_path=mine", f"data.sampler.class_path=mine | {_NOBODY}; this verl | data.custom_cls"),
    ("+trainer.val_generations_to_log_to_wandb=4", "verl reads trainer.log_val_generations"),
    ("+dta.shuffle=false", "dta.shuffle=false | did you mean data.shuffle?"),
    (
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "ppo_mini_batch_size=64 counts tasks | has 4: one mini-batch | 4 x 2 episodes have about 264 | "
        "turnkey.update.mini_batches=4",
    ),
]

# Behind +turnkey=gigpo; none of the words may be said.
QUIET = [
    # What verl reads although its own files do not list it, and what it hands on.
    ("+data.cache_dir=/tmp/cache +data.need_tools_kwargs=true", _NOBODY),
    ("+data.apply_chat_template_kwargs.enable_thinking=false", _NOBODY),
    ("+ray_kwargs.ray_init.runtime_env.env_vars.A=b +ray_kwargs.ray_init._temp_dir=/tmp/ray", _NOBODY),
    ("+actor_rollout_ref.model.override_config.attention_dropout=0.1", _NOBODY),
    (f"+{_FIELD}.engine_kwargs.vllm.swap_space=4 +{_FIELD}.custom.mine.deep=1", _NOBODY),
    ("+actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-6", _NOBODY),
    ("+reward.custom_reward_function.reward_kwargs.strict=true", _NOBODY),
    ("+trainer.v1.turnkey_sync.mine=1 +my.own.key=3 +experiment.note=x", _NOBODY),
    ("+critic.rollout_m=1", _NOBODY),  # no critic is made
    # As many optimizer steps either way, or chosen on purpose.
    ("actor_rollout_ref.actor.ppo_mini_batch_size=256", "counts tasks"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=64 turnkey.update.mini_batches=4", "counts tasks"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "counts tasks"),
    (
        "actor_rollout_ref.actor.ppo_mini_batch_size=8 turnkey.rollout.prompt=conversation "
        "turnkey.rollout.max_tokens_per_turn=8",
        "counts tasks",
    ),
    # Near to what is refused.
    ("+turnkey/env=babyai turnkey.env.kwargs.level=MiniGrid-Empty-5x5-v0 +turnkey.env.kwargs.max_steps=9", "plus"),
    ("+turnkey.env.kwargs.max_steps=20 turnkey.env.kwargs.max_steps=30", "needs a plus"),
]
