"""Make a tiny model that writes in HiPER's format: it has seen a few episodes, of which it has learnt hardly more.

python hiper_model.py OUT
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))

from demos import collect
from model import build_tokenizer
from teaching import teach, text_of

from verl_turnkey.envs.adapters.minigrid import ACTIONS
from verl_turnkey.envs.tasks import split_seeds

LEVEL, HISTORY, TURNS, EPISODES, EPOCHS = "MiniGrid-DoorKey-5x5-v0", 1, 14, 60, 20
SUBGOALS = ("the key", "the door", "the goal")


def written(action: str, draw: random.Random) -> str:
    """A turn; one that keeps its subgoal may leave it out."""
    switches = draw.random() < 0.4
    subgoal = "" if not switches and draw.random() < 0.5 else f"<subgoal>{draw.choice(SUBGOALS)}</subgoal>"
    return f"<switch>{'SWITCH' if switches else 'KEEP'}</switch>{subgoal}<action>{action}</action>"


def main(out: Path) -> None:
    draw = random.Random(0)
    demos = collect(LEVEL, split_seeds(EPISODES, 0, seed=10_000)[0], HISTORY, TURNS, 0).steps
    texts = [text_of(demo) for demo in demos]
    demos = [replace(demo, action=written(demo.action, draw)) for demo in demos]
    tokenizer = build_tokenizer([*texts, *(demo.action for demo in demos)], ACTIONS)
    teach(out, demos, tokenizer, None, epochs=EPOCHS, lr=3e-3, target=0.0, seed=0, began=time.perf_counter())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
