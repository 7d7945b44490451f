#!/usr/bin/env bash
# Agents in a virtual environment of their own, beside the training one, whose packages theirs must not change:
#   examples/agents/install.sh [FOLDER]     FOLDER: default .venv-agents
set -euo pipefail
folder="${1:-.venv-agents}"
packages=(mini-swe-agent==2.4.6)
[ "$(cat "$folder/.stamp" 2>/dev/null)" = "${packages[*]}" ] && exit
python3 -m venv --clear "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
echo "${packages[*]}" >"$folder/.stamp"
