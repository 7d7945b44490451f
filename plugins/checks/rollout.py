"""Driver checks of engines, agent loops, the trainer's mode and loggers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.plugins.checks.findings import ignored, refuse, warn
from verl_turnkey.plugins.checks.paths import absent
from verl_turnkey.plugins.checks.unknown_keys import unaccepted
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.schema import TurnkeyConfig, closest
from verl_turnkey.plugins.rollout.strategies import KEY, read_strategy
from verl_turnkey.plugins.verl_api.internals import own_manager
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOOP = f"{ROLLOUT}.agent.default_agent_loop"

# Strategies of each kind of actor that ``model_engine`` composes, by its dataclass; those of FSDP are tested here.
STRATEGIES = {
    "FSDPActorConfig": FSDP,
    "McoreActorConfig": ("megatron",),
    "VeOmniActorConfig": ("veomni",),
    "TorchTitanActorConfig": ("torchtitan",),
}
ENGINES = {"FSDPActorConfig": "dp", "McoreActorConfig": "megatron", "VeOmniActorConfig": "veomni"}
TURBO = "verl.workers.engine.fsdp.fsdp_turbo_impl"  # from verl 0.9.1 on
TESTED_ROLLOUT = "vllm"
SENDERS = ("nccl", "nixl", "delta_sharded", "kimi_ckpt_engine", "mooncake")
"""verl's engines that send weights to other machines; which are installed is known only there"""

# Loggers that need a further package, and its module.
LOGGERS = {name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "trackio", "clearml", "rl_insight")}
LOGGERS["vemlp_wandb"] = "volcengine_ml_platform"


def check_rollout(config: DictConfig, turnkey: TurnkeyConfig, mode: str, loops: Collection[str]) -> None:
    """Refuse engines, loops, modes and loggers that cannot work; warn of untested engines.

    ``loops``: the agent loops of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    _check_strategy(config)
    _check_engine(config, turnkey, loops)
    known = agent_loops(config)
    loop = str(config.actor_rollout_ref.rollout.agent.default_agent_loop)
    if loop not in known and own_manager(config) is None:
        refuse("unknown-agent-loop", f"there is no {LOOP}={loop!r}{closest(loop, known)}")
    _check_gpus(config, mode)
    _check_tools(config)
    rollout, forked = config.actor_rollout_ref.rollout, read_strategy(turnkey.rollout.strategy) is not None
    if rollout.get("full_determinism") and rollout.name == TESTED_ROLLOUT and (rollout.n > 1 or forked):
        refuse(
            "full-determinism",
            f"{ROLLOUT}.full_determinism=true gives all requests of a server the same seed, so that all rollouts of a "
            f"task are equal and there is nothing to compare: set it to false ({ROLLOUT}.seed seeds each "
            "server as a whole)",
        )
    if mode == "turnkey_separate_async":
        _check_separate(config)
    _check_loss_name(config)
    _check_loggers(config)
    if config.trainer.get("val_only") and not config.trainer.get("val_before_train", True):
        refuse(
            "val-only-without-validation",
            "trainer.val_only=true validates before training and stops there, and trainer.val_before_train=false "
            "leaves that out, so that the run would train: set trainer.val_before_train=true",
        )
    _warn_greedy(config)
    if {*loops} == {"turnkey_env"}:
        _warn_turns(config)


def agent_loops(config: DictConfig) -> list[str]:
    """Names of the agent loops that workers know: verl's, ours, and those of the user's modules and YAML file.

    Raises:
        ConfigError: the YAML file is missing or has another content.
    """
    importlib.import_module("verl.experimental.agent_loop")  # fills the registry
    from verl.experimental.agent_loop.agent_loop import (
        _agent_loop_registry,
        resolve_config_path,  # pyright: ignore[reportPrivateImportUsage]
    )

    names = [*_agent_loop_registry]
    key = f"{ROLLOUT}.agent.agent_loop_config_path"
    if path := OmegaConf.select(config, key):
        try:
            entries: Any = OmegaConf.load(resolve_config_path(path))
            names += [str(entry["name"]) for entry in entries]
        except Exception as error:
            refuse("agent-loops-unreadable", f"{key}={path} cannot be read ({type(error).__name__}: {error})")
    return names


def _check_tools(config: DictConfig) -> None:
    """Check files of tools, which verl's agent-loop workers load after the models, with any agent loop."""
    from verl.experimental.agent_loop.agent_loop import resolve_config_path  # pyright: ignore[reportPrivateImportUsage]

    for name in ("tool_config_path", "function_tool_path"):
        key = f"{ROLLOUT}.multi_turn.{name}"
        if not (path := OmegaConf.select(config, key)):
            continue
        try:
            file = resolve_config_path(path)
        except FileNotFoundError:  # not in a folder that verl searches
            file = path
        if not os.path.isfile(file):
            absent(config, f"{key}={path}: there is no such file, and verl's workers load it with any agent loop")
        elif name == "tool_config_path":
            content: Any = OmegaConf.load(file)
            for tool in content.get("tools") or []:
                module = str(tool.class_name).rpartition(".")[0]
                try:
                    missing = find_spec(module) is None
                except ImportError:  # a parent is missing
                    missing = True
                if missing:
                    absent(config, f"{key}={path}: there is no module {module!r} of the tool {tool.class_name}")


def _check_strategy(config: DictConfig) -> None:
    actor = config.actor_rollout_ref.actor
    kind = str(actor.get("_target_", "")).rpartition(".")[2]
    known, strategy = STRATEGIES.get(kind), str(actor.strategy)
    if kind == "FSDPActorConfig" and strategy == "fsdp_turbo" and find_spec(TURBO):
        known = (*FSDP, strategy)
    if known is not None and strategy not in known:
        owner = next((ENGINES.get(actor_class) for actor_class, names in STRATEGIES.items() if strategy in names), None)
        way_out = f": it needs model_engine={owner}" if owner else closest(strategy, list(known))
        refuse("strategy-unusable", f"{ACTOR}.strategy={strategy} does not fit this configuration{way_out}")
    if strategy not in FSDP:
        warn(
            "strategy-untested",
            f"{ACTOR}.strategy={strategy} is untested with verl-turnkey, which is tested on fsdp and fsdp2",
        )


def _check_engine(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    rollout = config.actor_rollout_ref.rollout
    known = [*RolloutReplicaRegistry._registry]
    if OmegaConf.is_missing(rollout, "name"):
        alternatives = ", ".join(name for name in known if name != TESTED_ROLLOUT)
        refuse(
            "rollout-name-missing",
            f"{ROLLOUT}.name is not set: write {ROLLOUT}.name={TESTED_ROLLOUT} (or {alternatives})",
        )
    name = str(rollout.name)
    if name not in known:
        refuse("unknown-rollout-name", f"there is no {ROLLOUT}.name={name!r}{closest(name, known)}")
    if name != TESTED_ROLLOUT:
        warn("rollout-untested", f"{ROLLOUT}.name={name} is untested with verl-turnkey, which is tested on vllm")
    if name == "sglang" and rollout.skip_tokenizer_init:
        selected = read_strategy(turnkey.rollout.strategy)
        ways = {
            "turnkey.rollout.stop": (turnkey.rollout.stop, "use turnkey.rollout.stop_token_ids"),
            f"{KEY}.stop": (selected and getattr(selected[1], "stop", None), f"set {KEY}.stop=[]"),
        }
        for key, (stop, instead) in ways.items():
            if stop:
                refuse(
                    "skip-tokenizer-init",
                    f"{key}={stop} needs SGLang's tokenizer, which {ROLLOUT}.skip_tokenizer_init=true leaves out: set "
                    f"it to false, or {instead}",
                )
    short = turnkey.rollout.max_tokens_per_turn
    if name == "trtllm" and {*AGENT_LOOPS} & {*loops} and short not in (None, rollout.response_length):
        lower = "" if turnkey.rollout.prompt == "conversation" else "lower that instead, or "
        refuse(
            "turn-tokens-without-effect",
            f"turnkey.rollout.max_tokens_per_turn={short} has no effect with {ROLLOUT}.name=trtllm: verl's server "
            f"writes up to data.max_response_length={rollout.response_length} tokens whatever it is asked for; "
            f"{lower}use {ROLLOUT}.name={TESTED_ROLLOUT}",
        )
    if name == "trtllm" and (selected := read_strategy(turnkey.rollout.strategy)) and not selected[0].clones:
        refuse(
            "branching-trtllm",
            f"{KEY}={selected[0].name} asks the model for a few tokens, or for log-probabilities of a text, and "
            f"verl's server for {ROLLOUT}.name=trtllm supports neither: use {ROLLOUT}.name={TESTED_ROLLOUT}",
        )
    if next(unaccepted(config, ROLLOUT), None) and "unknown-dataclass-key" not in ignored(config):
        return  # check_accepted names the key
    try:  # as the workers do, but only after they have loaded the models
        omega_conf_to_dataclass(rollout)  # within the whole tree, so that an error names the key of the value
    except Exception as error:
        refuse("rollout-invalid", f"{ROLLOUT} is not valid: {_last_cause(error)}")


def _last_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_gpus(config: DictConfig, mode: str) -> None:
    """Refuse rollout servers whose GPUs do not divide the GPUs of their pool."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    per_server = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    pools = {"trainer": (trainer.nnodes, trainer.n_gpus_per_node)}
    if mode.endswith("separate_async") and rollout.nnodes:
        pools[ROLLOUT] = (rollout.nnodes, rollout.n_gpus_per_node)
        if not config.actor_rollout_ref.hybrid_engine:
            del pools["trainer"]
    for where, (nodes, gpus) in pools.items():
        if nodes * gpus % per_server:
            refuse(
                "rollout-gpus",
                f"{ROLLOUT}.tensor_model_parallel_size x data_parallel_size = {per_server} GPUs per server do not "
                f"divide the {nodes * gpus} of {where}.nnodes x {where}.n_gpus_per_node: set "
                f"{ROLLOUT}.tensor_model_parallel_size=1, or a divisor",
            )


def _check_separate(config: DictConfig) -> None:
    """Refuse what verl's separate_async would reject by an assertion inside Ray."""
    rollout, sync = config.actor_rollout_ref.rollout, config.trainer.v1.separate_async.parameter_sync_step
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    here = "trainer.v1.trainer_mode=turnkey_separate_async"
    if batch != sync * mini:
        refuse(
            "separate-batch-size",
            f"{here} needs data.train_batch_size = trainer.v1.separate_async.parameter_sync_step x "
            f"{ACTOR}.ppo_mini_batch_size, got {batch} and {sync} x {mini}",
        )
    for key in ("nnodes", "n_gpus_per_node"):
        if rollout[key] < 1:
            refuse(
                "separate-rollout-gpus",
                f"{here} needs GPUs of its own for the rollout: set {ROLLOUT}.{key}, got {rollout[key]}",
            )
    backend, key = str(rollout.checkpoint_engine.backend), f"{ROLLOUT}.checkpoint_engine.backend"
    if backend == "naive":
        refuse(
            "separate-weights-naive",
            f"{here} sends weights between machines: set {key} to nccl, nixl or another engine, got naive",
        )
    if backend not in SENDERS and not rollout.checkpoint_engine.get("custom_backend_module"):
        refuse("unknown-weights-engine", f"there is no {key}={backend!r}{closest(backend, list(SENDERS))}")


def _check_loss_name(config: DictConfig) -> None:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    name = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    if name not in POLICY_LOSS_REGISTRY:
        refuse(
            "unknown-loss",
            f"there is no {ACTOR}.policy_loss.loss_mode={name!r}"
            f"{known_as(name, of='loss') or closest(name, [*POLICY_LOSS_REGISTRY])}",
        )


def _check_loggers(config: DictConfig) -> None:
    from verl.utils.tracking import Tracking

    loggers: Any = config.trainer.logger
    names: Iterable[str] = [loggers] if isinstance(loggers, str) else loggers or []
    for name in names:
        if name not in Tracking.supported_backend:
            refuse(
                "unknown-logger",
                f"there is no trainer.logger={name!r}{closest(name, list(Tracking.supported_backend))}",
            )
        if name in LOGGERS and find_spec(LOGGERS[name]) is None:
            refuse(
                "logger-missing",
                f"trainer.logger={name} needs the package {LOGGERS[name]!r}: pip install it, or drop it",
            )


def _warn_greedy(config: DictConfig) -> None:
    """Warn of equal validation episodes: at temperature 0 verl's V1 trainers are greedy, whatever do_sample is."""
    validation = config.actor_rollout_ref.rollout.val_kwargs
    settings = [f"do_sample={validation.do_sample}"] * bool(validation.do_sample)
    settings += [f"n={validation.n}"] * (validation.n > 1)
    if settings and validation.temperature == 0:
        warn(
            "greedy-validation",
            f"{ROLLOUT}.val_kwargs: {' and '.join(settings)} at temperature=0, which is greedy whatever do_sample "
            "says: set val_kwargs.temperature, or n=1",
        )


def _warn_turns(config: DictConfig) -> None:
    """Warn of the keys of verl's multi-turn loops that turnkey_env does not read."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    replacements = {
        "max_assistant_turns": "turnkey.rollout.max_turns",
        "max_user_turns": "turnkey.rollout.max_turns",
    }
    if OmegaConf.select(config, "turnkey.rollout.action_format") != "tools":
        own = "an environment, which has its own actions, unless turnkey.rollout.action_format=tools"
        replacements |= {"tool_config_path": own, "function_tool_path": own}
    for key, instead in replacements.items():
        if multi_turn.get(key) is not None:
            warn(
                "multi-turn-without-effect",
                f"{ROLLOUT}.multi_turn.{key}={multi_turn[key]} has no effect with the agent loop turnkey_env: use "
                f"{instead}",
            )
    for key, default in {"max_tool_response_length": 256, "tool_response_truncate_side": "middle"}.items():
        if multi_turn.get(key, default) != default:
            warn(
                "multi-turn-cut-without-effect",
                f"{ROLLOUT}.multi_turn.{key}={multi_turn[key]} has no effect with the agent loop turnkey_env: "
                "observations are not cut",
            )
