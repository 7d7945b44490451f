import math

from naive.common import constant, less_penalties, mean, own_scores, peers, same, std, trajectories, unpenalised


def information_gain(rows, gamma=1.0, gain="probability", pool="separate"):
    scores, n = own_scores(unpenalised(rows, "outcomes")), len(rows)
    reward, last = [0.0] * n, [False] * n
    for members in trajectories(rows):
        value = [rows[i]["gold_probability"] for i in members]
        if gain == "log_probability":
            value = [math.log(v) if v else 0.0 for v in value]  # 0 only before an only turn
        for t, i in enumerate(members):
            last[i] = t + 1 == len(members)
            reward[i] = scores[i] if last[i] else value[t + 1] - value[t]
    z = []
    for i in range(n):
        values = [reward[j] for j in peers(rows, i) if pool == "joint" or last[j] == last[i]]
        if constant(values):
            z.append(0.0)
        else:
            z.append((reward[i] - mean(values)) / (math.sqrt(std(values, "population") ** 2 + 1e-8) + 1e-6))
    result = [0.0] * n
    for members in trajectories(rows):
        total = 0.0
        for i in reversed(members):
            total = z[i] + gamma * total
            result[i] = 0.0 if same(total, 0.0) else total
    return less_penalties(result, rows)
