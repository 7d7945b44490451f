#!/usr/bin/env bash
# ALFWorld with the settings of the GiGPO paper (arXiv:2505.10978): groups of 8 on 16 tasks, 50 turns, learning rate
# 1e-6, KL loss 0.01, two past turns in the prompt, gamma 0.95, penalty 0.1, success pays 10; 150 training steps.
#
#   ALFWORLD_DATA=... examples/launch/alfworld.sh [overrides of verl]
#
# METHOD=gigpo      a method: gigpo, hgpo, salt, proxmo, grpo_steps, ... (seeupo: with turnkey.update.mini_batches=null)
# MODEL=Qwen/Qwen2.5-1.5B-Instruct      for the 7B: MODEL=Qwen/Qwen2.5-7B-Instruct TP=2
# GPUS=2 NODES=1 TP=1
# TASKS=data/alfworld      training tasks from `train`, validation from `valid_unseen`; written when missing
# LAUNCH="python -m verl.trainer.main_ppo"      what is called with the overrides
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TASKS="${TASKS:-data/alfworld}"

if [ ! -f "$TASKS/train.parquet" ]; then
  turnkey tasks "$TASKS" --env turnkey/ALFWorld-v0 --val-kwargs '{"split": "valid_unseen"}' \
    --train 4096 --val 128 --data-source alfworld
fi

# Mini-batches: the released script takes 256 rows each, a batch has about 16 times as many (128 episodes of 30 turns).
launch alfworld \
  turnkey.rollout.max_turns=50 \
  turnkey.update.mini_batches=16 \
  data.max_prompt_length=2048 \
  "$@"
