#!/usr/bin/env bash
# The quickstart's model on a harder task: two errands in a house with closed cupboards and no hints where things are.
# Episodes of 12 to 24 turns; about 40 minutes on two cores. Options are those of the quickstart, such as --seed 1.
set -euo pipefail
exec "$(dirname "$0")/../quickstart.sh" --game house_search --out runs/real_model "$@"
