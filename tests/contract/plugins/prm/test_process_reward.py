"""The process reward model with verl's real workers: its numbers and the gradient of its update, by transformers."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract_tools import read, write
from row_layouts import PACKED, Places, Rollout, WorkerGroup, apart, filled, flat, noise
from torch.nn.functional import logsigmoid
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.advantage import make_record
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.config.scorers import COEFFICIENT, OUT, PRM_FOLDER, SCORE
from verl_turnkey.plugins.trainer.process_reward import ProcessReward
from verl_turnkey.plugins.trainer.worker_setup import NOT_FOR_WORKERS

BETA = 0.5


@pytest.fixture
def built(ready: Callable[..., Any], ranks: Any) -> Callable[..., Any]:
    """A trainer whose process reward model has started."""

    def build(world: int, *overrides: str) -> Any:
        made = ready(
            world,
            "critic.enable=false",
            f"turnkey.prm.beta={BETA}",
            "turnkey.prm.optim.lr=1e-3",
            *overrides,
            recipe="istar",
        )
        ranks[world].ask_all("build_prm", made.config, made.turnkey.prm)
        group = WorkerGroup(ranks[world], PRM_FOLDER)
        made.actor_rollout_wg._group.spawn = lambda names: dict.fromkeys(names, group)
        made.prm_group, made.local_trigger_step = group, 0
        return made

    return build


def scored(made: Any, rollout: Rollout) -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    """The columns of a batch, and the metrics. The old policy is some way off the model."""
    metrics: dict[str, Any] = {}
    with filled(rollout) as batch:
        batch = made._balance_batch(batch, metrics=metrics)
        batch = made._compute_old_log_prob(batch, metrics)
        old, number, places = read(batch, "old_log_probs"), noise("old", 0.4), Places(rollout)
        write(batch, "old_log_probs", lambda key, i: old[key][i] + number(places.token(key, i)))
        info = dict(batch.extra_info)
        made.process_reward.score(batch, metrics)
        assert batch.extra_info == info, "the settings of verl's own calls"
        names = ("old_log_probs", SCORE, *((COEFFICIENT,) if metrics["prm/updates"] else ()))
        return {name: read(batch, name) for name in names}, metrics


def log_ratios(rollout: Rollout, old: dict[str, list[float]], model: Any) -> dict[str, torch.Tensor]:
    """Of the model's own tokens, by row, with a graph; 0 elsewhere."""
    ratios = {}
    for (group, session), outputs in rollout.items():
        for index, output in enumerate(outputs):
            key, mask = f"{group}_{session}_{index}", torch.tensor(output.response_mask)
            ids = torch.tensor([*output.prompt_ids, *output.response_ids])
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
            first = len(output.prompt_ids)
            own = torch.stack([log_probs[t - 1, ids[t]] for t in range(first, len(ids))])
            ratios[key] = (own - torch.tensor(old[key])) * mask
    return ratios


def pairs_loss(rollout: Rollout, ratios: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    values, ends = defaultdict(float), {}
    for (group, session), outputs in rollout.items():
        steps = [step for output in outputs for step in output.extra_fields["turnkey"]["steps"]]
        if steps:
            ends[group, session] = any(step["success"] for step in steps)
            rows = (ratios[f"{group}_{session}_{index}"].sum() for index in range(len(outputs)))
            values[group, session] = BETA * sum(rows)
    gaps = [
        values[good] - values[bad]
        for good, won in ends.items()
        for bad, lost in ends.items()
        if good[0] == bad[0] and won and not lost
    ]
    return -logsigmoid(torch.stack(gaps)).mean(), len(gaps)


@pytest.mark.parametrize(("world", "settings"), [(1, []), (2, []), (2, PACKED)], ids=["one", "two", "packed"])
def test_scores_and_the_gradient_are_those_of_one_graph(built, model, rollout, world, settings):
    made = built(world, "turnkey.prm.scores=before", *settings)
    columns, metrics = scored(made, rollout)
    model.zero_grad()
    ratios = log_ratios(rollout, columns["old_log_probs"], model)
    loss, pairs = pairs_loss(rollout, ratios)
    loss.backward()
    assert metrics["prm/pairs"] == pairs > 0
    assert metrics["prm/loss"] == pytest.approx(loss.item(), abs=1e-5)
    for key, ratio in ratios.items():
        assert columns[SCORE][key] == pytest.approx((BETA * ratio).tolist(), abs=1e-4), key
    expected = flat({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert apart(expected, flat(made.prm_group.gradients)) < 1e-3
    assert metrics["prm/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-3)
    assert min(len(sizes) for sizes in made.prm_group.micro_batches) > 1


def test_branches_have_scores_and_the_model_does_not_learn_from_them(built, model, rollout):
    """Turns of another rollout as a branch of the first: neither loss nor gradient has them."""
    branch = rollout["a", 2][0]
    record = make_record([{**step, "success": True} for step in branch.extra_fields["turnkey"]["steps"]], branch=1)
    branch = branch.model_copy(update={"extra_fields": {**branch.extra_fields, "turnkey": record}})
    key = f"a_0_{len(rollout['a', 0])}"
    columns, metrics = scored(built(1, "turnkey.prm.scores=before"), {**rollout, ("a", 0): [*rollout["a", 0], branch]})
    loss, pairs = pairs_loss(rollout, log_ratios(rollout, columns["old_log_probs"], model))
    assert (metrics["prm/pairs"], metrics["prm/loss"]) == (pairs, pytest.approx(loss.item(), abs=1e-5))
    assert any(columns[SCORE][key])
    assert not any(columns[COEFFICIENT][key])


def test_it_learns_every_so_many_batches_of_all_steps(compose):
    """Three batches a step here: of six every second one."""
    config = compose("+turnkey=istar", "turnkey.prm.every=2")
    batches = [(step, trigger) for step in (1, 2) for trigger in range(3)]
    trainers = (SimpleNamespace(config=config, global_steps=step, local_trigger_step=trigger, parameter_sync_step=3)
                for step, trigger in batches)  # fmt: skip
    assert [ProcessReward(trainer, turnkey_config(config))._is_due for trainer in trainers] == [False, True] * 3


def test_the_scores_are_of_the_model_that_has_learnt(built, rollout):
    made = built(1)
    _, metrics = scored(made, rollout)
    assert metrics["prm/updates"] == 1
    assert metrics["prm/loss_after"] < metrics["prm/loss"]
    frozen, without = scored(built(1, "turnkey.prm.every=0"), rollout)
    assert without["prm/updates"] == 0
    assert COEFFICIENT not in frozen
    assert without["prm/loss"] == pytest.approx(metrics["prm/loss"], abs=1e-5)


def test_the_first_batch_has_log_ratios_of_exactly_0(built, rollout):
    made = built(1, "turnkey.prm.every=0")
    made.global_steps = 1
    columns, metrics = scored(made, rollout)
    assert not any(any(row) for row in columns[SCORE].values())
    assert metrics["prm/loss"] == pytest.approx(0.6931471805599453)


@pytest.mark.parametrize(
    ("overrides", "first", "later"),
    [
        ((), True, False),
        (("reference=rollout",), True, False),
        (("path=${actor_rollout_ref.model.path}",), True, False),
        (("path=another/model",), False, False),
        (("reference=ref",), True, True),
        (("reference=ref", "path=another/model"), False, False),
        (("reference=base", "lora_rank=4", "path=another/model"), True, True),
        (("kind=head",), False, False),
    ],
)
def test_a_model_that_is_its_own_reference_has_no_log_ratios(compose, overrides, first, later):
    """Until the policy changes, if it is the reference, and until the model does."""
    config = compose("+turnkey=istar", *(f"turnkey.prm.{override}" for override in overrides))
    trainer = SimpleNamespace(config=config, global_steps=1, local_trigger_step=0)
    process_reward = ProcessReward(trainer, turnkey_config(config))
    assert process_reward._untouched == first
    trainer.global_steps = 2
    assert process_reward._untouched == later
    trainer.global_steps, process_reward._learnt = 1, True
    assert not process_reward._untouched


def test_a_policy_that_starts_with_an_adapter_is_not_the_model(compose):
    config = compose("+turnkey=istar", "actor_rollout_ref.model.lora_adapter_path=somewhere")
    trainer = SimpleNamespace(config=config, global_steps=1, local_trigger_step=0)
    assert not ProcessReward(trainer, turnkey_config(config))._untouched


def test_a_head_is_read_at_the_last_token_of_each_turn(built, rollout):
    settings = ("kind=head", "objective=sum_to_outcome", "use=redistribute", "scores=before", "optim.lr=1e-3")
    made = built(1, *(f"turnkey.prm.{setting}" for setting in settings))
    columns, metrics = scored(made, rollout)
    assert metrics["prm/updates"] == 1
    assert metrics["prm/grad_norm"] > 0
    for (group, session), outputs in rollout.items():
        for index, output in enumerate(outputs):
            last = max((i for i, own in enumerate(output.response_mask) if own), default=None)
            for name in (SCORE, COEFFICIENT):
                nonzero = [i for i, value in enumerate(columns[name][f"{group}_{session}_{index}"]) if value]
                assert nonzero == ([] if last is None else [last])
    _, after = scored(made, rollout)
    assert after["prm/loss"] < metrics["prm/loss"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_has_a_bias_or_none(built, rollout, ranks, tmp_path, bias: bool):
    settings = ("kind=head", "objective=sum_to_outcome", "use=redistribute", f"head_bias={str(bias).lower()}")
    made = built(1, *(f"turnkey.prm.{setting}" for setting in settings))
    _, metrics = scored(made, rollout)
    assert metrics["prm/loss_after"] < metrics["prm/loss"]
    ranks[1].ask_all("checkpoint", PRM_FOLDER, "save_checkpoint", str(tmp_path))
    [file] = tmp_path.glob("model_world_size_1_rank_0.pt")
    names = [name for name in torch.load(file, weights_only=False) if name.startswith("score.")]
    assert names == ["score.weight", "score.bias"][: 1 + bias]


def test_other_workers_are_not_sent_its_columns(built):
    assert {OUT, SCORE, COEFFICIENT} <= NOT_FOR_WORKERS
    assert built(1).process_reward._group._left_out == NOT_FOR_WORKERS - {COEFFICIENT}


def test_verl_sets_the_workers_of_each_pool_once_and_before_it_makes_them():
    """Our trainer adds a worker when it does."""
    source = inspect.getsource(PPOTrainer._setup)
    assert source.count("self.resource_pool_to_cls = ") == 1
    assert source.index("self.resource_pool_to_cls = ") < source.index("create_colocated_worker_cls(class_dict")
    assert "self.resource_pool_manager.create_resource_pool()" in source.split("self.resource_pool_to_cls = ")[0]
