"""Driver checks of ``turnkey.prm``: a model that cannot be built, learns nothing, or whose scores nobody reads."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.limits import ACTOR, ROLLOUT, check_turns
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.prm import TURN_SCORE, PrmConfig
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify, credit_params, estimator_of

KEY = "turnkey.prm"


def check_prm(config: DictConfig, turnkey: TurnkeyConfig, mode: str, loops: Collection[str]) -> None:
    """Refuse a process reward model that the run cannot have; ``mode``: ``trainer.v1.trainer_mode``.

    Raises:
        ConfigError: names the key to change.
    """
    prm = turnkey.prm
    if prm.kind is None:
        if prm != PrmConfig():
            warn("prm-without-effect", f"{KEY} has no effect without a model: set {KEY}.kind, or drop the other keys")
        return
    if not mode.startswith("turnkey_"):
        refuse(
            "prm-trainer",
            f"{KEY} needs a trainer of this package, but trainer.v1.trainer_mode is {mode!r}: set "
            f"trainer.v1.trainer_mode=turnkey_{mode}",
        )
    if (strategy := str(config.actor_rollout_ref.actor.strategy)) not in FSDP:
        refuse(
            "prm-engine",
            f"{KEY}.kind={prm.kind} is built with the actor's engine, and {ACTOR}.strategy={strategy}: set it to fsdp2",
        )
    _check_objective(prm)
    _check_reference(config, prm)
    _check_head(prm)
    _check_keys(prm)
    _check_readers(config, turnkey)
    _check_vocabulary(config, prm)
    _check_tokens(config, turnkey, loops)
    switching = f"trainer.v1.{mode.removeprefix('turnkey_')}.hybrid_rollout.enable_switch"
    if OmegaConf.select(config, switching) and not prm.offload:
        refuse(
            "prm-switching",
            f"{switching}=true gives the trainer's GPUs to generation between updates, and {KEY}.offload=false keeps "
            f"the model there: set {KEY}.offload=true",
        )


def _check_objective(prm: PrmConfig) -> None:
    from verl_turnkey.learned import ObjectiveParams, objective_spec  # torch, which a bare installation lacks

    if ":" in prm.objective:
        load_function(prm.objective, f"{KEY}.objective")
        return
    spec = objective_spec(prm.objective)
    if prm.kind not in spec.kinds:
        refuse(
            "prm-objective",
            f"{KEY}.objective={spec.name} is for {KEY}.kind={' or '.join(spec.kinds)}, got {prm.kind}: set "
            f"{KEY}.kind={spec.kinds[0]}, or another objective",
        )
    default = ObjectiveParams()
    unread = [key for key in ("over", "weigh", "positive") if key not in spec.reads]
    if changed := [key for key in unread if getattr(prm, key) != getattr(default, key)]:
        warn("prm-objective-keys", f"{KEY}.{changed[0]} has no effect with {KEY}.objective={spec.name}")


def _check_reference(config: DictConfig, prm: PrmConfig) -> None:
    if prm.kind != "implicit":
        return
    if prm.reference == "ref":
        from verl.trainer.ppo.utils import need_reference_policy

        if not need_reference_policy(config):
            refuse(
                "prm-reference-policy",
                f"{KEY}.reference=ref, and this run has no reference policy: set {ACTOR}.use_kl_loss=true (a "
                f"coefficient of 0 will do), or {KEY}.reference=old",
            )
    if prm.reference == "base" and not prm.lora_rank:
        refuse(
            "prm-reference-base",
            f"{KEY}.reference=base is the model without its adapter, and {KEY}.lora_rank=0 trains all weights: set "
            f"{KEY}.lora_rank, or {KEY}.reference=old",
        )
    fixed = prm.reference in ("ref", "base")
    if fixed and not prm.every and prm.starts_as_reference(config.actor_rollout_ref.model.path, None):
        refuse(
            "prm-reference-same",
            f"{KEY}.every=0 leaves the model as it starts, with the weights of {KEY}.reference={prm.reference}, so all "
            f"of its scores are 0: set {KEY}.every=1, or with reference=ref {KEY}.path to other weights",
        )
    if prm.reference == "rollout" and not config.actor_rollout_ref.rollout.calculate_log_probs:
        refuse(
            "prm-reference-rollout",
            f"{KEY}.reference=rollout needs the log-probabilities of the inference engine: set "
            f"{ROLLOUT}.calculate_log_probs=true",
        )


def _check_head(prm: PrmConfig) -> None:
    if prm.kind != "head":
        if not prm.head_bias:
            refuse(
                "prm-head-bias",
                f"{KEY}.head_bias=false is for {KEY}.kind=head, and {KEY}.kind={prm.kind} has no head: drop it",
            )
        return
    if prm.reference != "old":
        refuse(
            "prm-head-reference",
            f"{KEY}.kind=head has no log-ratios, and {KEY}.reference={prm.reference} is what they are to: drop it",
        )
    if prm.lora_rank:
        refuse(
            "prm-head-lora",
            f"{KEY}.lora_rank={prm.lora_rank}: verl builds adapters only for generative models, and {KEY}.kind=head is "
            f"none: set {KEY}.lora_rank=0",
        )
    if not prm.every and prm.path is None:
        refuse(
            "prm-head-untrained",
            f"{KEY}.kind=head starts with random numbers for its head, and {KEY}.every=0 never trains it: set "
            f"{KEY}.path to a trained one, or {KEY}.every=1",
        )


def _check_keys(prm: PrmConfig) -> None:
    """Warn of keys that this model does not read."""
    default = PrmConfig()
    unread = {f"{KEY}.kind=head": ("beta",)} if prm.kind == "head" else {}
    unread |= {} if prm.lora_rank else {f"{KEY}.lora_rank=0": ("lora_alpha",)}
    unread |= {} if prm.every else {f"{KEY}.every=0": ("scores", "optim")}
    for reason, keys in unread.items():
        if changed := [key for key in keys if getattr(prm, key) != getattr(default, key)]:
            warn("prm-keys", f"{KEY}.{changed[0]} has no effect with {reason}: drop it")


def _check_readers(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Scores have one source and a reader."""
    estimator, prm = estimator_of(config), turnkey.prm
    if prm.use != "column":
        if estimator is None:
            refuse(
                "prm-use",
                f"{KEY}.use={prm.use} changes the rewards that estimators of this package read, and "
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} is none of them: take one, such as "
                "+turnkey=turn_gae",
            )
        return
    name = TURN_SCORE.removeprefix("extra.")
    if any(entry.get("column") == name for entry in turnkey.rewards):
        refuse(
            "prm-two-scores",
            f"{KEY}.kind={prm.kind} gives the column {name}, and so does a component of turnkey.rewards: drop that "
            f"component, or set {KEY}.kind=null",
        )
    readers = (
        () if estimator is None else estimator.columns(credit_params(config, turnkey), credit_modify(config, turnkey))
    )
    if TURN_SCORE not in readers:
        warn(
            "prm-unread",
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} does not read {TURN_SCORE}, so the scores of "
            f"{KEY} change nothing: take +turnkey=istar, or set {KEY}.use=reward",
        )


def _check_vocabulary(config: DictConfig, prm: PrmConfig) -> None:
    """Of folders on this machine; the trainer compares the others before it builds a model."""
    own = config.actor_rollout_ref.model.get("tokenizer_path") or config.actor_rollout_ref.model.path
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


def _check_tokens(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """A micro-batch has to hold the longest row."""
    actor, prm = config.actor_rollout_ref.actor, turnkey.prm
    response, _ = check_turns(config, turnkey, loops)
    longest = config.actor_rollout_ref.rollout.prompt_length + response
    spread = max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)
    limit = prm.max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    if limit * spread < longest:
        source = "" if prm.max_token_len_per_gpu else f", which is {ACTOR}.ppo_max_token_len_per_gpu,"
        refuse(
            "prm-tokens",
            f"{KEY}.max_token_len_per_gpu={limit}{source} is too small: a row may have {longest} tokens; raise it to "
            f"{-(-longest // spread)}",
        )
