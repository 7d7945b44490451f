from naive import common
from naive.common import less_penalties, own_returns, standardise, trajectories, unpenalised


def contexts(rows, k):
    """The last k + 1 anchors of the own trajectory for every row, or None where some are missing."""
    result = [None] * len(rows)
    for members in trajectories(rows):
        for position in range(k, len(members)):
            window = [rows[i]["anchor"] for i in members[position - k : position + 1]]
            if None not in window:
                result[members[position]] = window
    return result


def hgpo(
    rows,
    gamma=0.95,
    history=2,
    alpha=1.0,
    norm="mean_std",
    std="population",
    weights="paper",
    episode_level=False,
    scope="outcomes",
    singleton="zero",
    epsilon=1e-6,
):
    returns = own_returns(unpenalised(rows, scope), gamma)
    items = [[] for _ in rows]  # (weight, advantage)
    if episode_level:
        for item, advantage in zip(items, common.episode_level(rows, norm, scope, singleton, epsilon), strict=True):
            item.append((1.0, advantage))
    for k in range(history + 1):
        context = contexts(rows, k)
        weight = (k + (1 if weights == "paper" else 2)) ** alpha
        for i, row in enumerate(rows):
            if context[i] is None:
                continue
            values = [returns[j] for j, r in enumerate(rows) if r["group"] == row["group"] and context[j] == context[i]]
            if len(values) > 1:
                items[i].append((weight, standardise(returns[i], values, norm, epsilon, std)))
    result = []
    for item in items:
        kept = [(weight, advantage) for weight, advantage in item if advantage != 0]
        total = sum(weight for weight, _ in kept) + (epsilon if weights == "code" else 0.0)
        result.append(sum(weight * advantage for weight, advantage in kept) / total if kept else 0.0)
    return less_penalties(result, rows, scope)
