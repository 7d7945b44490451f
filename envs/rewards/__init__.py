"""Rewards over one trajectory: components that add up, the rewards of several methods, and a remote judge.

``compose`` turns configuration into one function of an episode's steps. The formulas of the methods are functions in
the modules ``matchtir``, ``stepsearch``, ``progress`` and ``arena``.
"""

# Importing a module registers its component.
from verl_turnkey.envs.errors import JudgeError, RewardError
from verl_turnkey.envs.rewards import matchtir, progress, r1_router, stepsearch  # noqa: F401
from verl_turnkey.envs.rewards.arena import Standing, pairwise, tournament
from verl_turnkey.envs.rewards.components import (
    Component,
    GroupMember,
    Groups,
    RewardSpec,
    RewardStep,
    register_reward,
    rewards,
)
from verl_turnkey.envs.rewards.composition import LOOPS_OWN, Composition, Shaped, column_clash, compose
from verl_turnkey.envs.rewards.judge import Judge, JudgeConfig
from verl_turnkey.envs.rewards.outcome import right_answers

__all__ = [
    "LOOPS_OWN",
    "Component",
    "Composition",
    "GroupMember",
    "Groups",
    "Judge",
    "JudgeConfig",
    "JudgeError",
    "RewardError",
    "RewardSpec",
    "RewardStep",
    "Shaped",
    "Standing",
    "column_clash",
    "compose",
    "pairwise",
    "register_reward",
    "rewards",
    "right_answers",
    "tournament",
]
