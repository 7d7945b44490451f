"""HiPER's credit in verl's advantage step: one critic's values, and advantages by the decisions of a turn."""

from __future__ import annotations

import numpy as np
import pytest
import transfer_queue as tq
from contract_tools import PARTITION, Compose, advance, batch_of, put, read, write
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit, make_record, make_step
from verl_turnkey.plugins.checks.driver import resolve_and_check as check

STREAMS = ("switch", "subgoal", "action")
SPANS = {"switch": (0, 2), "subgoal": (2, 4), "action": (5, 6)}  # token 4 is of no decision
EPISODES = {0: [(1, 0.0), (0, 0.0), (1, 1.0)], 1: [(1, 0.0), (0, 0.0)]}  # of each turn: switches, reward


def value(key: str, position: int) -> float:
    return 0.1 * position + 0.01 * int(key[-1]) + 0.2 * int(key[2])


def played(switch: int, reward: float, step: int, last: bool) -> AgentLoopOutput:
    extra = {"switch": switch, **{f"has_{stream}": 1 for stream in STREAMS}}
    for stream, (first, behind) in SPANS.items():
        extra |= {f"from_{stream}": first, f"to_{stream}": behind}
    record = make_record([make_step(step=step, reward=reward, terminated=last, extra=extra)])
    return AgentLoopOutput(
        prompt_ids=[5] * 3,
        response_ids=[7] * 6,
        response_mask=[1] * 6,
        response_logprobs=[-1.0] * 6,
        reward_score=0.0,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"reward_extra_info": {}, "min_global_steps": 1, "max_global_steps": 1, "turnkey": record},
    )


def test_each_decision_has_its_own_advantage_from_one_critic(queue, trainer):
    for session, turns in EPISODES.items():
        rows = [played(*turn, t, t == len(turns) - 1) for t, turn in enumerate(turns)]
        put("g", session, rows)
    batch = batch_of(tq.kv_list(PARTITION)[PARTITION])
    write(batch, "values", value)
    made = trainer("critic.enable=true", "turnkey.credit.heads=1", recipe="hae")
    assert made.use_critic
    after = advance(made, batch)
    advantages, returns = read(after, "advantages"), read(after, "returns")

    places = [(session, t) for session, turns in EPISODES.items() for t in range(len(turns))]
    keys = [f"g_{session}_{t}" for session, t in places]
    before = [value(key, 0) for key in keys]
    columns = {"switch": [EPISODES[s][t][0] for s, t in places], **dict.fromkeys(("value_low", "value_high"), before)}
    expected = compute_credit(
        "hae",
        StepBatch(
            group=[0] * len(places),
            trajectory=[s for s, _ in places],
            step=[t for _, t in places],
            reward=[EPISODES[s][t][1] for s, t in places],
            terminated=[t == len(EPISODES[s]) - 1 for s, t in places],
            extra={**columns, "value_term": before},
        ),
    )
    for i, key in enumerate(keys):
        switch, subgoal = (expected.extra[f"{name}_advantages"][i] for name in ("switch", "subgoal"))
        tokens = [switch] * 2 + [subgoal] * 2 + [0.0, expected.advantage[i]]
        np.testing.assert_allclose(advantages[key], tokens, atol=1e-5)
        assert returns[key] == pytest.approx([expected.returns[i]] * 6, abs=1e-5)
    assert len({round(a, 4) for row in advantages.values() for a in row}) > 8


def test_the_driver_wants_the_critic_and_the_format(compose: Compose):
    whole = ["+turnkey=hae", "turnkey.rollout.action_format=hiper", "critic.enable=true"]
    check(compose(*whole), use_critic=True)
    with pytest.raises(ConfigError, match=r"hae needs the column 'extra\.value_low'.*critic\.enable=True"):
        check(compose(*whole[:2]), use_critic=False)
    with pytest.raises(ConfigError, match=r"hae needs the column 'extra\.switch'"):
        check(compose(whole[0], whole[2]), use_critic=True)
