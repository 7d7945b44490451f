"""Checks of further passes of the actor: ``turnkey.teacher``, mutual information, and measured hidden states."""

from __future__ import annotations

from verl_turnkey.losses.tensors import TEACHER
from verl_turnkey.plugins.checks.files import columns
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.limits import check_turns
from verl_turnkey.plugins.checks.paths import positions
from verl_turnkey.plugins.checks.run import ACTOR, REF, ROLLOUT, Run, needs_off, needs_our_trainer, spread_of
from verl_turnkey.plugins.checks.texts import has_text
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.mutual_information import KEY as MUTUAL_INFORMATION
from verl_turnkey.plugins.config.mutual_information import MutualInformationConfig
from verl_turnkey.plugins.config.teacher import TeacherConfig
from verl_turnkey.plugins.credit.supplied import BYPASS, OF_RANK, OF_TEACHER
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
        warn("mutual-information-without-effect")
    if teacher.source is None:
        _check_readers(run)
        if teacher != TeacherConfig():
            warn("teacher-without-effect")
        return
    spec, source = read_source(teacher.source)
    teacher.text_template()
    check_pass(run, KEY)
    if teacher.weights == "ref" and not run.use_reference:
        refuse("teacher-reference")
    if spec is not None:
        _check_source(run, spec, source)
    for name in getattr(source, "columns", ()):
        if lacking := [file for file in run.files if not has_text(file, name)]:
            refuse("teacher-column", name=name, file=lacking[0], columns=", ".join(columns(lacking[0])))
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
        refuse("teacher-missing", readers=" and ".join(readers))


def check_pass(run: Run, key: str) -> None:
    """Refuse settings that rule out a further pass of the actor over rows with other prompts; ``key`` turns it on."""
    needs_our_trainer("teacher-trainer", run, key=key)
    needs_off("teacher-bypass", run, BYPASS, key=key)
    modes = [f"{ACTOR}.{engine}router_replay.mode" for engine in ("", "fsdp_config.", "megatron.", "veomni.")]
    for routing, off in ((f"{ROLLOUT}.enable_rollout_routing_replay", False), *((mode, "disabled") for mode in modes)):
        if (value := run.get(routing)) not in (None, off):
            refuse("teacher-routing", key=key, routing=routing, value=value, off=str(off).lower())


def _check_source(run: Run, spec: TeacherSource, source: Source) -> None:
    teacher = run.turnkey.teacher
    if spec.per_turn and run.turnkey.rollout.rows_hold_turns and run.our_loops:
        refuse("teacher-turns", source=spec.name)
    if (spec.per_turn or spec.observations) and run.verls_loops:
        refuse("teacher-records", source=spec.name, loop=run.verls_loops[0])
    replaced = getattr(source, "replaced", (spec, source))[1]  # by a placebo
    of_group = spec.name in OF_GROUPS and getattr(replaced, "about", "group") == "group"
    compares = of_group or teacher.rows == "mixed_groups"
    if compares and run.rollout.n == 1 and not run.trains_branches:
        warn("teacher-single-rollout", source=spec.name, rows=teacher.rows)


def _check_size(run: Run) -> None:
    """A row with its text has to fit into a micro-batch that is cut by tokens, and into the model's positions."""
    parts, most = run.config.actor_rollout_ref, run.turnkey.teacher.max_tokens
    prompt, response = parts.rollout.prompt_length, check_turns(run)[0]
    longest = prompt + response + most
    of_reference = run.turnkey.teacher.weights == "ref" and not parts.model.get("lora_rank", 0)
    key, engine, part = (REF, parts.ref, parts.ref) if of_reference else (ROLLOUT, parts.actor, parts.rollout)
    spread, limit = spread_of(engine), part.log_prob_max_token_len_per_gpu
    if str(parts.actor.strategy) in FSDP and part.log_prob_use_dynamic_bsz and limit * spread < longest:
        refuse(
            "teacher-tokens",
            key=key,
            limit=limit,
            longest=longest,
            prompt=prompt,
            response=response,
            text=most,
            least=-(-longest // spread),
        )
    # The inference server never sees the text, so a limit of its own does not count.
    room = positions(run.config)[0] if parts.rollout.max_model_len is None else None
    if room is not None and longest > room:
        refuse("teacher-positions", longest=longest, prompt=prompt, response=response, most=most, room=room)


def check_hidden_rank(run: Run) -> None:
    """Refuse the modifier ``rank_shaping`` in a run that cannot measure all hidden states."""
    readers = [modification.spec.name for modification in run.modifiers if OF_RANK & {*modification.columns}]
    if not readers:
        return
    needs_off("rank-bypass", run, BYPASS, modifier=readers[0])
    if str(run.actor.strategy) not in FSDP:
        refuse("rank-engine", modifier=readers[0], strategy=run.actor.strategy)
    if (spread := spread_of(run.actor)) > 1:
        refuse("rank-sequence-parallel", modifier=readers[0], spread=spread)
