"""Methods with a critic or a prover."""

import math

from naive.common import constant, less_penalties, mean, std, trajectories


def gae(rows, gamma, lam, truncated="zero"):
    """A(t) = delta(t) + gamma lam A(t+1), delta(t) = r(t) + gamma V(t+1) - V(t), inside each trajectory."""
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        last = rows[members[-1]]
        next_value = last["value"] if truncated == "value" and last.get("truncated") else 0.0
        carry = 0.0
        for i in reversed(members):
            row = rows[i]
            if row.get("terminated"):
                next_value = carry = 0.0
            carry = row["reward"] + gamma * next_value - row["value"] + gamma * lam * carry
            next_value = row["value"]
            result[i] = carry
    return result


def whitened(rows, advantages):
    """Against all turns of the batch that have tokens; all turns when nobody said how many tokens they have."""
    counted = [a for row, a in zip(rows, advantages, strict=True) if row.get("tokens", 1) > 0]
    if len(counted) < 2 or constant(counted):
        return [0.0] * len(rows)
    return [(a - mean(counted)) / math.sqrt(std(counted) ** 2 + 1e-8) for a in advantages]


def turn_gae_returns(rows, gamma=0.99, lam=0.9, truncated="zero"):
    """The critic's targets."""
    return [a + row["value"] - row["penalty"] for a, row in zip(gae(rows, gamma, lam, truncated), rows, strict=True)]


def turn_gae(rows, gamma=0.99, lam=0.9, whiten="turns", truncated="zero"):
    advantages = gae(rows, gamma, lam, truncated)
    return less_penalties(whitened(rows, advantages) if whiten == "turns" else advantages, rows)


def vc_gae(rows, gamma=1.0, lam_actor=0.95, length_alpha=None, lam_critic=1.0, whiten="turns"):
    del lam_critic  # only the critic's targets feel it
    if length_alpha is None:
        return turn_gae(rows, gamma, lam_actor, whiten)
    advantages = [0.0] * len(rows)
    for members in trajectories(rows):  # one episode at a time: its own lambda
        lam = max(0.0, 1 - 1 / (length_alpha * len(members)))
        for i, value in zip(members, gae([rows[i] for i in members], gamma, lam), strict=True):
            advantages[i] = value
    return less_penalties(whitened(rows, advantages) if whiten == "turns" else advantages, rows)


def vc_gae_returns(rows, gamma=1.0, lam_critic=1.0):
    return turn_gae_returns(rows, gamma, lam_critic)


def progress(rows, alpha=3.0, prover="given", k=4, segments=False, whiten="none"):
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        value = [rows[i]["turn_value"] for i in members]
        other = value
        if "prover_value" in rows[0] and prover == "given":
            other = [rows[i]["prover_value"] for i in members]
        if prover == "best_of_k":
            other = [1 - (1 - v) ** k for v in value]
        value, other = [*value, 0.0], [*other, 0.0]
        for t, i in enumerate(members):
            begin, end = t, t + 1
            if segments:
                while begin > 0 and not rows[members[begin]]["value_rollouts"]:
                    begin -= 1
                while end < len(members) and not rows[members[end]]["value_rollouts"]:
                    end += 1
            reward = sum(rows[j]["reward"] for j in members[begin:end])
            result[i] = reward + value[end] - value[begin] + alpha * (reward + other[end] - other[begin])
    return less_penalties(whitened(rows, result) if whiten == "turns" else result, rows)


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
