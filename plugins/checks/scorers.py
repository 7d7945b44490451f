"""Checks of what scores turns beside the policy: a teacher, mutual information, a reward model, hidden states."""

from __future__ import annotations

from pathlib import Path

from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.losses.registry import TEACHER
from verl_turnkey.plugins.checks.data import has_text
from verl_turnkey.plugins.checks.files import columns
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.limits import check_turns
from verl_turnkey.plugins.checks.resources import model_config, positions, scaling
from verl_turnkey.plugins.checks.run import ACTOR, ESTIMATOR, LOG_PROBS, REF, ROLLOUT, CheckedRun, spread_of
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.scorers import (
    MUTUAL_INFORMATION,
    TURN_SCORE,
    MutualInformationConfig,
    PrmConfig,
    TeacherConfig,
)
from verl_turnkey.plugins.credit.trainer_columns import BYPASS, OF_RANK, OF_TEACHER
from verl_turnkey.plugins.teacher import TeacherSource, read_source
from verl_turnkey.plugins.teacher.sources import KEY, Source

OF_GROUPS = ("group_success", "group_failures", "reflection")
TOKENS, WEIGHTS = "turnkey.teacher.max_tokens", "turnkey.teacher.weights"


def check_teacher(run: CheckedRun) -> None:
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


def _check_readers(run: CheckedRun) -> None:
    """Refuse readers of a teacher's log-probabilities in a run without a teacher."""
    method, loss = run.estimator, run.loss
    readers = [f"the modifier {m.spec.name}" for m in run.modifiers if OF_TEACHER & {*m.columns}]
    if method and OF_TEACHER & {*method.columns(run.params)}:
        readers.append(f"the method {method.name}")
    if loss and TEACHER.keys() & {*loss.needs}:
        readers.append(f"the loss {loss.name}")
    if readers:
        refuse("teacher-missing", readers=" and ".join(readers))


def check_pass(run: CheckedRun, key: str) -> None:
    """Refuse settings that rule out a further pass of the actor over rows with other prompts; ``key`` turns it on."""
    run.needs_our_trainer("teacher-trainer", key=key)
    run.needs_off("teacher-bypass", BYPASS, key=key)
    modes = [f"{ACTOR}.{engine}router_replay.mode" for engine in ("", "fsdp_config.", "megatron.", "veomni.")]
    for routing, off in ((f"{ROLLOUT}.enable_rollout_routing_replay", False), *((mode, "disabled") for mode in modes)):
        if (value := run.get(routing)) not in (None, off):
            refuse("teacher-routing", key=key, routing=routing, value=value, off=str(off).lower())


def _check_source(run: CheckedRun, spec: TeacherSource, source: Source) -> None:
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


def _check_size(run: CheckedRun) -> None:
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
    # The inference server never sees the text, so a limit of its own does not count, but the model's RoPE scaling does.
    own = parts.rollout.max_model_len is None and not scaling(model_config(run.config))
    room = positions(run.config)[0] if own else None
    if room is not None and longest > room:
        refuse("teacher-positions", longest=longest, prompt=prompt, response=response, most=most, room=room)


def check_hidden_rank(run: CheckedRun) -> None:
    """Refuse the modifier ``rank_shaping`` in a run that cannot measure all hidden states."""
    readers = [modification.spec.name for modification in run.modifiers if OF_RANK & {*modification.columns}]
    if not readers:
        return
    run.needs_off("rank-bypass", BYPASS, modifier=readers[0])
    if str(run.actor.strategy) not in FSDP:
        refuse("rank-engine", modifier=readers[0], strategy=run.actor.strategy)
    if (spread := spread_of(run.actor)) > 1:
        refuse("rank-sequence-parallel", modifier=readers[0], spread=spread)


PRM = "turnkey.prm"


def check_prm(run: CheckedRun) -> None:
    """Refuse a process reward model that the run cannot have."""
    prm = run.turnkey.prm
    if prm.kind is None:
        if prm != PrmConfig():
            warn("prm-without-effect")
        return
    run.needs_our_trainer("prm-trainer")
    if (strategy := str(run.actor.strategy)) not in FSDP:
        refuse("prm-engine", kind=prm.kind, strategy=strategy)
    _check_objective(prm)
    _check_reference(run)
    _check_head(prm)
    _check_keys(prm)
    _check_scores_read(run)
    _check_vocabulary(run)
    _check_tokens(run)
    switching = f"trainer.v1.{run.mode.removeprefix('turnkey_')}.hybrid_rollout.enable_switch"
    if run.get(switching) and not prm.offload:
        refuse("prm-switching", switching=switching)


def _check_objective(prm: PrmConfig) -> None:
    from verl_turnkey.losses.objectives import ObjectiveParams, objective_spec  # torch, which a bare installation lacks

    if ":" in prm.objective:
        load_function(prm.objective, f"{PRM}.objective")
        return
    spec = objective_spec(prm.objective)
    if prm.kind not in spec.kinds:
        kinds = " or ".join(spec.kinds)
        refuse("prm-objective", objective=spec.name, kinds=kinds, kind=prm.kind, instead=spec.kinds[0])
    default = ObjectiveParams()
    unread = [key for key in ("over", "weigh", "positive") if key not in spec.reads]
    if changed := [key for key in unread if getattr(prm, key) != getattr(default, key)]:
        warn("prm-objective-keys", key=changed[0], objective=spec.name)


def _check_reference(run: CheckedRun) -> None:
    prm = run.turnkey.prm
    if prm.kind != "implicit":
        return
    if prm.reference == "ref" and not run.use_reference:
        refuse("prm-reference-policy")
    if prm.reference == "base" and not prm.lora_rank:
        refuse("prm-reference-base")
    stays = not prm.every and prm.reference in ("ref", "base")
    if stays and prm.starts_as_reference(run.config.actor_rollout_ref.model.path, None):
        refuse("prm-reference-same", reference=prm.reference)
    if prm.reference == "rollout":
        run.needs_on("prm-reference-rollout", LOG_PROBS)


def _check_head(prm: PrmConfig) -> None:
    if prm.kind != "head":
        if not prm.head_bias:
            refuse("prm-head-bias", kind=prm.kind)
        return
    if prm.reference != "old":
        refuse("prm-head-reference", reference=prm.reference)
    if prm.lora_rank:
        refuse("prm-head-lora", lora_rank=prm.lora_rank)
    if not prm.every and prm.path is None:
        refuse("prm-head-untrained")


def _check_keys(prm: PrmConfig) -> None:
    """Warn of keys that this model does not read."""
    default = PrmConfig()
    unread = {f"{PRM}.kind=head": ("beta",)} if prm.kind == "head" else {}
    unread |= {} if prm.lora_rank else {f"{PRM}.lora_rank=0": ("lora_alpha",)}
    unread |= {} if prm.every else {f"{PRM}.every=0": ("scores", "optim")}
    for reason, keys in unread.items():
        if changed := [key for key in keys if getattr(prm, key) != getattr(default, key)]:
            warn("prm-keys", key=changed[0], reason=reason)


def _check_scores_read(run: CheckedRun) -> None:
    """Scores have one source and a reader."""
    prm = run.turnkey.prm
    if prm.use != "column":
        if run.estimator is None:
            refuse("prm-use", use=prm.use, method=run.value_text(ESTIMATOR))
        return
    name = TURN_SCORE.removeprefix("extra.")
    if any(entry.get("column") == name for entry in run.turnkey.rewards):
        refuse("prm-two-scores", kind=prm.kind, name=name)
    if TURN_SCORE not in run.columns:
        warn("prm-unread", method=run.value_text(ESTIMATOR))


def _check_vocabulary(run: CheckedRun) -> None:
    """Of folders on this machine; the trainer compares the others before it builds a model."""
    path, model = run.turnkey.prm.path, run.config.actor_rollout_ref.model
    if path is None:
        return
    folders = [Path(name).expanduser() for name in (path, model.get("tokenizer_path") or model.path)]
    if not all(folder.is_dir() for folder in folders):
        return
    from transformers import AutoTokenizer

    of_prm, of_actor = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in folders)
    if of_prm != of_actor:
        refuse("prm-vocabulary", path=path, own=len(of_prm), actors=len(of_actor))


def _check_tokens(run: CheckedRun) -> None:
    """A micro-batch has to hold the longest row."""
    limit, spread, source = run.turnkey.prm.max_token_len_per_gpu, spread_of(run.actor), ""
    longest = run.rollout.prompt_length + check_turns(run)[0]
    if limit is None:
        limit, source = run.actor.ppo_max_token_len_per_gpu, f", which is {ACTOR}.ppo_max_token_len_per_gpu,"
    if limit * spread < longest:
        refuse("prm-tokens", limit=limit, source=source, longest=longest, least=-(-longest // spread))
