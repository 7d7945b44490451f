"""Which groups of a batch differ most in their rewards: the filter of StarPO-S.

RAGEN, arXiv:2504.20073: "train on the most uncertain prompts". Its first code keeps a share of the groups, its later
code the fewest groups that hold a share of all spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from verl_turnkey.plugins.config.training import share_of

TOLERANCE = 0.01
"""how far the kept groups may fall short of their share of all spread, as in RAGEN's code"""


def spread(scores: Sequence[float]) -> float:
    """Sample standard deviation; 0 with fewer than two episodes, and exactly 0 if all are equal."""
    if len(scores) < 2 or min(scores) == max(scores):
        return 0.0
    return float(np.std(scores, ddof=1))


def most_spread(spreads: Mapping[str, float], share: float, by: str) -> list[str]:
    """The groups to train, at least one, in descending order of spread; ties by name.

    Args:
        spreads: of each group.
        share: in (0, 1]; with 1 all groups are kept.
        by: ``groups``: that share of the number of groups, rounded down; ``spread``: the fewest groups whose spreads
            add up to that share of the sum of all, less :data:`TOLERANCE`.
    """
    names = sorted(spreads, key=lambda name: (-spreads[name], name))
    if share >= 1:
        return names
    if by == "groups":
        number = share_of(len(names), share)
    else:
        so_far = np.cumsum([spreads[name] for name in names])
        number = int(np.searchsorted(so_far, share * so_far[-1] - TOLERANCE)) + 1
    return names[: min(max(1, number), len(names))]
