import math
import re
from collections import Counter

from naive.common import (
    episode_level,
    less_penalties,
    mean,
    one_row_per_trajectory,
    own_returns,
    own_scores,
    peers,
    same,
    texts,
    unpenalised,
)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def succeeded(rows):
    """A trajectory succeeds when one of its steps says so."""
    winners = {row["trajectory"] for row in rows if row["success"]}
    return [row["trajectory"] in winners for row in rows]


def modulation(rows, alpha, beta, success_rate):
    """1 + beta f: f > 0 for a success, the more so the rarer it is, f < 0 for a failure."""
    scores = own_scores(rows)
    flags = succeeded(rows) if success_rate == "trajectories" else None
    result = []
    for i in range(len(rows)):
        members = peers(rows, i)
        if flags is not None:
            success = flags[i]
            p = mean([float(flags[j]) for j in one_row_per_trajectory(rows, members)])
        else:
            success = scores[i] > 0.5 and not same(scores[i], 0.5)
            # The released code takes the mean of a single row to be 0.
            p = min(1.0, max(0.0, mean([scores[j] for j in members]))) if len(members) > 1 else 0.0
        f = sigmoid((1 - p) ** alpha) - 0.5 if success else sigmoid(-(p**alpha)) - 0.5
        result.append(1 + beta * f)
    return result


def tf_idf(documents, max_features):
    """scikit-learn's TfidfVectorizer with its defaults: {term: weight} per document, of length 1 or empty."""
    counts = [Counter(re.findall(r"\b\w\w+\b", document.lower())) for document in documents]
    corpus = sum(counts, Counter())
    vocabulary = sorted(corpus, key=lambda term: (-corpus[term], term))[:max_features]
    frequency = {term: sum(term in count for count in counts) for term in vocabulary}
    vectors = []
    for count in counts:
        vector = {
            term: count[term] * (math.log((1 + len(documents)) / (1 + frequency[term])) + 1)
            for term in vocabulary
            if term in count
        }
        length = math.sqrt(sum(weight**2 for weight in vector.values()))
        vectors.append({term: weight / length for term, weight in vector.items()})
    return vectors


def proximity_level(rows, gamma, temperature, neighbours, max_features):
    """Own return against the average of the group's, weighted by how close their texts are."""
    returns = own_returns(rows, gamma)
    documents = texts(rows)
    named = [i for i, text in enumerate(documents) if text is not None]
    vectors = dict(zip(named, tf_idf([str(documents[i]) for i in named], max_features), strict=True))
    if not any(vectors.values()):
        return [0.0] * len(rows)
    result = []
    for i, row in enumerate(rows):
        if i not in vectors:  # compared with nothing
            result.append(0.0)
            continue
        near = [j for j in peers(rows, i) if neighbours == "all_steps" or rows[j]["step"] == row["step"]]
        near = [j for j in near if j in vectors]
        cosine = [sum(weight * vectors[j].get(term, 0.0) for term, weight in vectors[i].items()) for j in near]
        weights = [math.exp((c - max(cosine)) / temperature) for c in cosine]
        baseline = math.fsum(w * returns[j] for w, j in zip(weights, near, strict=True)) / math.fsum(weights)
        result.append(returns[i] - baseline)
    return result


def proxmo(
    rows,
    gamma=0.95,
    alpha=4.0,
    beta=0.1,
    temperature=0.1,
    step_advantage_w=1.0,
    norm="mean_std",
    success_rate="trajectories",
    neighbours="same_step",
    scope="outcomes",
    singleton="zero",
    max_features=1024,
    epsilon=1e-6,
):
    episode = episode_level(rows, norm, scope, singleton, epsilon)
    compared = unpenalised(rows, scope)
    weight = modulation(compared, alpha, beta, success_rate)
    step = proximity_level(compared, gamma, temperature, neighbours, max_features)
    result = [w * e + step_advantage_w * s for w, e, s in zip(weight, episode, step, strict=True)]
    return less_penalties(result, rows, scope)
