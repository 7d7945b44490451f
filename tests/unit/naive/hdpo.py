from naive.common import episode_level, less_penalties, peers, standardise, trajectories


def hdpo(rows, epsilon=1e-6):
    return less_penalties(episode_level(rows, "mean_std", "outcomes", "zero", epsilon), rows)


def tool_advantages(rows, epsilon=1e-6):
    efficiency, result = {}, [0.0] * len(rows)
    for members in trajectories(rows):
        if rows[members[0]]["success"]:
            efficiency[rows[members[0]]["trajectory"]] = 1 / (1 + sum(rows[i]["tool_calls"] for i in members))
    for i, row in enumerate(rows):
        solved = {rows[j]["trajectory"] for j in peers(rows, i)} & efficiency.keys()
        if row["trajectory"] in solved and len(solved) > 1:
            values = [efficiency[name] for name in sorted(solved)]
            result[i] = standardise(efficiency[row["trajectory"]], values, "mean_std", epsilon)
    return result
