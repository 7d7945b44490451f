"""Checks of engines, agent loops, the trainer's mode and loggers, and of ``turnkey.rollout.strategy``."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.plugins.checks.findings import ignored, refuse, warn
from verl_turnkey.plugins.checks.keys import unaccepted
from verl_turnkey.plugins.checks.resources import absent, model_config, searched
from verl_turnkey.plugins.checks.run import ESTIMATOR, FILTER, KL, LOG_PROBS, ROLLOUT, CheckedRun
from verl_turnkey.plugins.checks.values import short_text
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.schema import RolloutConfig, closest
from verl_turnkey.plugins.rollout.strategies import BRANCH_COLUMNS, KEY, read_strategy
from verl_turnkey.plugins.verl_api.internals import own_manager

# Strategies of each kind of actor that ``model_engine`` composes, by its dataclass; those of FSDP are tested here.
STRATEGIES = {
    "FSDPActorConfig": FSDP,
    "McoreActorConfig": ("megatron",),
    "VeOmniActorConfig": ("veomni",),
    "TorchTitanActorConfig": ("torchtitan",),
}
ENGINES = {"FSDPActorConfig": "dp", "McoreActorConfig": "megatron", "VeOmniActorConfig": "veomni"}
TURBO = "verl.workers.engine.fsdp.fsdp_turbo_impl"  # from verl 0.9.1 on
SENDERS = ("nccl", "nixl", "delta_sharded", "kimi_ckpt_engine", "mooncake")
"""verl's engines that send weights to other machines; which are installed is known only there"""
# Loggers that need a further package, and its module.
LOGGERS = {name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "trackio", "clearml", "rl_insight")}
LOGGERS["vemlp_wandb"] = "volcengine_ml_platform"


def check_rollout(run: CheckedRun) -> None:
    """Refuse engines, loops, modes and loggers that cannot work; warn of untested engines."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    config, rollout = run.config, run.rollout
    _check_strategy(run)
    _check_engine(run)
    if own_manager(config) is None:
        loop = str(rollout.agent.default_agent_loop)
        run.needs_name("unknown-agent-loop", loop, agent_loops(config))
    _check_gpus(run)
    _check_tools(run)
    if rollout.get("full_determinism") and rollout.name == "vllm" and (rollout.n > 1 or run.strategy):
        refuse("full-determinism")
    if run.mode == "turnkey_separate_async":
        _check_separate(run)
    if (name := run.loss_name) not in POLICY_LOSS_REGISTRY:
        refuse("unknown-loss", name=name, instead=known_as(name, of="loss") or closest(name, [*POLICY_LOSS_REGISTRY]))
    _check_loggers(run)
    if config.trainer.get("val_only") and not config.trainer.get("val_before_train", True):
        refuse("val-only-without-validation")
    validation = rollout.val_kwargs
    settings = [f"do_sample={validation.do_sample}"] * bool(validation.do_sample)
    settings += [f"n={validation.n}"] * (validation.n > 1)
    if settings and validation.temperature == 0:  # V1 trainers do not read do_sample
        warn("greedy-validation", settings=" and ".join(settings))
    if {*run.loops} == {"turnkey_env"}:
        _warn_turns(run)


def agent_loops(config: DictConfig) -> list[str]:
    """Names of the agent loops that workers know: verl's, ours, and those of the user's modules and YAML file."""
    importlib.import_module("verl.experimental.agent_loop")  # fills the registry
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    names = [*_agent_loop_registry]
    key = f"{ROLLOUT}.agent.agent_loop_config_path"
    if path := OmegaConf.select(config, key):
        try:
            entries: Any = OmegaConf.load(searched(path))
            names += [str(entry["name"]) for entry in entries]
        except Exception as error:
            refuse("agent-loops-unreadable", path=path, kind=type(error).__name__, error=error)
    return names


def _check_tools(run: CheckedRun) -> None:
    """Check files of tools, which verl's agent-loop workers load after the models, with any agent loop."""
    for name in ("tool_config_path", "function_tool_path"):
        key = f"{ROLLOUT}.multi_turn.{name}"
        if not (path := run.get(key)):
            continue
        file = searched(path)
        if not os.path.isfile(file):
            absent(run.config, f"{key}={path}: there is no such file, and verl's workers load it with any agent loop")
        elif name == "tool_config_path":
            try:
                content: Any = OmegaConf.load(file)
            except Exception as error:
                refuse("tool-config-unreadable", name=name, path=path, kind=type(error).__name__, error=error)
                continue
            for tool in content.get("tools") or []:
                module = str(tool.class_name).rpartition(".")[0]
                try:
                    missing = find_spec(module) is None
                except ImportError:  # a parent is missing
                    missing = True
                if missing:
                    absent(run.config, f"{key}={path}: there is no module {module!r} of the tool {tool.class_name}")


def _check_strategy(run: CheckedRun) -> None:
    kind = str(run.actor.get("_target_", "")).rpartition(".")[2]
    usable, strategy = STRATEGIES.get(kind), str(run.actor.strategy)
    if kind == "FSDPActorConfig" and strategy == "fsdp_turbo" and find_spec(TURBO):
        usable = (*FSDP, strategy)
    if usable is not None and strategy not in usable:
        owner = next((ENGINES.get(actor_class) for actor_class, names in STRATEGIES.items() if strategy in names), None)
        way_out = f": it needs model_engine={owner}" if owner else closest(strategy, list(usable))
        refuse("strategy-unusable", strategy=strategy, way_out=way_out)
    if strategy not in FSDP:
        warn("strategy-untested", strategy=strategy)


def _check_engine(run: CheckedRun) -> None:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    rollout, options = run.rollout, run.turnkey.rollout
    engines = [*RolloutReplicaRegistry._registry]
    if OmegaConf.is_missing(rollout, "name"):
        refuse("rollout-name-missing", alternatives=", ".join(name for name in engines if name != "vllm"))
    name = str(rollout.name)
    run.needs_name("unknown-rollout-name", name, engines)
    if name != "vllm":
        warn("rollout-untested", name=name)
    forked = read_strategy(options.strategy)
    if name == "sglang" and rollout.skip_tokenizer_init:
        of_strategy = forked and getattr(forked[1], "stop", None)
        ways = (
            ("turnkey.rollout.stop", options.stop, "use turnkey.rollout.stop_token_ids"),
            (f"{KEY}.stop", of_strategy, f"set {KEY}.stop=[]"),
        )
        for key, stop, instead in ways:
            if stop:
                refuse("skip-tokenizer-init", key=key, stop=stop, instead=instead)
    short = options.max_tokens_per_turn
    if name == "trtllm" and run.our_loops and short not in (None, rollout.response_length):
        lower = "" if options.prompt == "conversation" else "lower that instead, or "
        refuse("turn-tokens-without-effect", short=short, response_length=rollout.response_length, lower=lower)
    if name == "trtllm" and forked and not forked[0].clones:
        refuse("branching-trtllm", strategy=forked[0].name)
    if next(unaccepted(run.config, ROLLOUT), None) and "unknown-dataclass-key" not in ignored(run.config):
        return  # check_accepted names the key
    try:  # as the workers do, but only after they have loaded the models
        omega_conf_to_dataclass(rollout)  # within the whole tree, so that an error names the key of the value
    except Exception as error:
        last: BaseException = error
        while last.__cause__ is not None:
            last = last.__cause__
        refuse("rollout-invalid", keys=" and ".join(_culprits(run.config, str(error))), reason=short_text(last))


def _culprits(config: DictConfig, error: str) -> list[str]:
    """The keys whose removal alone makes the part of ``config`` that Hydra's ``error`` names valid; the part itself if
    there is none.
    """
    from hydra.utils import instantiate

    full_key = re.search(r"full_key: (\S+)", error)
    part: str = full_key[1] if full_key else ROLLOUT
    values: Any = {}
    names: list[str] = []
    with suppress(OmegaConfBaseException, ValueError):  # a broken interpolation; a single value
        values = OmegaConf.to_container(OmegaConf.select(config, part), resolve=True)
    for name in values:
        with suppress(Exception):
            instantiate({key: value for key, value in values.items() if key != name}, _convert_="partial")
            names.append(name)
    # Without a target nothing is made, and a rollout without a name passes most of verl's tests.
    names = [name for name in names if name not in ("_target_", "name")] or names
    return [_set_by(config, f"{part}.{name}") for name in names] or [part]


def _set_by(config: DictConfig, key: str) -> str:
    """The key that gives ``key`` its value: the source, if it is an interpolation."""
    names, node = key.split("."), config
    for at, name in enumerate(names, 1):
        node: Any = node._get_node(name, validate_access=False)
        if node is not None and node._is_interpolation():
            source = re.match(r"\$\{(?:oc\.select:)?(\w[\w.]*)[,}]", node._value())
            return _set_by(config, ".".join([source[1], *names[at:]])) if source else key
        if not isinstance(node, DictConfig):
            break
    return key


def _check_gpus(run: CheckedRun) -> None:
    """Refuse rollout servers whose GPUs do not divide those of their pool, and tensor parallelism that does not divide
    the model's heads.
    """
    rollout, pools = run.rollout, run.pools
    number, heads = rollout.tensor_model_parallel_size, model_config(run.config).get("num_attention_heads")
    if isinstance(heads, int) and heads % number:
        refuse("rollout-heads", number=number, heads=heads, fits=math.gcd(number, heads))
    per_server = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    if ROLLOUT in pools and not run.config.actor_rollout_ref.hybrid_engine:
        del pools["trainer"]
    for where, (nodes, gpus) in pools.items():
        if nodes * gpus % per_server:
            refuse("rollout-gpus", per_server=per_server, gpus=nodes * gpus, where=where)


def _check_separate(run: CheckedRun) -> None:
    """Refuse what verl's separate_async would reject by an assertion inside Ray."""
    rollout, sync = run.rollout, run.config.trainer.v1.separate_async.parameter_sync_step
    batch, mini = run.config.data.train_batch_size, run.actor.ppo_mini_batch_size
    backend = f"{ROLLOUT}.checkpoint_engine.backend"
    if batch != sync * mini:
        refuse("separate-batch-size", batch=batch, sync=sync, mini=mini)
    for key in ("nnodes", "n_gpus_per_node"):
        if rollout[key] < 1:
            refuse("separate-rollout-gpus", key=key, value=rollout[key])
    if run.get(backend) == "naive":
        refuse("separate-weights-naive")
    elif not rollout.checkpoint_engine.get("custom_backend_module"):
        run.needs_name("unknown-weights-engine", str(run.get(backend)), SENDERS)


def _check_loggers(run: CheckedRun) -> None:
    from verl.utils.tracking import Tracking

    loggers: Any = run.config.trainer.logger
    names: Iterable[str] = [loggers] if isinstance(loggers, str) else loggers or []
    for name in names:
        run.needs_name("unknown-logger", name, Tracking.supported_backend)
        if name in LOGGERS and find_spec(LOGGERS[name]) is None:
            refuse("logger-missing", name=name, package=LOGGERS[name])


def _warn_turns(run: CheckedRun) -> None:
    """Warn of the keys of verl's multi-turn loops that turnkey_env does not read."""
    multi_turn, turns = run.rollout.multi_turn, "turnkey.rollout.max_turns"
    replacements = {"max_assistant_turns": turns, "max_user_turns": turns}
    if run.turnkey.rollout.action_format != "tools":
        actions = "an environment, which has its own actions, unless turnkey.rollout.action_format=tools"
        replacements |= {"tool_config_path": actions, "function_tool_path": actions}
    for key, instead in replacements.items():
        if multi_turn.get(key) is not None:
            warn("multi-turn-without-effect", key=key, value=multi_turn[key], instead=instead)
    for key, default in {"max_tool_response_length": 256, "tool_response_truncate_side": "middle"}.items():
        if multi_turn.get(key, default) != default:
            warn("multi-turn-cut-without-effect", key=key, value=multi_turn[key])


SCORING_SERVERS = ("vllm",)
"""verl's servers that return log-probabilities of a given text"""


def check_branching(run: CheckedRun, reward_columns: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a strategy that cannot work; warn of one whose measurements nothing reads.

    ``reward_columns``: those that reward components add. The probe checks whether the environment can be cloned.

    Returns:
        The columns that the strategy adds; none for independent episodes.
    """
    selected = read_strategy(run.turnkey.rollout.strategy)
    if selected is None:
        return ()
    (spec, strategy), options, rollout = selected, run.turnkey.rollout, run.rollout
    setting, method = f"{KEY}={spec.name}", run.estimator
    run.needs_our_loop("branching-agent-loop", strategy=spec.name)
    if method is None:
        refuse("branching-estimator", strategy=spec.name, method=run.value_text(ESTIMATOR))
    elif method.independent:
        refuse("branching-independent", strategy=spec.name, method=method.name)
    if spec.log_probs:
        run.needs_on("branching-log-probs", LOG_PROBS, strategy=spec.name)
    total = getattr(strategy, "trajectories", None)
    if total is not None and total <= rollout.n:
        refuse("branching-trajectories", total=total, n=rollout.n)
    least = turn = options.max_tokens_per_turn or rollout.response_length
    unit = f"branch: one turn may take {turn} tokens"
    if not spec.clones:
        least = getattr(strategy, "tokens", 1)
        unit = f"answer: one may take {least} tokens"
        _check_room(run, least)
    if options.branch_tokens is not None and options.branch_tokens < least:
        refuse("branching-tokens", branch_tokens=options.branch_tokens, unit=unit)
    if spec.scores and run.mode != "turnkey_sync":
        refuse("branching-scores-trainer", setting=setting, mode=run.mode)
    if spec.scores and (server := str(rollout.name)) not in SCORING_SERVERS:
        refuse("branching-scores-server", setting=setting, server=server)
    columns = (*BRANCH_COLUMNS, *spec.gives)
    if clash := sorted({*columns} & {*reward_columns}):
        refuse("branching-column-clash", strategy=spec.name, column=clash[0])
    if spec.trains:  # branches by their own outcome
        run.needs_off("branching-filter-groups", FILTER, strategy=spec.name)
    if spec.trains and run.get(KL):
        refuse("branching-kl-in-reward", strategy=spec.name)
    if spec.clones:
        _warn_budget(options, turn, getattr(strategy, "turns", None))
    if method is None:
        return columns
    read = {*run.columns, *method.before}
    if spec.gives and not {f"extra.{name}" for name in spec.gives} & read:
        warn("branching-unread", strategy=spec.name, gives=", ".join(spec.gives), method=method.name)
    if spec.trains and "extra.parent" not in read:
        warn("branching-parent-unread", strategy=spec.name, method=method.name)
    return columns


def _check_room(run: CheckedRun, tokens: int) -> None:
    """Refuse answers so long that no prompt fits before them: every query would fail."""
    rollout = run.rollout
    room, keys = rollout.prompt_length + rollout.response_length, "data.max_prompt_length + data.max_response_length"
    if rollout.max_model_len is not None and rollout.max_model_len < room:
        room, keys = rollout.max_model_len, f"{ROLLOUT}.max_model_len"
    if tokens >= room:
        refuse("branching-no-room", tokens=tokens, keys=keys, room=room)


def _warn_budget(options: RolloutConfig, turn: int, turns: int | None) -> None:
    """Warn of a budget that is too small for a branch from the first turns."""
    longest = min(options.max_turns, turns or options.max_turns)
    for key, per_turn in {"branch_tokens": turn, "branch_steps": 1}.items():
        limit, needed = getattr(options, key), longest * per_turn
        if limit is not None and limit < needed:
            before = options.max_turns - limit // per_turn
            warn(
                "branching-budget", key=key, limit=limit, before=before, needed=needed, turns=longest, per_turn=per_turn
            )
