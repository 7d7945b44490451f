from naive.common import one_row_per_trajectory, peers, standardise


def length_gate(rows, base, weight=0.1):
    def length(row):
        return sum(r["tokens"] for r in rows if r["trajectory"] == row["trajectory"])

    def solved(row):
        return any(r["success"] for r in rows if r["trajectory"] == row["trajectory"])

    result = []
    for i, value in enumerate(base):
        group = [rows[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        if len(group) > 1 and all(map(solved, group)):
            value -= weight * standardise(length(rows[i]), [length(row) for row in group], "mean_std", 1e-6)
        result.append(value)
    return result
