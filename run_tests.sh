#!/usr/bin/env bash
# Install the pinned CPU stack and the environments, then run tests: unit, contract (real verl, real environments),
# openenv (in a virtual environment of its own: its packages and verl's do not go together), end to end (real training).
# A skipped or expectedly failing test fails the run (tests/conftest.py).
#
#   ./run_tests.sh                 # unit tests, and of the others those in tests/fast.txt: each mechanism once
#   ./run_tests.sh all             # everything but what is marked as long
#   ./run_tests.sh long            # that: real runs of further methods and modes, lost processes and nodes
#   ./run_tests.sh rotation        # a thirtieth of the files that `all` adds and of the long tests, by the date:
#                                  # each is run within 30 days (--share and --day of tests/conftest.py)
#   ./run_tests.sh unit            # only tests/unit; also: fast, rest (what all adds), contract, openenv, e2e
#   VERL=verl==0.9.0 TURNKEY_VENV=.venv-0.9.0 ./run_tests.sh verl    # what moved in another verl, then what touches verl
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
venv="${TURNKEY_VENV:-.venv}"
parts="${*:-unit fast}"
[ "$parts" = all ] && parts="unit fast rest openenv"

# Install Debian's packages for commands that are missing; each argument is COMMAND:PACKAGE.
debian_packages() {
    local missing=() command
    for command in "$@"; do
        command -v "${command%%:*}" >/dev/null || missing+=("${command##*:}")
    done
    [ ${#missing[@]} -eq 0 ] && return
    echo "Installing Debian packages: ${missing[*]}"
    local sudo=()
    [ "$(id -u)" -eq 0 ] || sudo=(sudo)
    "${sudo[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

openenv() {
    local own="$venv-openenv"
    if [ "$(cat "$own/.stamp" 2>/dev/null)" != "$(cat setup.py pyproject.toml | sha256sum)" ]; then
        "$venv/bin/uv" venv --quiet --clear --seed --python "$venv/bin/python" "$own"
        "$venv/bin/uv" pip install --quiet --python "$own/bin/python" openenv==0.10.0 fastmcp uvicorn pytest pytest-timeout \
            "gymnasium>=1.0" "numpy>=1.26" typer rich packaging setuptools
        "$venv/bin/uv" pip install --quiet --python "$own/bin/python" --no-deps --no-build-isolation -e .
        cat setup.py pyproject.toml | sha256sum >"$own/.stamp"
    fi
    "$own/bin/python" -m pytest tests/openenv --durations=5
}

# Every page in its place, every link and anchor one that leads somewhere. Not --quiet: strict counts what is logged.
site() {
    local folder
    folder="$(mktemp -d)"
    NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict --site-dir "$folder"
    rm -r "$folder"
}

# What moved in the installed verl, then the contract tests of what touches verl, whatever moved.
against_verl() {
    local failed=0
    "$venv/bin/turnkey" doctor --verl || failed=1
    side_by_side --dist loadfile \
        tests/contract/plugins/{test_registration.py,verl_api,credit,actor,rollout,trainer,shutdown,checks} || failed=1
    return $failed
}

# Compilers for two of the environments' packages, Java for ScienceWorld, a browser for MiniWoB++, sandboxes of agents.
programs=(g++:g++ make:make java:default-jre-headless chromium:chromium chromedriver:chromium-driver bwrap:bubblewrap)
case "$parts" in
    *fast* | *rest* | *rotation* | *contract* | *e2e* | *long*) debian_packages "${programs[@]}" ;;
    *unit*) debian_packages bwrap:bubblewrap ;;
esac
bash examples/install_cpu.sh "$venv" examples/cpu/environments.txt examples/cpu/docs.txt
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
# Two at a time; with more threads than cores those of torch would spin while they wait for each other.
export OMP_NUM_THREADS=1
side_by_side() {
    "$venv/bin/python" -m pytest --durations=5 -n 2 "$@"
}

fast() {
    grep "^tests/$1" tests/fast.txt
}

# What fast leaves out; further arguments are pytest's.
rest() {
    local tree
    for tree in contract e2e; do
        side_by_side "tests/$tree" $(fast "$tree" | sed 's/^/--deselect=/') --dist loadfile -m "not long" "$@"
    done
}

long() {
    local tree
    for tree in contract e2e; do side_by_side "tests/$tree" --dist loadfile -m long "$@"; done
}

for part in $parts; do
    echo "== $part"
    case "$part" in
        unit)
            "$venv/bin/pyright" --pythonpath "$venv/bin/python"
            site
            side_by_side tests/unit --dist worksteal
            ;;
        # Trees one after the other: names of their files repeat.
        fast) for tree in contract e2e; do side_by_side $(fast "$tree") --dist loadfile -m "not long"; done ;;
        rest) rest ;;
        long) long ;;
        rotation)
            day=$(($(date +%s) / 86400)) # one for all, also past midnight
            rest --share 30 --day "$day"
            long --share 30 --day "$day"
            ;;
        openenv) openenv ;;
        verl) against_verl ;;
        *) side_by_side "tests/$part" --dist loadfile -m "not long" ;;
    esac
done
