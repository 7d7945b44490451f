"""Our policy losses in verl's registry: found by name, averaged as verl averages, and with their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from contract_tools import PARTITION, Compose, Episode, NoParams, advance, fill, put, read, rejecting, row
from tensordict import TensorDict
from test_weighing import Engine
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.utils import need_critic
from verl.workers.config import FSDPActorConfig

from verl_turnkey.losses import TokenLoss, losses, policy_loss, register_loss, registry
from verl_turnkey.plugins.actor import loss as bridge
from verl_turnkey.plugins.actor import loss_inputs
from verl_turnkey.plugins.checks.driver import resolve_and_check as check
from verl_turnkey.plugins.checks.update import PROVIDED
from verl_turnkey.plugins.config.schema import loss_of, loss_params, turnkey_config
from verl_turnkey.plugins.register import configure
from verl_turnkey.plugins.verl_api.ledger import loss_names
from verl_turnkey.plugins.verl_api.queue import fields_of

TEACHER = {
    "teacher_log_prob": -torch.arange(20.0).reshape(4, 5) / 10,
    "has_teacher": torch.tensor([True, False, True, True]),
}
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1]])


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 5, generator=draw)
    return {
        "log_prob": old + 0.4 * torch.randn(4, 5, generator=draw),
        "old_log_prob": old,
        "advantages": torch.randn(4, 5, generator=draw),
        "response_mask": MASK,
    }


def worker():
    actor = SimpleNamespace(engine=Engine(), loss_fn=partial(print))
    actor.set_loss_fn = lambda fn: setattr(actor, "loss_fn", fn)
    return SimpleNamespace(actor=actor)


@pytest.fixture(autouse=True)
def fresh_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_params", {})
    monkeypatch.setattr(bridge, "_found_finite", set())


def under_verl(name: str, inputs: dict[str, torch.Tensor], rows: slice = slice(None), **more):
    """As ``ppo_loss`` calls it for one micro-batch of a mini-batch of all rows."""
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(MASK.sum()), global_batch_size=4)
    part = {key: tensor[rows] for key, tensor in inputs.items()}
    return get_policy_loss_fn(name)(**part, loss_agg_mode="token-mean", config=config, **more)


@pytest.mark.parametrize("name", [name for name in loss_names() if not losses()[name].needs])
@pytest.mark.parametrize("prefix", ["", "turnkey/"])
def test_verls_mean_over_tokens_is_the_loss_itself(inputs, name, prefix):
    params = losses()[name].params()
    configure(worker(), (), name, params)
    loss, metrics = under_verl(prefix + name, inputs)
    expected, plain = policy_loss(name, **inputs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics == {f"actor/{key}": value for key, value in plain.items()}


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("a3po", {"staleness": torch.tensor([1.0, 2.0, 8.0, 1.0])}),
        (
            "hdpo",
            {
                "tool_advantages": torch.tensor([[1.0], [0.0], [-2.0], [0.0]]).expand(4, 5),
                "weight_share": torch.full((4,), 3.0),
            },
        ),
        (
            "rebel",
            {
                "rewards": torch.tensor([1.0, 0.0, 2.0, 0.0]),
                "group_reward": torch.tensor([0.5, 0.5, 1.0, 1.0]),
                "group_log_ratio": torch.tensor([0.1, 0.1, -0.2, -0.2]),
            },
        ),
        ("sdar", TEACHER),
        ("skill_sd", TEACHER),
        ("sdpo_sampled", {**TEACHER, "weight_share": torch.full((4,), 2.0)}),
    ],
)
def test_further_inputs_travel_with_the_rows(inputs, name, columns):
    """The columns of a micro-batch are at the loss's hand while verl's loss function runs, and only then."""
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)

    def verls(model_output, data, dp_group=None, config=None):
        config.global_batch_info.update(dp_size=1, batch_num_tokens=int(MASK.sum()), global_batch_size=4)
        mode = "seq-mean-token-mean" if name == "rebel" else "token-mean"
        return get_policy_loss_fn(name)(**inputs, loss_agg_mode=mode, config=config)

    class Actor:
        engine = Engine()

        def __init__(self):
            self.loss_fn = partial(verls, config=config)

        def set_loss_fn(self, fn):
            self.loss_fn = fn

    actor = Actor()
    configure(SimpleNamespace(actor=actor), (), name, losses()[name].params())
    nested = {
        key: value if value.dim() == 1 else torch.nested.as_nested_tensor(list(value), layout=torch.jagged)
        for key, value in columns.items()
    }
    assert actor.loss_fn.keywords["config"] is config
    queue = {loss_inputs.queue_name(key): value for key, value in nested.items()}
    loss, metrics = actor.loss_fn(model_output={}, data=TensorDict({**queue, "other": MASK}, batch_size=4))
    expected, plain = policy_loss(name, **inputs, **columns)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics == {f"actor/{key}": value for key, value in plain.items()}
    assert loss_inputs.current() == {}


def test_parameters_arrive(inputs):
    values = []
    for clip_low in (0.2, 0.01):
        configure(worker(), (), "turn_ratio", losses()["turn_ratio"].params(clip_low=clip_low))
        values.append(under_verl("turn_ratio", inputs)[0].item())
        assert values[-1] == pytest.approx(policy_loss("turn_ratio", **inputs, clip_low=clip_low)[0].item(), rel=1e-5)
    assert values[0] != pytest.approx(values[1], rel=1e-3)


def test_rollout_correction_weighs_the_tokens(inputs):
    configure(worker(), (), "dgpo", losses()["dgpo"].params())
    plain = under_verl("dgpo", inputs)[0].item()
    assert under_verl("dgpo", inputs, rollout_is_weights=torch.full((4, 5), 0.5))[0].item() == pytest.approx(plain / 2)


@dataclass(frozen=True)
class ScaleParams:
    scale: float = 2.0


def test_a_parameter_called_scale_scales_no_gradient(inputs, monkeypatch):
    """Only a loss that says so takes hold of the engine."""
    for name, hooked in (("st_ppo", True), ("plain", False)):
        monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
        if name == "plain":
            plain = register_loss("plain", params=ScaleParams)
            plain(lambda inputs, params: TokenLoss(-params.scale * inputs.log_prob * inputs.advantages))
        process = worker()
        configure(process, (), name, losses()[name].params())
        assert ("train_batch" in vars(process.actor.engine)) is hooked
    assert under_verl("plain", inputs)[0].item() == pytest.approx(policy_loss("plain", **inputs)[0].item(), rel=1e-5)


def test_a_wrong_loss_stops_the_first_update(inputs, monkeypatch):
    """A scalar would be spread over the tokens; numbers are looked at once per worker, where there are tokens."""
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
    returned = [TokenLoss(torch.tensor(0.6))]
    register_loss("wrong", params=ScaleParams)(lambda inputs, params: returned[0])
    configure(worker(), (), "wrong", ScaleParams())
    with pytest.raises(ValueError, match=r"loss 'wrong': expected TokenLoss\.loss of shape \(4, 5\)"):
        under_verl("wrong", inputs)
    not_finite = TokenLoss(torch.full((4, 5), torch.nan))
    padding = {**inputs, "response_mask": torch.zeros(4, 5)}
    returned[0] = TokenLoss(torch.zeros(4, 5))
    under_verl("wrong", padding)
    returned[0] = not_finite
    with pytest.raises(ValueError, match=r"finite numbers.* got 20 not finite"):
        under_verl("wrong", inputs)
    returned[0] = TokenLoss(torch.zeros(4, 5))
    under_verl("wrong", inputs)
    returned[0] = not_finite  # weeks later verl leaves such a step out, as it does for every loss
    assert under_verl("wrong", inputs)[0].isnan()


def test_without_our_trainer_there_are_no_parameters(inputs):
    with pytest.raises(RuntimeError, match=r"trainer\.v1\.trainer_mode=turnkey_sync"):
        under_verl("turn_ratio", inputs)


def test_configuration_to_parameters(compose: Compose):
    config = compose("+turnkey=gigpo", "+turnkey/loss=turn_ratio", "turnkey.loss.clip_low=0.1")
    assert loss_of(config).name == "turn_ratio"
    assert loss_params(config, turnkey_config(config)).clip_low == 0.1
    check(config, use_critic=need_critic(config))


OPTIONS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in loss_names()),
    ("segment_mask", {"threshold": 0.5}),
    ("segment_mask", {"threshold": 1.0, "drop_zeros": True}),
    *(("turn_ratio", {"ratio": r, "aggregate": "turns"}) for r in ("geometric", "product")),
    ("turn_ratio", {"gradient": "token", "dual_clip": 3.0}),
    ("sdpo_sampled", {"rows": "all", "weight": 0.5}),
]
FURTHER = {
    "staleness": torch.tensor([1.0, 2.0, 8.0, 1.0]),
    "tool_advantages": MASK * torch.tensor([[1.0], [0.0], [-2.0], [0.0]]),
    **TEACHER,
    **{key: torch.tensor([1.0, 0.0, 2.0, 0.5]) for key in ("rewards", "group_reward", "group_log_ratio")},
}


@pytest.mark.parametrize("parts", [(slice(0, 4),), (slice(0, 1), slice(1, 4)), (slice(0, 2), slice(2, 3), slice(3, 4))])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_micro_batches_add_up(inputs, name, options, parts, monkeypatch):
    """The gradient of each row is the same however the mini-batch is split: that of the loss on all rows at once."""
    spec = losses()[name]
    params = spec.params(**options)
    columns = {key: value for key, value in FURTHER.items() if key in spec.needs}
    rows = {key: inputs[key] for key in ("old_log_prob", "advantages", "response_mask")}
    share = registry.weight_share(spec, params, **rows, extra=columns)
    travels = columns | ({} if share is None else {"weight_share": share.expand(4)})
    configure(worker(), (), name, params)
    log_prob = inputs["log_prob"].clone().requires_grad_()
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(MASK.sum()), global_batch_size=4)
    mode = "seq-mean-token-mean" if spec.per_row else "token-mean"
    for rows in parts:
        here = {key: value[rows] for key, value in travels.items()}
        monkeypatch.setattr(loss_inputs, "current", lambda here=here: here)
        part = {key: tensor[rows] for key, tensor in {**inputs, "log_prob": log_prob}.items()}
        get_policy_loss_fn(name)(**part, loss_agg_mode=mode, config=config)[0].backward()
    whole = inputs["log_prob"].clone().requires_grad_()
    policy_loss(name, **{**inputs, "log_prob": whole}, **columns, **options)[0].backward()
    assert whole.grad.abs().sum() > 0
    torch.testing.assert_close(log_prob.grad, whole.grad)


def columns_of(made, episodes):
    """The further columns that stand beside the rows once the trainer has computed advantages, by row key."""
    batch = advance(made, fill(episodes), old_log_probs=lambda key, i: -0.05 if (key[2], i) == ("1", 0) else -1.0)
    names = [name for name in fields_of(batch) if name.startswith("turnkey_") and name != "turnkey_task"]
    return {name: read(batch, name) for name in names}, read(batch, "response_mask")


EPISODES: dict[str, list[Episode]] = {
    "a": [[{"reward": 1.0, "anchor": "s"}, {"reward": 0.0, "anchor": "t"}], [{"reward": 0.0, "anchor": "s"}]],
    "b": [[{"reward": 0.0, "anchor": "s"}], "it died", [{"reward": 0.0, "anchor": "s"}]],
}


def test_the_trainer_sends_what_a_loss_with_weights_cannot_see_in_a_part(queue, trainer):
    """The tokens of the batch for each trained one; where the loss has an ordinary mean, nothing."""
    columns, mask = columns_of(trainer("+turnkey/loss=segment_mask"), EPISODES)
    assert set(columns) == {"turnkey_weight_share"}
    tokens = [(key[2], i) for key, row in mask.items() for i, m in enumerate(row) if m]
    share = len(tokens) / len([token for token in tokens if token != ("1", 0)])
    assert share > 1
    assert list(columns["turnkey_weight_share"].values()) == pytest.approx([share] * len(mask))
    tq.kv_clear(keys=list(mask), partition_id=PARTITION)
    assert columns_of(trainer("+turnkey/loss=turn_ratio"), EPISODES)[0] == {}


def test_a_weight_may_depend_on_the_advantage(queue, trainer):
    """The trainer knows it when it computes the share: group b has no credit, and its tokens do not count."""
    columns, mask = columns_of(trainer("+turnkey/loss=segment_mask", "turnkey.loss.drop_zeros=true"), EPISODES)
    tokens = [(key, i) for key, row in mask.items() for i, m in enumerate(row) if m]
    left = [(key, i) for key, i in tokens if key[0] == "a" and (key[2], i) != ("1", 0)]
    assert 0 < len(left) < len(tokens) - 1
    assert list(columns["turnkey_weight_share"].values()) == pytest.approx([len(tokens) / len(left)] * len(mask))


@pytest.mark.parametrize("name", ["st_ppo", "turn_ratio"])
def test_a_rejection_splits_no_turn_of_a_loss(queue, trainer, name):
    """The turns are those of the mask before; the weights those of the mask that is left."""
    aggregate = ["turnkey.loss.aggregate=turns"] if name == "turn_ratio" else []
    for session in range(2):
        put("w", session, [row("11100111", [{"step": t, "reward": t, "anchor": "s"} for t in range(2)], 1.0)])
    rejected = {("w_0_0", 1), *(("w_1_0", i) for i in (5, 6, 7))}
    batch = rejecting(trainer, rejected, f"+turnkey/loss={name}", *aggregate)
    assert read(batch, "response_mask")["w_0_0"] == [1, 0, 1, 0, 0, 1, 1, 1]
    assert read(batch, "turnkey_turn")["w_0_0"] == [0, 0, 0, -1, -1, 1, 1, 1]
    if aggregate:  # 8 tokens are left, of 3 turns
        assert read(batch, "turnkey_weight_share") == pytest.approx({"w_0_0": 8 / 3, "w_1_0": 8 / 3})


def test_what_a_loss_accepts_and_nobody_gives_is_left_out(queue, trainer, monkeypatch):
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
    register_loss("mine", params=NoParams, accepts=("prior", "staleness", "rewards"))(lambda inputs, params: None)
    made = trainer()
    loss = made.advantage_step.loss = losses()["mine"]
    made.advantage_step.loss_params = NoParams()
    columns, _ = columns_of(made, EPISODES)
    assert set(columns) == {"turnkey_staleness", "turnkey_rewards"}
    mask = torch.nested.as_nested_tensor([torch.ones(3)], layout=torch.jagged)
    nobody = loss_inputs.Batch(trainer().advantage_step.steps, {}, [{"max_global_steps": 0}], 1, mask, rejects=False)
    assert set(loss_inputs.columns(loss, nobody).keys()) == {"turnkey_staleness"}  # there is no table of steps
    rows = TensorDict({"turnkey_staleness": torch.ones(2)}, batch_size=2)
    assert list(loss_inputs.read(rows, loss.inputs)) == ["staleness"]
    assert loss_inputs.read(rows, ("prior",)) == {}


def test_the_inputs_the_trainer_provides_are_the_ones_the_driver_counts_on():
    assert set(PROVIDED) == set(loss_inputs.PROVIDERS)
