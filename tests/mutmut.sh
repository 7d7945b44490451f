#!/usr/bin/env bash
# All mutations that mutmut makes of a file without verl, and those that the tests miss:
#
#   pip install mutmut==3.8.1
#   tests/mutmut.sh advantage/group_ops.py tests/unit/advantage/test_group_ops.py
#
# It works on a copy, because mutmut writes next to what it mutates and the folders of src/ are links.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 2 ] || { echo "usage: $0 FILE TESTS..." >&2; exit 2; }
file="$1"
shift
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/tests"
cp -rL src "$copy/src"
cp -r tests/unit tests/data "$copy/tests"
cp -r docs "$copy/docs"
cat >"$copy/pyproject.toml" <<END
[tool.pytest.ini_options]
pythonpath = ["tests/unit"]
addopts = "-p no:asyncio -p no:anyio -p no:hydra_pytest"

[tool.mutmut]
source_paths = ["src/verl_turnkey/${file%%/*}"]
only_mutate = ["src/verl_turnkey/$file"]
pytest_add_cli_args_test_selection = [$(printf '"%s", ' "$@")]
also_copy = ["src/verl_turnkey", "tests/unit", "tests/data", "docs"]
END
cd "$copy"
export OMP_NUM_THREADS=1 PYTHONPATH="$copy/src"
python -m mutmut run
python -m mutmut results
