# What the launch scripts share: the settings of the GiGPO paper that do not depend on the environment. To be sourced.
# Statistics and penalties as its released code has them: turnkey.credit.scope=steps turnkey.credit.singleton=score.
METHOD="${METHOD:-gigpo}"
MODEL="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
LAUNCH="${LAUNCH:-python -m verl.trainer.main_ppo}"

# launch NAME [overrides]: the environment's recipe NAME under METHOD; TASKS holds the parquet files.
launch() {
  local name="$1"
  shift
  exec $LAUNCH \
    "+turnkey=$METHOD" "+turnkey/env=$name" \
    turnkey.rollout.history=2 \
    turnkey.rollout.invalid_action_penalty=0.1 \
    "turnkey.rewards=[{name: step, weight: 10}]" \
    data.train_files="$TASKS/train.parquet" \
    data.val_files="$TASKS/val.parquet" \
    data.train_batch_size=16 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TP:-1}" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.4 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true \
    algorithm.use_kl_in_reward=false \
    trainer.n_gpus_per_node="${GPUS:-2}" \
    trainer.nnodes="${NODES:-1}" \
    trainer.total_training_steps=150 \
    trainer.total_epochs=150 \
    trainer.test_freq=5 \
    trainer.save_freq=25 \
    trainer.project_name="$name" \
    trainer.experiment_name="$METHOD" \
    "$@"
}
