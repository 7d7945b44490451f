"""Checks of ``turnkey.prm``: a model that cannot be built, learns nothing, or whose scores nobody reads."""

from __future__ import annotations

from pathlib import Path

from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.limits import check_turns
from verl_turnkey.plugins.checks.run import ACTOR, ESTIMATOR, LOG_PROBS, Run, needs_on, needs_our_trainer, spread_of
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.prm import TURN_SCORE, PrmConfig

KEY = "turnkey.prm"


def check_prm(run: Run) -> None:
    """Refuse a process reward model that the run cannot have."""
    prm = run.turnkey.prm
    if prm.kind is None:
        if prm != PrmConfig():
            warn("prm-without-effect")
        return
    needs_our_trainer("prm-trainer", run)
    if (strategy := str(run.actor.strategy)) not in FSDP:
        refuse("prm-engine", kind=prm.kind, strategy=strategy)
    _check_objective(prm)
    _check_reference(run)
    _check_head(prm)
    _check_keys(prm)
    _check_readers(run)
    _check_vocabulary(run)
    _check_tokens(run)
    switching = f"trainer.v1.{run.mode.removeprefix('turnkey_')}.hybrid_rollout.enable_switch"
    if run.get(switching) and not prm.offload:
        refuse("prm-switching", switching=switching)


def _check_objective(prm: PrmConfig) -> None:
    from verl_turnkey.learned import ObjectiveParams, objective_spec  # torch, which a bare installation lacks

    if ":" in prm.objective:
        load_function(prm.objective, f"{KEY}.objective")
        return
    spec = objective_spec(prm.objective)
    if prm.kind not in spec.kinds:
        refuse(
            "prm-objective", objective=spec.name, kinds=" or ".join(spec.kinds), kind=prm.kind, instead=spec.kinds[0]
        )
    default = ObjectiveParams()
    unread = [key for key in ("over", "weigh", "positive") if key not in spec.reads]
    if changed := [key for key in unread if getattr(prm, key) != getattr(default, key)]:
        warn("prm-objective-keys", key=changed[0], objective=spec.name)


def _check_reference(run: Run) -> None:
    prm = run.turnkey.prm
    if prm.kind != "implicit":
        return
    if prm.reference == "ref" and not run.use_reference:
        refuse("prm-reference-policy")
    if prm.reference == "base" and not prm.lora_rank:
        refuse("prm-reference-base")
    fixed = prm.reference in ("ref", "base")
    if fixed and not prm.every and prm.starts_as_reference(run.config.actor_rollout_ref.model.path, None):
        refuse("prm-reference-same", reference=prm.reference)
    if prm.reference == "rollout":
        needs_on("prm-reference-rollout", run, LOG_PROBS)


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
    unread = {f"{KEY}.kind=head": ("beta",)} if prm.kind == "head" else {}
    unread |= {} if prm.lora_rank else {f"{KEY}.lora_rank=0": ("lora_alpha",)}
    unread |= {} if prm.every else {f"{KEY}.every=0": ("scores", "optim")}
    for reason, keys in unread.items():
        if changed := [key for key in keys if getattr(prm, key) != getattr(default, key)]:
            warn("prm-keys", key=changed[0], reason=reason)


def _check_readers(run: Run) -> None:
    """Scores have one source and a reader."""
    prm = run.turnkey.prm
    if prm.use != "column":
        if run.estimator is None:
            refuse("prm-use", use=prm.use, method=run.shown(ESTIMATOR))
        return
    name = TURN_SCORE.removeprefix("extra.")
    if any(entry.get("column") == name for entry in run.turnkey.rewards):
        refuse("prm-two-scores", kind=prm.kind, name=name)
    if TURN_SCORE not in run.columns:
        warn("prm-unread", method=run.shown(ESTIMATOR))


def _check_vocabulary(run: Run) -> None:
    """Of folders on this machine; the trainer compares the others before it builds a model."""
    prm, model = run.turnkey.prm, run.config.actor_rollout_ref.model
    own = model.get("tokenizer_path") or model.path
    if prm.path is None or not all(Path(path).expanduser().is_dir() for path in (prm.path, own)):
        return
    from transformers import AutoTokenizer

    first, second = (AutoTokenizer.from_pretrained(Path(path).expanduser()).get_vocab() for path in (prm.path, own))
    if first != second:
        refuse("prm-vocabulary", path=prm.path, own=len(first), actors=len(second))


def _check_tokens(run: Run) -> None:
    """A micro-batch has to hold the longest row."""
    own, spread = run.turnkey.prm.max_token_len_per_gpu, spread_of(run.actor)
    longest = run.rollout.prompt_length + check_turns(run)[0]
    limit = own or run.actor.ppo_max_token_len_per_gpu
    if limit * spread < longest:
        source = "" if own else f", which is {ACTOR}.ppo_max_token_len_per_gpu,"
        refuse("prm-tokens", limit=limit, source=source, longest=longest, least=-(-longest // spread))
