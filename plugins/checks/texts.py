"""Checks of texts of the data in prompts: ``turnkey.groups.hint_high`` and ``turnkey.rollout.skill``."""

from __future__ import annotations

from collections.abc import Mapping

from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.plugins.checks.files import columns, rows
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.run import FILTER, Run, needs_off, needs_our_loop
from verl_turnkey.plugins.rollout.hints import COLUMN as HINT

HINTS, SKILL = "turnkey.groups.hint_high", "turnkey.rollout.skill"


def check_hints(run: Run) -> None:
    needs_our_loop("hints-agent-loop", run, hint_high=run.shown(HINTS))
    if not _shows_task(run):
        refuse("hints-template", hint_high=run.shown(HINTS), template=run.shown("turnkey.rollout.template"))
    if lacking := [file for file in run.files if HINT not in columns(file)]:
        refuse("hints-missing", hint_high=run.shown(HINTS), file=lacking[0])
    needs_off("hints-filter-groups", run, FILTER, hint_high=run.shown(HINTS))


def check_skill(run: Run) -> None:
    """Refuse a text of the data that no prompt would show."""
    name = run.turnkey.rollout.skill
    if name is None:
        return
    needs_our_loop("skill-agent-loop", run, skill=run.shown(SKILL))
    if not _shows_task(run):
        refuse("skill-template", skill=run.shown(SKILL), template=run.shown("turnkey.rollout.template"))
    if lacking := [file for file in run.files if not has_text(file, name)]:
        refuse("skill-missing", skill=run.shown(SKILL), file=lacking[0])


def _shows_task(run: Run) -> bool:
    return "{task}" in load_template(run.turnkey.rollout.template)


def has_text(file: str, name: str) -> bool:
    """Whether ``file`` has a column ``name``, or its first row such a key in ``extra_info``."""
    if name in (names := columns(file)):
        return True
    extra = next(rows(file, ["extra_info"]), (None,))[0] if "extra_info" in names else None
    return isinstance(extra, Mapping) and name in extra
