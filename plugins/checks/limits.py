"""Checks of sizes and of what verl reports only once models are loaded: counts, tokens and rows of a micro-batch,
positions of the model, optimizers, reward code, the queue.

verl reports most of these after the first rollout, some with the first long row, perhaps days later.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse, refuse_with, warn
from verl_turnkey.plugins.checks.resources import (
    RAISES_POSITIONS,
    absent,
    model_config,
    model_positions,
    positions,
    vllm_positions,
)
from verl_turnkey.plugins.checks.run import (
    ACTOR,
    BATCH,
    FILTER,
    LOSS,
    MODE,
    REF,
    ROLLOUT,
    CheckedRun,
    N,
    spread_of,
    updates_of_a_step,
)
from verl_turnkey.plugins.config import machine
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.resolve import CRITIC_TOKENS
from verl_turnkey.plugins.config.schema import closest
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

COUNTS = (
    BATCH,
    "data.max_prompt_length",
    "data.max_response_length",
    N,
    f"{ROLLOUT}.val_kwargs.n",
    f"{ROLLOUT}.agent.num_workers",
    *(f"{ROLLOUT}.{what}_parallel_size" for what in ("tensor_model", "data", "pipeline_model")),
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.v1.separate_async.parameter_sync_step",
)
MAY_BE_NULL = ("data.gen_batch_size", "data.val_batch_size", f"{ROLLOUT}.max_model_len")
# Whether a pass cuts micro-batches by tokens, and the key with their rows where it does not.
MICRO_BATCHES = (
    (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    (f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_micro_batch_size_per_gpu"),
)
TOKENS = "critic.ppo_max_token_len_per_gpu"
SPREAD = "ulysses_sequence_parallel_size"


def check_limits(run: CheckedRun) -> None:
    """Refuse sizes with which a run would stop later or train nothing."""
    number = run.turnkey.update.mini_batches
    episodes = run.config.data.train_batch_size // updates_of_a_step(run.config) * run.rollout.n
    if number is not None and number > episodes:
        refuse("mini-batches-episodes", number=number, episodes=episodes)
    _check_micro_batches(run)
    # Actor and critic take the same mini-batches of whole episodes, cut for as many data-parallel ranks.
    key, spread = f"critic.fsdp.{SPREAD}", spread_of(run.actor) if str(run.actor.strategy) in FSDP else None
    if run.use_critic and run.our_trainer and spread not in (None, run.get(key)):
        refuse("critic-ranks", setting=run.setting(key), spread=spread)
    response, described = check_turns(run)
    prompt = run.rollout.prompt_length
    longest = prompt + response
    row_size = f"a row may have {longest} tokens (data.max_prompt_length={prompt} and {response} {described})"
    _check_tokens(run, longest, row_size)
    room, key = positions(run.config)
    if room is not None and longest > room:
        refuse(
            "context-too-long",
            longest=longest,
            prompt=prompt,
            response=response,
            described=described,
            key=key,
            room=room,
        )


def check_turns(run: CheckedRun) -> tuple[int, str]:
    """Refuse a conversation without room for turns. Returns how many tokens may follow a prompt, and what they are."""
    options, response = run.turnkey.rollout, run.rollout.response_length
    turn = options.max_tokens_per_turn
    if options.prompt != "conversation":  # also where the data name our loop, row by row
        return turn or response if {*run.loops} == {"turnkey_env"} else response, "written"
    if turn is None:
        needs = "turnkey.agent" if "turnkey_agent" in run.loops else "turnkey.rollout.prompt=conversation"
        refuse("turn-tokens-missing", needs=needs, response=response)
    if turn > response or (turn == response and options.max_turns > 1):
        refuse("response-shorter-than-turn", response=response, turn=turn)
    return response, "appended to it, turns and observations"


def check_counts(config: DictConfig) -> None:
    """Refuse counts that are not positive whole numbers; other checks compute with them."""
    for key in (*COUNTS, *MAY_BE_NULL):
        value = OmegaConf.select(config, key)
        if value is None and key in MAY_BE_NULL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse_with(f"range:{key}", f"{key}: expected a whole number, 1 or more, got {value!r}")
    # verl takes a batch in whole fetches of data.gen_batch_size prompts, or sets this to 1 itself.
    fetch, batch = config.data.get("gen_batch_size"), config.data.train_batch_size
    single = str(OmegaConf.select(config, MODE)).removeprefix("turnkey_") != "sync"
    single |= any(OmegaConf.select(config, key) for key in (FILTER, "trainer.v1.sampler.sync_refill_failed_groups"))
    if fetch and not single and batch % fetch:
        refuse("gen-batch-size", fetch=fetch, batch=batch)


def _check_micro_batches(run: CheckedRun) -> None:
    """With fixed micro-batches the trainer pads to their sizes, which verl does not choose itself."""
    (actor, _), (rollout, _), _ = MICRO_BATCHES
    dynamic = {switch: bool(run.get(switch)) for switch, _ in MICRO_BATCHES}
    if dynamic[actor] != dynamic[rollout]:
        refuse("dynamic-batch-mismatch", actor=actor, first=dynamic[actor], rollout=rollout, second=dynamic[rollout])
    for switch, size in MICRO_BATCHES if run.use_reference else MICRO_BATCHES[:2]:
        rows, former_key = run.get(size), size.removesuffix("_per_gpu")
        if not dynamic[switch] and (not isinstance(rows, int) or rows < 1):
            former = run.get(former_key)
            unread = f" ({former_key}={former} counts the rows of all GPUs, and verl ignores it)" if former else ""
            refuse("micro-batch-size-missing", switch=switch, size=size, rows=rows, unread=unread)
        idle = [key for key in (size, former_key) if run.get(key) is not None]
        if dynamic[switch] and idle:
            tokens = size.replace("micro_batch_size", "max_token_len")
            warn("micro-batch-size-without-effect", key=idle[0], value=run.get(idle[0]), switch=switch, tokens=tokens)
    phases = "turnkey.update.order=reverse_turns" if run.turnkey.update.order == "reverse_turns" else None
    if run.loss is not None and run.loss.compares_groups:
        phases = f"{LOSS}={run.loss.name}"
    if phases and not (dynamic[actor] and dynamic[rollout]):
        refuse("fixed-micro-batches", phases=phases, actor=actor)


def _check_tokens(run: CheckedRun, longest: int, row_size: str) -> None:
    """A micro-batch cut by tokens has to hold the longest row; with sequence parallelism its GPUs hold it together."""
    parts, critic = run.config.actor_rollout_ref, run.config.critic
    if str(parts.actor.strategy) not in FSDP:
        return  # other engines count differently
    spread = spread_of(parts.actor)
    used = [(f"{ACTOR}.ppo_max_token_len_per_gpu", parts.actor.use_dynamic_bsz, spread)]
    used.append((f"{ROLLOUT}.log_prob_max_token_len_per_gpu", parts.rollout.log_prob_use_dynamic_bsz, spread))
    if run.use_reference:
        key = f"{REF}.log_prob_max_token_len_per_gpu"
        used.append((key, parts.ref.log_prob_use_dynamic_bsz, spread_of(parts.ref)))
    if run.use_critic:
        differs = run.get(CRITIC_TOKENS) not in (None, critic.ppo_max_token_len_per_gpu)
        used.append((f"+{CRITIC_TOKENS}" if differs else TOKENS, True, critic.fsdp.ulysses_sequence_parallel_size))
        sizes = ("ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu")  # (the second follows the first)
        if key := next((key for key in sizes if critic.get(key) is not None), None):
            warn("critic-micro-batch-without-effect", key=key, value=critic[key])
    actor, actor_cuts, _ = used[0]
    actor_short = actor_cuts and (run.get(actor) or 0) * spread < longest
    for key, dynamic, gpus in used:
        limit, (node, _, name) = run.get(key.lstrip("+")) or 0, key.lstrip("+").rpartition(".")
        follows = key != actor and gpus >= spread and OmegaConf.is_interpolation(run.get(node), name)
        if dynamic and limit * gpus < longest and not (actor_short and follows):  # to raise the actor's is enough
            together, least = f" on each of {gpus} GPUs ({SPREAD})" if gpus > 1 else "", -(-longest // gpus)
            refuse("micro-batch-tokens", key=key, limit=limit, together=together, row_size=row_size, least=least)


FUNCTION = "reward.custom_reward_function"
QUEUE = "transfer_queue.backend.SimpleStorage.total_storage_size"
SCHEDULES = ("constant", "cosine")
"""of the learning rate, with FSDP"""
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""lets vLLM, not verl, go past the positions of the model"""


def check_late(run: CheckedRun) -> None:
    """Refuse what would end the run after GPUs were reserved."""
    _check_reward_code(run)
    _check_optimizers(run)
    _check_spread(run)
    _check_length(run)
    _check_queue(run)
    sampler = run.config.trainer.v1.sampler
    threshold = sampler.max_off_policy_threshold
    if threshold is not None and not (isinstance(threshold, int) and threshold > 0):
        refuse("off-policy-threshold", threshold=threshold)
    run.needs_name("unknown-off-policy-strategy", str(sampler.max_off_policy_strategy), ("drop", "wait"))


def _check_reward_code(run: CheckedRun) -> None:
    """Check the reward manager and function, which verl loads in workers of their own with any agent loop."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.reward import get_custom_reward_fn

    name, source = str(run.config.reward.reward_manager.name), run.config.reward.reward_manager.source
    if source == "register" and name not in REWARD_MANAGER:
        choices = ", ".join(REWARD_MANAGER)
        refuse("unknown-reward-manager", name=name, closest=closest(name, [*REWARD_MANAGER]), choices=choices)
    path = run.get(f"{FUNCTION}.path")
    if not path or "://" in path or {*run.loops} <= {*AGENT_LOOPS}:  # which does not call it, or as a component
        return
    if not Path(path).expanduser().is_file():
        absent(run.config, f"{FUNCTION}.path={path}: there is no such file")
        return
    try:
        get_custom_reward_fn(run.config)
    except Exception as error:  # the user's own code runs here
        name, kind = run.get(f"{FUNCTION}.name"), type(error).__name__
        refuse("reward-function-unloadable", path=path, name=name, kind=kind, error=error)


def _check_optimizers(run: CheckedRun) -> None:
    for role in (ACTOR, "critic") if run.use_critic else (ACTOR,):
        if run.get(f"{role}.strategy") not in FSDP:
            continue
        schedule = f"{role}.optim.lr_scheduler_type"
        run.needs_name("unknown-schedule", run.get(schedule), SCHEDULES, role=role)
        module, name = run.get(f"{role}.optim.optimizer_impl"), run.get(f"{role}.optim.optimizer")
        if not module:
            continue
        setting = f"{role}.optim.optimizer_impl={module}"
        if find_spec(str(module).partition(".")[0]) is None:
            absent(run.config, f"{setting}: the package is not installed")
        elif not hasattr(importlib.import_module(module), name):
            refuse("unknown-optimizer", role=role, module=module, name=name)
    if run.config.actor_rollout_ref.model.get("use_liger") and find_spec("liger_kernel") is None:
        absent(run.config, "actor_rollout_ref.model.use_liger=true needs the package liger_kernel: pip install it")


def _check_spread(run: CheckedRun) -> None:
    """Sequence parallelism must divide the GPUs and the attention heads."""
    heads = model_config(run.config).get("num_attention_heads")
    gpus = run.config.trainer.nnodes * run.config.trainer.n_gpus_per_node
    for part in ("", "fsdp_config.") if run.actor.strategy in FSDP else ():
        key = f"{ACTOR}.{part}ulysses_sequence_parallel_size"
        number = run.get(key)
        if gpus % number:
            refuse("spread-gpus", part=part, number=number, gpus=gpus)
        if heads and heads % number:
            refuse("spread-heads", part=part, number=number, heads=heads)


def _check_length(run: CheckedRun) -> None:
    """verl does not start with more positions than the model's configuration has, and vLLM with no more than it
    computes from the model's files.
    """
    (most, key), limit, who = model_positions(run.config), run.rollout.max_model_len, "verl"
    limit, key = (most, key) if limit is None else (limit, f"{ROLLOUT}.max_model_len")
    of_workers = run.get("ray_kwargs.ray_init.runtime_env.env_vars")
    variables = os.environ | (dict(of_workers) if isinstance(of_workers, DictConfig) else {})
    variable = variables.get(LONGER)
    without_limit = str(variable).strip().lower() in ("1", "true")
    without_limit |= bool({"hf_overrides", "max_model_len"} & {*(run.get(f"{ROLLOUT}.engine_kwargs.vllm") or ())})
    vllm_most = None
    if run.rollout.name == "vllm" and not without_limit:
        folder = machine.model_folder(str(run.config.actor_rollout_ref.model.path))
        vllm_most = vllm_positions(machine.model_config(str(folder))) if folder else None
    if vllm_most is not None and (most is None or vllm_most < most):
        most, who = vllm_most, "vLLM"
    if limit is not None and most is not None and limit > most:
        raised = f", or, since vLLM allows it, {RAISES_POSITIONS}={vllm_most}"
        alternative = raised if vllm_most is not None and vllm_most >= limit else ""
        refuse("max-model-len", key=key, limit=limit, who=who, most=most, alternative=alternative)


def _check_queue(run: CheckedRun) -> None:
    """Rows that do not fit into the storage fail, and their episodes with them."""
    size = run.get(QUEUE)
    if size is None or run.get("transfer_queue.backend.storage_backend") != "SimpleStorage":
        return
    rows = run.config.data.train_batch_size * run.rollout.n
    rows *= run.turnkey.rollout.max_turns if run.our_loops else 1
    if rows > size:
        refuse("queue-too-small", size=size, rows=rows)
