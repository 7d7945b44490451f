"""The groups that are trained, on verl's own steps of an update and a real TransferQueue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transfer_queue as tq
from contract_tools import (
    PARTITION,
    SEPARATE,
    Compose,
    TwoRanks,
    advance,
    fill,
    make_record,
    make_step,
    output,
    put,
    read,
)
from verl.trainer.ppo.v1 import get_trainer_cls

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def played(reward: float, turns: int = 2) -> list[dict[str, Any]]:
    return [{"reward": 0.0, "anchor": "s"}] * (turns - 1) + [{"reward": reward, "anchor": "t"}]


#: Standard deviations: 0.577, 0, 0.707 of two that were played, 0, none, and 0.1414 of two.
BATCH = {
    "half": [played(1.0), played(0.0), played(1.0, 4), played(0.0)],
    "won": [played(1.0)] * 4,
    "wild": ["it died", played(1.0, 3), played(0.0), "it died"],
    "lost": [played(0.0), played(0.0), "it died", played(0.0)],
    "dead": ["it died"] * 4,
    "near": [played(0.2), played(0.4)],
}


@pytest.fixture
def made(queue, compose: Compose) -> Any:
    def build(mode: str, *overrides: str, method: str = "gigpo") -> Any:
        overrides = (*([*SEPARATE, f"{MINI_BATCH}=6"] if mode == "separate_async" else ()), *overrides)
        sizes = ("data.train_batch_size=12", "actor_rollout_ref.rollout.n=4")
        config = compose(f"+turnkey={method}", f"trainer.v1.trainer_mode=turnkey_{mode}", *sizes, *overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.global_steps, trainer.actor_rollout_wg = 1, TwoRanks()
        trainer.tokenizer = SimpleNamespace(eos_token_id=2)
        return trainer

    return build


def groups(batch: Any) -> set[str]:
    return {key.split("_")[0] for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")}


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize(
    ("overrides", "kept", "share"),
    [
        (["turnkey.groups.keep=0.4"], {"wild", "half"}, (0.5**0.5 + (1 / 3) ** 0.5)),
        (["turnkey.groups.keep=0.95", "turnkey.groups.keep_by=spread"], {"wild", "half", "near"}, None),
        (["turnkey.groups.keep=0.2"], {"wild"}, 0.5**0.5),
    ],
)
def test_the_groups_that_differ_most_are_left_and_the_others_leave_the_queue(made, mode, overrides, kept, share):
    trainer, metrics = made(mode, *overrides), {}
    whole = fill(BATCH)
    whole.extra_info["temperature"] = 0.7
    batch = trainer._balance_batch(whole, metrics)
    assert groups(batch) == kept
    assert set(tq.kv_list(PARTITION)[PARTITION]) == set(batch.keys)
    assert batch.extra_info["temperature"] == 0.7
    # mini-batches of two groups, of six with separate_async: as many as the kept groups fill
    assert trainer.batching.mini_batches("actor") == (1 if mode == "separate_async" else (len(kept) + 1) // 2)
    assert len(batch) % (2 * trainer.batching.mini_batches("actor")) == 0
    total = 0.5**0.5 + (1 / 3) ** 0.5 + 0.02**0.5
    assert metrics["groups/failed"] == pytest.approx(1 / 6)
    assert metrics["groups/kept"] == pytest.approx(len(kept) / 5)
    assert metrics["groups/kept_spread"] == pytest.approx(1.0 if share is None else share / total)
    assert metrics["groups/spread/mean"] == pytest.approx(total / 5)
    assert metrics["groups/without_spread"] == pytest.approx(2 / 5)
    assert metrics["groups/composed_return/mean"] == pytest.approx((2 + 4 + 1 + 0.6) / 15)
    assert metrics["groups/solved"] == pytest.approx((2 + 4 + 1 + 0.6) / 15)
    batch = advance(trainer, batch, metrics)
    assert metrics["episode/count"] == sum(len(BATCH[name]) for name in kept)


def test_the_advantages_of_the_kept_groups_are_those_without_the_others(made):
    alone = made("sync", "turnkey.groups.keep=0.4")
    advantages = read(advance(alone, alone._balance_batch(fill(BATCH), {})), "advantages")
    tq.kv_clear(keys=list(tq.kv_list(PARTITION)[PARTITION]), partition_id=PARTITION)
    whole = made("sync")
    expected = read(advance(whole, whole._balance_batch(fill(BATCH), {})), "advantages")
    real = [key for key in advantages if key.split("_")[0] in ("half", "wild")]
    assert len(real) == 17
    assert {key: advantages[key][:1] for key in real} == {key: expected[key][:1] for key in real}
    assert len({value for key in real for value in advantages[key]}) > 2


def test_episodes_that_left_no_row_are_missed_in_every_group_once(made):
    """A group that is left out is not missing; the episodes that it lacks are."""
    trainer, metrics = made("sync", "turnkey.groups.keep=0.2"), {}
    trainer.rollout_counter._prompts, trainer.rollout_counter._sampled = len(BATCH), list(BATCH)
    advance(trainer, trainer._balance_batch(fill(BATCH), metrics), metrics)
    assert metrics["episode/missing"] == 2  # of "near"


def test_all_groups_are_the_default_and_cost_nothing(made, monkeypatch):
    def read_nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("the outcomes were read")

    monkeypatch.setattr("verl_turnkey.plugins.trainer.groups.outcomes", read_nothing)
    trainer, metrics = made("sync"), {}
    assert groups(trainer._balance_batch(fill(BATCH), metrics)) == set(BATCH)
    assert trainer.batching.mini_batches("actor") == 6
    assert not [name for name in metrics if name.startswith("groups/")]


def test_rows_without_a_record_are_judged_by_verls_rewards(made):
    """As verl's own loops write them, under an estimator of verl's."""
    trainer = made("sync", "turnkey.groups.keep=0.5", "algorithm.adv_estimator=grpo", method="base")
    for group, scores in {"a": (0.0, 3.0), "b": (1.0, 1.0)}.items():
        for session, score in enumerate(scores):
            row = output(make_record([make_step(step=0, reward=score)]), 2, score)
            row.extra_fields = {name: value for name, value in row.extra_fields.items() if "steps" in name}
            put(group, session, [row], {"turnkey_task": "{}"})
    items = tq.kv_list(PARTITION)[PARTITION]
    batch = type(fill({}))(keys=list(items), tags=list(items.values()), partition_id=PARTITION)
    metrics: dict[str, float] = {}
    assert groups(trainer._balance_batch(batch, metrics)) == {"a"}
    assert metrics["groups/composed_return/mean"] == 5 / 4
    assert metrics["groups/solved"] == 3 / 4  # without acc the score, cut to 1
