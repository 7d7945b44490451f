"""Signals of episodes, by hand, against expressions over text, and from rows."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.plugins.credit.metrics import Signals, signal_metrics, signals
from verl_turnkey.plugins.credit.rows import read_rows


def loops(calls: str) -> int:
    return signals([ord(call) for call in calls], [True] * len(calls), False).loops


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        ("", 0),
        ("aa", 0),
        ("aaa", 1),
        ("aaaaaaa", 1),
        ("aaabaaa", 2),
        ("aabaab", 0),
        ("ababa", 0),
        ("ababab", 1),
        ("abababababab", 1),
        ("abababccbdbdbdaaa", 3),
        ("abcabcabc", 0),
    ],
)
def test_loops_by_hand(calls, number):
    assert loops(calls) == number


@pytest.mark.parametrize("seed", range(30))
def test_loops_like_expressions_over_text(seed):
    """A stretch of two calls in turn may share its last call with the next one: matches look ahead."""
    rng = np.random.default_rng(seed)
    calls = "".join(rng.choice(list("ab" if seed % 2 else "abc"), 40))
    repeated = len(re.findall(r"(?:^|(?<=(.)))(?!\1)(?=(.)\2\2)", calls))
    longest = [m.end() - m.start() for m in (_turns(calls, start) for start in range(len(calls))) if m]
    assert longest
    stretches = {_turns(calls, start).end() for start in range(len(calls)) if _is_long(_turns(calls, start))}
    assert loops(calls) == repeated + len(stretches)


def _turns(calls: str, start: int) -> re.Match[str] | None:
    return re.compile(r"(.)(?!\1)(.)(?:\1\2)*\1?|.").match(calls, start)


def _is_long(match: re.Match[str] | None) -> bool:
    return match is not None and match.end() - match.start() >= 6


def test_the_score_of_the_released_port():
    assert Signals(0, 0, False).score == 50
    assert Signals(2, 1, True).score == 50 - 16 - 5 - 3
    assert Signals(9, 0, False).score == 0


def made(*episodes: list[dict]) -> dict[str, float]:
    """The steps of each row in any order, one row per step; each rollout has a branch, and one failed beside."""
    keys, held = [], []
    for session, episode in enumerate(episodes):
        for t in reversed(range(len(episode))):
            keys.append(f"g_{session}_{t}")
            held.append(make_record([make_step(step=t, reward=0.0, **episode[t])]))
        keys.append(f"g_{session}_98")
        held.append(make_record([make_step(step=9, reward=0.0, valid=False, truncated=True)], branch=1))
    keys.append("g_99_0")
    held.append(make_record([], failed="it died"))
    masks = [torch.tensor([int(record["failed"] is None)]) for record in held]
    mask = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    return signal_metrics(read_rows(keys, [{}] * len(keys), [{"turnkey": record} for record in held], mask))


def test_metrics_of_rows():
    stuck = [{"anchor": "wall", "action": "forward"}] * 3
    walks = [{"anchor": f"cell {t}", "action": "forward"} for t in range(5)]
    fails = [{"anchor": "s", "action": None, "valid": False}] * 4
    fails[-1] = {**fails[-1], "truncated": True}
    assert made(stuck, walks, fails, walks[:1]) == {
        "episode/signals/failures": 4 / 4,
        "episode/signals/loops": 1 / 4,
        "episode/signals/exhausted": 1 / 4,
        "episode/signals/share": 2 / 4,
        "episode/signals/score": pytest.approx((45 + 50 + 50 - 32 - 3 + 50) / 4),
    }


def test_without_state_keys_the_action_alone_counts():
    assert made([{"action": "forward"}] * 5)["episode/signals/loops"] == 1


def test_rows_that_say_no_action_have_no_signals():
    assert made([{"anchor": "s"}] * 5) == {}
    assert made() == {}
