"""Rows of verl's own agent loops, which know nothing of us: their steps are derived from masks and rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import transfer_queue as tq
from contract_tools import PARTITION, Compose, advance, batch_of, nested, put, read, registered, row, write
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.utils import need_critic

from verl_turnkey.advantage import ConfigError, RecordError, StepBatch, make_record, make_step
from verl_turnkey.plugins.checks.driver import resolve_and_check as check
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.trainer.starvation import StarvedError


def output(mask: str, score: float, tool_rewards: list[float] | None = None, **extra: Any) -> AgentLoopOutput:
    """A row as verl's tool loop makes it."""
    return row(mask, None, score, turn_scores=[], tool_rewards=tool_rewards or [], **extra)


def fill(sessions: dict[tuple[str, int], list[AgentLoopOutput]]) -> KVBatchMeta:
    for (group, session), outputs in sessions.items():
        put(group, session, outputs)
    return batch_of(tq.kv_list(PARTITION)[PARTITION])


def tool_rows() -> dict[tuple[str, int], list[AgentLoopOutput]]:
    """Three turns, one turn, two turns cut after the second call, and an episode in which the model said nothing."""
    return {
        ("a", 0): [output("1100111010", 1.0, [0.5, 0.25])],
        ("a", 1): [output("111", 0.0)],
        ("b", 0): [output("0110011", 0.5, [0.125, 0.75])],
        ("b", 1): [output("000", 0.0)],
    }


@pytest.fixture
def capture() -> Iterator[list[StepBatch]]:
    """The batches that the estimators ``contract_capture`` (needs nothing) and ``contract_calls`` were given."""
    needs = {"contract_capture": (), "contract_calls": ("extra.tool_rewards",)}
    with registered(lambda batch: np.arange(1.0, len(batch) + 1), **needs) as seen:
        yield seen


def table(batch: StepBatch, *columns: str) -> dict[tuple[str, int], tuple[float, ...]]:
    """The columns by (trajectory, step)."""
    arrays = [batch.extra[c.removeprefix("extra.")] if c.startswith("extra.") else getattr(batch, c) for c in columns]
    names = [batch.ids["trajectory"][code] for code in batch.trajectory]
    return {
        (name, int(step)): tuple(float(array[i]) for array in arrays)
        for i, (name, step) in enumerate(zip(names, batch.step, strict=True))
    }


def test_the_table_of_a_tool_loops_rows(queue, trainer, capture):
    batch = fill(tool_rows())
    write(batch, "values", lambda key, i: 10.0 * batch.keys.index(key) + i)
    metrics: dict[str, Any] = {}
    made = trainer("algorithm.adv_estimator=contract_capture", "critic.enable=true", recipe="base")
    after = advance(made, batch, metrics)
    [steps] = capture
    a, b = (10.0 * batch.keys.index(key) for key in ("a_0_0", "b_0_0"))
    assert table(steps, "reward", "score", "terminated", "tokens", "value", "extra.tool_rewards") == {
        ("a_0", 0): (0.0, 1.0, False, 2, a, 0.5),
        ("a_0", 1): (0.0, 1.0, False, 3, a + 4, 0.25),
        ("a_0", 2): (1.0, 1.0, True, 1, a + 8, 0.0),  # the outcome, on a masked token behind the turn; no call
        ("a_1", 0): (0.0, 0.0, True, 3, 10.0 * batch.keys.index("a_1_0"), 0.0),
        ("b_0", 0): (0.0, 0.5, False, 2, b + 1, 0.125),
        ("b_0", 1): (0.5, 0.5, True, 2, b + 5, 0.75),
    }
    assert {steps.ids["group"][g] for g in steps.group} == {"a", "b"}
    # turn_scores: nobody filled them
    assert steps.given == {"env_return", "terminated", "tokens", "value", "extra.tool_rewards"}
    advantages = read(after, "advantages")
    credit = {place: float(i) for i, place in enumerate(table(steps), 1)}
    x, y, z = (credit["a_0", t] for t in range(3))
    assert advantages["a_0_0"] == [x, x, 0, 0, y, y, y, 0, z, 0]
    assert advantages["b_1_0"] == [0, 0, 0]
    episode = {name: value for name, value in metrics.items() if name.startswith("episode/")}
    assert episode.pop("episode/missing") == 4
    assert episode == {  # no success rate, no rate of invalid actions: nobody said
        "episode/count": 4,
        "episode/failed": 1,
        "episode/failed/other": 1,
        "episode/length/mean": 2,
        "episode/length/max": 3,
        "episode/composed_return/mean": 0.5,
    }
    assert made.advantage_step.real_rows == 3


def test_rewards_per_token_and_kl_go_to_their_turns(queue, trainer, capture):
    made = trainer(
        "algorithm.adv_estimator=contract_capture",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "algorithm.kl_penalty=kl",
        recipe="base",
    )
    batch = fill({("a", 0): [output("0110010", 1.0)], ("a", 1): [output("11", 0.0)]})
    rewards = {"a_0_0": [1, 2, 4, 8, 16, 32, 64], "a_1_0": [0, 0]}
    write(batch, "rm_scores", lambda key, i: rewards[key][i])
    write(batch, "ref_log_prob", lambda key, i: -1.0 - 0.1 * i)
    metrics: dict[str, Any] = {}
    advance(made, batch, metrics)
    of_turns = table(capture[0], "reward", "env_return")
    assert of_turns["a_0", 0][0] == pytest.approx(1 + 2 + 4 + 8 + 16 - 0.5 * (0.1 + 0.2))
    assert of_turns["a_0", 1][0] == pytest.approx(32 + 64 - 0.5 * 0.5)
    assert [of_turns[place][1] for place in (("a_0", 0), ("a_0", 1), ("a_1", 0))] == [127, 127, 0]
    assert metrics["episode/composed_return/mean"] == pytest.approx(127 / 2)  # without the penalty


def test_turn_gae_on_a_tool_loops_rows(queue, trainer):
    """Against a loop straight from the formula, over masks, rewards and values as they stand in the queue."""
    batch = fill(tool_rows())
    values = {key: [0.1 * i + 0.01 * n for i in range(10)] for n, key in enumerate(batch.keys)}
    write(batch, "values", lambda key, i: values[key][i])
    overrides = ["algorithm.adv_estimator=turn_gae", "critic.enable=true", "+turnkey.credit.gamma=0.9"]
    after = advance(trainer(*overrides, "+turnkey.credit.lam=0.8", recipe="base"), batch)
    starts = {"a_0_0": [0, 4, 8], "a_1_0": [0], "b_0_0": [1, 5]}
    outcome = {"a_0_0": 1.0, "a_1_0": 0.0, "b_0_0": 0.5}
    advantage: dict[tuple[str, int], float] = {}
    for key, places in starts.items():
        later = following = 0.0
        for turn, place in reversed(list(enumerate(places))):
            reward = outcome[key] if place == places[-1] else 0.0
            delta = reward + 0.9 * following - values[key][place]
            advantage[key, turn] = later = delta + 0.9 * 0.8 * later
            following = values[key][place]
    numbers = list(advantage.values())
    advantages, returns = read(after, "advantages"), read(after, "returns")
    for (key, turn), value in advantage.items():
        place = starts[key][turn]
        whitened = (value - np.mean(numbers)) / np.std(numbers, ddof=1)
        assert advantages[key][place] == pytest.approx(whitened, abs=1e-5)
        assert returns[key][place] == pytest.approx(value + values[key][place], abs=1e-5)
    assert returns["a_0_0"][4:7] == [returns["a_0_0"][4]] * 3  # every token of a turn has the turn's target


def test_an_outcome_that_verl_copies_to_each_row_of_an_episode_counts_once(queue, trainer, capture):
    """verl puts the last row's score on all of them."""
    rows = [output("110", 0.0, [0.5]), output("1011", 0.0, [0.25, 0.0]), output("01", 1.0)]
    batch = fill({("a", 0): rows, ("a", 1): [output("1", 0.0)]})
    assert [sum(row) for row in read(batch, "rm_scores").values()] == [1, 1, 1, 0]
    advance(trainer("algorithm.adv_estimator=contract_calls", recipe="base"), batch)
    assert table(capture[0], "reward", "terminated", "extra.tool_rewards") == {
        ("a_0", 0): (0, False, 0.5),
        ("a_0", 1): (0, False, 0.25),
        ("a_0", 2): (0, False, 0),
        ("a_0", 3): (1, True, 0),
        ("a_1", 0): (0, True, 0),
    }


@pytest.mark.parametrize("seed", range(10))
def test_derived_rewards_against_a_walk_over_the_tokens(seed):
    rng = np.random.default_rng(seed)
    keys, masks, scores = [], [], []
    expected: dict[tuple[str, int], float] = {}
    for session in range(5):
        turns: list[float] = []
        late = 0.0  # rewards of rows in which the model said nothing
        rows = int(rng.integers(1, 4))
        for index in range(rows):
            mask = rng.integers(0, 2, size=rng.integers(1, 8)) * int(rng.random() < 0.8)
            score = rng.normal(size=len(mask))
            keys.append(f"g_{session}_{index}")
            masks.append(mask)
            scores.append(score.copy())
            if index < rows - 1:
                score[-1] = 0.0
            before, previous = 0.0, 0
            first = len(turns)
            for m, reward in zip(mask, score, strict=True):
                if m and not previous:
                    turns.append(before if len(turns) == first else 0.0)
                if len(turns) == first:
                    before += reward
                else:
                    turns[-1] += reward
                previous = m
            late += before if len(turns) == first else 0.0
        if turns:
            turns[-1] += late
            expected |= {(f"g_{session}", t): reward for t, reward in enumerate(turns)}

    order = rng.permutation(len(keys))
    rows = read_rows(
        [keys[i] for i in order],
        [{}] * len(keys),
        [{}] * len(keys),
        nested([masks[i] for i in order]),
        scores=nested([scores[i] for i in order]),
    )
    rewards = {place: reward for place, (reward,) in table(rows.steps, "reward").items()}
    assert rewards == pytest.approx(expected)
    assert rows.failed.keys() == {f"g_{s}" for s in range(5)} - {trajectory for trajectory, _ in expected}
    assert not rows.recorded


# --- what is wrong is named -------------------------------------------------------------------------------------------


def test_rows_with_and_without_records_in_one_batch(queue, trainer):
    record = make_record([make_step(step=0, reward=1.0)])
    batch = fill({("a", 0): [output("11", 1.0, turnkey=record)], ("a", 1): [output("11", 1.0)]})
    with pytest.raises(RecordError, match=r"row a_1_0 carries no turnkey record, row a_0_0 does.*make_record"):
        advance(trainer(recipe="grpo_steps"), batch)


def test_no_row_with_a_token_of_the_model(queue, trainer):
    made = trainer("turnkey.env.patience=0", recipe="grpo_steps")
    fill({("a", 0): [output("00", 1.0)], ("a", 1): [output("0", 1.0)]})
    tq.kv_put(key="a", partition_id=PARTITION, tag={"is_prompt": True, "status": "finished", "global_steps": 1})
    with pytest.raises(StarvedError, match=r"all 2 episodes of a batch failed:\n  no token of its responses"):
        made.replay_buffer.sample(global_steps=1, partition_id=PARTITION, batch_size=1)


@pytest.mark.parametrize(
    ("lists", "overrides"),
    [
        ([[], []], []),  # nobody called a tool
        ([[0.5, 0.5, 0.5], []], []),  # more than turns
        ([["yes"], ["no"]], []),
        ([[0.5], [0.5]], ["actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2"]),  # calls are not turns
    ],
)
def test_a_list_that_does_not_fit_the_turns_is_not_there(queue, trainer, capture, lists, overrides):
    batch = fill({("a", session): [output("1101", 0.0, numbers)] for session, numbers in enumerate(lists)})
    with pytest.raises(ConfigError, match=r"contract_calls needs 'extra\.tool_rewards'"):
        advance(trainer("algorithm.adv_estimator=contract_calls", *overrides, recipe="base"), batch)


def test_a_method_that_needs_more_says_so_before_ray_and_at_the_first_step(queue, trainer, compose: Compose):
    """With the same words, and an example that has the missing column."""
    with pytest.raises(ConfigError) as late:
        advance(trainer(), fill({("a", 0): [output("1101", 1.0)]}))
    with pytest.raises(ConfigError) as early:
        checked(compose("+turnkey=gigpo", TOOL_AGENT))
    assert str(early.value) == str(late.value)
    assert "gigpo needs 'anchor' of each step" in str(early.value)
    assert "steps = [make_step(step=t, reward=reward[t], anchor=anchor[t]) for t in range(turns)]" in str(early.value)


TOOL_AGENT = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
SINGLE_TURN = "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"


def checked(config: Any) -> None:
    check(config, use_critic=need_critic(config))


@pytest.mark.parametrize("estimator", ["grpo_steps", "turn_gae", "vc_gae", "rebn", "contract_calls"])
def test_methods_that_compare_no_states_pass_with_the_tool_loop(compose: Compose, capture, estimator):
    checked(compose("+turnkey=base", f"algorithm.adv_estimator={estimator}", TOOL_AGENT, "critic.enable=true"))


@pytest.mark.parametrize(
    "overrides", [[SINGLE_TURN], [TOOL_AGENT, "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2"]]
)
def test_tool_rewards_that_cannot_be_told_per_turn_are_refused(compose: Compose, capture, overrides):
    with pytest.raises(ConfigError, match=r'extra=\{"tool_rewards": tool_rewards\[t\]\}'):
        checked(compose("+turnkey=base", "algorithm.adv_estimator=contract_calls", *overrides))
