#!/usr/bin/env bash
# The quickstart's model on a harder task: three errands in a house whose cupboards are closed, 15 to 24 turns an
# episode. Options are those of the quickstart, such as --seed 1.
set -euo pipefail
exec "$(dirname "$0")/../quickstart.sh" --game three_errands --out runs/real_model "$@"
