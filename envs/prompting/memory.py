"""The memory of an episode: the turns that its prompts show, and the summary of those that they no longer show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from verl_turnkey.envs.prompting.actions import ParsedAction


@dataclass(frozen=True)
class PromptTurn:
    """A past step as prompts show it."""

    observation: str
    action: str
    """what :func:`history_text` makes of the response"""


Summarize = Callable[[Sequence[PromptTurn]], str]
"""Makes a text of the turns that are no longer shown, oldest first."""


class SummaryError(RuntimeError):
    """The function of ``turnkey.rollout.summary`` raised, or did not return text."""


@dataclass(frozen=True)
class PromptHistory:
    """What one prompt shows of the past."""

    turns: Sequence[PromptTurn] = ()
    """oldest first"""
    summary: str = ""
    """of the turns before them"""


@dataclass
class Memory:
    """The turns of one episode, and how many of them a prompt shows.

    Args:
        window: turns shown at most.
        summarize: makes ``PromptHistory.summary``; None: always empty. Called once per number of turns left out.
    """

    window: int
    summarize: Summarize | None = None
    turns: list[PromptTurn] = field(default_factory=list)
    _summaries: dict[int, str] = field(default_factory=dict)

    def add(self, turn: PromptTurn) -> None:
        self.turns.append(turn)

    def copy(self) -> Memory:
        """A copy that continues independently."""
        return replace(self, turns=[*self.turns], _summaries={**self._summaries})

    @property
    def cuts(self) -> int:
        """How often the history can be made shorter: once per turn shown, and once more for the summary."""
        return min(self.window, len(self.turns)) + (self.summarize is not None)

    def history(self, cut: int = 0) -> PromptHistory:
        """The turns in the window without the ``cut`` oldest, and the summary, which is cut last.

        Raises:
            SummaryError: ``summarize`` raised, or did not return text.
        """
        length = min(self.window, len(self.turns)) - cut
        if length < 0:
            return PromptHistory()
        first = len(self.turns) - length
        return PromptHistory(self.turns[first:], self._summary(first))

    def _summary(self, turns: int) -> str:
        """Of the first ``turns`` turns, which never change, so it is made once."""
        if self.summarize is None or turns == 0:
            return ""
        if turns not in self._summaries:
            try:
                text = self.summarize(self.turns[:turns])
            except Exception as error:
                raise SummaryError(f"turnkey.rollout.summary raised {type(error).__name__}: {error}") from error
            if not isinstance(text, str):
                raise SummaryError(f"turnkey.rollout.summary must return text, not {type(text).__name__}")
            self._summaries[turns] = text
        return self._summaries[turns]


def history_text(parsed: ParsedAction, text: str, whole: bool) -> str:
    """A past turn as later prompts show it: the action, or without one the beginning of what follows the thoughts."""
    if whole:
        return text.strip() or "(nothing)"
    if parsed.action is None:
        return " ".join((text if parsed.content is None else parsed.content).split())[:80] or "(nothing)"
    return parsed.action
