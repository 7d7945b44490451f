"""The estimators once more, as plain loops straight from the formulas: slow, obvious, without code of the package.

``naive.<method>(rows, **params)`` takes a list of dicts, one per step, with group, trajectory, step, reward, penalty
and whatever else the method reads (anchor, action, score, value, ..., hashable or None), and returns the advantages in
that order. Parameters and defaults are those of the estimator of that name.
"""

from naive.gigpo import gigpo
from naive.grpo_steps import grpo_steps
from naive.hdpo import hdpo, tool_advantages
from naive.hgpo import hgpo
from naive.proxmo import proxmo
from naive.rebn import rebn
from naive.salt import salt
from naive.seeupo import seeupo
from naive.turn_gae import turn_gae
from naive.vc_gae import vc_gae

__all__ = [
    "gigpo",
    "grpo_steps",
    "hdpo",
    "hgpo",
    "proxmo",
    "rebn",
    "salt",
    "seeupo",
    "tool_advantages",
    "turn_gae",
    "vc_gae",
]
