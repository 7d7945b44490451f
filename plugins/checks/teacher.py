"""Checks of further passes of the actor: ``turnkey.teacher``, mutual information, and measured hidden states."""

from __future__ import annotations

from verl_turnkey.losses.tensors import TEACHER
from verl_turnkey.plugins.checks.files import columns
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.limits import check_turns
from verl_turnkey.plugins.checks.paths import positions
from verl_turnkey.plugins.checks.run import ACTOR, REF, ROLLOUT, N, Run, needs_off, needs_our_trainer, spread_of
from verl_turnkey.plugins.checks.texts import has_text
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.mutual_information import KEY as MUTUAL_INFORMATION
from verl_turnkey.plugins.config.mutual_information import MutualInformationConfig
from verl_turnkey.plugins.config.teacher import TeacherConfig
from verl_turnkey.plugins.credit.trainer_columns import BYPASS, OF_RANK, OF_TEACHER
from verl_turnkey.plugins.teacher import TeacherSource, read_source
from verl_turnkey.plugins.teacher.registry import KEY, Source

OF_GROUPS = ("group_success", "group_failures", "reflection")
TOKENS, WEIGHTS = "turnkey.teacher.max_tokens", "turnkey.teacher.weights"


def check_teacher(run: Run) -> None:
    """Refuse a teacher that the run cannot have."""
    teacher = run.turnkey.teacher
    if run.turnkey.mutual_information.every:
        check_pass(run, MUTUAL_INFORMATION)
    elif run.turnkey.mutual_information != MutualInformationConfig():
        problem = "turnkey.mutual_information has no effect without a step to compute it at"
        warn("mutual-information-without-effect", f"{problem}: set {MUTUAL_INFORMATION}=5, or drop the other keys")
    if teacher.source is None:
        _check_readers(run)
        if teacher != TeacherConfig():
            idle = "turnkey.teacher has no effect without a source"
            warn("teacher-without-effect", f"{idle}: set {KEY}, or drop the other keys")
        return
    spec, source = read_source(teacher.source)
    teacher.text_template()
    check_pass(run, KEY)
    if teacher.weights == "ref" and not run.use_reference:
        problem = f"{WEIGHTS}=ref, and this run has no reference policy"
        on = f"{ACTOR}.use_kl_loss=true (a coefficient of 0 will do)"
        refuse("teacher-reference", f"{problem}: set {on}, or {WEIGHTS}=old")
    if spec is not None:
        _check_source(run, spec, source)
    for name in getattr(source, "columns", ()):
        if lacking := [file for file in run.files if not has_text(file, name)]:
            problem = f"{KEY} reads the column {name!r}, and {lacking[0]} has no such column, nor key in extra_info"
            has = f"columns: {', '.join(columns(lacking[0]))}"
            refuse("teacher-column", f"{problem} ({has}): write it into the data, or name another one")
    _check_size(run)


def _check_readers(run: Run) -> None:
    """Refuse readers of a teacher's log-probabilities in a run without a teacher."""
    method, loss = run.estimator, run.loss
    readers = [
        f"the modifier {modification.spec.name}"
        for modification in run.modifiers
        if OF_TEACHER & {*modification.columns}
    ]
    if method and OF_TEACHER & {*method.columns(run.params)}:
        readers.append(f"the method {method.name}")
    if loss and TEACHER.keys() & {*loss.needs}:
        readers.append(f"the loss {loss.name}")
    if readers:
        problem = f"{' and '.join(readers)} compares log-probabilities with those under a teacher's prompt"
        refuse("teacher-missing", f"{problem}: set {KEY}=task_skill, or another source of its text")


def check_pass(run: Run, key: str) -> None:
    """Refuse settings that rule out a further pass of the actor over rows with other prompts; ``key`` turns it on."""
    needs_our_trainer("teacher-trainer", run, key)
    needs = f"{key} needs the actor's pass for the old log-probabilities, which {BYPASS}=true leaves out"
    needs_off("teacher-bypass", run, BYPASS, needs)
    modes = [f"{ACTOR}.{engine}router_replay.mode" for engine in ("", "fsdp_config.", "megatron.", "veomni.")]
    for routing, off in ((f"{ROLLOUT}.enable_rollout_routing_replay", False), *((mode, "disabled") for mode in modes)):
        if (value := run.get(routing)) not in (None, off):
            problem = (
                f"{key} scores rows with other prompts, for which {routing}={value} has no expert routes to replay"
            )
            refuse("teacher-routing", f"{problem}: set {routing}={str(off).lower()}")


def _check_source(run: Run, spec: TeacherSource, source: Source) -> None:
    teacher, setting = run.turnkey.teacher, f"{KEY}={spec.name}"
    if spec.per_turn and run.turnkey.rollout.rows_hold_turns and run.our_loops:
        problem = f"{setting} gives a text per turn, and later turns of a row would see the texts of earlier ones"
        refuse("teacher-turns", f"{problem}: set turnkey.rollout.layout=steps")
    if (spec.per_turn or spec.observations) and run.verls_loops:
        problem = f"{setting} reads the steps of records, and the agent loop {run.verls_loops[0]} writes none"
        refuse("teacher-records", f"{problem}: use turnkey_env, or another source")
    replaced = getattr(source, "replaced", (spec, source))[1]  # by a placebo
    of_group = spec.name in OF_GROUPS and getattr(replaced, "about", "group") == "group"
    compares = of_group or teacher.rows == "mixed_groups"
    if compares and run.rollout.n == 1 and not run.trains_branches:
        problem = (
            f"{setting} with turnkey.teacher.rows={teacher.rows} reads other episodes of a group, and {N}=1 has none"
        )
        warn("teacher-single-rollout", f"{problem}: no row has a text; raise n")


def _check_size(run: Run) -> None:
    """A row with its text has to fit into a micro-batch that is cut by tokens, and into the model's positions."""
    parts, most = run.config.actor_rollout_ref, run.turnkey.teacher.max_tokens
    prompt, response = parts.rollout.prompt_length, check_turns(run)[0]
    longest = prompt + response + most
    described = f"data.max_prompt_length={prompt}, a response of {response}, {TOKENS}={most}"
    row_size = f"a row may have {longest} tokens with its text ({described})"
    of_reference = run.turnkey.teacher.weights == "ref" and not parts.model.get("lora_rank", 0)
    key, engine, part = (REF, parts.ref, parts.ref) if of_reference else (ROLLOUT, parts.actor, parts.rollout)
    spread, limit = spread_of(engine), part.log_prob_max_token_len_per_gpu
    if str(parts.actor.strategy) in FSDP and part.log_prob_use_dynamic_bsz and limit * spread < longest:
        problem = f"{key}.log_prob_max_token_len_per_gpu={limit} is too small: {row_size}"
        refuse("teacher-tokens", f"{problem}; raise it to {-(-longest // spread)}, or lower {TOKENS}")
    # The inference server never sees the text, so a limit of its own does not count.
    room = positions(run.config)[0] if parts.rollout.max_model_len is None else None
    if room is not None and longest > room:
        problem = f"{row_size}, but the model has {room} positions"
        refuse("teacher-positions", f"{problem}: lower {TOKENS} or data.max_prompt_length")


def check_hidden_rank(run: Run) -> None:
    """Refuse the modifier ``rank_shaping`` in a run that cannot measure all hidden states."""
    readers = [modification.spec.name for modification in run.modifiers if OF_RANK & {*modification.columns}]
    if not readers:
        return
    measures = f"the modifier {readers[0]} measures the hidden states of the old policy's forward pass"
    needs_off("rank-bypass", run, BYPASS, f"{measures}, and {BYPASS}=true leaves it out")
    if str(run.actor.strategy) not in FSDP:
        refuse("rank-engine", f"{measures}, with FSDP alone: set {ACTOR}.strategy=fsdp2, got {run.actor.strategy}")
    key = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    if (spread := spread_of(run.actor)) > 1:
        refuse("rank-sequence-parallel", f"{measures}, of which each rank has a part with {key}={spread}: set {key}=1")
