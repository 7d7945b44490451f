"""The node ``turnkey.teacher``: a second prompt for each response, with a text that the policy did not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl_turnkey.advantage.params import check


@dataclass(frozen=True)
class TeacherConfig:
    """Which text a teacher's prompt holds, for which rows, and by which weights it is scored."""

    source: str | dict[str, Any] | None = None
    """where the text comes from: a registered name, module:function, or a mapping with name and options; null: none"""
    template: str = "\n\nPrivileged information:\n{text}"
    """what is put at the end of the prompt's last message, with {text}; or the path of a file with it"""
    max_tokens: int = 1024
    """tokens of the text in its template; of a longer text the end is cut"""
    weights: Literal["old", "ref"] = "old"
    """weights that score the responses; old: those before the update; ref: the reference policy's"""
    rows: Literal["all", "mixed_groups", "failed"] = "all"
    """rows that get a text: all, those of groups with both outcomes, or those of failed episodes"""

    def __post_init__(self) -> None:
        check("{text}" in self.template or "\n" not in self.template, "template", "a text with {text}", self.template)
        check(self.max_tokens > 0, "max_tokens", "positive", self.max_tokens)
