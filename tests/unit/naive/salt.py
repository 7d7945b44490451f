from naive.common import episode_level, leave_one_out, less_penalties, mean, trajectories

TERMINAL = ("terminal",)
BEGINNING = ("beginning",)


def edges(rows):
    """(state, action, next state, terminated) of every row; None where a part is unknown."""
    result = [None] * len(rows)
    for members in trajectories(rows):
        for i, following in zip(members, [*members[1:], None], strict=True):
            row = rows[i]
            if "next_anchor" in row:
                target = TERMINAL if row["next_anchor"] is None else row["next_anchor"]
            else:
                target = TERMINAL if following is None else rows[following]["anchor"]
            edge = (row["anchor"], row["action"], target, row.get("terminated", False))
            result[i] = None if None in edge else edge
    return result


def keys(rows, history):
    """What must be the same for two rows to be merged; None never matches."""
    edge = edges(rows)
    result = [None] * len(rows)
    for members in trajectories(rows):
        for position, i in enumerate(members):
            path = [edge[j] for j in members[max(0, position - history) : position + 1]]
            if None not in path:
                beginning = [BEGINNING] if position < history else []
                result[i] = (rows[i]["group"], beginning + path)
    return result


def salt(rows, base="grpo", average="occurrences", history=0, norm="mean_std", epsilon=1e-6):
    grpo = base == "grpo"
    own = episode_level(rows, norm, "outcomes", "zero", epsilon) if grpo else leave_one_out(rows, "outcomes", "zero")
    key = keys(rows, history)
    result = []
    for i, value in enumerate(own):
        by_trajectory = {}
        for j, row in enumerate(rows):
            if key[i] is not None and key[j] == key[i]:
                by_trajectory.setdefault(row["trajectory"], []).append(own[j])
        if len(by_trajectory) < 2:
            result.append(value)
        elif average == "occurrences":
            result.append(mean([v for values in by_trajectory.values() for v in values]))
        else:
            result.append(mean([mean(values) for values in by_trajectory.values()]))
    return less_penalties(result, rows)
