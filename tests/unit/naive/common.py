"""What several twins share: turns, trajectories, returns, scores, and one value against the values of its group."""

import math


def mean(values):
    return math.fsum(values) / len(values)


def std(values, kind="sample"):
    centre = mean(values)
    square = math.fsum((v - centre) ** 2 for v in values)
    return math.sqrt(square / (len(values) - 1 if kind == "sample" else len(values)))


def same(a, b):
    """Equal up to the rounding of a sum."""
    return abs(a - b) <= 1e-12 * max(1.0, abs(a), abs(b))


def constant(values):
    return same(min(values), max(values))


def turns_of(mask):
    """Positions of each run of ones."""
    runs = []
    for i, token in enumerate(mask):
        if token:
            runs += [[]] if not i or not mask[i - 1] else []
            runs[-1].append(i)
    return runs


def trajectories(rows):
    """The row numbers of each trajectory, in step order."""
    rows_of = {}
    for i, row in enumerate(rows):
        rows_of.setdefault(row["trajectory"], []).append(i)
    return [sorted(members, key=lambda i: rows[i]["step"]) for members in rows_of.values()]


def solved(rows, i, above=None):
    """Of the trajectory of row ``i``: by its return above a number, else by a flag on any step, else above 0."""
    row = rows[i]
    if above is None and "success" in row:
        return any(other["success"] for other in rows if other["trajectory"] == row["trajectory"])
    return row.get("env_return", row["score"]) > (above or 0.0)


class Conversations:
    """The steps of one trajectory where they are a tree, as plain recursions.

    A row has ``after``, the number of the step that it goes on after, or -1; ``request``, equal for samples of one
    request; ``own``, the reward reported for it; and ``outcome``, what the trajectory earned as a whole.
    """

    def __init__(self, rows):
        self.rows = rows
        self.outcome = math.fsum(row["outcome"] for row in rows)

    def children(self, t):
        return [u for u, row in enumerate(self.rows) if row["after"] == self.rows[t]["step"]]

    def samples(self, t):
        return [u for u, row in enumerate(self.rows) if row["request"] == self.rows[t]["request"]]

    def below(self, t):
        return max((1 + self.distance(u) for u in self.children(t)), default=0)

    def distance(self, t):
        return max(map(self.below, self.samples(t)))

    def path(self, t):
        before = [u for u, row in enumerate(self.rows) if row["step"] == self.rows[t]["after"]]
        return [*self.path(before[0]), t] if before else [t]

    def next(self, t):
        return [u for u in self.children(t) if self.distance(u) + 1 == self.below(t)]

    def reported(self, t, gamma):
        return self.rows[t]["own"] + gamma * math.fsum(self.reported(u, gamma) for u in self.children(t))

    def returned(self, t, gamma):
        return self.reported(t, gamma) + gamma ** self.distance(t) * self.outcome


def step_returns(rows, gamma):
    """R(t) = r(t) + gamma R(t+1) inside each trajectory, or along its conversations."""
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        if "after" in rows[members[0]]:
            tree = Conversations([rows[i] for i in members])
            for t, i in enumerate(members):
                result[i] = tree.returned(t, gamma)
            continue
        total = 0.0
        for i in reversed(members):
            total = rows[i]["reward"] + gamma * total
            result[i] = total
    return result


def unpenalised(rows, scope):
    """The rows as they are compared: with scope "outcomes" nothing but what was earned counts."""
    return [{**row, "penalty": 0.0} for row in rows] if scope == "outcomes" else rows


def less_penalties(advantages, rows, scope="outcomes"):
    """Every step pays its own penalty at the end, or, in the released scopes, has paid it."""
    if scope != "outcomes":
        return advantages
    return [advantage - row["penalty"] for advantage, row in zip(advantages, rows, strict=True)]


def own_returns(rows, gamma):
    return [total - row["penalty"] for total, row in zip(step_returns(rows, gamma), rows, strict=True)]


def own_scores(rows):
    """Outcome of the trajectory, by default the sum of its rewards, less the step's own penalty."""
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        total = math.fsum(rows[i]["reward"] for i in members)
        for i in members:
            result[i] = rows[i].get("score", total) - rows[i]["penalty"]
    return result


def peers(rows, i):
    """The rows of the same prompt group, row i included."""
    return [j for j, row in enumerate(rows) if row["group"] == rows[i]["group"]]


def one_row_per_trajectory(rows, members):
    """The earliest step of every trajectory among the row numbers."""
    earliest = {}
    for i in members:
        t = rows[i]["trajectory"]
        if t not in earliest or rows[i]["step"] < rows[earliest[t]]["step"]:
            earliest[t] = i
    return list(earliest.values())


def standardise(value, values, norm, epsilon, kind="sample"):
    """value against the values of its group; a group without spread gives no standardised credit."""
    centre = values[0] if constant(values) else mean(values)
    centred = 0.0 if same(value, centre) else value - centre
    if norm == "mean":
        return centred
    return 0.0 if constant(values) else centred / (std(values, kind) + epsilon)


def episode_level(rows, norm, scope, singleton, epsilon):
    own = own_scores(unpenalised(rows, scope))
    result = []
    for i, value in enumerate(own):
        members = peers(rows, i)
        if scope != "steps":
            members = one_row_per_trajectory(rows, members)
        if len(members) == 1:
            result.append(value if singleton == "score" else 0.0)
        else:
            result.append(standardise(value, [own[j] for j in members], norm, epsilon))
    return result


def leave_one_out(rows, scope, singleton):
    """The value against the mean of the other values of its group; a row that is not counted itself, by n / (n - 1)."""
    own = own_scores(unpenalised(rows, scope))
    result = []
    for i, value in enumerate(own):
        members = peers(rows, i)
        if scope != "steps":
            members = one_row_per_trajectory(rows, members)
        n = len(members)
        if n == 1:
            result.append(value if singleton == "score" else 0.0)
        else:
            result.append(n / (n - 1) * standardise(value, [own[j] for j in members], "mean", None))
    return result


def texts(rows):
    """The texts a method compares: the text column, else the anchors; None stays None."""
    return [row["text"] if "text" in row else row["anchor"] for row in rows]
