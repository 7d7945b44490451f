"""A critic with three heads on verl's real workers: values, targets and the gradient of its update, by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contract_tools import read, write
from naive.critics import streams
from row_layouts import PACKED, Places, Rollout, apart, filled, flat, noise
from tensordict import TensorDict
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.utils.model import load_valuehead_model

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.methods.hae import HEADS
from verl_turnkey.plugins.checks.checkpoints import check_resumed_heads
from verl_turnkey.plugins.credit.heads import target_field, value_field
from verl_turnkey.plugins.critic.worker import HeadedCritic, heads_loss, labels, learnt_positions
from verl_turnkey.plugins.trainer import worker_setup
from verl_turnkey.plugins.trainer.worker_setup import NOT_FOR_WORKERS

ORACLE = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "learned_check_values.json").read_text())
CLIP = 0.1
FIELDS = [value_field(HEADS, head) for head in HEADS]
OVERRIDES = [f"critic.cliprange_value={CLIP}", "critic.optim.lr=1e-2", "turnkey.credit.normalise=false"]


@pytest.fixture(scope="module")
def decided(rollout: Rollout) -> Rollout:
    """The rollout with the columns of HiPER's format: of some turns without a subgoal, of some without either."""
    rollout, draw = deepcopy(rollout), np.random.default_rng(7)
    for outputs in rollout.values():
        for output in outputs:
            for step in output.extra_fields["turnkey"]["steps"]:
                tokens = sum(output.response_mask)
                switch = int(draw.integers(0, tokens + 1))
                subgoal = int(draw.choice([0, draw.integers(switch, tokens + 1)]))
                step["extra"] |= {"switch": int(draw.integers(2)), "to_switch": switch, "to_subgoal": subgoal}
    return rollout


@pytest.fixture
def built(ready: Callable[..., Any], ranks: Any) -> Callable[..., Any]:
    """A trainer whose critic has three heads, and the last layer of that critic."""

    def build(world: int, *overrides: str, seed: int = 0) -> tuple[Any, torch.nn.Linear]:
        made = ready(world, *OVERRIDES, *overrides, recipe="hae")
        weight, bias = ranks[world].ask_all("build_heads", made.config.critic, HEADS, seed)[0]
        layer = torch.nn.Linear(weight.shape[1], len(HEADS))
        layer.load_state_dict({"weight": weight, "bias": bias})
        return made, layer

    return build


def places(rollout: Rollout) -> dict[str, dict[str, int]]:
    """By row with a token, the response token before which each head is read; each row is one step."""
    positions = {}
    for (group, session), outputs in rollout.items():
        for index, output in enumerate(outputs):
            tokens = sum(output.response_mask)
            for step in output.extra_fields["turnkey"]["steps"] if tokens else []:
                extra = step["extra"]
                behind = extra["to_subgoal"] or extra["to_switch"]
                positions[f"{group}_{session}_{index}"] = {"low": min(behind, tokens - 1), "high": 0, "term": 0}
    return positions


def values(rollout: Rollout, model: Any, layer: torch.nn.Linear) -> dict[str, torch.Tensor]:
    """Of each row, before every response token: (tokens, heads), with a graph."""
    by_row = {}
    for (group, session), outputs in rollout.items():
        for index, output in enumerate(outputs):
            ids = torch.tensor([*output.prompt_ids, *output.response_ids])
            hidden = model.model(ids[None]).last_hidden_state[0]
            by_row[f"{group}_{session}_{index}"] = layer(hidden[len(output.prompt_ids) - 1 : -1])
    return by_row


def rows_of(rollout: Rollout, read_values: Callable[[str, str], float]) -> tuple[list[str], list[dict[str, Any]]]:
    """The steps of played episodes for the naive twin, and the key of each one's row."""
    keys, rows = [], []
    for (group, session), outputs in rollout.items():
        for index, output in enumerate(outputs):
            key = f"{group}_{session}_{index}"
            for step in output.extra_fields["turnkey"]["steps"]:
                keys.append(key)
                row = {**step, "trajectory": f"{group}_{session}", "switch": step["extra"]["switch"]}
                rows.append(row | {f"value_{head.name}": read_values(key, head.name) for head in HEADS})
    return keys, rows


@pytest.mark.parametrize(("world", "settings"), [(1, []), (2, []), (2, PACKED)], ids=["one", "two", "packed"])
def test_values_targets_and_gradient_are_those_of_one_graph(built, model, decided, world, settings):
    made, layer = built(world, *settings)
    by_graph, at = values(decided, model, layer), places(decided)
    metrics: dict[str, Any] = {}
    with filled(decided) as batch:
        batch = made._balance_batch(batch, metrics=metrics)
        batch = made._compute_old_log_prob(batch, metrics)
        batch = made._compute_values(batch, metrics)
        for column, field in enumerate(FIELDS):
            for key, row in read(batch, field).items():
                if key in by_graph:
                    np.testing.assert_allclose(row, by_graph[key][:, column].detach(), atol=2e-5, err_msg=key)
        # The critic that gave the values was some way off, so that clipping matters.
        token, old = Places(decided), {}
        for field in FIELDS:
            now, number = read(batch, field), noise(field, 0.4)
            write(batch, field, lambda key, i, now=now, number=number: now[key][i] + number(token.token(key, i)))
            old[field] = read(batch, field)
        batch = made._compute_advantage(batch, metrics)
        targets = {head.name: read(batch, target_field(head)) for head in HEADS}
        made._update_critic(batch, metrics)

    def value(key: str, name: str) -> float:
        field = FIELDS[[head.name for head in HEADS].index(name)]
        return old[field][key][at[key][name] if key in at else 0]

    keys, rows = rows_of(decided, value)
    naive_streams = streams(rows, normalise=False)
    losses: dict[str, Any] = {}
    for column, head in enumerate(HEADS):
        terms, written = [], 0
        for t, key in enumerate(keys):
            if key not in at or (head.name == "high" and not naive_streams["opens"][t]):
                continue
            place, target = at[key][head.name], naive_streams[head.name][t]
            assert targets[head.name][key][place] == pytest.approx(target, abs=1e-5), (key, head)
            written += 1
            new, before = by_graph[key][place, column], old[FIELDS[column]][key][place]
            clipped = new.clamp(before - CLIP, before + CLIP)
            terms.append(torch.maximum((new - target) ** 2, (clipped - target) ** 2))
        assert written == sum(int(np.isfinite(row).sum()) for row in targets[head.name].values()) > 4
        losses[head.name] = torch.stack(terms).mean()
    model.zero_grad()
    sum(losses.values()).backward()
    for name, loss in losses.items():
        assert metrics[f"critic/{name}/vf_loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert 0 <= metrics[f"critic/{name}/vf_clipfrac"] <= 1
    assert any(metrics[f"critic/{name}/vf_clipfrac"] for name in losses)
    assert metrics["critic/vf_loss"] == pytest.approx(sum(loss.item() for loss in losses.values()), rel=1e-4)
    gradients = dict(made.critic_wg.gradients)
    expected = {"score.weight": layer.weight.grad, "score.bias": layer.bias.grad}
    expected |= {f"model.{name}": p.grad for name, p in model.model.named_parameters()}
    assert apart(flat(expected), flat({name: gradients[name] for name in expected})) < 1e-3
    of_heads = gradients["score.weight"]
    assert all(row.norm() > 0 for row in of_heads)
    assert not any(torch.allclose(of_heads[i], of_heads[i - 1]) for i in range(3))


def test_a_checkpoint_has_the_heads(built, ranks, decided, tmp_path):
    made, layer = built(1)
    first = critics_values(made, decided)
    ranks[1].ask_all("checkpoint", "critic", "save_checkpoint", str(tmp_path))
    (other,) = ranks[1].ask_all("build_heads", made.config.critic, HEADS, 1)
    assert not torch.allclose(other[0], layer.weight)
    assert apart_values(critics_values(made, decided), first) > 0.01
    ranks[1].ask_all("checkpoint", "critic", "load_checkpoint", str(tmp_path))
    assert apart_values(critics_values(made, decided), first) == 0


def test_only_a_critic_with_as_many_heads_is_resumed_from(ready, ranks, tmp_path):
    """The checkpoints are verl's: of its own critic of one value, and of one with three heads."""
    config = ready(1, *OVERRIDES, recipe="hae").config
    ranks[1].ask_all("checkpoint", "critic", "save_checkpoint", str(tmp_path / "1"))
    ranks[1].ask_all("build_heads", config.critic, HEADS, 0)
    ranks[1].ask_all("checkpoint", "critic", "save_checkpoint", str(tmp_path / "3"))
    for reads, other in ((3, 1), (1, 3)):
        config.turnkey.credit.heads = reads
        check_resumed_heads(tmp_path / str(reads), config)
        message = (
            rf"{tmp_path}/{other} was .* heads \({other}\) than .*=hae reads \({reads}\): .*credit.heads={other}\)"
        )
        with pytest.raises(ConfigError, match=message):
            check_resumed_heads(tmp_path / str(other), config)


def critics_values(made: Any, rollout: Rollout) -> dict[str, Mapping[str, list[float]]]:
    with filled(rollout) as batch:
        batch = made._balance_batch(batch, metrics={})
        batch = made._compute_values(batch, {})
        return {field: read(batch, field) for field in FIELDS}


def apart_values(steps: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Of the head that differs least the largest difference."""
    return min(
        max(
            np.abs(np.subtract(row, other[field][key])).max()
            for key, row in steps[field].items()
            if key in other[field]
        )
        for field in FIELDS
    )


def test_the_loss_is_the_released_codes():
    """One row per head; each pair of numbers stands at two tokens."""
    case = ORACLE["hiper_value_loss"]
    columns: dict[str, torch.Tensor] = {}
    output, learnt = {}, {}

    def jagged(row: list[float]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row)], layout=torch.jagged)

    for head, field in zip(HEADS, FIELDS, strict=True):
        predicted, old, target = case["head: prediction, old, target at its positions"][head.name]
        off = [9.0] * (3 - len(predicted))  # tokens where the head learns nothing
        output[field] = jagged([*predicted, *off, 0.0])  # the value before a token is the output of the one before
        columns |= {field: jagged([*old, *off]), target_field(head): jagged([*target, *[torch.nan] * len(off)])}
        learnt[learnt_positions(head)] = len(predicted)
    columns["response_mask"] = torch.nested.as_nested_tensor([torch.ones(3, dtype=torch.int64)], layout=torch.jagged)
    data = TensorDict(columns, batch_size=1)
    tu.assign_non_tensor(data, dp_size=1, **learnt)
    loss, metrics = heads_loss(output, data, config=SimpleNamespace(cliprange_value=case["clip"]), heads=HEADS)
    assert loss.item() == pytest.approx(case["released, no 1/2"])
    for name, half in case["each, with verl 0.9.1's factor 1/2"].items():
        assert metrics[f"critic/{name}/vf_loss"].aggregate() == pytest.approx(2 * half)


def test_a_head_without_a_position_in_the_batch_learns_nothing():
    def jagged(row: list[float]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row)], layout=torch.jagged)

    weights = torch.tensor([0.5, 0.5], requires_grad=True)
    output = {field: torch.nested.nested_tensor_from_jagged(weights * 1, torch.tensor([0, 2])) for field in FIELDS}
    nothing = {target_field(head): jagged([torch.nan]) for head in HEADS}
    data = TensorDict(
        {**{field: jagged([0.0]) for field in FIELDS}, **nothing, "response_mask": jagged([1.0])}, batch_size=1
    )
    tu.assign_non_tensor(data, dp_size=1, **{learnt_positions(head): 0 for head in HEADS})
    loss, _ = heads_loss(output, data, config=SimpleNamespace(cliprange_value=0.5), heads=HEADS)
    loss.backward()
    assert loss.item() == 0
    assert weights.grad.tolist() == [0, 0]


def test_the_trainer_puts_the_worker_in_the_place_of_verls(trainer):
    """With one head for all, the critic is verl's."""
    made = trainer("critic.enable=true", recipe="hae")
    made._init_resource_pool_mgr()
    worker = made.role_worker_mapping[Role.Critic].__ray_actor_class__
    assert issubclass(worker, HeadedCritic)
    assert worker.heads == HEADS
    made = trainer("critic.enable=true", "turnkey.credit.heads=1", recipe="hae")
    made._init_resource_pool_mgr()
    assert not issubclass(made.role_worker_mapping[Role.Critic].__ray_actor_class__, HeadedCritic)
    assert made.value_heads.fields == frozenset()


def test_weights_of_tokens_are_for_the_actor_alone(built):
    """A critic with heads has no loss that takes any."""
    made, _ = built(1, "turnkey.update.weight_by=step")
    worker_setup.set_up_training(made, made.turnkey, made.advantage_step)
    with pytest.raises(AssertionError, match="found no worker with a critic"):
        worker_setup.weigh([], made.critic_wg.workers)


def test_only_the_critics_workers_are_sent_its_columns(built):
    made, _ = built(1)
    own = {*FIELDS[1:], *map(target_field, HEADS)}
    assert made.value_heads.fields == own
    assert made.actor_rollout_wg._left_out == NOT_FOR_WORKERS | own
    assert made.critic_wg._left_out == NOT_FOR_WORKERS


def test_verls_own_loader_is_back_afterwards():
    from verl.utils import model

    with labels(3):
        assert model.load_valuehead_model is not load_valuehead_model
    assert model.load_valuehead_model is load_valuehead_model
