from naive.common import trajectories


def trial(rows, base, coefficient=0.1):
    result = [[] for _ in rows]
    for members in trajectories(rows):
        gaps = {i: rows[i]["gaps"] for i in members}
        score = {i: sum(map(abs, gap)) / len(gap) if gap else 0.0 for i, gap in gaps.items()}
        weighted = sum(len(gaps[i]) * score[i] for i in members)
        for i in members:
            weight = score[i] * sum(map(len, gaps.values())) / weighted if weighted else 0.0
            bound = abs(base[i])
            result[i] = [base[i] + coefficient * min(max(weight * gap, -bound), bound) for gap in gaps[i]]
    return result
