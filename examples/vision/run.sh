#!/usr/bin/env bash
# A tiny vision-language model learns to find things in pictures: imitation, then GiGPO on stock verl and vLLM, on a CPU.
#
#   ./examples/vision/run.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv="${TURNKEY_VENV:-.venv}"
bash examples/install_cpu.sh "$venv"
exec "$venv/bin/python" examples/vision/run.py "$@"
