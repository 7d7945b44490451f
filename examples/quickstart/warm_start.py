"""Make the quickstart's model: a tiny Qwen3 that has watched good, mediocre and aimless players.

    python examples/quickstart/warm_start.py --out runs/quickstart/model --seed 0

Afterwards it knows every action and when it is useful, but far from reliably: what is left is for reinforcement
learning. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from demos import collect
from model import build_tokenizer
from play import play, summarize
from teaching import teach, text_of
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from verl_turnkey.envs.adapters.minigrid import ACTIONS
from verl_turnkey.envs.tasks import split_seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", default="MiniGrid-DoorKey-5x5-v0", help="a DoorKey level")
    parser.add_argument("--history", type=int, default=1, help="past steps in a prompt, as in turnkey.rollout.history")
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=650, help="demonstrated episodes")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--target", type=float, default=0.3, help="go on until this success in episodes on other seeds")
    parser.add_argument("--check", type=int, default=128, help="episodes to play for that; 0: do not look")
    args = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    # Seeds of their own: neither the training nor the validation tasks come from this stream. Starts are the same: the
    # smallest level has 48, and the demonstrations have them all.
    seeds, others = split_seeds(args.episodes, args.check, seed=10_000 + args.seed)
    demos = collect(args.level, seeds, args.history, args.max_turns, args.seed)
    print(f"{len(demos.steps)} steps; players won {demos.won} ({time.perf_counter() - began:.0f} s)", flush=True)

    texts = (text_of(demo) for demo in demos.steps)

    def check(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        players = play(model, tokenizer, args.level, others, history=args.history, max_turns=args.max_turns)
        return summarize(players)

    teach(
        args.out,
        demos.steps,
        build_tokenizer(texts, ACTIONS),
        check if args.check else None,
        epochs=args.epochs,
        lr=args.lr,
        target=args.target,
        seed=args.seed,
        began=began,
    )


if __name__ == "__main__":
    main()
