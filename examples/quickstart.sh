#!/usr/bin/env bash
# Train an agent with real verl, vLLM and Ray on this machine, without a GPU, and show that it got better.
#
#   ./examples/quickstart.sh                    # a fresh run, seed 0
#   ./examples/quickstart.sh --resume           # go on where the last run stopped
#   ./examples/quickstart.sh --method grpo_steps --seed 1 --steps 30
#   ./examples/quickstart.sh --help
#
# The first run makes .venv and installs the pinned CPU stack into it; further runs find it there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TURNKEY_QUICKSTART_STARTED="${TURNKEY_QUICKSTART_STARTED:-$(date +%s)}"
venv="${TURNKEY_VENV:-.venv}"
bash examples/install_cpu.sh "$venv"
exec "$venv/bin/python" examples/quickstart/run.py "$@"
