"""Driver checks of ``turnkey.rollout.skill``: a text of the data in the policy's own prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.plugins.checks.files import columns, rows
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.schema import TurnkeyConfig


def check_skill(turnkey: TurnkeyConfig, files: Sequence[str], loops: Collection[str]) -> None:
    """Refuse a text of the data in the prompts where no prompt would show it; ``files``: of the data, on this machine.

    Raises:
        ConfigError: names the key to change.
    """
    name, setting = turnkey.rollout.skill, f"turnkey.rollout.skill={turnkey.rollout.skill}"
    if name is None:
        return
    if "turnkey_env" not in loops:
        refuse(
            "skill-agent-loop",
            f"{setting} has no effect with the agent loop {min(loops)}: only turnkey_env shows it; set it to null",
        )
    if "{task}" not in load_template(turnkey.rollout.template):
        refuse(
            "skill-template",
            f"{setting} is shown after the task, but turnkey.rollout.template={turnkey.rollout.template} does not show "
            "the {task}: choose another template",
        )
    if lacking := [file for file in files if not _has(file, name)]:
        refuse(
            "skill-missing",
            f"{setting} shows a text of the data, but {lacking[0]} has neither a column nor a key of extra_info with "
            "that name: write one that the data have",
        )


def _has(file: str, name: str) -> bool:
    if name in (names := columns(file)):
        return True
    extra = next(rows(file, ["extra_info"]), (None,))[0] if "extra_info" in names else None
    return isinstance(extra, Mapping) and name in extra
