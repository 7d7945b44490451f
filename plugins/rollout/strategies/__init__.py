"""When episodes fork, and what their branches are for.

Imports nothing of verl: the tables of the documentation and the checks of the driver read it, too.
"""

from verl_turnkey.plugins.rollout.strategies import builtin as builtin
from verl_turnkey.plugins.rollout.strategies.registry import (
    BRANCH_COLUMNS,
    INDEPENDENT,
    KEY,
    SCORE,
    Ask,
    Fork,
    ForkPoint,
    QueriedState,
    Strategy,
    StrategySpec,
    most_clones,
    read_strategy,
    register_strategy,
    strategies,
)

__all__ = [
    "BRANCH_COLUMNS",
    "INDEPENDENT",
    "KEY",
    "SCORE",
    "Ask",
    "Fork",
    "ForkPoint",
    "QueriedState",
    "Strategy",
    "StrategySpec",
    "most_clones",
    "read_strategy",
    "register_strategy",
    "strategies",
]
