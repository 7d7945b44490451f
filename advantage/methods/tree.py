"""Tree advantage: where episodes fork, each branch against its siblings, by the outcomes of the leaves below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, Norm
from verl_turnkey.advantage.methods._step_columns import key_column, refuse_trees, step_column
from verl_turnkey.advantage.params import ConfigError, NotNegative, Positive, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class TreeParams(Ranged):
    rule: Literal["siblings", "treerl", "tree_grpo", "arpo", "spo"] = "siblings"
    """the fork against its siblings (our reading of PORTool's idea); TreeRL's differences of values; Tree-GRPO's, the
    leaf against those of its group and of its tree; ARPO's, the leaf against those of its group; or SPO's, what the
    step adds to the value of its parent (with norm=mean; mean_std also divides by the std of the siblings)"""
    trajectory_w: NotNegative = 1.0  # siblings: weight of the outcome against the group's leaves
    fork_w: NotNegative = 1.0  # siblings: weight of the step against its siblings
    norm: Norm = "mean_std"  # all but treerl: divide by the sample std, or only subtract the mean
    epsilon: Positive = 1e-6  # added to the stds
    shared: Literal["mean", "sum"] = "mean"
    """arpo: a shared step counts once, with the mean of its leaves' advantages (hard), or as often as leaves share it,
    as where each trains a copy of it (soft)"""


@register_estimator(
    "tree",
    params=TreeParams,
    needs=("extra.parent",),
    before=("extra.parent",),
    paper="tree advantage; TreeRL, arXiv:2506.11902; Tree-GRPO, arXiv:2509.21240; ARPO, arXiv:2507.19849; "
    "SPO, arXiv:2505.23564",
    summary="compares each branch of a tree of episodes with its siblings, by the outcomes of the leaves below it",
)
def tree(batch: StepBatch, params: TreeParams) -> Credit:
    """Credit of the steps of a tree of episodes, from the outcomes R of its leaves.

    ::

        V(s) = mean of R over the leaves below step s, or of the leaf s itself
        A(s) = trajectory_w (V(s) - mean_g) / F_g + fork_w (V(s) - mean_b) / F_b                  rule="siblings"
        A(s) = ((V(s) - V(root)) + (V(s) - V(parent of s))) / sqrt(leaves below s)                rule="treerl"
        A(s) = (V(s) - mean_g) / F_g + (V(s) - mean_t) / F_t                                      rule="tree_grpo"
        A(s) = (V(s) - mean_g) / F_g, with shared="sum" times the leaves below s                  rule="arpo"
        A(s) = (W(s) - W(parent of s)) / F_b                                                      rule="spo"
        W(s) = mean of W over the children of s, each once, or R of the leaf s itself
        and in each, minus the step's own penalty

    ``g``: all leaves of the group, ``t``: those of the step's tree, ``b``: the step and its siblings, each once; ``F``
    the sample std plus epsilon (``norm="mean_std"``) or 1, ``F_b`` that of V or W over ``b``. ``V(root)`` is the mean
    over the group's leaves. A step without siblings has no fork part; a group of one leaf, and one whose leaves are all
    equal, get 0. Which steps are siblings ``extra.parent`` says: equal keys, the same node (:func:`read_tree`).

    Source: "siblings" is our own, after PORTool (arXiv:2510.26020), which does not publish its aggregation and weights.
    "treerl": TreeRL, arXiv:2506.11902, from a third-party note. "tree_grpo": Tree-GRPO, arXiv:2509.21240, released
    code, which trains on one row per leaf and gives the copies of a shared step the values of their leaves; the mean of
    these is what the one step gets here. It gives a tree of one leaf its raw score, we give 0. "arpo": ARPO,
    arXiv:2507.19849, from detailed restatements: the mean over the leaves below of their GRPO advantages. Its soft
    default trains each leaf's copy of a shared step with that leaf's advantage. These copies have the same ratio, so
    that their gradients add up to that of ``shared="sum"`` where none is clipped. "spo": the tree of SPO,
    arXiv:2505.23564, released code, whose nodes are segments of a text. Which std it may divide by is not said. It
    leaves edges of 0 out of the loss: ``segment_mask`` with ``drop_zeros``.
    """
    nodes = read_tree(batch)
    n = len(nodes.up)
    outcome = leaf_outcomes(batch, nodes)
    value, leaves = leaf_means(nodes, outcome)

    def against(members: Ints, codes: Ints, values: Floats) -> Floats:
        stats = ops.group_stats(values[members], codes[members], n)
        return ops.normalize(value, codes, stats, params.norm, params.epsilon)

    steps = np.unique(nodes.node)
    of_group = against(nodes.leaf, nodes.group, outcome)
    if params.rule == "treerl":
        root = ops.group_stats(outcome[nodes.leaf], nodes.group[nodes.leaf], batch.n_groups).mean[nodes.group]
        parent = value[nodes.up]
        scale = np.sqrt(np.maximum(leaves, 1))
        parts = {
            "root_level": np.where(ops.equal(value, root), 0.0, value - root) / scale,
            "parent_level": np.where(ops.equal(value, parent), 0.0, value - parent) / scale,
        }
        groups = {"root_level": nodes.group, "parent_level": nodes.up}
    elif params.rule == "tree_grpo":
        parts = {"episode_level": of_group, "tree_level": against(nodes.leaf, nodes.tree, outcome)}
        groups = {"episode_level": nodes.group, "tree_level": nodes.tree}
    elif params.rule == "arpo":
        parts = {"episode_level": of_group * (leaves if params.shared == "sum" else 1)}
        groups = {"episode_level": nodes.group}
    elif params.rule == "spo":
        value = means = child_means(nodes, outcome)
        parts, groups = {"parent_level": against(steps, nodes.up, means)}, {"parent_level": nodes.up}
    else:
        fork = params.fork_w * against(steps, nodes.up, value)
        parts = {"episode_level": params.trajectory_w * of_group, "fork_level": fork}
        groups = {"episode_level": nodes.group, "fork_level": nodes.up}
    siblings = np.bincount(nodes.up[steps], minlength=n)[nodes.up[steps]]
    metrics = {
        "credit/groups": float(batch.n_groups),
        "credit/leaves": float(len(nodes.leaf)),
        "credit/nodes": float(len(steps)),
        "credit/share_nodes_with_siblings": float(np.mean(siblings >= 2)) if len(steps) else 0.0,
    }
    return Credit.of_parts(
        {name: part[nodes.node] for name, part in parts.items()},
        batch.penalty,
        metrics=metrics,
        levels={"child_mean" if params.rule == "spo" else "leaf_mean": value[nodes.node]},
        groups={name: group[nodes.node] for name, group in groups.items()},
    )


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
    origin, n_keys = ops.joint_codes(batch.group, parent)
    following = ops.next_values(origin, batch.runs, -1)
    visits = ops.cut_runs(batch.runs, following != origin)  # steps at one place, of which the last one gets on
    last = visits.last
    leads_to = np.where(following < 0, n_keys + np.arange(len(batch)), following)  # the end: a node of its own
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
    visit, visits = ops.joint_codes(tree.node, batch.trajectory)
    node = np.zeros(visits, dtype=np.int64)
    node[visit] = tree.node
    stats = ops.group_stats(batch.reward, visit, visits)
    total = ops.group_stats(stats.mean * stats.size, node, n).mean
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
        above, stats = ops.stats_by(tree.up[nodes], total[nodes])
        total[above] += stats.mean * stats.size
        np.add.at(count, tree.up[nodes], count[nodes])
    return total / np.maximum(count, 1), count


def child_means(tree: Tree, outcome: Floats) -> Floats:
    """The outcome of each leaf, and of each other node the mean over its children, each counted once (N,)."""
    value = np.where(np.isin(np.arange(len(tree.up)), tree.leaf), outcome, 0.0)
    for nodes in tree.levels[:0:-1]:  # from the deepest up to the first steps
        above, stats = ops.stats_by(tree.up[nodes], value[nodes])
        value[above] = stats.mean
    return value


def _error(batch: StepBatch, row: int, what: str) -> ConfigError:
    trajectory = batch.ids["trajectory"][batch.trajectory[row]]
    return ConfigError(
        f"extra.parent: row {row}, trajectory {trajectory!r}, step {batch.step[row]}: {what}: expected a key of the "
        "path so far (such as a hash of the actions taken), which differs where paths differ; a key of the state alone "
        "does not make a tree"
    )
