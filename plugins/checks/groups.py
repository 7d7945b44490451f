"""Checks of ``turnkey.groups``: how often tasks are played, which groups are trained."""

from __future__ import annotations

from verl_turnkey.plugins.checks.data import check_hints
from verl_turnkey.plugins.checks.files import ROLLOUTS, columns
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import FILTER, LOG_PROBS, ROLLOUT, CheckedRun, updates_of_a_step
from verl_turnkey.plugins.config.checkpoint_files import remembering
from verl_turnkey.plugins.config.training import GroupsConfig
from verl_turnkey.plugins.credit.trainer_columns import BYPASS
from verl_turnkey.plugins.rollout.strategies import read_strategy

KEEP = "turnkey.groups.keep"


def check_groups(run: CheckedRun) -> None:
    """Refuse settings of ``turnkey.groups`` that cannot work."""
    groups = run.turnkey.groups
    if groups == GroupsConfig():
        return
    run.needs_our_trainer("groups-trainer")
    if groups.keep < 1:
        _check_kept(run)
    if groups.allocation != "even":
        _check_allocation(run)
    elif (groups.n_low, groups.n_high) != (None, None):
        warn("groups-n-without-effect")
    if groups.hint_high:
        check_hints(run)
        hints = run.setting("turnkey.groups.hint_high")
        _warn_remembering(run, f"{hints}: what {{}} remembers of earlier batches includes outcomes with hints")
    if groups.stores:
        _check_stored(run)


def _check_kept(run: CheckedRun) -> None:
    groups, keep = run.turnkey.groups, run.setting(KEEP)
    if run.rollout.n < 2:
        refuse("keep-single-rollout", keep=run.value_text(KEEP), n=run.rollout.n)
    if run.strategy and run.strategy.trains:
        refuse("keep-branching", keep=run.value_text(KEEP), strategy=run.strategy.name)
    batch = run.config.data.train_batch_size // updates_of_a_step(run.config)
    if groups.keep_by == "groups" and not groups.kept(batch):
        refuse("keep-too-small", keep=run.value_text(KEEP), batch=batch, least=1 / batch)
    _warn_remembering(run, f"{keep}: {{}} then remembers only the kept groups of earlier batches")


def _warn_remembering(run: CheckedRun, message: str) -> None:
    if names := remembering(run.estimator, run.params, run.modifiers):
        warn("groups-memory", message=message.format(" and ".join(names)))


def _check_allocation(run: CheckedRun) -> None:
    groups, n = run.turnkey.groups, run.rollout.n
    low, high = groups.bounds(n)
    if not low < n < high:
        refuse("allocation-range", allocation=groups.allocation, low=low, high=high, n=n)
    if low == 1:
        warn("allocation-single-episode", allocation=groups.allocation)
    forked = read_strategy(run.turnkey.rollout.strategy)
    if forked and getattr(forked[1], "trajectories", None) is not None:
        refuse("allocation-branching", allocation=groups.allocation, strategy=forked[0].name)
    if run.config.data.train_batch_size < 2:
        refuse("allocation-single-task", allocation=groups.allocation)
    if run.get(FILTER):
        refuse("allocation-filter-groups", allocation=groups.allocation)
    for file in run.files:
        if ROLLOUTS in columns(file):
            refuse("allocation-column", file=file, allocation=groups.allocation)


def _check_stored(run: CheckedRun) -> None:
    groups = run.turnkey.groups
    key = f"turnkey.groups.{'replay' if groups.replay else 'buffer'}"
    setting = run.setting(key)
    if groups.replay and groups.buffer:
        refuse("stored-twice", setting=setting, buffer=groups.buffer)
    if groups.keep < 1:
        refuse("stored-keep", setting=setting, keep=run.value_text(KEEP), key=key)
    if groups.replay and groups.hint_high:
        refuse("stored-hints", setting=setting, hint_high=run.value_text("turnkey.groups.hint_high"))
    if groups.buffer and run.rollout.n < 2:
        refuse("stored-single-rollout", buffer=groups.buffer, n=run.rollout.n)
    run.needs_off("stored-filter-groups", FILTER, setting=setting)
    if run.strategy:
        refuse("stored-branching", setting=setting, strategy=run.strategy.name)
    run.needs_off("stored-routing", f"{ROLLOUT}.enable_rollout_routing_replay", setting=setting)
    run.needs_on("stored-log-probs", LOG_PROBS, setting=setting)
    corrections = (BYPASS, "algorithm.rollout_correction.rollout_is", "turnkey.update.importance")
    if not any(run.get(key) for key in corrections):
        warn("stored-uncorrected", setting=setting)
    _warn_remembering(run, f"{setting}: what {{}} remembers of earlier batches includes stored episodes")
