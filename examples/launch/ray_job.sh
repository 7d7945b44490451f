#!/usr/bin/env bash
# A Ray cluster that runs already: submits the run as a job, which goes on when this terminal is closed.
# Settings: examples/launch/common.sh; its paths are those of the cluster's nodes.
#
#   RAY_API_SERVER_ADDRESS=http://head:8265 NODES=2 GPUS=8 examples/launch/ray_job.sh [overrides]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec ray job submit --address="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" --no-wait -- \
  python -m verl.trainer.main_ppo "${LINE[@]}" "$@"
