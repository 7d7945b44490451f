"""Decision density against a loop over all turns, and from rows."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.plugins.credit.metrics import decision_density, decision_metrics
from verl_turnkey.plugins.credit.rows import read_rows


def naive(turns: list[tuple[int, int, int, float]]) -> tuple[float, float]:
    """Of turns as state, action, trajectory and what is still earned."""
    covered = decisions = 0
    for state, action, _, _ in turns:
        first: dict[tuple[bool, int], float] = {}
        for s, a, trajectory, ahead in turns:
            if s == state:
                first.setdefault((a == action, trajectory), ahead)
        own = [ahead for (same, _), ahead in first.items() if same]
        other = [ahead for (same, _), ahead in first.items() if not same]
        if len(own) < 2 or len(other) < 2:
            continue
        covered += 1
        error = math.sqrt(statistics.variance(own) / len(own) + statistics.variance(other) / len(other))
        decisions += abs(statistics.mean(own) - statistics.mean(other)) > 2 * error + 1e-9
    return decisions / covered if covered else math.nan, covered / len(turns)


@pytest.mark.parametrize("seed", range(40))
def test_equals_a_loop_over_all_turns(seed):
    rng = np.random.default_rng(seed)
    turns = [
        (int(rng.integers(4)), int(rng.integers(1, 4)), trajectory, float(rng.choice([0.0, 1.0, 1e4])))
        for trajectory in range(rng.integers(1, 9))
        for _ in range(rng.integers(1, 6))
    ]
    got = decision_density(*(np.array(column) for column in zip(*turns, strict=True)))
    assert got == pytest.approx(naive(turns), nan_ok=True)


def test_one_episode_with_two_other_actions_covers_nothing():
    """Two episodes go left; a single one tries right and back."""
    turns = [(0, 0, 0, 1.0), (0, 0, 1, 1.0), (0, 1, 2, 0.0), (0, 2, 2, 0.0)]
    density, covered = decision_density(*(np.array(column) for column in zip(*turns, strict=True)))
    assert math.isnan(density)
    assert covered == 0


def made(*episodes: list[tuple[str, str, float]]) -> dict[str, float]:
    """The turns of each episode, as state, action and reward, in a row each, and a branch; one episode failed."""
    keys, records = ["g_99_0"], [make_record([], failed="it died")]
    for session, episode in enumerate(episodes):
        for t, (anchor, action, reward) in reversed([*enumerate(episode)]):
            keys.append(f"{'gh'[session % 2]}_{session}_{t}")
            records.append(make_record([make_step(step=t, reward=reward, anchor=anchor, action=action)]))
        keys.append(f"{'gh'[session % 2]}_{session}_98")
        away = make_step(step=0, reward=session % 3, anchor=episode[0][0], action="away")
        records.append(make_record([away], branch=1))
    masks = [torch.tensor([int(record["failed"] is None)]) for record in records]
    mask = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    return decision_metrics(read_rows(keys, [{}] * len(keys), [{"turnkey": record} for record in records], mask))


def test_metrics_of_rows():
    """Left wins and right loses, after a corridor in which nothing is to be chosen."""
    won, lost = [("hall", "on", 0.5), ("fork", "left", 1.0)], [("hall", "on", 0.5), ("fork", "right", 0.0)]
    assert made(*[won] * 4, *[lost] * 4) == {"episode/decisions/covered": 0.5, "episode/decisions/density": 1.0}
    # what was earned before the turn does not count, and without a second episode there is no error to compare with
    late = [("hall", "on", 7.0), ("fork", "left", 0.0)]
    assert made(*[late] * 4, *[lost] * 4) == {"episode/decisions/covered": 0.5, "episode/decisions/density": 0.0}
    assert made(won, won, lost, lost) == {"episode/decisions/covered": 0.0}


def test_rows_without_states_or_episodes_have_none():
    keys, record = ["g_0_0"], make_record([make_step(step=0, reward=1.0, action="on")])
    rows = read_rows(
        keys, [{}], [{"turnkey": record}], torch.nested.as_nested_tensor([torch.ones(1)], layout=torch.jagged)
    )
    assert decision_metrics(rows) == {}
    assert made() == {}
