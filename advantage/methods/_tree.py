"""Trees of steps: which steps are one node, which node each was taken from, and the outcomes of the leaves below."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, cut_runs, group_stats, joint_codes, next_values
from verl_turnkey.advantage.methods._step_columns import key_column, refuse_trees, step_column
from verl_turnkey.advantage.params import ConfigError


@dataclass(frozen=True)
class Tree:
    """The nodes of all groups, N of them: the steps, and before them the places that steps were taken from.

    ``node`` (S,) and ``origin`` (S,): the node that each step is, and the one that it was taken from. ``up`` (N,): the
    origin of each node, itself where there is none. ``group`` (N,): its group. ``tree`` (N,): the node that its path
    begins at. ``leaf`` (N,): no step was taken from it. ``levels``: the nodes by depth, the shallowest first.
    """

    node: Ints
    origin: Ints
    up: Ints
    group: Ints
    tree: Ints
    leaf: Ints
    levels: list[Ints]


def read_tree(batch: StepBatch) -> Tree:
    """The trees that ``extra.parent`` describes.

    Steps of a group with equal ``parent`` were taken from the same node, and so were siblings; a step is itself the
    node that the next step of its trajectory was taken from. A step that led nowhere, such as a refused action, has the
    key of the next step: it is one node with the step that got on. A node that several trajectories share is one,
    whether each of them holds its steps or only the first.

    Raises:
        ConfigError: a step has no key, one node has two origins, or a path comes back to itself: ``parent`` is a key of
            the state then, not of the path.
    """
    refuse_trees(batch, "extra.parent")
    parent, ids = key_column(batch, "parent")
    if len(nowhere := np.flatnonzero(parent >= len(ids))):
        raise _error(batch, int(nowhere[0]), "it has no key")
    origin, known = joint_codes(batch.group, parent)
    following = next_values(origin, batch.runs, -1)
    visits = cut_runs(batch.runs, following != origin)  # steps at one place, of which the last one gets on
    last = visits.last
    leads_to = np.where(following < 0, known + np.arange(len(batch)), following)  # the end: a node of its own
    node = np.empty_like(origin)
    node[visits.order] = np.repeat(leads_to[last], visits.lengths)
    distinct, codes = np.unique(np.concatenate([origin, node]), return_inverse=True)
    origin, node = np.split(codes.reshape(-1), 2)
    n = len(distinct)

    up, group = np.arange(n), np.zeros(n, dtype=np.int64)
    up[node] = origin
    group[origin] = group[node] = batch.group
    wrong = np.flatnonzero(up[node] != origin)
    if len(wrong):
        raise _error(batch, int(wrong[0]), "the step after it was also taken after another step")
    depth, tree = (up != np.arange(n)).astype(np.int64), up
    for _ in range(max(1, n.bit_length())):  # each round doubles how far up one has looked
        depth, tree = depth + depth[tree], tree[tree]
    wrong = np.flatnonzero((up[tree] != tree)[node] | (node == origin))
    if len(wrong):
        raise _error(batch, int(wrong[0]), "the path comes back to itself")
    leaf = np.bincount(origin, minlength=n) == 0
    by_depth = np.argsort(depth, kind="stable")
    levels = np.split(by_depth, np.flatnonzero(np.diff(depth[by_depth])) + 1)
    return Tree(node, origin, up, group, tree, np.flatnonzero(leaf), levels if n else [])


def leaf_outcomes(batch: StepBatch, tree: Tree) -> Floats:
    """Outcome of each node that is a leaf (N,): the score of its trajectory when given, else its rewards.

    ``extra.leaf_outcome``, of each trajectory's last step, comes before both: components that rate a step by what came
    of it give a shared one another reward in each branch.

    A trajectory that begins at a fork has the rewards on the path to the fork as well; of a step that several
    trajectories hold it is the mean of theirs.
    """
    n = len(tree.up)
    last = batch.runs.last
    outcome = np.zeros(n)
    outcome[tree.node[last]] = batch.score[last]
    if "extra.leaf_outcome" in batch.given:
        outcome[tree.node[last]] = step_column(batch, "tree", "leaf_outcome")[last]
        return outcome
    if "score" in batch.given:
        return outcome
    visit, visits = joint_codes(tree.node, batch.trajectory)
    node = np.zeros(visits, dtype=np.int64)
    node[visit] = tree.node
    stats = group_stats(batch.reward, visit, visits)
    total = group_stats(stats.mean * stats.size, node, n).mean
    for nodes in tree.levels[1:]:
        total[nodes] += total[tree.up[nodes]]
    outcome[tree.node[last]] += total[tree.origin[batch.first_rows]]
    return outcome


def leaf_means(tree: Tree, outcome: Floats) -> tuple[Floats, Ints]:
    """Mean outcome of the leaves below each node, or of the leaf itself (N,), and how many leaves these are (N,)."""
    n = len(tree.up)
    total, count = np.zeros(n), np.zeros(n, dtype=np.int64)
    total[tree.leaf], count[tree.leaf] = outcome[tree.leaf], 1
    for nodes in tree.levels[:0:-1]:  # from the deepest up to the first steps
        above, place = np.unique(tree.up[nodes], return_inverse=True)
        stats = group_stats(total[nodes], place.reshape(-1), len(above))
        total[above] += stats.mean * stats.size
        np.add.at(count, tree.up[nodes], count[nodes])
    return total / np.maximum(count, 1), count


def child_means(tree: Tree, outcome: Floats) -> Floats:
    """The outcome of each leaf, and of each other node the mean over its children, each counted once (N,)."""
    value = np.where(np.isin(np.arange(len(tree.up)), tree.leaf), outcome, 0.0)
    for nodes in tree.levels[:0:-1]:  # from the deepest up to the first steps
        above, place = np.unique(tree.up[nodes], return_inverse=True)
        value[above] = group_stats(value[nodes], place.reshape(-1), len(above)).mean
    return value


def _error(batch: StepBatch, row: int, what: str) -> ConfigError:
    trajectory = batch.ids["trajectory"][batch.trajectory[row]]
    return ConfigError(
        f"extra.parent: row {row}, trajectory {trajectory!r}, step {batch.step[row]}: {what}: expected a key of the "
        "path so far (such as a hash of the actions taken), which differs where paths differ; a key of the state alone "
        "does not make a tree"
    )
