"""``turnkey.update.weight_by`` under verl's own loss functions: what weighs alike, in any split and either layout."""

from __future__ import annotations

import ast
import importlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
import verl
from contract_tools import PARTITION, advance, batch_of, fill, nested, put, read, rejecting
from contract_tools import row as played_row
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import CriticConfig, FSDPActorConfig, PolicyLossConfig
from verl.workers.utils import losses as verls
from verl.workers.utils.losses import ppo_loss, value_loss

from verl_turnkey.losses import losses
from verl_turnkey.losses.registry import weighs
from verl_turnkey.losses.turns import turn_ids
from verl_turnkey.plugins.actor import loss as bridge
from verl_turnkey.plugins.actor import weighing
from verl_turnkey.plugins.actor.weighing import token_weights
from verl_turnkey.plugins.checks.header import MEANS
from verl_turnkey.plugins.checks.update import OTHER_MODES, TAKE_WEIGHTS
from verl_turnkey.plugins.register import configure

UNITS = ("step", "episode", "task")
TASKS = [[[2, 3, 1], [4], [1, 1]], [[1, 2, 2, 1]]]  # tokens of each turn, by task and episode
TOKENS = [
    (t, e, k, i) for t, es in enumerate(TASKS) for e, ks in enumerate(es) for k, n in enumerate(ks) for i in range(n)
]
N = len(TOKENS)
PROMPT = 2
DRAW = torch.Generator().manual_seed(0)
GIVEN = {
    name: scale * torch.randn(N, generator=DRAW, dtype=torch.float64)
    for name, scale in (
        ("now", 0.2),
        ("old_log_probs", 0.2),
        ("advantages", 1.0),
        ("ref_log_prob", 0.2),
        ("entropy", 1.0),
        ("values", 1.0),
        ("returns", 1.0),
        ("predicted", 1.0),
    )
}
GIVEN = {
    name: column - 1 if name in ("now", "old_log_probs", "ref_log_prob") else column for name, column in GIVEN.items()
}
ENTROPY_COEFF, KL_COEF, CLIP = 0.3, 0.7, 0.5


@dataclass
class Row:
    key: str
    tokens: list[int | None]
    """of each response token its position in ``TOKENS``; None where it is masked"""


def rows_of(layout: str) -> list[Row]:
    rows = []
    for t, episodes in enumerate(TASKS):
        for e, turns in enumerate(episodes):
            parts = [[TOKENS.index((t, e, k, i)) for i in range(n)] for k, n in enumerate(turns)]
            if layout == "steps":
                rows += [Row(f"{t}_{e}_{k}", list(part)) for k, part in enumerate(parts)]
            else:
                rows.append(Row(f"{t}_{e}_0", [x for part in parts for x in (*part, None, None)][:-2]))
    return [*rows, Row("2_0_0", [None]), Row("padding", [None, None])]


ROWS = {layout: rows_of(layout) for layout in ("steps", "merged")}


def weights_of(by: str, rows: list[Row]) -> list[torch.Tensor]:
    mask = nested([[int(x is not None) for x in row.tokens] for row in rows])
    return list(token_weights(by, [row.key for row in rows], turn_ids(mask), mask).unbind())


def batch(rows: list[Row], weights: list[torch.Tensor], **settings: Any) -> TensorDict:
    """A micro-batch as verl's engine hands it to a loss."""

    def column(name: str) -> torch.Tensor:
        return nested([[0.3 if x is None else GIVEN[name][x].item() for x in row.tokens] for row in rows])

    names = ("old_log_probs", "advantages", "ref_log_prob", "values", "returns")
    tensors = {name: column(name) for name in names} | {
        "prompts": nested([[5] * PROMPT for _ in rows]),
        "responses": nested([[7] * len(row.tokens) for row in rows]),
        "response_mask": nested([[int(x is not None) for x in row.tokens] for row in rows]),
        weighing.COLUMN: nested(weights),
    }
    others = {"dp_size": 1, "batch_num_tokens": 777, "global_batch_size": 55.5, weighing.MINI_BATCHES: 1}
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=others | settings)


def model_output(rows: list[Row], leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of all tokens of the rows; those of the responses are the leaves."""

    def whole(name: str) -> torch.Tensor:
        masked = 0.1 + 0 * leaves[name].sum()  # a model's output has a gradient everywhere
        flat = []
        for row in rows:
            response = [masked if x is None else leaves[name][x] for x in row.tokens]
            # verl shifts by one: the output at a position is about the next token.
            flat += [torch.zeros(()) for _ in range(PROMPT - 1)] + response + [torch.zeros(())]
        lengths = torch.tensor([0] + [PROMPT + len(row.tokens) for row in rows])
        return torch.nested.nested_tensor_from_jagged(torch.stack(flat), lengths.cumsum(0))

    return {"log_probs": whole("now"), "entropy": whole("entropy"), "values": whole("predicted")}


def actor_config(name: str, mode: str = "token-mean") -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=mode,
        entropy_coeff=ENTROPY_COEFF,
        use_kl_loss=True,
        kl_loss_coef=KL_COEF,
        kl_loss_type="kl",
        policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.5),
    )


def critic_loss() -> partial:
    config = SimpleNamespace(cliprange_value=CLIP, loss_agg_mode="token-mean", loss_scale_factor=None)
    assert {*vars(config)} <= {*CriticConfig.__dataclass_fields__}
    return partial(value_loss, config=config)


class Engine:
    """What the losses that scale gradients take hold of; how they do is in test_clipping_bias.py."""

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        raise NotImplementedError


def worker(loss_fn: partial) -> SimpleNamespace:
    made = SimpleNamespace(loss_fn=loss_fn, engine=Engine())
    made.set_loss_fn = partial(setattr, made, "loss_fn")
    return made


def weighed_actor(name: str = "vanilla") -> partial:
    actor = worker(partial(ppo_loss, config=actor_config(name)))
    weighing.weigh_actor(SimpleNamespace(worker_dict={"actor": SimpleNamespace(actor=actor)}))
    return actor.loss_fn


def weighed_critic() -> partial:
    critic = worker(critic_loss())
    weighing.weigh_critic(SimpleNamespace(worker_dict={"actor": worker(partial(print)), "critic": critic}))
    return critic.loss_fn


Split = list[list[list[list[int]]]]
"""Mini-batches of ranks of micro-batches of rows."""


def gradients(loss_fn: Callable[..., Any], rows: list[Row], weights: list[torch.Tensor], split: Split) -> torch.Tensor:
    """The mean over mini-batches of their gradients, (3, N): verl adds micro-batches up and averages the ranks."""
    leaves = {name: GIVEN[name].float().requires_grad_() for name in ("now", "entropy", "predicted")}
    for mini_batch in split:
        for micro_batch in itertools.chain.from_iterable(mini_batch):
            part = [rows[i] for i in micro_batch]
            data = batch(
                part,
                [weights[i] for i in micro_batch],
                **{"dp_size": len(mini_batch), weighing.MINI_BATCHES: len(split)},
            )
            loss, _ = loss_fn(model_output=model_output(part, leaves), data=data)
            (loss / len(mini_batch) / len(split)).backward()
    return torch.stack([torch.zeros(N) if leaf.grad is None else leaf.grad for leaf in leaves.values()]).double()


def by_hand(by: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of actor and critic, from the formulas."""
    counted = {
        "step": lambda t, e, k: 1 / (sum(len(ks) for es in TASKS for ks in es) * TASKS[t][e][k]),
        "episode": lambda t, e, k: 1 / (sum(map(len, TASKS)) * sum(TASKS[t][e])),
        "task": lambda t, e, k: 1 / (len(TASKS) * len(TASKS[t]) * sum(TASKS[t][e])),
    }
    w = torch.tensor([counted[by](t, e, k) for t, e, k, _ in TOKENS], dtype=torch.float64)
    assert w.sum() == pytest.approx(1)
    leaves = {name: GIVEN[name].clone().requires_grad_() for name in ("now", "entropy", "predicted")}
    ratio, advantage = (leaves["now"] - GIVEN["old_log_probs"]).exp(), GIVEN["advantages"]
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    actor = policy - ENTROPY_COEFF * leaves["entropy"] + KL_COEF * (leaves["now"] - GIVEN["ref_log_prob"])
    near = GIVEN["values"] + (leaves["predicted"] - GIVEN["values"]).clamp(-CLIP, CLIP)
    critic = torch.maximum((leaves["predicted"] - GIVEN["returns"]) ** 2, (near - GIVEN["returns"]) ** 2) / 2
    flat = []
    for loss in (actor, critic):
        grads = torch.autograd.grad((w * loss).sum(), list(leaves.values()), allow_unused=True, retain_graph=True)
        flat.append(torch.stack([torch.zeros(N).double() if g is None else g for g in grads]))
    return flat[0], flat[1]


def deal(rows: int, mini_batches: int, ranks: int, seed: int) -> Split:
    """The rows in any order over mini-batches, ranks and micro-batches, none of them empty."""
    draw = random.Random(seed)
    order = draw.sample(range(rows), rows)

    def cut(part: list[int], pieces: int) -> list[list[int]]:
        ends = [0, *sorted(draw.sample(range(1, len(part)), pieces - 1)), len(part)]
        return [part[a:b] for a, b in itertools.pairwise(ends)]

    places = cut(order, mini_batches * ranks)
    micro = [cut(part, draw.randint(1, len(part))) for part in places]
    return [micro[i * ranks : (i + 1) * ranks] for i in range(mini_batches)]


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(
    by=st.sampled_from(UNITS),
    layout=st.sampled_from(["steps", "merged"]),
    mini_batches=st.integers(1, 3),
    ranks=st.integers(1, 2),
    seed=st.integers(0, 999),
)
def test_no_split_and_no_layout_changes_the_gradient(by, layout, mini_batches, ranks, seed):
    """Policy, entropy, KL and value loss are those of the formulas, to 1e-6."""
    rows = ROWS[layout]
    weights = weights_of(by, rows)
    split = deal(len(rows), mini_batches, ranks, seed)
    actor, critic = by_hand(by)
    for loss_fn, expected in ((weighed_actor(), actor), (weighed_critic(), critic)):
        gradient = gradients(loss_fn, rows, weights, split)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_each_term_takes_part_in_the_comparison():
    actor, critic = by_hand("episode")
    assert (actor[:2].abs().max(1).values > 1e-3).all()
    assert critic[2].abs().max() > 1e-3
    assert not torch.allclose(actor, by_hand("step")[0], rtol=0.1)
    assert not torch.allclose(actor, by_hand("task")[0], rtol=0.1)


OURS = [name for name, spec in losses().items() if not spec.needs and not weighs(spec, spec.params())]


@pytest.mark.parametrize("name", [*TAKE_WEIGHTS, *OURS])
def test_every_loss_that_the_driver_lets_pass_takes_the_weights(name, monkeypatch):
    """Its gradient at each token is the weight times that of the plain sum."""
    monkeypatch.setattr(bridge, "_params", {})
    if name in OURS:
        process = SimpleNamespace(actor=worker(partial(print)))
        configure(process, (), name, losses()[name].params())
    rows = ROWS["steps"]
    weights = weights_of("task", rows)
    whole: Split = [[[list(range(len(rows)))]]]
    torch.manual_seed(0)  # clip_cov draws
    gradient = gradients(weighed_actor(name), rows, weights, whole)
    torch.manual_seed(0)
    plain = gradients(weighed_actor(name), rows, [torch.ones_like(w) for w in weights], whole)
    of_token = torch.zeros(N, dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        for x, w in zip(row.tokens, weight.tolist(), strict=True):
            if x is not None:
                of_token[x] = w
    assert plain[0].abs().max() > 0.1
    torch.testing.assert_close(gradient, plain * of_token, rtol=1e-4, atol=1e-7)


def test_without_weights_the_sum_is_verls_token_sum():
    rows = ROWS["merged"]
    ones = [torch.ones(len(row.tokens)) for row in rows]
    whole: Split = [[[list(range(len(rows)))]]]
    sums = partial(ppo_loss, config=actor_config("vanilla", "token-sum"))
    torch.testing.assert_close(gradients(weighed_actor(), rows, ones, whole), gradients(sums, rows, ones, whole))


def test_all_of_verls_losses_are_known():
    """A new one in verl is refused in the driver until it is looked at."""
    of_verl = {name for name, fn in core_algos.POLICY_LOSS_REGISTRY.items() if fn.__module__.startswith("verl.")}
    assert of_verl == {*TAKE_WEIGHTS, "geo_mean"}
    assert "agg_loss" not in core_algos.POLICY_LOSS_REGISTRY["geo_mean"].__code__.co_names


def test_verl_binds_agg_loss_where_we_replace_it():
    """Wherever verl's code takes it by name: the losses of an update, a distillation (refused), and metrics."""
    root = Path(verl.__file__).parent
    modules = set()
    for file in root.rglob("*.py"):
        text = file.read_text()
        if "agg_loss" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            taken = isinstance(node, ast.ImportFrom) and any(alias.name == "agg_loss" for alias in node.names)
            if taken or (isinstance(node, ast.FunctionDef) and node.name == "agg_loss"):
                modules.add(".".join(("verl", *file.relative_to(root).with_suffix("").parts)))
    metrics = {
        "verl.trainer.ppo.v1.trainer_base",
        "verl.trainer.ppo.ray_trainer",
        "verl.experimental.separation.ray_trainer",
    }
    assert modules == {*weighing.BINDINGS, "verl.trainer.distillation.losses", *metrics}
    assert {id(importlib.import_module(name).agg_loss) for name in weighing.BINDINGS} == {id(core_algos.agg_loss)}


def test_verls_function_is_back_after_an_error():
    before = core_algos.agg_loss
    with weighing.weighed(torch.ones(1, 1), 1):
        assert core_algos.agg_loss is verls.agg_loss is not before
    with pytest.raises(RuntimeError, match="size of tensor"), weighing.weighed(torch.ones(3, 3), 1):
        core_algos.agg_loss(torch.ones(2, 2), torch.ones(2, 2), "token-mean")
    assert core_algos.agg_loss is verls.agg_loss is before


def test_rows_without_the_column_stop_the_update():
    data = batch(ROWS["steps"], weights_of("step", ROWS["steps"])).exclude(weighing.COLUMN)
    with pytest.raises(RuntimeError, match=r"no column turnkey_weight.*turnkey\.update\.weight_by"):
        weighed_actor()(model_output={}, data=data)
    with pytest.raises(RuntimeError, match="no worker with a critic"):
        weighing.weigh_critic(SimpleNamespace(worker_dict={"actor": worker(partial(print))}))


def test_every_mean_of_verls_has_its_words():
    accepted = set()
    for mode in MEANS:
        accepted.add(actor_config("vanilla", mode).loss_agg_mode)
    assert accepted == {*MEANS} == {"token-mean", *OTHER_MODES}
    used = set(core_algos.agg_loss.__code__.co_consts)
    means = {x for const in used for x in (const if isinstance(const, tuple) else (const,)) if isinstance(x, str)}
    assert {x for x in means if x.startswith(("token-", "seq-mean-")) and " " not in x} == accepted


# --- what the trainer writes ------------------------------------------------------------------------------------------

EPISODES: dict[str, Any] = {
    "a": [[{"reward": float(t == 2), "anchor": "s"} for t in range(3)], [{"reward": 0.0, "anchor": "s"}]],
    "b": ["it died", [{"reward": 0.0, "anchor": "s"}, {"reward": 1.0, "anchor": "t"}]],
}


def by_row(batch: Any) -> dict[str, float]:
    return {key: sum(weights) for key, weights in read(batch, weighing.COLUMN).items()}


@pytest.mark.parametrize("recipe", ["gigpo", "base"])
def test_the_trainer_writes_the_weights_of_the_batch(queue, trainer, recipe):
    """With an estimator of ours and with verl's own: failed episodes and the padding of two ranks are not counted."""
    overrides = ["algorithm.adv_estimator=grpo"] if recipe == "base" else []
    filled = fill(EPISODES)
    expected = {
        "step": dict.fromkeys(("a_0_0", "a_0_1", "a_0_2", "a_1_0", "b_1_0", "b_1_1"), 1 / 6),
        "episode": {"a_0": 1 / 3, "a_1": 1 / 3, "b_1": 1 / 3},
        "task": {"a": 1 / 2, "b": 1 / 2},
    }
    for by, shares in expected.items():
        made = trainer(f"turnkey.update.weight_by={by}", *overrides, recipe=recipe)
        weights = by_row(advance(made, filled))
        for unit, share in shares.items():
            assert sum(w for key, w in weights.items() if key.startswith(unit)) == pytest.approx(share)
        assert sum(weights.values()) == pytest.approx(1)


def test_without_weights_nothing_is_written_and_nothing_replaced(queue, trainer):
    batch = advance(trainer(), fill(EPISODES))
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    assert weighing.COLUMN not in data


def test_rejected_tokens_weigh_nothing_and_their_turn_as_much_as_before(queue, trainer):
    """Two turns in one row; of the first a token is left, in a hole of the mask; all of another episode is rejected."""
    for session in range(3):
        put("w", session, [played_row("11100111", [{"step": t, "reward": t, "anchor": "s"} for t in range(2)], 1.0)])
    rejected = {("w_0_0", 1), *(("w_1_0", i) for i in (5, 6, 7)), *(("w_2_0", i) for i in range(8))}
    weights = read(rejecting(trainer, rejected, "turnkey.update.weight_by=step"), weighing.COLUMN)
    assert weights["w_0_0"] == pytest.approx([1 / 6, 0, 1 / 6, 0, 0, 1 / 9, 1 / 9, 1 / 9])
    assert weights["w_1_0"] == pytest.approx([1 / 9, 1 / 9, 1 / 9, 0, 0, 0, 0, 0])
    assert weights["w_2_0"] == [0] * 8


def test_the_one_step_of_a_row_may_have_gaps_and_runs_are_steps_where_nobody_tells(queue, trainer):
    put("g", 0, [played_row("11011", [{"step": 0, "reward": 1.0, "anchor": "s"}], 1.0)])
    batch = advance(trainer("turnkey.update.weight_by=step"), batch_of(tq.kv_list(PARTITION)[PARTITION]))
    assert read(batch, weighing.COLUMN)["g_0_0"] == pytest.approx([1 / 4, 1 / 4, 0, 1 / 4, 1 / 4])
    tq.kv_clear(keys=batch.keys, partition_id=PARTITION)
    put("g", 0, [played_row("10011", None, 1.0)])
    made = trainer("turnkey.update.weight_by=step", "algorithm.adv_estimator=grpo", recipe="base")
    batch = advance(made, batch_of(tq.kv_list(PARTITION)[PARTITION]))
    assert read(batch, weighing.COLUMN)["g_0_0"] == pytest.approx([1 / 2, 0, 0, 1 / 4, 1 / 4])
