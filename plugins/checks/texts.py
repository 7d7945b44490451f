"""Checks of texts of the data in prompts: ``turnkey.groups.hint_high`` and ``turnkey.rollout.skill``."""

from __future__ import annotations

from collections.abc import Mapping

from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.tasks import HINT
from verl_turnkey.plugins.checks.files import columns, rows
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.run import FILTER, Run, needs_off, needs_our_loop

HINTS, SKILL = "turnkey.groups.hint_high", "turnkey.rollout.skill"


def check_hints(run: Run) -> None:
    setting = run.setting(HINTS)
    needs_our_loop("hints-agent-loop", run, setting, "shows hints")
    if not _shows_task(run):
        template = run.setting("turnkey.rollout.template")
        refuse("hints-template", f"{setting} shows hints after the task, but {template} does not show the {{task}}")
    if lacking := [file for file in run.files if HINT not in columns(file)]:
        column = f"{lacking[0]} has no column {HINT!r} with a text for each task"
        refuse("hints-missing", f"{setting} shows the hints of the data, but {column}")
    unsolved = f"{setting} is for tasks that nobody solves, which {FILTER}=true drops before they are seen"
    needs_off("hints-filter-groups", run, FILTER, unsolved)


def check_skill(run: Run) -> None:
    """Refuse a text of the data that no prompt would show."""
    name, setting = run.turnkey.rollout.skill, run.setting(SKILL)
    if name is None:
        return
    needs_our_loop("skill-agent-loop", run, setting, "shows it")
    if not _shows_task(run):
        template = run.setting("turnkey.rollout.template")
        problem = f"{setting} is shown after the task, but {template} does not show the {{task}}"
        refuse("skill-template", f"{problem}: choose another template")
    if lacking := [file for file in run.files if not has_text(file, name)]:
        column = f"{lacking[0]} has neither a column nor a key of extra_info with that name"
        refuse("skill-missing", f"{setting} shows a text of the data, but {column}: write one that the data have")


def _shows_task(run: Run) -> bool:
    return "{task}" in load_template(run.turnkey.rollout.template)


def has_text(file: str, name: str) -> bool:
    """Whether ``file`` has a column ``name``, or its first row such a key in ``extra_info``."""
    if name in (names := columns(file)):
        return True
    extra = next(rows(file, ["extra_info"]), (None,))[0] if "extra_info" in names else None
    return isinstance(extra, Mapping) and name in extra
