"""Training batches whose rows come from an agent-loop manager that shares no code with verl's."""

from __future__ import annotations

from typing import Any

import foreign_manager
import pytest
import transfer_queue as tq
from contract_tools import EPISODES, PARTITION, Episode, advance, batch_of, fill, output, read
from foreign_manager import Manager
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_turnkey.advantage import ConfigError, make_record, make_step
from verl_turnkey.plugins.checks.driver import resolve_and_check
from verl_turnkey.plugins.checks.files import training_loops
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.trainer.outcomes import PlayedOnly, outcomes
from verl_turnkey.plugins.verl_api.internals import Dealing, own_manager

CLASS = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=foreign_manager.Manager"


def outputs_of(episode: Episode) -> list[AgentLoopOutput]:
    """A row for each step, or the one masked row of a failed episode."""
    if isinstance(episode, str):
        return [output(make_record([], failed=episode), 1, 0.0, masked=True)]
    score = sum(step["reward"] for step in episode)
    records = [make_record([make_step(step=t, **step)]) for t, step in enumerate(episode)]
    return [output(record, 1 + t % 3, score) for t, record in enumerate(records)]


def play(made: Any, *dropped: str) -> KVBatchMeta:
    """The batch that the trainer gets for the prompts ``a`` and ``b``; ``dropped``: extra fields in no row."""
    manager = Manager.create(None, lambda uid: map(outputs_of, EPISODES[uid]))
    manager.dropped = dropped
    made.agent_loop_manager = Dealing(manager, VALIDATION)
    made._submit_batch_to_rollout(list_of_dict_to_tensordict([{"uid": uid} for uid in EPISODES]))
    batch, _ = made.replay_buffer.sample(global_steps=1, partition_id=PARTITION, batch_size=2)
    assert "extra_fields" not in tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    return batch


def by_step(advantages: dict[str, list[float]]) -> dict[str, float]:
    """The credit of each row, whose tokens all have the same."""
    assert all(len(set(tokens)) == 1 for tokens in advantages.values())
    return {key: tokens[0] for key, tokens in advantages.items()}


def test_rows_without_the_column_extra_fields_get_the_same_credit_as_verls(queue, trainer):
    verls: dict[str, Any] = {}
    expected = by_step(read(advance(trainer(), fill(EPISODES), verls), "advantages"))
    tq.kv_clear(keys=list(tq.kv_list(PARTITION)[PARTITION]), partition_id=PARTITION)
    metrics: dict[str, Any] = {}
    made = trainer()
    actual = by_step(read(advance(made, play(made), metrics), "advantages"))
    assert actual == pytest.approx(expected)
    names = {name for name in verls if name.startswith(("episode/", "credit/"))}
    assert {name: metrics[name] for name in names} == {name: verls[name] for name in names}
    assert metrics["episode/failed"] == 1


def test_without_reward_extra_info_outcomes_and_metrics_come_from_the_records_and_scores(queue, trainer):
    made = trainer()
    batch = play(made, "reward_extra_info")
    assert [episode.solved for episode in outcomes(batch)["a"]] == [0.0, 0.0, 0.0]  # no record says success
    assert [episode.score for episode in outcomes(batch)["a"]] == [1.0, 0.25, 0.0]
    assert [episode.score for episode in outcomes(batch)["b"]] == [0.5, 0.0]
    keys = [key for key in batch.keys if key.startswith("b")]
    made.replay_buffer.filter_groups_metric = "acc"
    assert PlayedOnly(made.replay_buffer)._values(keys, PARTITION) == [None] * len(keys)
    metrics: dict[str, Any] = {}
    advance(made, batch, metrics)
    assert metrics["episode/success_rate"] == 0
    assert metrics["episode/composed_return/mean"] == pytest.approx(1.75 / 5)


def test_rows_without_anything_of_ours_have_the_turns_of_their_masks(queue, trainer):
    extra = ("turnkey", "reward_extra_info", "min_global_steps", "max_global_steps")
    made = trainer(recipe="grpo_steps")
    metrics: dict[str, Any] = {}
    advance(made, play(made, *extra), metrics)
    assert metrics["episode/count"] == 6
    assert metrics["episode/failed"] == 1
    assert "episode/success_rate" not in metrics
    with pytest.raises(ConfigError, match="gigpo needs 'anchor' of each step"):
        advance(trainer(), batch_of(tq.kv_list(PARTITION)[PARTITION] | {}), {})


def test_the_checks_leave_its_agent_loop_to_the_manager(compose, monkeypatch):
    assert own_manager(compose("+turnkey=gigpo")) is None
    verls = CLASS.replace("foreign_manager.Manager", "verl.trainer.ppo.v1.AgentLoopManagerTQ")
    assert own_manager(compose("+turnkey=gigpo", verls)) is None
    line = ["+turnkey=gigpo", CLASS, "turnkey.env.probe=false"]
    for loop in ("single_turn_agent", "my_agents"):
        config = compose(*line, f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}")
        assert training_loops(config) == {"Manager"}
        resolve_and_check(config, use_critic=False)
    config = compose(*line)  # the recipe's turnkey_env, which a manager may play too
    assert training_loops(config) == {"turnkey_env"}
    assert foreign_manager.Manager.__slots__
