"""Driver checks of ``turnkey.groups``: how often tasks are played, which groups are trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.plugins.checks.files import columns
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.limits import updates_of_a_step
from verl_turnkey.plugins.config.checkpoint_files import remembering
from verl_turnkey.plugins.config.groups import GroupsConfig
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify, credit_params, estimator_of
from verl_turnkey.plugins.credit.supplied import BYPASS
from verl_turnkey.plugins.rollout.hints import COLUMN as HINT
from verl_turnkey.plugins.rollout.strategies import KEY, read_strategy

COLUMN = "__rollout_n__"
"""in which a data row says how often verl plays it"""
KEEP = "turnkey.groups.keep"


def check_groups(
    config: DictConfig, turnkey: TurnkeyConfig, mode: str, files: Sequence[str], loops: Collection[str]
) -> None:
    """Refuse settings of ``turnkey.groups`` that cannot work.

    ``mode`` is ``trainer.v1.trainer_mode``, ``files`` the data that are on this machine, ``loops`` the agent loops of
    their rows.

    Raises:
        ConfigError: names the key to change.
    """
    groups = turnkey.groups
    if groups == GroupsConfig():
        return
    if not mode.startswith("turnkey_"):
        refuse(
            "groups-trainer",
            f"turnkey.groups is read by the trainers of this package, but trainer.v1.trainer_mode is {mode!r}: set "
            f"trainer.v1.trainer_mode=turnkey_{mode}",
        )
    if groups.keep < 1:
        _check_kept(config, turnkey)
    if groups.allocation != "even":
        _check_allocation(config, turnkey, files)
    elif (groups.n_low, groups.n_high) != (None, None):
        warn("groups-n-without-effect", "turnkey.groups.n_low and n_high have no effect with allocation=even")
    if groups.hint_high:
        _check_hints(config, turnkey, files, loops)
    if groups.stores:
        _check_stored(config, turnkey)


def _check_kept(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    setting = f"{KEEP}={turnkey.groups.keep}"
    if config.actor_rollout_ref.rollout.n < 2:
        refuse(
            "keep-single-rollout",
            f"{setting} compares the rewards of the episodes of a task, but actor_rollout_ref.rollout.n="
            f"{config.actor_rollout_ref.rollout.n}: raise it to 2 or more",
        )
    forked = read_strategy(turnkey.rollout.strategy)
    if forked and forked[0].trains:
        refuse(
            "keep-branching",
            f"{setting} sees one outcome per rollout, and {KEY}={forked[0].name} trains several: set {KEEP} to 1",
        )
    batch = config.data.train_batch_size // updates_of_a_step(config)
    if turnkey.groups.keep_by == "groups" and not turnkey.groups.kept(batch):
        refuse(
            "keep-too-small",
            f"{setting} is less than one of the {batch} groups of an update (data.train_batch_size): raise it to "
            f"{1 / batch:.3g} or more",
        )
    _warn_remembering(config, turnkey, f"{setting}: {{}} then remembers only the kept groups of earlier batches")


def _warn_remembering(config: DictConfig, turnkey: TurnkeyConfig, message: str) -> None:
    if names := remembering(estimator_of(config), credit_params(config, turnkey), credit_modify(config, turnkey)):
        warn("groups-memory", message.format(" and ".join(names)))


def _check_allocation(config: DictConfig, turnkey: TurnkeyConfig, files: Sequence[str]) -> None:
    groups = turnkey.groups
    setting, n = f"turnkey.groups.allocation={groups.allocation}", config.actor_rollout_ref.rollout.n
    low, high = groups.bounds(n)
    if not low < n < high:
        refuse(
            "allocation-range",
            f"{setting} gives each task from {low} to {high} episodes (turnkey.groups.n_low, n_high), and {n} on "
            "average: expected n_low < actor_rollout_ref.rollout.n < n_high",
        )
    if low == 1:
        warn(
            "allocation-single-episode",
            f"{setting} may play a task once (turnkey.groups.n_low=1), and methods that compare the episodes of a "
            "task give a single one no credit",
        )
    forked = read_strategy(turnkey.rollout.strategy)
    if forked and getattr(forked[1], "trajectories", None) is not None:
        refuse(
            "allocation-branching",
            f"{setting} varies the rollouts of a task, and {KEY}={forked[0].name} counts its trajectories by "
            "actor_rollout_ref.rollout.n: set turnkey.groups.allocation=even",
        )
    if config.data.train_batch_size < 2:
        refuse(
            "allocation-single-task",
            f"{setting} divides the episodes of a batch among its tasks: raise data.train_batch_size",
        )
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        refuse(
            "allocation-filter-groups",
            f"{setting} learns from all groups, and algorithm.filter_groups.enable=true drops those that end alike "
            "before they are seen: set it to false; turnkey.groups.keep leaves out groups as well",
        )
    for file in files:
        if COLUMN in columns(file):
            refuse(
                "allocation-column",
                f"{file} has a column {COLUMN}, which {setting} would overwrite: drop it, or set allocation=even",
            )


def _check_hints(config: DictConfig, turnkey: TurnkeyConfig, files: Sequence[str], loops: Collection[str]) -> None:
    setting = f"turnkey.groups.hint_high={turnkey.groups.hint_high}"
    if "turnkey_env" not in loops:
        refuse(
            "hints-agent-loop",
            f"{setting} has no effect with the agent loop {min(loops)}: only turnkey_env shows hints",
        )
    if "{task}" not in load_template(turnkey.rollout.template):
        refuse(
            "hints-template",
            f"{setting} shows hints after the task, but turnkey.rollout.template={turnkey.rollout.template} does not "
            "show the {task}",
        )
    if lacking := [file for file in files if HINT not in columns(file)]:
        refuse(
            "hints-missing",
            f"{setting} shows the hints of the data, but {lacking[0]} has no column {HINT!r} with a text for each task",
        )
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        refuse(
            "hints-filter-groups",
            f"{setting} is for tasks that nobody solves, which algorithm.filter_groups.enable=true drops before they "
            "are seen: set it to false",
        )
    _warn_remembering(
        config, turnkey, f"{setting}: what {{}} remembers of earlier batches includes outcomes with hints"
    )


def _check_stored(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    groups, rollout = turnkey.groups, config.actor_rollout_ref.rollout
    name = "replay" if groups.replay else "buffer"
    setting = f"turnkey.groups.{name}={getattr(groups, name)}"
    if groups.replay and groups.buffer:
        refuse(
            "stored-twice",
            f"{setting} and turnkey.groups.buffer={groups.buffer} may train one stored episode twice in a batch: set "
            "one of them to 0",
        )
    if groups.keep < 1:
        refuse(
            "stored-keep",
            f"{setting} adds episodes to groups that all ended alike, which {KEEP}={groups.keep} leaves out: set one "
            f"of them to its default, turnkey.groups.{name}=0 or {KEEP}=1",
        )
    if groups.replay and groups.hint_high:
        refuse(
            "stored-hints",
            f"{setting} may compare episodes that were played with a hint with those without "
            f"(turnkey.groups.hint_high={groups.hint_high}): set one of them to 0",
        )
    if groups.buffer and rollout.n < 2:
        refuse(
            "stored-single-rollout",
            f"turnkey.groups.buffer={groups.buffer} stores groups whose episodes have different rewards, but "
            f"actor_rollout_ref.rollout.n={rollout.n}: raise it to 2 or more",
        )
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        refuse(
            "stored-filter-groups",
            f"{setting} adds episodes to groups that all ended alike, which algorithm.filter_groups.enable=true drops "
            "before they are seen: set it to false",
        )
    forked = read_strategy(turnkey.rollout.strategy)
    if forked:
        refuse(
            "stored-branching",
            f"{setting} stores episodes that do not fork, but {KEY}={forked[0].name}: set {KEY} to independent",
        )
    if rollout.get("enable_rollout_routing_replay", False):
        refuse(
            "stored-routing",
            f"{setting} would replay the expert routes of older weights: set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=false",
        )
    if not rollout.calculate_log_probs:
        refuse(
            "stored-log-probs",
            f"{setting} stores each episode with the log-probabilities of the policy that played it: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true",
        )
    corrections = (BYPASS, "algorithm.rollout_correction.rollout_is", "turnkey.update.importance")
    if not any(OmegaConf.select(config, key) for key in corrections):
        warn(
            "stored-uncorrected",
            f"{setting} trains episodes of older weights as if the current ones had played them: set "
            f"algorithm.rollout_correction.rollout_is=token, turnkey.update.importance=turn or {BYPASS}=true",
        )
    _warn_remembering(config, turnkey, f"{setting}: what {{}} remembers of earlier batches includes stored episodes")
