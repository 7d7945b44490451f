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
            warn("prm-without-effect", f"{KEY} has no effect without a model: set {KEY}.kind, or drop the other keys")
        return
    needs_our_trainer("prm-trainer", run, KEY)
    if (strategy := str(run.actor.strategy)) not in FSDP:
        problem = f"{KEY}.kind={prm.kind} is built with the actor's engine, and {ACTOR}.strategy={strategy}"
        refuse("prm-engine", f"{problem}: set it to fsdp2")
    _check_objective(prm)
    _check_reference(run)
    _check_head(prm)
    _check_keys(prm)
    _check_readers(run)
    _check_vocabulary(run)
    _check_tokens(run)
    switching = f"trainer.v1.{run.mode.removeprefix('turnkey_')}.hybrid_rollout.enable_switch"
    if run.get(switching) and not prm.offload:
        problem = f"{switching}=true gives the trainer's GPUs to generation, and {KEY}.offload=false keeps the model"
        refuse("prm-switching", f"{problem} there: set {KEY}.offload=true")


def _check_objective(prm: PrmConfig) -> None:
    from verl_turnkey.losses.objectives import ObjectiveParams, objective_spec  # torch, which a bare installation lacks

    if ":" in prm.objective:
        load_function(prm.objective, f"{KEY}.objective")
        return
    spec = objective_spec(prm.objective)
    if prm.kind not in spec.kinds:
        problem = f"{KEY}.objective={spec.name} is for {KEY}.kind={' or '.join(spec.kinds)}, got {prm.kind}"
        refuse("prm-objective", f"{problem}: set {KEY}.kind={spec.kinds[0]}, or another objective")
    default = ObjectiveParams()
    unread = [key for key in ("over", "weigh", "positive") if key not in spec.reads]
    if changed := [key for key in unread if getattr(prm, key) != getattr(default, key)]:
        warn("prm-objective-keys", f"{KEY}.{changed[0]} has no effect with {KEY}.objective={spec.name}")


def _check_reference(run: Run) -> None:
    prm = run.turnkey.prm
    if prm.kind != "implicit":
        return
    if prm.reference == "ref" and not run.use_reference:
        problem = f"{KEY}.reference=ref, and this run has no reference policy"
        on = f"{ACTOR}.use_kl_loss=true (a coefficient of 0 will do)"
        refuse("prm-reference-policy", f"{problem}: set {on}, or {KEY}.reference=old")
    if prm.reference == "base" and not prm.lora_rank:
        problem = f"{KEY}.reference=base is the model without its adapter, and {KEY}.lora_rank=0 trains all weights"
        refuse("prm-reference-base", f"{problem}: set {KEY}.lora_rank, or {KEY}.reference=old")
    fixed = prm.reference in ("ref", "base")
    if fixed and not prm.every and prm.starts_as_reference(run.config.actor_rollout_ref.model.path, None):
        problem = f"{KEY}.every=0 leaves the weights of {KEY}.reference={prm.reference}: all scores are 0"
        refuse("prm-reference-same", f"{problem}: set {KEY}.every=1, or with reference=ref {KEY}.path to other weights")
    if prm.reference == "rollout":
        needs = f"{KEY}.reference=rollout needs the log-probabilities of the inference engine"
        needs_on("prm-reference-rollout", run, LOG_PROBS, needs)


def _check_head(prm: PrmConfig) -> None:
    if prm.kind != "head":
        if not prm.head_bias:
            problem = f"{KEY}.head_bias=false is for {KEY}.kind=head, and {KEY}.kind={prm.kind} has no head"
            refuse("prm-head-bias", f"{problem}: drop it")
        return
    if prm.reference != "old":
        problem = f"{KEY}.reference={prm.reference} is for log-ratios, which {KEY}.kind=head does not have"
        refuse("prm-head-reference", f"{problem}: drop it")
    if prm.lora_rank:
        problem = (
            f"{KEY}.lora_rank={prm.lora_rank}: verl builds adapters only for generative models, not {KEY}.kind=head"
        )
        refuse("prm-head-lora", f"{problem}: set {KEY}.lora_rank=0")
    if not prm.every and prm.path is None:
        problem = f"{KEY}.kind=head starts with a random head, and {KEY}.every=0 never trains it"
        refuse("prm-head-untrained", f"{problem}: set {KEY}.path to a trained one, or {KEY}.every=1")


def _check_keys(prm: PrmConfig) -> None:
    """Warn of keys that this model does not read."""
    default = PrmConfig()
    unread = {f"{KEY}.kind=head": ("beta",)} if prm.kind == "head" else {}
    unread |= {} if prm.lora_rank else {f"{KEY}.lora_rank=0": ("lora_alpha",)}
    unread |= {} if prm.every else {f"{KEY}.every=0": ("scores", "optim")}
    for reason, keys in unread.items():
        if changed := [key for key in keys if getattr(prm, key) != getattr(default, key)]:
            warn("prm-keys", f"{KEY}.{changed[0]} has no effect with {reason}: drop it")


def _check_readers(run: Run) -> None:
    """Scores have one source and a reader."""
    prm, method = run.turnkey.prm, run.setting(ESTIMATOR)
    if prm.use != "column":
        if run.estimator is None:
            problem = f"{KEY}.use={prm.use} changes the rewards that estimators of this package read, unlike {method}"
            refuse("prm-use", f"{problem}: take one, such as +turnkey=turn_gae")
        return
    name = TURN_SCORE.removeprefix("extra.")
    if any(entry.get("column") == name for entry in run.turnkey.rewards):
        problem = f"{KEY}.kind={prm.kind} gives the column {name}, and so does a component of turnkey.rewards"
        refuse("prm-two-scores", f"{problem}: drop that component, or set {KEY}.kind=null")
    if TURN_SCORE not in run.columns:
        problem = f"{method} does not read {TURN_SCORE}, so the scores of {KEY} change nothing"
        warn("prm-unread", f"{problem}: take +turnkey=istar, or set {KEY}.use=reward")


def _check_vocabulary(run: Run) -> None:
    """Of folders on this machine; the trainer compares the others before it builds a model."""
    prm, model = run.turnkey.prm, run.config.actor_rollout_ref.model
    own = model.get("tokenizer_path") or model.path
    if prm.path is None or not all(Path(path).expanduser().is_dir() for path in (prm.path, own)):
        return
    from transformers import AutoTokenizer

    first, second = (AutoTokenizer.from_pretrained(Path(path).expanduser()).get_vocab() for path in (prm.path, own))
    if first != second:
        refuse("prm-vocabulary", vocabulary_error(prm.path, len(first), len(second)))


def vocabulary_error(path: str | None, own: int, actors: int) -> str:
    """That the model ``path`` has other tokens than the actor; ``own``, ``actors``: how many each has."""
    return (
        f"{KEY}.path={path} has a tokenizer of its own ({own} tokens, the actor's has {actors}), and would read the "
        "actor's token ids as other text: give a model with the actor's tokenizer"
    )


def _check_tokens(run: Run) -> None:
    """A micro-batch has to hold the longest row."""
    own, spread = run.turnkey.prm.max_token_len_per_gpu, spread_of(run.actor)
    longest = run.rollout.prompt_length + check_turns(run)[0]
    limit = own or run.actor.ppo_max_token_len_per_gpu
    if limit * spread < longest:
        source = "" if own else f", which is {ACTOR}.ppo_max_token_len_per_gpu,"
        problem = f"{KEY}.max_token_len_per_gpu={limit}{source} is too small: a row may have {longest} tokens"
        refuse("prm-tokens", f"{problem}; raise it to {-(-longest // spread)}")
