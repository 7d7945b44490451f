#!/usr/bin/env bash
# One node with GPUs; verl starts Ray itself. Settings: examples/launch/common.sh; overrides of verl as arguments.
#
#   ALFWORLD_DATA=... examples/launch/one_node.sh [overrides]
#   METHOD=hgpo ENVIRONMENT=webshop PRESET=hgpo_webshop_7b MODEL=Qwen/Qwen2.5-7B-Instruct TP=2 GPUS=4 \
#     URL=http://127.0.0.1:8020 GOALS=... examples/launch/one_node.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec python -m verl.trainer.main_ppo "${LINE[@]}" "$@"
