from naive.common import less_penalties, standardise


def siblings(rows, norm="mean_std", epsilon=1e-6):
    def place(row):
        return row["group"], row["parent"]

    result = []
    for row in rows:
        scores = [other["candidate_score"] for other in rows if place(other) == place(row)]
        result.append(standardise(row["candidate_score"], scores, norm, epsilon))
    return less_penalties(result, rows)
