"""What a fork costs the server: the share of prompt tokens in vLLM's prefix cache, in short training runs.

    python benchmarks/prefix_cache.py          # trains missing runs, about three minutes each on two CPU cores

One step of the quickstart's task with 4 groups of 4 episodes, by stock verl with vLLM on the CPU: episodes that do not
fork, and two strategies that do. vLLM caches whole blocks of tokens; on a CPU the default is 128 tokens, and the
prompts here have 60 to 80. Prints a table; runs are in runs/prefix_cache.
"""

from __future__ import annotations

import json

from quickstart_runs import ROOT, train_missing

RUNS = ROOT / "runs" / "prefix_cache"
SMALL = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
BLOCK = "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={}"
STRATEGIES = {
    "independent": ("gigpo", ()),
    "tree": ("tree", ("turnkey.rollout.strategy={name: tree, every: 6}",)),
    "entropy_branch": (
        "tree",
        ("turnkey.credit.rule=arpo", "turnkey.rollout.strategy={name: entropy_branch, trajectories: 8}"),
    ),
}
COLUMNS = {"rows/cached_prompt_share": "all trained turns", "branching/cached_prompt_share": "first turns of branches"}


def measure(strategy: str, block: int) -> dict[str, float]:
    """The metrics of a run of one step."""
    method, overrides = STRATEGIES[strategy]
    out = RUNS / f"{strategy}-{block}"
    words = [*SMALL, BLOCK.format(block), *overrides]
    options = ["--n-val", "4", *(part for word in words for part in ("--override", word))]
    train_missing(out, method=method, seed=0, steps=1, options=tuple(options))
    metrics: dict[str, float] = {}
    for path in out.glob("metrics-*.jsonl"):
        for line in path.read_text().splitlines():
            metrics |= json.loads(line)["data"]
    return metrics


def main() -> None:
    print(f"| strategy | tokens of a block | {' | '.join(COLUMNS.values())} |")
    print(f"|{' --- |' * (2 + len(COLUMNS))}")
    for strategy, block in (("independent", 32), ("tree", 32), ("entropy_branch", 32), ("entropy_branch", 128)):
        metrics = measure(strategy, block)
        shares = [f"{metrics[name]:.2f}" if name in metrics else "-" for name in COLUMNS]
        print(f"| {strategy} | {block} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
