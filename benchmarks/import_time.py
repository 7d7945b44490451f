"""What this package costs at the start of the processes of a run.

    python benchmarks/import_time.py          # what the plugin adds to `import verl`, which every process pays
    python benchmarks/import_time.py roles    # the processes of a run: what we import in each, and which packages

For the first, the entry point is loaded by hand right after verl, in fresh processes, so that the noise of verl's own
seconds does not drown it. For the second, each process imports what verl's class for it does, and then what this
package runs in it; Python itself prints the time of each import (``-X importtime``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

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
LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|( *)([\w.]+)$", re.MULTILINE)
OURS = "verl_turnkey"
MARK = "====="
LOOPS = "verl.experimental.agent_loop.agent_loop"
ALGOS = "verl.trainer.ppo.core_algos"
#: Process -> what verl's class for it imports, what the trainer of this package runs in it.
ROLES = {
    "driver": (f"import verl.trainer.main_ppo, {ALGOS}", "import verl_turnkey.plugins.checks.driver"),
    "trainer": (
        f"import verl.trainer.main_ppo, verl.trainer.ppo.v1, {LOOPS}",
        "import verl_turnkey.plugins.trainer.trainer",
    ),
    "actor, critic": (
        f"import verl.workers.engine_workers, {ALGOS}",
        "import verl_turnkey.plugins.registries, verl_turnkey.plugins.actor.loss, verl_turnkey.plugins.actor.weighing",
    ),
    "agent loop": (f"import {LOOPS}, {ALGOS}", "import verl_turnkey.plugins.rollout.agent_loop"),
    "environment host": ("import ray", "import verl_turnkey.envs.hosting.host"),
    "environment": ("", "import verl_turnkey.envs.hosting.process_main"),
}


def plugin() -> None:
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    runs = []
    for _ in range(RUNS):
        answer = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
        runs.append(json.loads(answer.stdout.splitlines()[-1]))
    verl = statistics.median(run[0] for run in runs)
    ours = sorted(1000 * run[1] for run in runs)
    print(f"import verl: {verl:.2f} s; the plugin adds {statistics.median(ours):.1f} ms")
    print(f"({RUNS} processes, {ours[0]:.1f} to {ours[-1]:.1f} ms; modules added: {len(runs[0][2])})")


@dataclass
class Imports:
    """Of one process, in microseconds: of all modules, of ours, and of packages that ours imported first."""

    total: int = 0
    own: int = 0
    modules: int = 0
    brought: Counter[str] = field(default_factory=Counter)

    def row(self) -> str:
        return f"{self.own / 1000:.0f} ({self.modules} modules)"

    def packages(self) -> str:
        named = [f"{package} {us / 1000:.0f}" for package, us in self.brought.most_common(5) if us >= 5000]
        return ", ".join(named) or "-"


def read(text: str) -> Imports:
    """Python prints a module after those that it imports, which are indented further; read backwards, it is before."""
    imports = Imports()
    within: list[tuple[int, str]] = []
    for own, _, indent, name in reversed(LINE.findall(text)):
        depth = len(indent)
        while within and within[-1][0] >= depth:
            within.pop()
        root = name.partition(".")[0]
        imports.total += int(own)
        if root == OURS:
            imports.own += int(own)
            imports.modules += 1
        elif any(package == OURS for _, package in within):
            imports.brought[root] += int(own)
        within.append((depth, root))
    return imports


def roles() -> None:
    print(
        "| process | verl's imports, s | our plugin in them, ms | its packages | what we run in it, ms | its packages |"
    )
    print("|---|---|---|---|---|---|")
    for role, (theirs, ours) in ROLES.items():
        marked = f"{theirs}\nimport sys\nprint('{MARK}', file=sys.stderr, flush=True)\n{ours}"
        command = [sys.executable, "-X", "importtime", "-c", marked]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        before, after = map(read, text.split(MARK))
        cells = [f"{before.total / 1e6:.1f}", before.row(), before.packages(), after.row(), after.packages()]
        print(f"| {role} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("plugin", "roles"), default="plugin")
    {"plugin": plugin, "roles": roles}[parser.parse_args().what]()
