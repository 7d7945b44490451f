"""What an episode remembers: the turns that prompts show, and what becomes of those that they no longer do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Turn:
    """A past step: what was seen, and what was done."""

    observation: str
    action: str
    """as later prompts show it: the action, or everything that the model wrote"""


Summarize = Callable[[Sequence[Turn]], str]
"""From the turns that are no longer shown, oldest first, to a text in their place."""


class SummaryError(RuntimeError):
    """The function of ``turnkey.rollout.summary`` raised, or returned something else than text."""


@dataclass(frozen=True)
class View:
    """What one prompt shows of the past."""

    turns: Sequence[Turn] = ()
    """oldest first"""
    summary: str = ""
    """of the turns before them"""


@dataclass
class Memory:
    """The turns of one episode, and how much of them a prompt can show.

    Args:
        window: turns shown at most.
        summarize: makes ``View.summary``; None: always empty. Called once for each number of turns that fell out.
    """

    window: int
    summarize: Summarize | None = None
    turns: list[Turn] = field(default_factory=list)
    _summaries: dict[int, str] = field(default_factory=dict)

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)

    @property
    def cuts(self) -> int:
        """How often a view can be made shorter: once per turn shown, and once more for the summary."""
        return min(self.window, len(self.turns)) + (self.summarize is not None)

    def view(self, cut: int = 0) -> View:
        """The last turns, without the ``cut`` oldest of those that the window holds; the summary goes last of all.

        Raises:
            SummaryError: as its name says.
        """
        shown = min(self.window, len(self.turns)) - cut
        if shown < 0:
            return View()
        first = len(self.turns) - shown
        return View(self.turns[first:], self._summary(first))

    def _summary(self, turns: int) -> str:
        """Of the first ``turns`` turns, which never change."""
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
