"""Driver checks of ``turnkey.teacher``: what would score other tokens than meant, fit nowhere, or have no text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.losses.tensors import TEACHER
from verl_turnkey.plugins.checks.files import columns, rows
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.limits import ACTOR, REF, ROLLOUT, check_turns
from verl_turnkey.plugins.checks.paths import positions
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.mutual_information import KEY as MUTUAL_INFORMATION
from verl_turnkey.plugins.config.mutual_information import MutualInformationConfig
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify, credit_params, estimator_of, loss_of
from verl_turnkey.plugins.config.teacher import TeacherConfig
from verl_turnkey.plugins.credit.supplied import BYPASS, OF_TEACHER
from verl_turnkey.plugins.credit.unrecorded import VERLS_LOOPS
from verl_turnkey.plugins.rollout.strategies import read_strategy
from verl_turnkey.plugins.teacher import TeacherSource, read_source
from verl_turnkey.plugins.teacher.registry import KEY, Source
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

OF_GROUPS = ("group_success", "group_failures", "reflection")


def check_teacher(
    config: DictConfig,
    turnkey: TurnkeyConfig,
    mode: str,
    files: Sequence[str],
    loops: Collection[str],
) -> None:
    """Refuse a teacher that the run cannot have.

    Args:
        mode: ``trainer.v1.trainer_mode``.
        files: the training files on this machine.
        loops: the agent loops of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    teacher = turnkey.teacher
    if turnkey.mutual_information.every:
        check_pass(config, mode, MUTUAL_INFORMATION)
    elif turnkey.mutual_information != MutualInformationConfig():
        warn(
            "mutual-information-without-effect",
            f"turnkey.mutual_information has no effect without a step to compute it at: set {MUTUAL_INFORMATION}=5, or "
            "drop the other keys",
        )
    if teacher.source is None:
        _check_readers(config, turnkey)
        if teacher != TeacherConfig():
            warn(
                "teacher-without-effect",
                f"turnkey.teacher has no effect without a source: set {KEY}, or drop the other keys",
            )
        return
    spec, source = read_source(teacher.source)
    teacher.text_template()
    check_pass(config, mode, KEY)
    if teacher.weights == "ref" and not _has_reference(config):
        refuse(
            "teacher-reference",
            "turnkey.teacher.weights=ref, and this run has no reference policy: set "
            "actor_rollout_ref.actor.use_kl_loss=true (a coefficient of 0 will do), or turnkey.teacher.weights=old",
        )
    if spec is not None:
        _check_source(config, turnkey, spec, source, loops)
    for name in getattr(source, "columns", ()):
        _check_column(name, files)
    _check_size(config, turnkey, loops)


def _check_readers(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Refuse readers of a teacher's log-probabilities in a run without a teacher."""
    estimator, loss = estimator_of(config), loss_of(config)
    readers = [f"the modifier {one.spec.name}" for one in credit_modify(config, turnkey) if OF_TEACHER & {*one.columns}]
    if estimator and OF_TEACHER & {*estimator.columns(credit_params(config, turnkey))}:
        readers.append(f"the method {estimator.name}")
    if loss and TEACHER.keys() & {*loss.needs}:
        readers.append(f"the loss {loss.name}")
    if readers:
        refuse(
            "teacher-missing",
            f"{' and '.join(readers)} compares each response with its log-probabilities under a teacher's prompt: set "
            "turnkey.teacher.source=task_skill, or another source of its text",
        )


def _has_reference(config: DictConfig) -> bool:
    from verl.trainer.ppo.utils import need_reference_policy

    return bool(need_reference_policy(config))


def check_pass(config: DictConfig, mode: str, key: str) -> None:
    """Refuse settings that rule out a further pass of the actor over rows with other prompts; ``key`` turns it on."""
    if not mode.startswith("turnkey_"):
        refuse(
            "teacher-trainer",
            f"{key} needs a trainer of this package, but trainer.v1.trainer_mode is {mode!r}: set "
            f"trainer.v1.trainer_mode=turnkey_{mode}",
        )
    if OmegaConf.select(config, BYPASS):
        refuse(
            "teacher-bypass",
            f"{key} needs the actor's pass for the old log-probabilities, but {BYPASS}=true replaces it by the "
            f"inference engine's log-probabilities: set {BYPASS}=false",
        )
    modes = [f"{ACTOR}.{engine}router_replay.mode" for engine in ("", "fsdp_config.", "megatron.", "veomni.")]
    for routing, off in ((f"{ROLLOUT}.enable_rollout_routing_replay", False), *((mode, "disabled") for mode in modes)):
        if (value := OmegaConf.select(config, routing)) not in (None, off):
            refuse(
                "teacher-routing",
                f"{key} scores rows with other prompts, which have no expert routes to replay, but "
                f"{routing}={value} replays those of the rollout: set {routing}={str(off).lower()}",
            )


def _check_source(
    config: DictConfig, turnkey: TurnkeyConfig, spec: TeacherSource, source: Source, loops: Collection[str]
) -> None:
    rollout = turnkey.rollout
    if spec.per_turn and rollout.rows_hold_turns and {*AGENT_LOOPS} & {*loops}:
        refuse(
            "teacher-turns",
            f"{KEY}={spec.name} gives a text per turn, and rows hold several turns, of which later ones would see the "
            "text of earlier ones: set turnkey.rollout.layout=steps",
        )
    without = sorted({*loops} & {*VERLS_LOOPS})
    if (spec.per_turn or spec.observations) and without:
        refuse(
            "teacher-records",
            f"{KEY}={spec.name} reads the steps of records, and the agent loop {without[0]} writes none: use "
            "turnkey_env, or another source",
        )
    replaced = getattr(source, "replaced", (spec, source))[1]  # by a placebo
    of_group = spec.name in OF_GROUPS and getattr(replaced, "about", "group") == "group"
    compares = of_group or turnkey.teacher.rows == "mixed_groups"
    forked = read_strategy(rollout.strategy)
    if compares and config.actor_rollout_ref.rollout.n == 1 and not (forked and forked[0].trains):
        warn(
            "teacher-single-rollout",
            f"{KEY}={spec.name} with turnkey.teacher.rows={turnkey.teacher.rows} takes texts from, or compares, other "
            "episodes of a group, and actor_rollout_ref.rollout.n=1 has none: no row has a text; raise n",
        )


def _check_column(name: str, files: Sequence[str]) -> None:
    for file in files:
        known = columns(file)
        if name in known:
            continue
        extra = next(rows(file, ["extra_info"]), (None,))[0] if "extra_info" in known else None
        if name not in (extra or {}):
            refuse(
                "teacher-column",
                f"{KEY} reads the column {name!r}, and {file} has no such column, nor a key of that name in extra_info "
                f"(columns: {', '.join(known)}): write it into the data, or name another one",
            )


def _check_size(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """A row with its text has to fit into a micro-batch that is cut by tokens, and into the model's positions."""
    parts, most = config.actor_rollout_ref, turnkey.teacher.max_tokens
    response, _ = check_turns(config, turnkey, loops)
    longest = parts.rollout.prompt_length + response + most
    row_size = (
        f"a row may have {longest} tokens with turnkey.teacher.max_tokens={most} of text (data.max_prompt_length="
        f"{parts.rollout.prompt_length} and a response of {response})"
    )
    of_reference = turnkey.teacher.weights == "ref" and not parts.model.get("lora_rank", 0)
    key, engine, part = (REF, parts.ref, parts.ref) if of_reference else (ROLLOUT, parts.actor, parts.rollout)
    spread = max(engine.ulysses_sequence_parallel_size, engine.fsdp_config.ulysses_sequence_parallel_size)
    limit = part.log_prob_max_token_len_per_gpu
    if str(parts.actor.strategy) in FSDP and part.log_prob_use_dynamic_bsz and limit * spread < longest:
        refuse(
            "teacher-tokens",
            f"{key}.log_prob_max_token_len_per_gpu={limit} is too small: {row_size}; raise it to "
            f"{-(-longest // spread)}, or lower turnkey.teacher.max_tokens",
        )
    # The inference server never sees the text, so a limit of its own does not count.
    room = positions(config)[0] if parts.rollout.max_model_len is None else None
    if room is not None and longest > room:
        refuse(
            "teacher-positions",
            f"{row_size}, but the model has {room} positions: lower turnkey.teacher.max_tokens or "
            "data.max_prompt_length",
        )
