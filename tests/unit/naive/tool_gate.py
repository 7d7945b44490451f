from naive.common import one_row_per_trajectory, peers, standardise


def tool_gate(rows, base, weight=0.15, average="rated"):
    def calls(row):
        return sum(r["tool_calls"] for r in rows if r["trajectory"] == row["trajectory"])

    def solved(row):
        return any(r["success"] for r in rows if r["trajectory"] == row["trajectory"])

    tool = []
    for i, row in enumerate(rows):
        rated = [rows[j] for j in one_row_per_trajectory(rows, peers(rows, i)) if solved(rows[j])]
        values = [1 / (calls(r) + 1) for r in rated]
        tool.append(
            standardise(1 / (calls(row) + 1), values, "mean_std", 1e-6) if solved(row) and len(rated) > 1 else 0
        )
    tokens = sum(row["tokens"] for row, value in zip(rows, tool, strict=True) if value != 0)
    factor = sum(row["tokens"] for row in rows) / tokens if average == "rated" and tokens else 1.0
    return [value + weight * factor * t for value, t in zip(base, tool, strict=True)]
