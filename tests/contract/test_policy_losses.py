"""Our policy losses in verl's registry: found by name, averaged as verl averages, and with their parameters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from contract_tools import Compose
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.utils import need_critic
from verl.workers.config import FSDPActorConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses import TokenLoss, losses, policy_loss, register_loss, registry
from verl_turnkey.plugins import loss as bridge
from verl_turnkey.plugins import loss_inputs
from verl_turnkey.plugins.config import loss_of, loss_params, turnkey_config
from verl_turnkey.plugins.registration import loss_names
from verl_turnkey.plugins.validate import check
from verl_turnkey.plugins.validate_update import PROVIDED

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


class Engine:
    """What the losses that scale gradients take hold of; how they do is in test_clipping_bias.py."""

    def train_batch(self, data, loss_function):
        raise NotImplementedError


WORKER = SimpleNamespace(actor=SimpleNamespace(engine=Engine()))


def with_loss_fn():
    actor = SimpleNamespace(engine=Engine(), loss_fn=partial(print))
    actor.set_loss_fn = lambda fn: setattr(actor, "loss_fn", fn)
    return SimpleNamespace(actor=actor)


@pytest.fixture(autouse=True)
def fresh_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_params", {})


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
    bridge.configure(WORKER, (), name, params)
    found, metrics = under_verl(prefix + name, inputs)
    expected, plain = policy_loss(name, **inputs)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics == {f"actor/{key}": value for key, value in plain.items()}


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("a3po", {"staleness": torch.tensor([1.0, 2.0, 8.0, 1.0])}),
        (
            "hdpo",
            {
                "tool_advantages": torch.tensor([[1.0], [0.0], [-2.0], [0.0]]).expand(4, 5),
                "tool_share": torch.full((4,), 3.0),
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
    bridge.configure(SimpleNamespace(actor=actor), (), name, losses()[name].params())
    nested = {
        key: value if value.dim() == 1 else torch.nested.as_nested_tensor(list(value), layout=torch.jagged)
        for key, value in columns.items()
    }
    assert actor.loss_fn.keywords["config"] is config
    queue = {loss_inputs.queue_name(key): value for key, value in nested.items()}
    found, metrics = actor.loss_fn(model_output={}, data=TensorDict({**queue, "other": MASK}, batch_size=4))
    expected, plain = policy_loss(name, **inputs, **columns)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics == {f"actor/{key}": value for key, value in plain.items()}
    assert loss_inputs.current() == {}


def test_parameters_arrive(inputs):
    values = []
    for clip_low in (0.2, 0.01):
        bridge.configure(WORKER, (), "turn_ratio", losses()["turn_ratio"].params(clip_low=clip_low))
        values.append(under_verl("turn_ratio", inputs)[0].item())
        assert values[-1] == pytest.approx(policy_loss("turn_ratio", **inputs, clip_low=clip_low)[0].item(), rel=1e-5)
    assert values[0] != pytest.approx(values[1], rel=1e-3)


def test_micro_batches_add_up(inputs):
    bridge.configure(WORKER, (), "turn_ratio", losses()["turn_ratio"].params())
    whole = under_verl("turn_ratio", inputs)[0].item()
    parts = [under_verl("turn_ratio", inputs, rows)[0].item() for rows in (slice(0, 1), slice(1, 4))]
    assert sum(parts) == pytest.approx(whole, rel=1e-5)


def test_rollout_correction_weighs_the_tokens(inputs):
    bridge.configure(WORKER, (), "dgpo", losses()["dgpo"].params())
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
        engine = Engine()
        bridge.configure(SimpleNamespace(actor=SimpleNamespace(engine=engine)), (), name, losses()[name].params())
        assert ("train_batch" in vars(engine)) is hooked
    assert under_verl("plain", inputs)[0].item() == pytest.approx(policy_loss("plain", **inputs)[0].item(), rel=1e-5)


def test_without_our_trainer_there_are_no_parameters(inputs):
    with pytest.raises(RuntimeError, match=r"trainer\.v1\.trainer_mode=turnkey_sync"):
        under_verl("turn_ratio", inputs)


def test_configuration_to_parameters(compose: Compose):
    config = compose("+turnkey=gigpo", "+turnkey/loss=turn_ratio", "turnkey.loss.clip_low=0.1")
    assert loss_of(config).name == "turn_ratio"
    assert loss_params(config, turnkey_config(config)).clip_low == 0.1
    check(config, use_critic=need_critic(config))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+turnkey=gigpo", "+turnkey/loss=dgpo", "+turnkey.loss.clip=0.1"], ["turnkey.loss.clip", "clip_low"]),
        (["+turnkey=gigpo", "+turnkey/loss=dgpo", "turnkey.loss.n=-1"], ["turnkey.loss.n", "> 0"]),
        (["+turnkey/loss=dgpo"], ["dgpo", "trainer.v1.trainer_mode=turnkey_sync"]),
        (
            ["+turnkey=gigpo", "actor_rollout_ref.actor.policy_loss.loss_mode=a3po"],
            ["a3po", "algorithm.rollout_correction.bypass_mode=true"],
        ),
        (["+turnkey=gigpo", "+turnkey/loss=hdpo"], ["hdpo", "adv_estimator=gigpo", "tool_advantages"]),
        (["+turnkey=seeupo", "turnkey.update.mini_batches=2"], ["turnkey.update.mini_batches", "reverse_turns"]),
        (["+turnkey=seeupo", "+turnkey/loss=rebel"], ["reverse_turns", "rebel"]),
        (["+turnkey=seeupo", "algorithm.rollout_correction.bypass_mode=true"], ["old_policy=iteration"]),
        (
            ["+turnkey=seeupo", "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"],
            ["reverse_turns", "a row per turn"],
        ),
    ],
)
def test_what_cannot_work_is_refused(compose: Compose, overrides, words):
    config = compose(*overrides)
    with pytest.raises(ConfigError) as error:
        check(config, use_critic=need_critic(config))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("overrides", [["+turnkey=seeupo"], ["+turnkey=gigpo", "+turnkey/loss=a3po"]])
def test_recipes_with_further_keys_pass(compose: Compose, overrides):
    config = compose(*overrides)
    check(config, use_critic=need_critic(config))


def test_a_schedule_that_moves_with_every_turn_is_named(compose: Compose):
    config = compose("+turnkey=seeupo", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine")
    with pytest.warns(UserWarning, match="moves with each"):
        check(config, use_critic=need_critic(config))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [
                "+turnkey=rebn",
                "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
                "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
            ],
            "one importance ratio per row",
        ),
        (
            ["+turnkey=base", "+turnkey/loss=turn_ratio", "algorithm.adv_estimator=gae", "critic.enable=true"],
            "turnkey.loss.gradient=token",
        ),
    ],
)
def test_levels_that_do_not_go_together_are_named(compose: Compose, overrides, words):
    config = compose(*overrides)
    with pytest.warns(UserWarning, match=words):
        check(config, use_critic=need_critic(config))


@pytest.mark.parametrize("parts", [(slice(0, 4),), (slice(0, 1), slice(1, 4)), (slice(0, 2), slice(2, 3), slice(3, 4))])
@pytest.mark.parametrize("name", ["hdpo", "rebel"])
def test_micro_batches_of_losses_with_further_inputs_add_up(inputs, name, parts, monkeypatch):
    """The gradient of each row is the same however the mini-batch is split."""
    columns = {
        "hdpo": {
            "tool_advantages": MASK * torch.tensor([[1.0], [0.0], [-2.0], [0.0]]),
            "tool_share": torch.full((4,), 2.0),
        },
        "rebel": {key: torch.tensor([1.0, 0.0, 2.0, 0.5]) for key in ("rewards", "group_reward", "group_log_ratio")},
    }[name]
    bridge.configure(with_loss_fn(), (), name, losses()[name].params())
    log_prob = inputs["log_prob"].clone().requires_grad_()
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(MASK.sum()), global_batch_size=4)
    mode = "seq-mean-token-mean" if name == "rebel" else "token-mean"
    for rows in parts:
        monkeypatch.setattr(
            loss_inputs, "current", lambda rows=rows: {key: value[rows] for key, value in columns.items()}
        )
        part = {key: tensor[rows] for key, tensor in {**inputs, "log_prob": log_prob}.items()}
        get_policy_loss_fn(name)(**part, loss_agg_mode=mode, config=config)[0].backward()
    whole = inputs["log_prob"].clone().requires_grad_()
    policy_loss(name, **{**inputs, "log_prob": whole}, **columns)[0].backward()
    torch.testing.assert_close(log_prob.grad, whole.grad)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+turnkey/loss=rebel", "actor_rollout_ref.actor.loss_agg_mode=token-mean"], "mean over rows"),
        (
            ["+turnkey/loss=segment_mask", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"],
            "weighs its tokens",
        ),
    ],
)
def test_a_mean_that_the_loss_does_not_mean_is_refused(compose: Compose, overrides, words):
    config = compose("+turnkey=grpo_steps", *overrides)
    with pytest.raises(ConfigError, match=words):
        check(config, use_critic=need_critic(config))


def test_the_inputs_the_trainer_provides_are_the_ones_the_driver_counts_on():
    assert set(PROVIDED) == set(loss_inputs.PROVIDERS)


def test_verls_clip_keys_are_not_silently_ignored(compose: Compose):
    config = compose("+turnkey=gigpo", "+turnkey/loss=turn_ratio", "actor_rollout_ref.actor.clip_ratio_high=0.28")
    with pytest.warns(UserWarning, match=r"clip_ratio_high=0.28 has no effect on turn_ratio, which reads turnkey.loss"):
        check(config, use_critic=need_critic(config))
    config = compose("+turnkey=gigpo", "+turnkey/loss=turn_ratio")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(config, use_critic=need_critic(config))
    assert [str(w.message) for w in caught if "has no effect" in str(w.message)] == []
