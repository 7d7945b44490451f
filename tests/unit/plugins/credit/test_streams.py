"""Advantages of a turn's decisions on its tokens: against a loop over the tokens."""

import random
from dataclasses import replace

import numpy as np
import pytest

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit
from verl_turnkey.plugins.credit.estimator import STREAMS, stream_advantages


def batch_of(spans, streams=tuple(STREAMS)):
    """An episode with these spans, (S, 3, 2), in the order of STREAMS; of ``streams`` alone."""
    n = len(spans)
    extra = {"switch": [1, 0] * n, "value_low": [0.5] * n, "value_high": [0.25] * n, "value_term": [0.1] * n}
    extra = {name: values[:n] for name, values in extra.items()}
    for i, stream in enumerate(streams):
        extra |= {f"from_{stream}": [s[i][0] for s in spans], f"to_{stream}": [s[i][1] for s in spans]}
    return StepBatch(group=[0] * n, trajectory=[0] * n, step=range(n), reward=[1.0] * n, extra=extra)


def naive(credit, spans, step):
    seen, result = {}, []
    for s in step:
        place = seen[s] = seen.get(s, -1) + 1
        value = 0.0
        own = (credit.extra["switch_advantages"][s], credit.extra["subgoal_advantages"][s], credit.advantage[s])
        for (first, behind), advantage in zip(spans[s], own, strict=True):
            if first <= place < behind:
                value = advantage
        result.append(value)
    return result


@pytest.mark.parametrize("seed", range(5))
def test_equals_a_loop_over_the_tokens(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(0, 12) for _ in range(6)]
    cuts = [sorted(rng.randrange(0, length + 1) for _ in range(4)) for length in lengths]
    spans = [[(a, b), (max(a, b - 1), c), (max(a, c - 1), d)] for a, b, c, d in cuts]  # neighbours share a token
    batch = batch_of(spans)
    credit = compute_credit("hae", batch, normalise=False)
    step = [s for s in rng.sample(range(6), 6) for _ in range(lengths[s])]
    got = stream_advantages(credit, batch, np.array(step, dtype=np.int64))
    np.testing.assert_allclose(got, naive(credit, spans, step))
    assert len({*credit.advantage, *credit.extra["switch_advantages"]}) > 2


def test_without_the_tokens_of_decisions_a_turn_has_one_advantage():
    spans = [[(0, 1), (1, 2), (2, 3)]] * 2
    batch = batch_of(spans)
    bare = batch_of(spans, ("switch", "subgoal"))
    step = np.array([0, 0, 1])
    assert stream_advantages(compute_credit("hae", bare), bare, step) is None
    assert stream_advantages(compute_credit("grpo_steps", batch), batch, step) is None


def test_modifiers_of_tokens_are_refused():
    batch = batch_of([[(0, 1), (1, 2), (2, 3)]] * 2)
    credit = replace(compute_credit("hae", batch), tokens=np.zeros(3))
    with pytest.raises(ConfigError, match="drop its modifiers of tokens"):
        stream_advantages(credit, batch, np.array([0, 0, 1]))
