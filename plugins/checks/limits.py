"""Checks of sizes in the driver: counts, tokens of a micro-batch, rows of a micro-batch, the model's positions.

verl reports most of these after the first rollout, some with the first long row, perhaps days later.
"""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.paths import positions
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.resolve import CRITIC_TOKENS
from verl_turnkey.plugins.config.schema import TurnkeyConfig, loss_of

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))

COUNTS = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{ROLLOUT}.n",
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
MAY_BE_NULL = ("trainer.total_training_steps", "data.gen_batch_size", "data.val_batch_size", f"{ROLLOUT}.max_model_len")

# Whether a pass cuts micro-batches by tokens, and the key with their rows where it does not.
MICRO_BATCHES = (
    (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    (f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_micro_batch_size_per_gpu"),
)
TOKENS = "critic.ppo_max_token_len_per_gpu"


def check_limits(
    config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str], *, use_critic: bool, use_reference: bool
) -> None:
    """Refuse sizes with which a run would stop later or train nothing; ``loops``: those of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    _check_mini_batches(config, turnkey)
    _check_micro_batches(config, turnkey, use_reference)
    if use_critic:
        _check_ranks(config)
    rollout = config.actor_rollout_ref.rollout
    response, described = check_turns(config, turnkey, loops)
    longest = rollout.prompt_length + response
    row_size = (
        f"a row may have {longest} tokens (data.max_prompt_length={rollout.prompt_length} and {response} {described})"
    )
    _check_tokens(config, longest, row_size, use_critic, use_reference)
    room, key = positions(config)
    if room is not None and longest > room:
        refuse(
            "context-too-long",
            f"{row_size}, but {key} gives {room}: lower data.max_prompt_length or data.max_response_length",
        )


def updates_of_a_step(config: DictConfig) -> int:
    """Updates per training step: more than one with ``separate_async``."""
    mode, key = str(config.trainer.v1.trainer_mode), "trainer.v1.separate_async.parameter_sync_step"
    return int(OmegaConf.select(config, key)) if mode.removeprefix("turnkey_") == "separate_async" else 1


def check_turns(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> tuple[int, str]:
    """Refuse a conversation without room for turns. Returns how many tokens may follow a prompt, and what they are.

    Raises:
        ConfigError: names the key to change.
    """
    rollout = config.actor_rollout_ref.rollout
    response, turn, described = rollout.response_length, turnkey.rollout.max_tokens_per_turn, "written"
    if turnkey.rollout.prompt == "conversation":  # also where the data name our loop, row by row
        if turn is None:
            refuse(
                "turn-tokens-missing",
                f"{'turnkey.agent' if 'turnkey_agent' in loops else 'turnkey.rollout.prompt=conversation'} needs a "
                "limit for one turn: set "
                f"turnkey.rollout.max_tokens_per_turn, at most data.max_response_length={response}, the limit for all "
                "that follows the first prompt",
            )
        if turn > response or (turn == response and turnkey.rollout.max_turns > 1):
            refuse(
                "response-shorter-than-turn",
                f"data.max_response_length={response} limits all turns and observations of a conversation, and one "
                f"turn may have turnkey.rollout.max_tokens_per_turn={turn} tokens: every conversation would end after "
                "its first turn. Raise data.max_response_length to the length of an episode",
            )
        described = "appended to it, turns and observations"
    elif {*loops} == {"turnkey_env"}:
        response = turn or response
    return response, described


def check_counts(config: DictConfig) -> None:
    """Refuse counts that are not positive whole numbers; other checks compute with them.

    Raises:
        ConfigError: names the key to change.
    """
    for key in (*COUNTS, *MAY_BE_NULL):
        value = OmegaConf.select(config, key)
        if value is None and key in MAY_BE_NULL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse(f"range:{key}", f"{key}: expected a whole number, 1 or more, got {value!r}")
    _check_fetches(config)


def _check_fetches(config: DictConfig) -> None:
    """verl takes a batch in whole fetches of ``data.gen_batch_size`` prompts, or sets this to 1 itself."""
    fetch, batch = config.data.get("gen_batch_size"), config.data.train_batch_size
    single = str(config.trainer.v1.trainer_mode).removeprefix("turnkey_") != "sync"
    single |= bool(OmegaConf.select(config, "algorithm.filter_groups.enable"))
    single |= bool(OmegaConf.select(config, "trainer.v1.sampler.sync_refill_failed_groups"))
    if fetch and not single and batch % fetch:
        refuse(
            "gen-batch-size",
            f"data.gen_batch_size={fetch} does not divide data.train_batch_size={batch}, and verl fetches batches in "
            "parts of that size: set data.gen_batch_size=null, or a divisor",
        )


def _check_mini_batches(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """A mini-batch holds whole episodes."""
    mini_batches = turnkey.update.mini_batches
    if mini_batches is None:
        return
    episodes = config.data.train_batch_size // updates_of_a_step(config) * config.actor_rollout_ref.rollout.n
    if mini_batches > episodes:
        refuse(
            "mini-batches-episodes",
            f"turnkey.update.mini_batches={mini_batches}: each holds whole episodes, and an update has {episodes} "
            f"episodes (data.train_batch_size x rollout.n): lower it to {episodes}",
        )


def _check_ranks(config: DictConfig) -> None:
    """Actor and critic take the same mini-batches of whole episodes, cut for as many data-parallel ranks."""
    actor, key = config.actor_rollout_ref.actor, "critic.fsdp.ulysses_sequence_parallel_size"
    if not str(config.trainer.v1.trainer_mode).startswith("turnkey_") or str(actor.strategy) not in FSDP:
        return
    spread = max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)
    if (own := OmegaConf.select(config, key)) != spread:
        refuse(
            "critic-ranks",
            f"{key}={own} and {ACTOR}.fsdp_config.ulysses_sequence_parallel_size={spread} give actor and critic "
            f"different numbers of data-parallel ranks, but they share the mini-batches: set {key}={spread}",
        )


def _check_micro_batches(config: DictConfig, turnkey: TurnkeyConfig, use_reference: bool) -> None:
    """With fixed micro-batches the trainer pads to their sizes, which verl needs to be given."""
    (actor, _), (rollout, _), _ = MICRO_BATCHES
    dynamic = {switch: bool(OmegaConf.select(config, switch)) for switch, _ in MICRO_BATCHES}
    if dynamic[actor] != dynamic[rollout]:
        refuse(
            "dynamic-batch-mismatch",
            f"{actor}={dynamic[actor]} and {rollout}={dynamic[rollout]}: verl computes both in one engine, so set them "
            "alike",
        )
    for switch, size in MICRO_BATCHES if use_reference else MICRO_BATCHES[:2]:
        rows, former_key = OmegaConf.select(config, size), size.removesuffix("_per_gpu")
        if not dynamic[switch] and (not isinstance(rows, int) or rows < 1):
            former = OmegaConf.select(config, former_key)
            unread = (
                f" ({former_key}={former} counts the rows of all GPUs, and verl reads it no more)" if former else ""
            )
            refuse(
                "micro-batch-size-missing",
                f"{switch}=false needs the rows of a micro-batch: set {size}, got {rows}{unread}",
            )
        if dynamic[switch] and (
            ignored_keys := [key for key in (size, former_key) if OmegaConf.select(config, key) is not None]
        ):
            warn(
                "micro-batch-size-without-effect",
                f"{ignored_keys[0]}={OmegaConf.select(config, ignored_keys[0])} has no effect with {switch}=true, "
                f"where a micro-batch is limited by tokens: only {switch}=false reads it",
            )
    loss = loss_of(config)
    phases = "turnkey.update.order=reverse_turns" if turnkey.update.order == "reverse_turns" else None
    if loss is not None and loss.compares_groups:
        phases = f"{ACTOR}.policy_loss.loss_mode={loss.name}"
    if phases and not all(dynamic[switch] for switch in (actor, rollout)):
        refuse(
            "fixed-micro-batches",
            f"{phases} updates on parts of the batch, which fixed micro-batches need not divide: set {actor}=true",
        )


def _check_tokens(config: DictConfig, longest: int, row_size: str, use_critic: bool, use_reference: bool) -> None:
    """A micro-batch cut by tokens has to hold the longest row; with sequence parallelism its GPUs hold it together."""
    parts = config.actor_rollout_ref
    if str(parts.actor.strategy) not in FSDP:
        return  # other engines count differently
    spread = max(parts.actor.ulysses_sequence_parallel_size, parts.actor.fsdp_config.ulysses_sequence_parallel_size)
    used = [(f"{ACTOR}.ppo_max_token_len_per_gpu", parts.actor.use_dynamic_bsz, spread)]
    used.append((f"{ROLLOUT}.log_prob_max_token_len_per_gpu", parts.rollout.log_prob_use_dynamic_bsz, spread))
    if use_reference:
        own = max(parts.ref.ulysses_sequence_parallel_size, parts.ref.fsdp_config.ulysses_sequence_parallel_size)
        used.append((f"{REF}.log_prob_max_token_len_per_gpu", parts.ref.log_prob_use_dynamic_bsz, own))
    if use_critic:
        limit = OmegaConf.select(config, CRITIC_TOKENS)
        key = TOKENS if limit in (None, config.critic.ppo_max_token_len_per_gpu) else f"+{CRITIC_TOKENS}"
        used.append((key, True, config.critic.fsdp.ulysses_sequence_parallel_size))
        for rows in ("ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu"):
            if (micro_batch := config.critic.get(rows)) is not None:
                warn(
                    "critic-micro-batch-without-effect",
                    f"critic.{rows}={micro_batch} has no effect, nor has critic.use_dynamic_bsz: verl limits the "
                    f"critic's micro-batches by tokens, {TOKENS}",
                )
                break  # the second follows the first
    for key, dynamic, gpus in used:
        limit = OmegaConf.select(config, key.lstrip("+")) or 0
        if dynamic and limit * gpus < longest:
            together = f" on each of {gpus} GPUs (ulysses_sequence_parallel_size)" if gpus > 1 else ""
            refuse(
                "micro-batch-tokens",
                f"{key}={limit}{together} is too small: {row_size}; raise it to {-(-longest // gpus)}",
            )
