"""When episodes fork, and what their branches are for: one file per strategy.

Imports nothing of verl: the tables of the documentation and the checks of the driver read it, too.
"""

from verl_turnkey.plugins.rollout.strategies import entropy_branch as entropy_branch
from verl_turnkey.plugins.rollout.strategies import probe as probe
from verl_turnkey.plugins.rollout.strategies import siblings as siblings
from verl_turnkey.plugins.rollout.strategies import spo_chain as spo_chain
from verl_turnkey.plugins.rollout.strategies import tree as tree
from verl_turnkey.plugins.rollout.strategies import vine as vine
from verl_turnkey.plugins.rollout.strategies.registry import (
    BRANCH_COLUMNS,
    INDEPENDENT,
    KEY,
    SCORE,
    Ask,
    Asked,
    Fork,
    ForkPoint,
    Place,
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
    "Asked",
    "Fork",
    "ForkPoint",
    "Place",
    "QueriedState",
    "Strategy",
    "StrategySpec",
    "most_clones",
    "read_strategy",
    "register_strategy",
    "strategies",
]
