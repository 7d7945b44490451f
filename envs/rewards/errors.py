"""What can go wrong with a reward, apart from a wrong configuration (which is a ``ConfigError``)."""

from __future__ import annotations


class RewardError(RuntimeError):
    """A reward of this episode cannot be computed; the message names the component and what it lacked."""


class JudgeError(RewardError):
    """A judge gave no score: the message has the URL, the status and the beginning of what came back."""
