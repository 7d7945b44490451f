#!/usr/bin/env bash
# WebShop with the settings of the GiGPO paper (arXiv:2505.10978): groups of 8 on 16 tasks, 15 turns, learning rate
# 1e-6, KL loss 0.01, two past turns in the prompt, gamma 0.95, penalty 0.1, success pays 10; 150 training steps.
#
#   URL=http://127.0.0.1:8020 examples/launch/webshop.sh [overrides of verl]
#
# METHOD=gigpo      a method: gigpo, hgpo, salt, proxmo, grpo_steps, ... (seeupo: with turnkey.update.mini_batches=null)
# MODEL=Qwen/Qwen2.5-1.5B-Instruct      for the 7B: MODEL=Qwen/Qwen2.5-7B-Instruct TP=2
# GPUS=2 NODES=1 TP=1
# URL=http://127.0.0.1:8020      a running webshop_server.py (docs/envs/webshop.md); the tasks remember it
# TASKS=data/webshop      training goals from 500 on, validation goals 0 to 499; written when missing, which needs GOALS
# LAUNCH="python -m verl.trainer.main_ppo"      what is called with the overrides
set -euo pipefail
METHOD="${METHOD:-gigpo}"
MODEL="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
TASKS="${TASKS:-data/webshop}"
LAUNCH="${LAUNCH:-python -m verl.trainer.main_ppo}"
URL="${URL:-http://127.0.0.1:8020}"

if [ ! -f "$TASKS/train.parquet" ]; then
  : "${GOALS:?set it to the number of goals that your shop has: curl -d '{}' $URL/info}"
  turnkey tasks "$TASKS" --env turnkey/WebShop-v0 --kwargs "{\"url\": \"$URL\", \"goals\": [500, $GOALS]}" \
    --val-kwargs '{"goals": [0, 500]}' --train 4096 --val 128 --data-source webshop
fi

# Mini-batches: the released script takes 64 rows each, a batch has about 20 times as many (128 episodes of 10 turns).
exec $LAUNCH \
  "+turnkey=$METHOD" +turnkey/env=webshop \
  turnkey.env.kwargs.url="$URL" \
  turnkey.env.kwargs.reward=success \
  turnkey.rollout.history=2 \
  turnkey.rollout.max_turns=15 \
  turnkey.rollout.invalid_action_penalty=0.1 \
  "turnkey.rewards=[{name: step, weight: 10}]" \
  turnkey.update.mini_batches=20 \
  data.train_files="$TASKS/train.parquet" \
  data.val_files="$TASKS/val.parquet" \
  data.train_batch_size=16 \
  data.max_prompt_length=4096 \
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
  trainer.project_name=webshop \
  trainer.experiment_name="$METHOD" \
  "$@"
