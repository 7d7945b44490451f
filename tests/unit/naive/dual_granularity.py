from naive.common import episode_level, less_penalties, peers, standardise


def dual_granularity(rows, beta=0.3, weight="tokens"):
    outcome = episode_level(rows, "mean_std", "outcomes", "zero", 1e-6)
    result = []
    for i, row in enumerate(rows):
        scores = []
        for j in peers(rows, i):
            scores += [rows[j]["turn_score"]] * (rows[j].get("tokens", 1) if weight == "tokens" else 1)
        step = standardise(row["turn_score"], scores, "mean_std", 1e-6, "population") if scores else 0.0
        result.append(outcome[i] + beta * step)
    return less_penalties(result, rows)
