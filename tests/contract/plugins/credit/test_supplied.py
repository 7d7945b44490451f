"""Columns that the trainer supplies, from the fields that verl has in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import transfer_queue as tq
from contract_tools import EOS, PARTITION, Compose, advance, batch_of, put, read, registered, row, write
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.utils import need_critic

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit
from verl_turnkey.plugins.checks.driver import resolve_and_check as check
from verl_turnkey.plugins.credit.trainer_columns import task_key

ALL = ("extra.log_prob", "extra.entropy", "extra.task")
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
TASKS = ['{"env_id": "x", "seed": 1}', '{"env_id": "x", "seed": 2}']


@pytest.fixture
def capture() -> Iterator[list[StepBatch]]:
    """The batches that ``contract_supplied`` (all columns) and ``contract_sure`` (no entropy) were given."""
    needs = {"contract_supplied": ALL, "contract_sure": ("extra.log_prob", "extra.task")}
    with registered(lambda batch: np.zeros(len(batch)), **needs) as seen:
        yield seen


def fill(sessions: dict[tuple[str, int], list[AgentLoopOutput]], data: dict[str, dict[str, Any]]) -> KVBatchMeta:
    """The episodes in the queue, with the fields of the data row of each group and verl's entropies."""
    for (group, session), outputs in sessions.items():
        put(group, session, outputs, data[group])
    batch = upsample_batch_to_divisible_size(batch_of(tq.kv_list(PARTITION)[PARTITION]), 7, EOS)
    write(batch, "entropy", entropy)
    return batch


def entropy(key: str, position: int) -> float:
    return len(key) + 0.5 * position


def log_prob(key: str, position: int) -> float:
    return -1.0 - position


def columns(batch: StepBatch) -> dict[tuple[str, int], tuple[Any, ...]]:
    """(log_prob, entropy, task) by trajectory and step."""
    names = [batch.ids["trajectory"][code] for code in batch.trajectory]
    held = zip(*(batch.extra[name.removeprefix("extra.")].tolist() for name in ALL), strict=True)
    return dict(zip(zip(names, batch.step.tolist(), strict=True), held, strict=True))


PLAYED = {
    ("a", 0): [row("011", [{"step": 0}]), row("10", [{"step": 1}])],
    ("a", 1): [row("0110010", [{"step": 0}, {"step": 1}])],  # merged
    ("a", 2): [row("0", "it died")],
    ("b", 0): [row("1", [{"step": 0}])],
}
OURS = {group: {"turnkey_task": task} for group, task in zip("ab", TASKS, strict=True)}


def expected(sessions: dict[tuple[str, int], list[AgentLoopOutput]], data: dict[str, dict[str, Any]]) -> dict[Any, Any]:
    """Token by token."""
    columns: dict[Any, Any] = {}
    for (group, session), outputs in sessions.items():
        turns: list[list[tuple[str, int]]] = []
        for index, output in enumerate(outputs):
            previous = 0
            for i, m in enumerate(output.response_mask):
                if m and not previous:
                    turns.append([])
                if m:
                    turns[-1].append((f"{group}_{session}_{index}", i))
                previous = m
        key = task_key({"data_source": "x", **data[group]})
        for t, tokens in enumerate(turns):
            numbers = [entropy(*token) for token in tokens]
            columns[f"{group}_{session}", t] = (sum(log_prob(*token) for token in tokens), np.mean(numbers), key)
    return columns


@pytest.mark.parametrize("recorded", [True, False])
def test_each_turn_has_its_own_tokens_and_its_task(queue, trainer, capture, recorded):
    played = PLAYED
    if not recorded:
        played = {
            place: [row("".join(map(str, o.response_mask)), None) for o in rows] for place, rows in PLAYED.items()
        }
    batch = fill(played, OURS)
    assert any(tag.get("is_padding") for tag in batch.tags)
    batch.reorder(np.random.default_rng(3).permutation(len(batch)).tolist())
    advance(trainer("algorithm.adv_estimator=contract_supplied", recipe="base"), batch, old_log_probs=log_prob)
    assert columns(capture[0]) == expected(played, OURS)
    assert len({task for *_, task in columns(capture[0]).values()}) == 2


def test_a_data_row_of_another_form_is_known_by_its_prompt(queue, trainer, capture):
    prompts = {group: [{"role": "user", "content": group}] for group in "ab"}
    data = {group: {"raw_prompt": prompts[group], "index": 0} for group in "ab"}
    batch = fill(PLAYED, data)
    advance(trainer("algorithm.adv_estimator=contract_supplied", recipe="base"), batch, old_log_probs=log_prob)
    assert columns(capture[0]) == expected(PLAYED, data)


def test_what_the_records_say_is_left_alone(queue, trainer, capture):
    extra = {"log_prob": -3.0, "entropy": 2.0, "task": "mine"}
    batch = fill({("a", 0): [row("11", [{"step": 0, "extra": extra}])]}, OURS)
    advance(trainer("algorithm.adv_estimator=contract_supplied", recipe="base"), batch)
    assert columns(capture[0]) == {("a_0", 0): (-3.0, 2.0, "mine")}


def test_a_turn_without_a_token_has_no_entropy(queue, trainer, capture):
    batch = fill({("a", 0): [row("0", [{"step": 0}]), row("1", [{"step": 1}])]}, OURS)
    advance(trainer("algorithm.adv_estimator=contract_supplied", recipe="base"), batch, old_log_probs=log_prob)
    assert capture[0].extra["log_prob"].tolist() == [0.0, -1.0]
    np.testing.assert_array_equal(capture[0].extra["entropy"], [np.nan, entropy("a_0_1", 0)])


def test_nothing_is_supplied_that_nobody_needs(queue, trainer, capture):
    batch = fill(PLAYED, OURS)
    advance(trainer("algorithm.adv_estimator=contract_sure", recipe="base"), batch)
    assert set(capture[0].extra) == {"log_prob", "task"}


def test_in_bypass_mode_the_rollout_is_the_old_policy(queue, trainer, capture):
    batch = fill(PLAYED, OURS)
    made = trainer("algorithm.adv_estimator=contract_sure", BYPASS, recipe="base")
    made._compute_advantage(made._compute_old_log_prob(batch, {}), {})
    tokens = capture[0].tokens
    assert capture[0].extra["log_prob"].tolist() == (-tokens.astype(float)).tolist()


def test_entropies_are_refused_in_bypass_mode(queue, trainer, compose: Compose, capture):
    """In the driver, and for users' loops, whose records may have them, at the first step."""
    config = compose("+turnkey=base", "algorithm.adv_estimator=contract_supplied", BYPASS)
    with pytest.raises(ConfigError) as early:
        check(config, use_critic=need_critic(config))
    for (group, session), outputs in PLAYED.items():
        put(group, session, outputs, OURS[group])
    made = trainer("algorithm.adv_estimator=contract_supplied", BYPASS, recipe="base")
    batch = made._compute_old_log_prob(batch_of(tq.kv_list(PARTITION)[PARTITION]), {})
    with pytest.raises(ConfigError) as late:
        made._compute_advantage(batch, {})
    assert str(early.value) == str(late.value)
    assert "contract_supplied needs 'extra.entropy'" in str(early.value)
    config = compose("+turnkey=base", "algorithm.adv_estimator=contract_sure", BYPASS)
    check(config, use_critic=need_critic(config))


def test_verls_loops_pass_with_supplied_columns(compose: Compose, capture):
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    config = compose("+turnkey=base", "algorithm.adv_estimator=contract_supplied", loop)
    check(config, use_critic=need_critic(config))


# --- HiPER: one critic's values, and advantages by the decisions of a turn --------------------------------------------


STREAMS = ("switch", "subgoal", "action")
SPANS = {"switch": (0, 2), "subgoal": (2, 4), "action": (5, 6)}  # token 4 is of no decision
EPISODES = {0: [(1, 0.0), (0, 0.0), (1, 1.0)], 1: [(1, 0.0), (0, 0.0)]}  # of each turn: switches, reward


def value(key: str, position: int) -> float:
    return 0.1 * position + 0.01 * int(key[-1]) + 0.2 * int(key[2])


def played(switch: int, reward: float, step: int, last: bool) -> AgentLoopOutput:
    extra = {"switch": switch, **{f"has_{stream}": 1 for stream in STREAMS}}
    for stream, (first, behind) in SPANS.items():
        extra |= {f"from_{stream}": first, f"to_{stream}": behind}
    return row("111111", [{"step": step, "reward": reward, "terminated": last, "extra": extra}])


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
