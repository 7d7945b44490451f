from difflib import SequenceMatcher

from naive.common import episode_level, less_penalties, own_returns, standardise, texts, unpenalised


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
