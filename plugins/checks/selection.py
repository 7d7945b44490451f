"""Checks whether a composed configuration uses what its ``turnkey:`` node sets; launch lines: :mod:`command_line`."""

from __future__ import annotations

import difflib

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import estimators
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.catalog import ADAPTERS
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.values import value_at
from verl_turnkey.plugins.config.foreign_keys import FOREIGN, foreign, refusal
from verl_turnkey.plugins.config.presets import names, read
from verl_turnkey.plugins.config.recipe_files import leaves
from verl_turnkey.plugins.config.schema import MODIFY, TurnkeyConfig, estimator_of, loss_of
from verl_turnkey.plugins.verl_api.ledger import TRAINERS


def uses_us(config: DictConfig) -> bool:
    """Whether trainer, agent loop, estimator or loss is one of ours: without any of them stock verl runs.

    Another plugin may use the names of our estimators and losses: they count only beside a ``turnkey:`` node.
    """
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    loop = str(config.actor_rollout_ref.rollout.agent.default_agent_loop)
    if mode.startswith("turnkey_") or loop.startswith("turnkey_"):
        return True
    return "turnkey" in config and (estimator_of(config) is not None or loss_of(config) is not None)


def refuse_former_trainer(trainer: type, config: DictConfig | None) -> None:
    """Refuse a trainer that derives from verl's ``RayPPOTrainer``, before it makes its workers.

    It would train the stock agent loop's rows, or fail after the first rollout because rows lack an episode's steps.
    """
    if config is not None and uses_us(config):
        refuse("former-trainer", module=trainer.__module__, qualname=trainer.__qualname__)


def check_selection(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Refuse a ``turnkey:`` node that nothing reads, parameters without their estimator, and other frameworks' keys."""
    if "turnkey" not in config:
        return
    _check_preset(config, turnkey)
    if not uses_us(config):
        refuse("nothing-selected")
    _check_trainer_name(str(OmegaConf.select(config, "trainer.v1.trainer_mode")))
    parameters = [key for key, value in turnkey.credit.items() if key != MODIFY or value]
    if parameters and estimator_of(config) is None:
        name = str(config.algorithm.adv_estimator)
        refuse(
            "credit-without-method",
            parameters=", ".join(parameters),
            name=name,
            hint=did_you_mean(name, estimators()) or ".",
        )
    nodes = {key: value_at(config, key) for key in FOREIGN}
    values = {
        leaf: value
        for key, node in nodes.items()
        for leaf, value in (leaves(node, f"{key}.") if isinstance(node, DictConfig) else [(key, node)])
    }
    if foreign_values := [(f"{key}={value}", foreign(key) or "") for key, value in values.items() if value is not None]:
        refuse("method-clash", message=refusal(foreign_values))


def _check_preset(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Refuse published settings of another method or loss than the run's; another environment is a warning."""
    preset = turnkey.preset
    method = str(config.algorithm.adv_estimator).removeprefix("turnkey/")
    loss = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")).removeprefix("turnkey/")
    switch = f"turnkey/preset={preset.name}" if preset.name else "turnkey.preset.method, turnkey.preset.loss"
    if preset.method not in (None, method):
        own = [name for name in names() if read(name).method == method]
        instead = f"a preset of {method}: {', '.join(own)}" if own else f"drop it: {method} has no preset"
        refuse("preset-of-another-method", switch=switch, published=preset.method, method=method, instead=instead)
    if preset.loss not in (None, loss):
        refuse("preset-of-another-loss", switch=switch, method=method, published=preset.loss, loss=loss)
    env_id = next((adapter.id for adapter in ADAPTERS if preset.env and adapter.recipe == preset.env), None)
    if env_id not in (None, turnkey.env.id):
        warn("preset-of-another-environment", switch=switch, env_id=env_id, id=turnkey.env.id)


def _check_trainer_name(mode: str) -> None:
    """Refuse a misspelt trainer of ours, which would pass for another plugin's trainer."""
    verls_modes = {name.removeprefix("turnkey_") for name in TRAINERS}
    close = difflib.get_close_matches(mode, TRAINERS, n=1, cutoff=0.8)
    if mode not in TRAINERS and mode not in verls_modes and close:
        refuse("unknown-trainer-mode", mode=mode, instead=close[0])
