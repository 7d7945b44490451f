"""The node ``turnkey.teacher``: a second log-probability of what the model wrote, with a text that it did not see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_turnkey.advantage.params import ConfigError, check
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.plugins.config.roles import Code, TextOrFile, Trained

COLUMN = "teacher_log_prob"
"""field of verl's queue, (B, L) nested like ``old_log_probs``"""
HAS_TEXT = "has_teacher"
"""field of verl's queue, (B,) bool: whether the row's teacher had a text"""
SLOT = "{text}"


@dataclass(frozen=True)
class TeacherConfig:
    """Which text the teacher sees, and on which rows. The teacher is the policy itself, with the text in its prompt."""

    source: Trained[Code[str | dict[str, Any] | None]] = None
    """where the text comes from: the name of a source, a mapping with its name and options, or module:function; null:
    no teacher"""
    template: Trained[TextOrFile[str]] = "\n\nPrivileged information:\n{text}"
    """what is put at the end of the prompt's last message, with {text}; or the path of a file with it"""
    max_tokens: Trained[int] = 1024
    """tokens of the text in its template; of a longer text the end is cut"""
    weights: Trained[Literal["old", "ref"]] = "old"
    """old: the weights of old_log_probs; ref: those of the reference policy"""
    rows: Trained[Literal["all", "mixed_groups", "failed"]] = "all"
    """which rows get a text; mixed_groups: those of groups with a success and a failure; failed: those of episodes
    without success"""
    placebo: Trained[bool] = False
    """also score each row with a meaningless text of the same length, subtracted in teacher/contrast"""

    def __post_init__(self) -> None:
        check(self.max_tokens > 0, "max_tokens", "positive", self.max_tokens)
        check(SLOT in self.template or "\n" not in self.template, "template", "a text with {text}", self.template)

    def text_template(self) -> str:
        """The template itself.

        Raises:
            ConfigError: its file cannot be read, or has no ``{text}``.
        """
        if SLOT in self.template:
            return self.template
        try:
            text = read_text(Path(self.template).expanduser())
        except (OSError, ConfigError) as error:
            raise ConfigError(
                f"turnkey.teacher.template: expected a text with {SLOT}, or a file with one, got {self.template!r} "
                f"({type(error).__name__}: {error})"
            ) from error
        if SLOT not in text:
            raise ConfigError(f"turnkey.teacher.template: {self.template} has no {SLOT}, where the text would stand")
        return text
