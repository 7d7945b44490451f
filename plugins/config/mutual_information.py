"""The node ``turnkey.mutual_information``: a metric of how much responses say about their prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.config.roles import Apart

KEY = "turnkey.mutual_information.every"


@dataclass(frozen=True)
class MutualInformationConfig:
    """When and on how many prompts the metrics ``mutual_information/*`` are computed; RAGEN-2: every 5, 64 prompts."""

    every: Apart[int] = 0
    """at the first training step and at each multiple of it; 0: never"""
    prompts: Apart[int] = 16
    """tasks whose first prompts are compared, in that many squared short rows"""
    tokens: Apart[Literal["response", "thoughts"]] = "response"
    """tokens of the first turn that are scored: all, or its thoughts, as RAGEN-2"""

    def __post_init__(self) -> None:
        check(self.every >= 0, "every", "0 or more", self.every)
        check(self.prompts >= 2, "prompts", "2 or more", self.prompts)
