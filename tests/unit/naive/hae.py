from naive.common import constant, less_penalties, mean, std, trajectories


def hae(rows, **params):
    return less_penalties(streams(rows, **params)["action"], rows)


def streams(
    rows,
    gamma=1.0,
    lam_turn=0.95,
    lam_seg=0.95,
    keep_penalty=0.0,
    keep_penalty_mode="fixed",
    bootstrap_truncated=False,
    normalise=True,
):
    """Advantages of the three decisions, and the critics' targets, segment by segment from the end."""
    columns = {name: [0.0] * len(rows) for name in ("action", "subgoal", "switch", "low", "high", "term")}
    opens = [False] * len(rows)
    for members in trajectories(rows):
        cost = keep_penalty if keep_penalty_mode == "fixed" else keep_penalty / len(members) * (len(members) > 1)
        reward = {i: rows[i]["reward"] - cost * (not rows[i]["switch"]) for i in members}
        for segments in episodes(rows, members):
            after_high = carry = None
            for segment in reversed(segments):
                first, last = segment[0], segment[-1]
                opens[first] = True
                goes_on = bootstrap_truncated and not rows[last].get("terminated")
                if after_high is None:
                    after_low = rows[last]["value_low"] if goes_on else 0.0
                    after_high = rows[first]["value_high"] if goes_on else 0.0
                    carry = 0.0
                else:
                    after_low = after_high
                total, advantage, value = after_high, 0.0, after_low
                for i in reversed(segment):
                    total = reward[i] + gamma * total
                    columns["term"][i] = total
                    columns["switch"][i] = total - rows[i]["value_term"]
                    advantage = reward[i] + gamma * value - rows[i]["value_low"] + gamma * lam_turn * advantage
                    value = rows[i]["value_low"]
                    columns["action"][i] = advantage
                    columns["low"][i] = advantage + value - rows[i]["penalty"]
                carry = total - rows[first]["value_high"] + gamma ** len(segment) * lam_seg * carry
                columns["subgoal"][first] = carry
                after_high = rows[first]["value_high"]
                columns["high"][first] = carry + after_high
    if normalise:
        every = range(len(rows))
        for name, counted in (("action", every), ("subgoal", [i for i in every if opens[i]]), ("switch", every)):
            values = [columns[name][i] for i in counted]
            for i in counted:
                spread = 0.0 if constant(values) else std(values, "population") + 1e-8
                columns[name][i] = (columns[name][i] - mean(values)) / spread if spread else 0.0
    return columns | {"opens": opens}


def episodes(rows, members):
    """A trajectory's turns as segments; what follows a turn that terminated is another episode."""
    result, new = [], True
    for i in members:
        if new:
            result.append([[i]])
        elif rows[i]["switch"]:
            result[-1].append([i])
        else:
            result[-1][-1].append(i)
        new = rows[i].get("terminated", False)
    return result
