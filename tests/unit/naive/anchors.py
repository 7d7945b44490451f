"""Methods that compare steps in equal states."""

from difflib import SequenceMatcher

from naive import common
from naive.common import episode_level, less_penalties, own_returns, standardise, texts, trajectories, unpenalised


def anchor_clusters(rows):
    """Same prompt and same state; None is alone."""
    return [("alone", i) if r["anchor"] is None else (r["group"], r["anchor"]) for i, r in enumerate(rows)]


def similarity_clusters(rows, threshold):
    """In batch order, each row joins the first cluster of its prompt whose opening text is similar enough."""
    text = texts(rows)
    clusters = []
    opened = {}
    for i, row in enumerate(rows):
        cluster = i
        if text[i] is not None:
            openers = opened.setdefault(row["group"], [])
            for opener in openers:
                if SequenceMatcher(None, text[i], text[opener]).ratio() >= threshold:
                    cluster = opener
                    break
            else:
                openers.append(i)
        clusters.append(cluster)
    return clusters


def gigpo(
    rows,
    gamma=0.95,
    step_advantage_w=1.0,
    norm="mean_std",
    scope="outcomes",
    singleton="zero",
    similarity=None,
    epsilon=1e-6,
):
    returns = own_returns(unpenalised(rows, scope), gamma)
    clusters = anchor_clusters(rows) if similarity is None else similarity_clusters(rows, similarity)
    result = []
    for i, episode in enumerate(episode_level(rows, norm, scope, singleton, epsilon)):
        values = [returns[j] for j in range(len(rows)) if clusters[j] == clusters[i]]
        result.append(episode + step_advantage_w * standardise(returns[i], values, norm, epsilon))
    return less_penalties(result, rows, scope)


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
