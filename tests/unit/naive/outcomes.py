"""Methods that compare outcomes."""

from statistics import median

from naive.common import (
    constant,
    episode_level,
    leave_one_out,
    less_penalties,
    mean,
    one_row_per_trajectory,
    own_scores,
    peers,
    same,
    standardise,
    std,
    trajectories,
    unpenalised,
)


def grpo_steps(rows, norm="mean_std", scope="outcomes", singleton="zero", epsilon=1e-6):
    return less_penalties(episode_level(rows, norm, scope, singleton, epsilon), rows, scope)


def rloo_steps(rows, scope="outcomes", singleton="zero"):
    return less_penalties(leave_one_out(rows, scope, singleton), rows, scope)


def maxrl(rows, epsilon=0.0, singleton="zero"):
    own = own_scores(unpenalised(rows, "outcomes"))
    result = []
    for i, value in enumerate(own):
        values = [own[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        if len(values) == 1:
            result.append(value if singleton == "score" else 0.0)
        elif any(v < 0 and not same(v, 0) for v in values) or same(mean(values), 0) or same(value, mean(values)):
            result.append(0.0)
        else:
            result.append((value - mean(values)) / (mean(values) + epsilon))
    return less_penalties(result, rows)


def mc_grpo(rows, floor=0.6745, epsilon=1e-3):
    own = own_scores(unpenalised(rows, "outcomes"))
    result = []
    for i, value in enumerate(own):
        values = [own[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        middle = median(values)
        if constant(values) or same(value, middle):
            result.append(0.0)
            continue
        scale = max(median([abs(v - middle) for v in values]), floor * std(values)) + epsilon
        other = [v for v in values if not same(v, middle)]
        result.append((value - middle) / scale * len(values) / max(len(other), 1))
    return less_penalties(result, rows)


def ngrpo(rows, r_max=1.0, epsilon=1e-6):
    own = own_scores(unpenalised(rows, "outcomes"))
    result = []
    for i, value in enumerate(own):
        values = [own[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        result.append(standardise(value, [*values, r_max], "mean_std", epsilon))
    return less_penalties(result, rows)


def seeupo(rows, clamp=3.0, singleton="score"):
    centred = episode_level(rows, "mean", "outcomes", singleton, 1.0)
    batch = [centred[i] for i in one_row_per_trajectory(rows, range(len(rows)))]
    centre = batch[0] if constant(batch) else mean(batch)
    spread = 0.0 if constant(batch) else std(batch)
    result = []
    for value in centred:
        value = 0.0 if same(value, centre) else value - centre
        if spread > 1e-6:
            value /= spread
        result.append(max(-clamp, min(clamp, value)))
    return less_penalties(result, rows)


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
