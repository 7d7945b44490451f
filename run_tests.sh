#!/usr/bin/env bash
# Install the pinned CPU stack, then run every test: unit, contract (real verl), end to end (real training).
# A skipped or expectedly failing test fails the run (tests/conftest.py).
#
#   ./run_tests.sh                 # everything
#   ./run_tests.sh unit            # only tests/unit; also: contract, e2e
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
venv="${TURNKEY_VENV:-.venv}"
bash examples/install_cpu.sh "$venv"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
for part in ${1:-unit contract e2e}; do
    echo "== tests/$part"
    "$venv/bin/python" -m pytest "tests/$part" --durations=5
done
