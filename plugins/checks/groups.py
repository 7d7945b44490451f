"""Checks of ``turnkey.groups``: how often tasks are played, which groups are trained."""

from __future__ import annotations

from verl_turnkey.plugins.checks.files import ROLLOUTS, columns
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import (
    BATCH,
    FILTER,
    LOG_PROBS,
    ROLLOUT,
    N,
    Run,
    needs_off,
    needs_on,
    needs_our_trainer,
)
from verl_turnkey.plugins.checks.sizes import updates_of_a_step
from verl_turnkey.plugins.checks.texts import check_hints
from verl_turnkey.plugins.config.checkpoint_files import remembering
from verl_turnkey.plugins.config.groups import GroupsConfig
from verl_turnkey.plugins.credit.trainer_columns import BYPASS
from verl_turnkey.plugins.rollout.strategies import KEY, read_strategy

KEEP = "turnkey.groups.keep"


def check_groups(run: Run) -> None:
    """Refuse settings of ``turnkey.groups`` that cannot work."""
    groups = run.turnkey.groups
    if groups == GroupsConfig():
        return
    needs_our_trainer("groups-trainer", run, "turnkey.groups")
    if groups.keep < 1:
        _check_kept(run)
    if groups.allocation != "even":
        _check_allocation(run)
    elif (groups.n_low, groups.n_high) != (None, None):
        warn("groups-n-without-effect", "turnkey.groups.n_low and n_high have no effect with allocation=even")
    if groups.hint_high:
        check_hints(run)
        hints = run.setting("turnkey.groups.hint_high")
        _warn_remembering(run, f"{hints}: what {{}} remembers of earlier batches includes outcomes with hints")
    if groups.stores:
        _check_stored(run)


def _check_kept(run: Run) -> None:
    groups, keep = run.turnkey.groups, run.setting(KEEP)
    if run.rollout.n < 2:
        refuse("keep-single-rollout", f"{keep} compares a task's episodes, but {run.setting(N)}: raise it to 2 or more")
    if run.strategy and run.strategy.trains:
        strategy = f"{KEY}={run.strategy.name}"
        refuse("keep-branching", f"{keep} sees one outcome per rollout, and {strategy} trains several: set {KEEP} to 1")
    batch = run.config.data.train_batch_size // updates_of_a_step(run.config)
    if groups.keep_by == "groups" and not groups.kept(batch):
        problem = f"{keep} is less than one of the {batch} groups of an update ({BATCH})"
        refuse("keep-too-small", f"{problem}: raise it to {1 / batch:.3g} or more")
    _warn_remembering(run, f"{keep}: {{}} then remembers only the kept groups of earlier batches")


def _warn_remembering(run: Run, message: str) -> None:
    if names := remembering(run.estimator, run.params, run.modifiers):
        warn("groups-memory", message.format(" and ".join(names)))


def _check_allocation(run: Run) -> None:
    setting, n = run.setting("turnkey.groups.allocation"), run.rollout.n
    low, high = run.turnkey.groups.bounds(n)
    if not low < n < high:
        problem = (
            f"{setting} gives each task from {low} to {high} episodes (turnkey.groups.n_low, n_high), on average {n}"
        )
        refuse("allocation-range", f"{problem}: expected n_low < {N} < n_high")
    if low == 1:
        warn(
            "allocation-single-episode",
            f"{setting} may play a task once (turnkey.groups.n_low=1), and methods that compare the episodes of a task "
            "give a single one no credit",
        )
    forked = read_strategy(run.turnkey.rollout.strategy)
    if forked and getattr(forked[1], "trajectories", None) is not None:
        refuse(
            "allocation-branching",
            f"{setting} varies the rollouts of a task, and {KEY}={forked[0].name} counts its trajectories by {N}: set "
            "turnkey.groups.allocation=even",
        )
    if run.config.data.train_batch_size < 2:
        refuse("allocation-single-task", f"{setting} divides episodes among the tasks of a batch: raise {BATCH}")
    if run.get(FILTER):
        refuse(
            "allocation-filter-groups",
            f"{setting} learns from all groups, and {FILTER}=true drops those that end alike before they are seen: set "
            "it to false; turnkey.groups.keep leaves out groups as well",
        )
    for file in run.files:
        if ROLLOUTS in columns(file):
            problem = f"{file} has a column {ROLLOUTS}, which {setting} would overwrite"
            refuse("allocation-column", f"{problem}: drop it, or set allocation=even")


def _check_stored(run: Run) -> None:
    groups = run.turnkey.groups
    key = f"turnkey.groups.{'replay' if groups.replay else 'buffer'}"
    setting = run.setting(key)
    if groups.replay and groups.buffer:
        problem = f"{setting} and turnkey.groups.buffer={groups.buffer} may train a stored episode twice in a batch"
        refuse("stored-twice", f"{problem}: set one of them to 0")
    if groups.keep < 1:
        problem = f"{setting} adds episodes to groups that ended alike, which {run.setting(KEEP)} leaves out"
        refuse("stored-keep", f"{problem}: set {key}=0 or {KEEP}=1")
    if groups.replay and groups.hint_high:
        hints = run.setting("turnkey.groups.hint_high")
        refuse(
            "stored-hints", f"{setting} may compare episodes with and without a hint ({hints}): set one of them to 0"
        )
    if groups.buffer and run.rollout.n < 2:
        problem = f"turnkey.groups.buffer={groups.buffer} stores groups whose episodes have different rewards"
        refuse("stored-single-rollout", f"{problem}, but {run.setting(N)}: raise it to 2 or more")
    alike = f"{setting} adds episodes to groups that ended alike, which {FILTER}=true drops before they are seen"
    needs_off("stored-filter-groups", run, FILTER, alike)
    if run.strategy:
        problem = f"{setting} stores episodes that do not fork, but {KEY}={run.strategy.name}"
        refuse("stored-branching", f"{problem}: set {KEY} to independent")
    if run.rollout.get("enable_rollout_routing_replay", False):
        key = f"{ROLLOUT}.enable_rollout_routing_replay"
        refuse("stored-routing", f"{setting} would replay the expert routes of older weights: set {key}=false")
    needs_on("stored-log-probs", run, LOG_PROBS, f"{setting} needs the log-probabilities of the policy that played")
    corrections = (BYPASS, "algorithm.rollout_correction.rollout_is", "turnkey.update.importance")
    if not any(run.get(key) for key in corrections):
        warn(
            "stored-uncorrected",
            f"{setting} trains episodes of older weights as if the current ones had played them: set "
            f"algorithm.rollout_correction.rollout_is=token, turnkey.update.importance=turn or {BYPASS}=true",
        )
    _warn_remembering(run, f"{setting}: what {{}} remembers of earlier batches includes stored episodes")
