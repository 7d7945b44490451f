"""Methods on graphs of states."""

import importlib

import numpy as np

from naive.common import episode_level, leave_one_out, less_penalties, mean, same, standardise, std, trajectories

GOAL = ("goal",)


def graph(
    rows,
    rule="graphgpo",
    edge="paper",
    decay=0.1,
    scale=10.0,
    step_advantage_w=1.0,
    norm="mean_std",
    scope="outcomes",
    singleton="zero",
    epsilon=1e-6,
    gamma=0.99,
    success_value=None,
):
    if rule == "graft":
        return less_penalties(differences(rows, gamma), rows)
    if rule == "g2po":
        levels = g2po(rows, gamma, success_value, norm, scope, epsilon)
        episode = episode_level(rows, norm, scope, singleton, epsilon)
        total = [e + step_advantage_w * level for e, level in zip(episode, levels, strict=True)]
        return less_penalties(total, rows, scope)
    q = edge_values(rows, edge, decay, scale)
    state = states(rows)
    episode = episode_level(rows, norm, scope, singleton, epsilon)
    step = [
        standardise(q[i], [q[j] for j in range(len(rows)) if state[j] == state[i]], norm, epsilon)
        for i in range(len(rows))
    ]
    return less_penalties([e + step_advantage_w * s for e, s in zip(episode, step, strict=True)], rows, scope)


def states(rows):
    return [(row["group"], ("alone", i) if row["anchor"] is None else row["anchor"]) for i, row in enumerate(rows)]


def following(rows):
    """Where each step led: a state, GOAL, or a dead end of its own."""
    state, result = states(rows), [None] * len(rows)
    for members in trajectories(rows):
        solved = any(rows[i]["success"] for i in members)
        for i, after in zip(members, [*members[1:], None], strict=True):
            group = rows[i]["group"]
            if after is None and solved:
                result[i] = (group, GOAL)
            elif "next_anchor" in rows[i]:
                key = rows[i]["next_anchor"]
                result[i] = (group, ("end", i) if key is None else key)
            else:
                result[i] = (group, ("end", i)) if after is None else state[after]
    return result


def edge_values(rows, edge, decay, scale):
    before, after = states(rows), following(rows)
    result = []
    for i, row in enumerate(rows):
        members = [j for j, other in enumerate(rows) if other["group"] == row["group"]]
        distances = {(row["group"], GOAL): 0}
        while True:  # one more step away from success
            new = {
                before[j]: distances[after[j]] + 1
                for j in members
                if after[j] in distances and before[j] not in distances
            }
            if not new:
                break
            distances |= dict.fromkeys(new, max(distances.values()) + 1)
        beyond = max(distances.values()) + 1
        here, there = distances.get(before[i], beyond), distances.get(after[i], beyond)
        exponent = {"paper": there + 1, "code": there, "progress": there - here + 1}[edge]
        result.append(scale * decay**exponent)
    return result


def differences(rows, gamma):
    """gamma V(s') - V(s), V by solving the linear equations of the graph."""
    state = states(rows)
    names = sorted(set(state), key=state.index)
    a, b = np.eye(len(names)), np.zeros(len(names))
    target = [None] * len(rows)
    for members in trajectories(rows):
        for i, after in zip(members, [*members[1:], None], strict=True):
            outcome = rows[i].get("score", sum(rows[j]["reward"] for j in members))
            target[i] = outcome if after is None else state[after]
    for s in names:
        taken = [i for i in range(len(rows)) if state[i] == s]
        for i in taken:
            if isinstance(target[i], tuple):
                a[names.index(s), names.index(target[i])] -= gamma / len(taken)
            else:
                b[names.index(s)] += gamma * target[i] / len(taken)
    value = dict(zip(names, np.linalg.solve(a, b).tolist(), strict=True))
    pairs = [(gamma * (value[t] if isinstance(t, tuple) else t), value[s]) for s, t in zip(state, target, strict=True)]
    return [0.0 if same(after, before) else after - before for after, before in pairs]


def g2po(rows, gamma, success_value, norm, scope, epsilon):
    """The value of the next state against the same state's, plus the rise of the value against the group's."""
    state, visits, end = states(rows), {}, {}
    for members in trajectories(rows):
        outcome = rows[members[-1]].get("score", sum(rows[j]["reward"] for j in members))
        for back, i in enumerate(reversed(members)):
            visits.setdefault(state[i], []).append(gamma ** (back + 1) * outcome)
        solved = any(rows[i]["success"] for i in members)
        end[members[-1]] = (outcome if success_value is None else success_value) if solved else 0.0
    value = {s: sum(returns) / len(returns) for s, returns in visits.items()}
    after = [None] * len(rows)
    for members in trajectories(rows):
        for i, following in zip(members, [*members[1:], None], strict=True):
            after[i] = end[i] if following is None else value[state[following]]
    rise = [0.0 if same(a, value[s]) else a - value[s] for a, s in zip(after, state, strict=True)]
    cost = [row["penalty"] if scope != "outcomes" else 0.0 for row in rows]
    result = []
    for i, row in enumerate(rows):
        alike = [after[j] - cost[j] for j in range(len(rows)) if state[j] == state[i]]
        group = [rise[j] for j, other in enumerate(rows) if other["group"] == row["group"]]
        result.append(
            standardise(after[i] - cost[i], alike, norm, epsilon) + standardise(rise[i], group, norm, epsilon)
        )
    return result


TERMINAL = ("terminal",)
BEGINNING = ("beginning",)


def edges(rows):
    """(state, action, next state, terminated) of every row; None where a part is unknown."""
    result = [None] * len(rows)
    for members in trajectories(rows):
        for i, following in zip(members, [*members[1:], None], strict=True):
            row = rows[i]
            if "next_anchor" in row:
                target = TERMINAL if row["next_anchor"] is None else row["next_anchor"]
            else:
                target = TERMINAL if following is None else rows[following]["anchor"]
            edge = (row["anchor"], row["action"], target, row.get("terminated", False))
            result[i] = None if None in edge else edge
    return result


def keys(rows, history):
    """What must be the same for two rows to be merged; None never matches."""
    edge = edges(rows)
    result = [None] * len(rows)
    for members in trajectories(rows):
        for position, i in enumerate(members):
            path = [edge[j] for j in members[max(0, position - history) : position + 1]]
            if None not in path:
                beginning = [BEGINNING] if position < history else []
                result[i] = (rows[i]["group"], beginning + path)
    return result


def salt(rows, base="grpo", average="occurrences", history=0, norm="mean_std", epsilon=1e-6):
    grpo = base == "grpo"
    own = episode_level(rows, norm, "outcomes", "zero", epsilon) if grpo else leave_one_out(rows, "outcomes", "zero")
    key = keys(rows, history)
    result = []
    for i, value in enumerate(own):
        by_trajectory = {}
        for j, row in enumerate(rows):
            if key[i] is not None and key[j] == key[i]:
                by_trajectory.setdefault(row["trajectory"], []).append(own[j])
        if len(by_trajectory) < 2:
            result.append(value)
        elif average == "occurrences":
            result.append(mean([v for values in by_trajectory.values() for v in values]))
        else:
            result.append(mean([mean(values) for values in by_trajectory.values()]))
    return less_penalties(result, rows)


def rtmc(rows, gamma=0.99, n_prior=2.0, divide_by_std=False, states="anchor", actions="key", signature=None):
    act = [row["action"] if actions == "key" else row["action_signature"] for row in rows]
    if signature is not None:
        module, _, name = signature.partition(":")
        function = getattr(importlib.import_module(module), name)
        act = [None if key is None else function(key) for key in act]
    keys = [None] * len(rows)
    for members in trajectories(rows):
        for at, i in enumerate(members):
            key = {
                "anchor": rows[i].get("anchor"),
                "column": rows[i].get("state_signature"),
                "actions": frozenset(act[j] for j in members[:at] if act[j] is not None),
            }[states]
            here = (rows[i]["group"], ("alone", i) if key is None else ("state", key))
            keys[i] = (here, ("alone", i) if act[i] is None else ("action", act[i]))

    visits, outcomes = {}, {}
    for members in trajectories(rows):
        outcome = rows[members[-1]].get("score", sum(rows[j]["reward"] for j in members))
        outcomes.setdefault(rows[members[0]]["group"], []).append(outcome)
        seen = set()
        for at, i in enumerate(members):
            if keys[i] not in seen:
                seen.add(keys[i])
                visits.setdefault(keys[i], []).append(gamma ** (len(members) - 1 - at) * outcome)

    credit = []
    for i, row in enumerate(rows):
        q = mean(visits[keys[i]])
        alike = [g for (s, _), returns in visits.items() if s == keys[i][0] for g in returns]
        n = len(alike)
        value = (n * mean(alike) + n_prior * mean(outcomes[row["group"]])) / (n + n_prior)
        credit.append(0.0 if same(q, value) else q - value)
    if divide_by_std:
        spread = {}
        for row in rows:
            group = [c for c, other in zip(credit, rows, strict=True) if other["group"] == row["group"]]
            spread[row["group"]] = std(group, "population")
        credit = [
            c / spread[row["group"]] if spread[row["group"]] > 1e-8 else c for c, row in zip(credit, rows, strict=True)
        ]
    return less_penalties(credit, rows)
