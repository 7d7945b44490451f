import math

from naive.common import episode_level, less_penalties, own_scores, trajectories, unpenalised


def unlikely(rows, beta=0.25):
    """The rows with the rewards and scores of the method."""
    likely = {}
    for members in trajectories(rows):
        tokens = max(1, sum(rows[i]["tokens"] for i in members))
        likely[rows[members[0]]["trajectory"]] = sum(rows[i]["log_prob"] for i in members) / tokens
    own, result = own_scores(unpenalised(rows, "outcomes")), []
    for row, score in zip(rows, own, strict=True):
        others = [likely[t] for t in {r["trajectory"] for r in rows if r["group"] == row["group"]}]
        value = likely[row["trajectory"]]
        alike = [math.isclose(o, value, rel_tol=1e-12, abs_tol=1e-12) for o in others]
        rank = sum(o < value and not same for o, same in zip(others, alike, strict=True)) + (sum(alike) - 1) / 2
        factor = 1 - beta * rank / len(others)
        result.append({**row, "reward": row["reward"] * factor, "score": score * factor})
    return result


def unlikeliness(rows, beta=0.25):
    free = unlikely([{**row, "penalty": 0.0} for row in rows], beta)
    return less_penalties(episode_level(free, "mean_std", "outcomes", "zero", 1e-6), rows)
