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
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TASKS="${TASKS:-data/webshop}"
URL="${URL:-http://127.0.0.1:8020}"

if [ ! -f "$TASKS/train.parquet" ]; then
  : "${GOALS:?set it to the number of goals that your shop has: curl -d '{}' $URL/info}"
  turnkey tasks "$TASKS" --env turnkey/WebShop-v0 --kwargs "{\"url\": \"$URL\", \"goals\": [500, $GOALS]}" \
    --val-kwargs '{"goals": [0, 500]}' --train 4096 --val 128 --data-source webshop
fi

# Mini-batches: the released script takes 64 rows each, a batch has about 20 times as many (128 episodes of 10 turns).
launch webshop \
  turnkey.env.kwargs.url="$URL" \
  turnkey.env.kwargs.reward=success \
  turnkey.rollout.max_turns=15 \
  turnkey.update.mini_batches=20 \
  data.max_prompt_length=4096 \
  "$@"
