"""Methods on trees of steps."""

import math
from functools import cache

from naive.common import less_penalties, mean, same, standardise, trajectories


def tree(rows, rule="siblings", trajectory_w=1.0, fork_w=1.0, norm="mean_std", epsilon=1e-6, shared="mean"):
    origin, node = places(rows)
    up = dict(zip(node, origin, strict=True))
    children = {}
    for child, parent in up.items():
        children.setdefault(parent, []).append(child)

    @cache
    def leaves(place):
        below = children.get(place, [])
        return [leaf for child in below for leaf in leaves(child)] if below else [place]

    @cache
    def root(place):
        return root(up[place]) if place in up else place

    @cache
    def way(place):
        """Rewards on the way to a place, of each step the mean over the trajectories that hold it."""
        if place not in up:
            return 0.0
        visits = {}
        for row, at in zip(rows, node, strict=True):
            if at == place:
                visits[row["trajectory"]] = visits.get(row["trajectory"], 0.0) + row["reward"]
        return mean(list(visits.values())) + way(up[place])

    @cache
    def outcome(leaf):
        if "score" in rows[0]:
            return rows[leaf[1]]["score"]
        members = next(members for members in trajectories(rows) if members[-1] == leaf[1])
        return way(origin[members[0]]) + math.fsum(rows[i]["reward"] for i in members)

    @cache
    def value(place):
        return mean([outcome(leaf) for leaf in leaves(place)])

    @cache
    def of_children(place):
        return mean([of_children(child) for child in children[place]]) if place in children else outcome(place)

    def above(a, b):
        return 0.0 if same(a, b) else a - b

    @cache
    def everybody(group):
        ends = dict.fromkeys(place for place in node if place[0] == "leaf")
        return [outcome(place) for place in ends if rows[place[1]]["group"] == group]

    result = []
    for i, row in enumerate(rows):
        everyone = everybody(row["group"])
        own, parent = value(node[i]), value(origin[i])
        of_group = standardise(own, everyone, norm, epsilon)
        if rule == "arpo":
            of_leaves = [standardise(outcome(leaf), everyone, norm, epsilon) for leaf in leaves(node[i])]
            result.append(math.fsum(of_leaves) if shared == "sum" else mean(of_leaves))
        elif rule == "spo":
            siblings = [of_children(child) for child in children[origin[i]]]
            result.append(standardise(of_children(node[i]), siblings, norm, epsilon))
        elif rule == "treerl":
            both = above(own, mean(everyone)) + above(own, parent)
            result.append(both / math.sqrt(len(leaves(node[i]))))
        elif rule == "tree_grpo":
            result.append(of_group + standardise(own, [outcome(x) for x in leaves(root(node[i]))], norm, epsilon))
        else:
            fork = standardise(own, [value(child) for child in children[origin[i]]], norm, epsilon)
            result.append(trajectory_w * of_group + fork_w * fork)
    return less_penalties(result, rows)


def places(rows):
    """Which place each step was taken from, and which it led to; steps with one key after another led to one place."""
    origin, node = [None] * len(rows), [None] * len(rows)
    for members in trajectories(rows):
        for i in members:
            origin[i] = ("place", rows[i]["group"], rows[i]["parent"])
        for t, i in enumerate(members):
            later = [origin[j] for j in members[t + 1 :] if origin[j] != origin[i]]
            node[i] = later[0] if later else ("leaf", members[-1])
    return origin, node


def siblings(rows, norm="mean_std", epsilon=1e-6):
    def place(row):
        return row["group"], row["parent"]

    result = []
    for row in rows:
        scores = [other["candidate_score"] for other in rows if place(other) == place(row)]
        result.append(standardise(row["candidate_score"], scores, norm, epsilon))
    return less_penalties(result, rows)
