"""Launch lines in pairs, one letter apart: one is refused or warned about, the other must not be.

As in ``launch_lines``: what follows ``BASE``, the words of the message between bars, and the line that is in order.
"""

from __future__ import annotations

LENGTH = "'turnkey.rewards=[{name: step},{name: length, weight: -0.01, unit: tokens}]'"

INVALID = "'turnkey.rewards=[{name: step},{name: invalid, weight: -0.1}]'"

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LORA = "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.path={tmp}/weights"
ONE = f"trainer.n_gpus_per_node=1 {ROLLOUT}.tensor_model_parallel_size=1"
CPU = f"+turnkey/device=cpu {ONE} ray_kwargs.ray_init.num_cpus"

# Key, a value that must be refused with these words, and one that must not.
VALUES: list[tuple[str, str, str, str]] = [
    (f"{ACTOR}.optim.lr", "1-e6", "expected a number | did you mean 1e-6", "1e-6"),
    (f"{ACTOR}.optim.lr", "1e6", "1 at most", "1e-3"),
    (f"{ACTOR}.optim.lr", "-1e-6", "0 or more", "0"),
    (f"{ROLLOUT}.gpu_memory_utilization", "60", "1 at most", "0.6"),
    (f"{ROLLOUT}.top_p", "95", "1 at most", "0.95"),
    (f"{ROLLOUT}.temperature", "0", "a gradient of 0", "0.7"),
    (f"{ROLLOUT}.val_kwargs.temperature", "-1", "0 or more", "0"),
    (f"{ACTOR}.clip_ratio_high", "-0.2", "0 or more", "0.28"),
    (f"{ACTOR}.clip_ratio_low", "-1", "0 or more", "10"),  # of CISPO: no lower limit
    ("trainer.save_freq", "null", "-1: never", "-1"),
    ("trainer.test_freq", "null", "-1: never", "-1"),
    ("trainer.save_freq", "-2", "-1 or more", "20"),
    ("algorithm.gamma", "95", "1 at most", "1.0"),
    ("algorithm.use_kl_in_reward", "off", "any text is true for verl | did you mean false", "false"),
    ("critic.enable", "no", "did you mean false", "false"),
    ("trainer.val_before_train", "no", "did you mean false", "false"),
    (f"{ROLLOUT}.enforce_eager", "yes", "did you mean true", "true"),
    (f"{ACTOR}.fsdp_config.reshard_after_forward", "on", "did you mean true", "2"),
    ("trainer.critic_warmup", "[1]", "a whole number", "0"),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", "16k", "a whole number", "16384"),
    ("trainer.logger", "3", "expected a list", "console"),
    ("reward.sandbox_fusion", "3", "expected a mapping of keys", "null"),
    ("actor_rollout_ref.model.tokenizer_path", "[a]", "expected a path", "null"),
]

REFUSED_OR_NOT: list[tuple[str, str, str]] = [
    *(
        (f"+turnkey=gigpo {key}={bad}", f"{key}= | {words}", f"+turnkey=gigpo {key}={good}")
        for key, bad, words, good in VALUES
    ),
    (
        f"+turnkey=gigpo {ROLLOUT}.temperature=0",
        "a gradient of 0",
        f"+turnkey=gigpo {ROLLOUT}.temperature=0 trainer.val_only=true",
    ),
    (
        "+turnkey=gigpo actor_rollout_ref.model.lora_alpha=0 actor_rollout_ref.model.lora_rank=8",
        "lora_alpha=0: expected a number, above 0",
        "+turnkey=gigpo actor_rollout_ref.model.lora_alpha=0 actor_rollout_ref.model.lora_rank=0",
    ),
    (
        f"+turnkey=gigpo {ACTOR}.kl_loss_coef=-1 {ACTOR}.use_kl_loss=true",
        "kl_loss_coef=-1: expected a number, 0 or more",
        f"+turnkey=gigpo {ACTOR}.kl_loss_coef=-1 {ACTOR}.use_kl_loss=false",
    ),
    (
        f"+turnkey=gigpo {ROLLOUT}.temperature=0 trainer.logger=[consle] {ACTOR}.policy_loss.loss_mode=gspoo",
        "3 errors | a gradient of 0 | consle | gspoo",
        f"+turnkey=gigpo {ROLLOUT}.temperature=1 trainer.logger=[console] {ACTOR}.policy_loss.loss_mode=gspo",
    ),
    (
        f"+turnkey=gigpo {ROLLOUT}.temperature=hot trainer.val_only=true",
        "rollout.temperature=hot: expected a number",
        f"+turnkey=gigpo {ROLLOUT}.temperature=0.0 trainer.val_only=true",
    ),
    (
        "+turnkey=turn_gae critic.optim.lr=1e6 critic.ppo_max_token_len_per_gpu=16k",
        "critic.optim.lr=1000000.0: expected a number | critic.ppo_max_token_len_per_gpu=16k",
        "+turnkey=gigpo critic.optim.lr=1e6 critic.ppo_max_token_len_per_gpu=16k",
    ),
    (
        "+turnkey=turn_gae turnkey.update.weight_by=step critic.loss_agg_mode=token-sum",
        "conflicts with critic.loss_agg_mode=token-sum",
        "+turnkey=gigpo turnkey.update.weight_by=step critic.loss_agg_mode=token-sum",
    ),
    (
        f"+turnkey=gigpo {ROLLOUT}.agent=null",
        f"{ROLLOUT}.agent=null (expected a mapping of keys) | a check fails on it",
        "+turnkey=gigpo algorithm.rollout_correction=null",
    ),
    (
        f"+turnkey=gigpo {ACTOR}.loss_agg_mode=token_mean",
        "there is no actor_rollout_ref.actor.loss_agg_mode='token_mean'; did you mean 'token-mean'?",
        f"+turnkey=gigpo {ACTOR}.loss_agg_mode=token-sum",
    ),
    (
        f"+turnkey=gigpo {ROLLOUT}.data_parallel_size=0",
        "data_parallel_size: expected a whole number, 1 or more, got 0",
        f"+turnkey=gigpo {ROLLOUT}.data_parallel_size=2",
    ),
    (
        "+turnkey=progress turnkey.credit.alpha=0 'turnkey.rollout.strategy={name: probe, reward: {name: no}}'",
        "turnkey.rollout.strategy.reward.name: no reward component is called 'no'",
        "+turnkey=progress turnkey.credit.alpha=0 'turnkey.rollout.strategy={name: probe, reward: {name: step}}' "
        "turnkey.env.probe=false",
    ),
    (
        f"+turnkey=gigpo {ACTOR}.optim.lr=1-e6 trainer.save_freq=null {ROLLOUT}.top_p=95",
        "optim.lr=1-e6 | save_freq=None | top_p=95",
        f"+turnkey=gigpo {ACTOR}.optim.lr=1e-6 trainer.save_freq=1 {ROLLOUT}.top_p=0.95",
    ),
    (
        f"+turnkey=gigpo {ACTOR}.checkpoint.async_save=True trainer.save_freq=5",
        "async_save=false",
        f"+turnkey=gigpo {ACTOR}.checkpoint.async_save=True trainer.save_freq=-1",
    ),
    (
        "+turnkey=gigpo 'data.train_files=\"~/t.parquet\"'",
        "data.train_files=~/t.parquet | does not expand the ~",
        "+turnkey=gigpo 'data.train_files=\"{tmp}/[tf]rain.parquet\"'",
    ),
    (
        "+turnkey=gigpo 'data.train_files={tmp}/absent*.parquet'",
        "absent*.parquet | no such file",
        "+turnkey=gigpo 'data.train_files={tmp}/trai*.parquet'",
    ),
    (
        f"+turnkey=gigpo {LORA} 'actor_rollout_ref.model.target_modules=[q_projj]'",
        "target_modules | 'q_projj' | did you mean 'q_proj'",
        f"+turnkey=gigpo {LORA} 'actor_rollout_ref.model.target_modules=[q_proj,v_proj]'",
    ),
    (
        f"+turnkey=gigpo +{ROLLOUT}.agent.agent_loop_manager_class=my_manager.Manager",
        "agent_loop_manager_class=my_manager.Manager cannot be imported",
        f"+turnkey=gigpo +{ROLLOUT}.agent.agent_loop_manager_class=verl.experimental.agent_loop.AgentLoopManager",
    ),
    (
        f"+turnkey=gigpo +{ROLLOUT}.agent.agent_loop_manager_class=pathlib.Path",
        "agent_loop_manager_class=pathlib.Path has no method create",
        f"+turnkey=gigpo +{ROLLOUT}.agent.agent_loop_manager_class=null",
    ),
    (
        "+turnkey=gigpo +trainer.checkpoint_callback_class=no.such.Callback",
        "checkpoint_callback_class=no.such.Callback cannot be imported",
        "+turnkey=gigpo +trainer.checkpoint_callback_class=verl.trainer.ppo.checkpoint_callback.CheckpointCallback",
    ),
    (
        "+turnkey=gigpo +trainer.checkpoint_callback_class=pathlib.Path",
        "checkpoint_callback_class=pathlib.Path has no method on_save",
        "+turnkey=gigpo +trainer.checkpoint_callback_class=null",
    ),
    (
        f"+turnkey=gigpo +{ROLLOUT}.agent.agent_loop_manager_class=Manager",
        "agent_loop_manager_class=Manager: expected module.Class",
        f"+turnkey=gigpo +{ROLLOUT}.agent.agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ",
    ),
    (
        f"+turnkey=gigpo +{ROLLOUT}.router_config_path={{tmp}}/loops.yaml",
        "loops.yaml: expected a YAML file with router_class",
        f"+turnkey=gigpo +{ROLLOUT}.router_config_path={{tmp}}/router.yaml",
    ),
    (
        f"+turnkey=gigpo +{ROLLOUT}.router_config_path={{tmp}}/lost_router.yaml",
        "router_class=no.such.Router cannot be imported",
        f"+turnkey=gigpo +{ROLLOUT}.router_config_path={{tmp}}/router.yaml",
    ),
    (
        "+turnkey=gigpo data.custom_cls.path={tmp}/reward.py data.custom_cls.name=compute_score",
        "name=compute_score: expected a subclass of torch.utils.data.Dataset",
        "+turnkey=gigpo data.custom_cls.path={tmp}/dataset.py data.custom_cls.name=Mine",
    ),
    (
        f"+turnkey=gigpo +{ROLLOUT}.router_config_path={{tmp}}/no_router.yaml",
        "router_config_path | no such file",
        f"+turnkey=gigpo +{ROLLOUT}.router_config_path={{tmp}}/router.yaml",
    ),
    (
        "+turnkey=gigpo data.custom_cls.path={tmp}/reward.py data.custom_cls.name=Nothing",
        "data.custom_cls.path | name=Nothing | cannot be loaded",
        "+turnkey=gigpo data.custom_cls.path={tmp}/dataset.py data.custom_cls.name=Mine",
    ),
    (
        "+turnkey=gigpo actor_rollout_ref.model.external_lib=no_such_lib",
        "external_lib=no_such_lib | no such module",
        "+turnkey=gigpo actor_rollout_ref.model.external_lib=json",
    ),
    (
        "+turnkey=gigpo +turnkey/device=cpu trainer.n_gpus_per_node=8",
        "n_gpus_per_node=8 | ray_kwargs.ray_init.num_gpus=1",
        "+turnkey=gigpo +turnkey/device=cpu trainer.n_gpus_per_node=2 ray_kwargs.ray_init.num_gpus=2",
    ),
    (f"+turnkey=gigpo {CPU}=2", "ray_kwargs.ray_init.num_cpus=2 | forever", f"+turnkey=gigpo {CPU}=64"),
    (
        f"+turnkey=gigpo {INVALID}",
        "would count an invalid action twice",
        f"+turnkey=base algorithm.adv_estimator=grpo {INVALID}",
    ),
    (
        "+turnkey=maxrl algorithm.use_kl_in_reward=True",
        "algorithm.use_kl_in_reward=true | maxrl | use_kl_loss=true",
        "+turnkey=maxrl actor_rollout_ref.actor.use_kl_loss=True",
    ),
]

POTENTIAL = "'turnkey.rewards=[{{name: step}},{{name: potential, gamma: {}}}]' turnkey.env.probe=false"

WARNED_OR_NOT: list[tuple[str, str, str]] = [
    (
        "+turnkey=gigpo turnkey.rollout.action_format=textwrap:shorten",
        "nothing tells the model the format of turnkey.rollout.action_format=textwrap:shorten",
        "+turnkey=gigpo turnkey.rollout.action_format=textwrap:shorten turnkey.rollout.system=Shout.",
    ),
    (
        "+turnkey=gigpo turnkey.rollout.action_format={tmp}/shout.py:shout turnkey.rollout.template=minigrid",
        "turnkey.rollout.template=minigrid has no field {format} | is in no prompt",
        "+turnkey=gigpo turnkey.rollout.action_format={tmp}/shout.py:shout",
    ),
    (
        f"+turnkey=gigpo {ROLLOUT}.name=sglang",
        "rollout.name=sglang | it is not installed",
        "+turnkey=gigpo",
    ),
    (
        f"+turnkey=gigpo {LORA} 'actor_rollout_ref.model.target_modules=[q_proj,v_projj]'",
        "no module 'v_projj'",
        f"+turnkey=gigpo {LORA} actor_rollout_ref.model.target_modules=all-linear",
    ),
    ("+turnkey=gigpo +max_turns=4", "max_turns=4 has no effect | turnkey.rollout.max_turns?", "+turnkey=gigpo"),
    ("+turnkey=gigpo +note=x", "note=x has no effect unless code of your own reads it", "+turnkey=gigpo +my.note=x"),
    (
        "+turnkey=maxrl 'turnkey.rewards=[{name: outcome, lost: -1}]'",
        "turnkey.rewards: outcome gives a failure -1 | maxrl expects no outcome below 0",
        "+turnkey=maxrl 'turnkey.rewards=[{name: outcome, lost: 0.1}]'",
    ),
    (
        f"+turnkey=maxrl {POTENTIAL.format(1.0)}",
        "turnkey.rewards: potential gives an episode minus | maxrl expects no outcome below 0",
        "+turnkey=maxrl 'turnkey.rewards=[{name: step},{name: potential, gamma: 1.0, weight: 0}]' "
        "turnkey.env.probe=false",
    ),
    (
        f"+turnkey=mc_grpo {POTENTIAL.format(1.0)}",
        "turnkey.rewards (potential) | mc_grpo multiplies",
        "+turnkey=mc_grpo 'turnkey.rewards=[{name: outcome, lost: -1}]'",
    ),
    (f"+turnkey=maxrl {LENGTH}", "turnkey.rewards: length | maxrl | has a negative weight", "+turnkey=maxrl"),
    (
        f"+turnkey=mc_grpo {LENGTH}",
        "turnkey.rewards (length) | mc_grpo multiplies",
        f"+turnkey=grpo_steps {LENGTH}",
    ),
    (
        "+turnkey=mc_grpo algorithm.use_kl_in_reward=True",
        "algorithm.use_kl_in_reward=true | mc_grpo multiplies",
        "+turnkey=mc_grpo",
    ),
    (
        "+turnkey=base algorithm.adv_estimator=rloo",
        "algorithm.adv_estimator=rloo | +turnkey=rloo_steps | treats each row as a rollout",
        "+turnkey=base algorithm.adv_estimator=rloo data.train_files={tmp}/tool.parquet",
    ),
    (
        "+turnkey=base algorithm.adv_estimator=gpg",
        "+turnkey=grpo_steps | treats each row as a rollout",
        "+turnkey=base algorithm.adv_estimator=grpo",
    ),
    (
        f"+turnkey=gigpo {POTENTIAL.format(0.9)}",
        "potential with gamma=0.9 | set its gamma to 1.0 | changes which policy is best",
        f"+turnkey=gigpo {POTENTIAL.format(1.0)}",
    ),
    (
        f"+turnkey=base algorithm.adv_estimator=grpo {POTENTIAL.format(0.9)}",
        "potential with gamma=0.9 | since grpo compares outcomes without a discount",
        f"+turnkey=base algorithm.adv_estimator=grpo {POTENTIAL.format(1.0)}",
    ),
    (
        f"+turnkey=rebn turnkey.credit.gamma=0.95 {POTENTIAL.format(0.9)}",
        "turnkey.credit.gamma=0.95 | changes which policy is best",
        f"+turnkey=rebn turnkey.credit.gamma=0.9 {POTENTIAL.format(0.9)}",
    ),
    (
        "+turnkey=hgpo turnkey.rollout.history=4",
        "turnkey.credit.history=2 | turnkey.rollout.history=4 | set both to the same number",
        "+turnkey=hgpo turnkey.rollout.history=4 turnkey.credit.history=4",
    ),
    (
        "+turnkey=tree +turnkey/loss=rebel turnkey.rollout.strategy=tree",
        "rebel | trains branches that share their beginning",
        "+turnkey=grpo_steps +turnkey/loss=rebel",
    ),
]
