"""What the plugin adds to ``import verl``, which every process of a cluster pays.

    python benchmarks/import_time.py

The entry point is loaded by hand right after verl, in fresh processes, so that the noise of verl's own seconds does
not drown it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

RUNS = 5
CODE = """
import json, sys, time
start = time.perf_counter()
import verl
verl_seconds = time.perf_counter() - start
before = set(sys.modules)
start = time.perf_counter()
import verl_turnkey.plugins.entry as entry
assert entry.failure is None, entry.failure
print(json.dumps([verl_seconds, time.perf_counter() - start, sorted(set(sys.modules) - before)]))
"""


def main() -> None:
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    runs = []
    for _ in range(RUNS):
        answer = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
        runs.append(json.loads(answer.stdout.splitlines()[-1]))
    verl = statistics.median(run[0] for run in runs)
    ours = sorted(1000 * run[1] for run in runs)
    print(f"import verl: {verl:.2f} s; the plugin adds {statistics.median(ours):.1f} ms")
    print(f"({RUNS} processes, {ours[0]:.1f} to {ours[-1]:.1f} ms; modules added: {len(runs[0][2])})")


if __name__ == "__main__":
    main()
