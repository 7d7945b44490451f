"""Keys that verl does not have or does not read, values that a recipe replaces, a node ``turnkey`` without readers.

Only nodes that verl reads key by key are checked. Below others (``engine_kwargs``, ``override_config``,
``ray_init``, ``apply_chat_template_kwargs``, ...) any key reaches a library, and verl passes all of them on.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import estimators
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.catalog import ADAPTERS
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import ACTOR, ESTIMATOR, MODE, MODEL, ROLLOUT, CheckedRun
from verl_turnkey.plugins.checks.values import STOCK, value_at
from verl_turnkey.plugins.config.command_line import CommandLine, groups, near_miss
from verl_turnkey.plugins.config.composing import verls_config_dir, verls_keys
from verl_turnkey.plugins.config.foreign_keys import FOREIGN, foreign, refusal
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.config.presets import names, read
from verl_turnkey.plugins.config.recipe_files import beside_parameters, leaves
from verl_turnkey.plugins.config.schema import MODIFY, TurnkeyConfig, closest, estimator_of, loss_of
from verl_turnkey.plugins.verl_api.ledger import TRAINERS

# Nodes of plain keys. `actor_rollout_ref` holds those of the next list.
READ_BY_KEY = (
    *("data", "trainer", "trainer.v1", "algorithm", "algorithm.rollout_correction", "reward"),
    "actor_rollout_ref",
)
# Keys that verl's code reads although its YAML files do not list them.
UNLISTED = {
    *("data.cache_dir", "data.chat_template_func", "data.filter_prompts", "data.need_tools_kwargs"),
    "model_engine",  # a group of its files, which leaves its choice as a key
    *("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights", "trainer.remove_previous_ckpt_in_save"),
    *("reward.reward_kwargs", "reward.timeout"),
}
# Nodes that become a dataclass in each worker, which accepts no other key.
DATACLASSES = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model")
# Keys of earlier versions of verl that scripts still add.
FORMER = {
    "data.sampler": "this verl draws the tasks of a batch itself; a data set of your own is data.custom_cls",
    "trainer.val_generations_to_log_to_wandb": "verl reads trainer.log_val_generations",
}


def dataclasses(*, use_critic: bool, use_reference: bool) -> list[str]:
    """The nodes that become a dataclass in the workers of this run."""
    roles = [("critic", use_critic), ("actor_rollout_ref.ref", use_reference)]
    return [*DATACLASSES, *(name for name, used in roles if used)]


def check_accepted(config: DictConfig, node: str) -> None:
    """Refuse a key at which verl's workers would fail, with the closest one."""
    for key, target, parameters in unaccepted(config, node):
        argument, kind = override(key, OmegaConf.select(config, key)), target.rpartition(".")[2]
        hint = _closest(key, parameters)
        refuse("unknown-dataclass-key", argument=argument, kind=kind, hint=f"; {hint}" if hint else "")


def check_unknown(config: DictConfig) -> None:
    """Warn of keys that nothing reads, with the closest one."""
    for key, value in _unread(config):
        hint = next((text for former, text in FORMER.items() if f"{key}.".startswith(f"{former}.")), _closest(key))
        warn("unknown-key", argument=override(key, value), hint=f"; {hint}" if hint else "")


def unaccepted(config: DictConfig, node: str) -> Iterator[tuple[str, str, Collection[str]]]:
    """The keys of ``node``, and of dataclasses below it, that their class does not take: key, class, its arguments."""
    section, target = OmegaConf.select(config, node), OmegaConf.select(config, f"{node}._target_")
    if not isinstance(section, DictConfig) or target is None or (parameters := _parameters(str(target))) is None:
        return
    for name in map(str, section):
        key = f"{node}.{name}"
        if name != "_target_" and name not in parameters and key not in verls_keys():
            yield key, str(target), parameters
        if isinstance(section._get_node(name), DictConfig):
            yield from unaccepted(config, key)


@cache
def _parameters(target: str) -> Collection[str] | None:
    """The arguments of the class ``target``; None where they are not known, or it takes any."""
    from hydra.utils import get_class

    try:
        parameters = inspect.signature(get_class(target)).parameters
    except (ImportError, ValueError):  # verl itself reports it
        return None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else list(parameters)


def _unread(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """The keys that verl does not have, with their values; of an unknown node, all keys below it."""
    if not verls_keys():
        return
    exempt = {f"trainer.v1.{config.trainer.v1.trainer_mode}"}  # the parameters of a trainer of the user's own
    nodes = [node for node in READ_BY_KEY if node != "data" or not OmegaConf.select(config, "data.custom_cls.path")]
    for node in nodes:
        section = OmegaConf.select(config, node)
        for name in section if isinstance(section, DictConfig) else ():
            if (key := f"{node}.{name}") not in verls_keys() | UNLISTED | exempt:
                yield from _leaves(section, str(name), key)
    roots = {key for key in verls_keys() if "." not in key}
    for name in sorted({*map(str, config)} - roots - UNLISTED):
        # A node of another name is of the user's own code.
        plain = not isinstance(config._get_node(name), DictConfig)
        if plain or difflib.get_close_matches(name, roots, n=1, cutoff=0.8):
            yield from _leaves(config, name, name)


def _leaves(node: DictConfig, name: str, key: str) -> Iterator[tuple[str, Any]]:
    value = node._get_node(name)
    yield from leaves(value, f"{key}.") if isinstance(value, DictConfig) else [(key, node[name])]


def _closest(key: str, siblings: Collection[str] = ()) -> str:
    """``did you mean``: the same name elsewhere below the root, else the closest of the same node; empty: none."""
    parent, _, name = key.rpartition(".")
    root = key.partition(".")[0]
    below = f"{root}." if parent else ""
    keys = verls_keys() if parent else verls_keys() | {*beside_parameters("base")}
    moved = [other for other in keys if other.startswith(below) and other.endswith(f".{name}")]
    if len(moved) == 1:
        return f"did you mean {moved[0]}?"
    roots = {other.partition(".")[0] for other in verls_keys()}
    if root not in roots:
        close = difflib.get_close_matches(root, roots, n=1, cutoff=0.8)
        return f"did you mean {close[0]}{key[len(root) :]}?" if close else ""
    names = [other.removeprefix(f"{parent}.") for other in verls_keys() if other.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(name, [*names, *siblings], n=1, cutoff=0.7)
    return f"did you mean {parent}.{close[0]}?" if close else ""


# Key -> its default, and what verl does instead of reading it.
NOWHERE = {
    "actor_rollout_ref.nccl_timeout": (600, "verl's workers start their process groups with torch's own timeout"),
    f"{ACTOR}.freeze_vision_tower": (False, "verl's engines train all of the model"),
    f"{ACTOR}.use_prefix_grouper": (False, "verl's engines pass it on to no model"),
    f"{MODEL}.tiled_mlp.enabled": (False, "verl's engines pass it on to no model"),
    "skip.rollout.enable": (False, "verl's V1 trainers read skip.rollout_tq"),
    "skip.async_rollout.enable": (False, "verl's V1 trainers read skip.rollout_tq"),
}
# What the agent-loop workers import for ``rollout.trace.backend``.
TRACERS = ("weave", "mlflow", "trackio")
# verl's losses that clip ratios.
CLIPPING = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "clip_cov", "geo_mean", "cispo")


def check_unread(run: CheckedRun) -> None:
    """Warn of keys without effect; refuse those whose neglect loses checkpoints or trains something else."""
    for key, (default, instead) in NOWHERE.items():
        if run.get(key) not in (default, None):
            warn("key-without-effect", setting=run.setting(key), instead=instead)
    _check_elsewhere(run)
    if backend := run.get(f"{ROLLOUT}.trace.backend"):  # V1 trainers trace nothing, and each worker imports it
        if backend in TRACERS and find_spec(backend) is None:
            refuse("trace-package-missing", backend=backend)
        warn("trace-without-effect", backend=backend)
    saves, strategy = run.config.trainer.save_freq > 0, str(run.actor.strategy)
    if saves and strategy != "megatron" and (folder := run.config.trainer.get("default_hdfs_dir")):
        refuse("hdfs-dir", folder=folder, strategy=strategy)
    if run.get("skip.rollout_tq.enable") and run.our_loops:
        refuse("rollout-skip", loop=run.our_loops[0])


def _check_elsewhere(run: CheckedRun) -> None:
    """Warn of keys whose value verl reads elsewhere."""
    for role, engine in ((ACTOR, "fsdp_config"), *([("critic", "fsdp")] if run.use_critic else [])):
        clip, theirs = run.get(role).get("grad_clip", 1.0), run.get(f"{role}.optim.clip_grad")
        if clip not in (1.0, theirs):
            warn("grad-clip-without-effect", role=role, clip=clip, theirs=theirs)
        strategy, theirs = run.get(f"{role}.{engine}.strategy"), run.get(f"{role}.strategy")
        if strategy not in (None, "fsdp", theirs):
            warn("engine-strategy-without-effect", role=role, engine=engine, strategy=strategy, theirs=theirs)
    if run.use_critic:
        key = "ulysses_sequence_parallel_size"
        spread, theirs = run.config.critic.get(key, 1), run.get(f"critic.fsdp.{key}")
        if spread not in (1, theirs) and theirs is not None:
            warn("critic-spread-without-effect", spread=spread, theirs=theirs)
    ratio, low, high = (run.actor.get(f"clip_ratio{side}") for side in ("", "_low", "_high"))
    if run.loss_name in CLIPPING and ratio not in (None, 0.2, low, high) and None not in (low, high):
        warn("clip-ratio-without-effect", ratio=ratio, low=low, high=high)


LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


def replaced(config: DictConfig, arguments: Sequence[str]) -> list[str]:
    """A text for each value of the user's file that a recipe replaces; none without such a file."""
    flat = verls_config_dir() / STOCK
    if not (CommandLine(arguments).own_files and HydraConfig.initialized() and flat.is_file()):
        return []
    hydra = HydraConfig.get()
    words = [str(word) for word in hydra.overrides.task]
    user_words = [word for word in words if not word.lstrip("+").startswith("turnkey")]
    try:
        loader = GlobalHydra.instance().config_loader()
        without_groups = loader.load_configuration(str(hydra.job.config_name), user_words, RunMode.RUN)
    except HydraException:  # their file or line needs a group of ours
        return []
    stock = OmegaConf.load(flat)
    replacements = []
    for key, user_value in leaves(without_groups):
        if key == ESTIMATOR or key.startswith("hydra."):
            continue
        value = OmegaConf.select(config, key)
        if user_value in (value, OmegaConf.select(stock, key)):
            continue
        lost = f"your file has {key}={user_value}, and +turnkey would make it {value}: write {key}="
        if key == MODE and value != (matching := f"turnkey_{str(user_value).removeprefix('turnkey_')}"):
            refuse("group-replaces-override", message=f"{lost}{matching} on the launch line")
        if key == LOOP:
            refuse("group-replaces-choice", message=f"{lost}{user_value} or {value} on the launch line")
        if key != MODE:
            replacements.append(f"{key}={user_value} of your file, now {value}")
    return replacements


def uses_us(config: DictConfig) -> bool:
    """Whether trainer, agent loop, estimator or loss is one of ours: without any of them stock verl runs.

    Another plugin may use the names of our estimators and losses: they count only beside a ``turnkey:`` node.
    """
    mode = str(OmegaConf.select(config, MODE))
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
    mode, verls_modes = str(OmegaConf.select(config, MODE)), {name.removeprefix("turnkey_") for name in TRAINERS}
    close = difflib.get_close_matches(mode, TRAINERS, n=1, cutoff=0.8)
    if mode not in TRAINERS and mode not in verls_modes and close:  # else it would pass for another plugin's
        refuse("unknown-trainer-mode", mode=mode, instead=close[0])
    parameters = [key for key, value in turnkey.credit.items() if key != MODIFY or value]
    if parameters and estimator_of(config) is None:
        name = str(config.algorithm.adv_estimator)
        hint = did_you_mean(name, estimators()) or "."
        refuse("credit-without-method", parameters=", ".join(parameters), name=name, hint=hint)
    values: dict[str, Any] = {}
    for key in FOREIGN:
        node = value_at(config, key)
        values.update(leaves(node, f"{key}.") if isinstance(node, DictConfig) else {key: node})
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


def check_root_keys(config: DictConfig) -> None:
    """Refuse root keys such as ``turnkey/enviroment``, which Hydra makes of ``+turnkey/enviroment=x``."""
    for key in map(str, config):
        if near_miss(key.split("/")[0]) or key.startswith("turnkey/"):
            refuse("unknown-config-group", key=key, closest=closest(key, list(groups())))
    if isinstance(config.get("turnkey"), str):
        refuse("turnkey-plain-value", turnkey=config.turnkey)
