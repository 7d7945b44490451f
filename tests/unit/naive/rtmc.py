import importlib

from naive.common import less_penalties, mean, same, std, trajectories


def rtmc(rows, gamma=0.99, n_prior=2.0, divide_by_std=False, states="anchor", actions="key", signature=None):
    act = [row["action"] if actions == "key" else row["action_signature"] for row in rows]
    if signature is not None:
        module, _, name = signature.partition(":")
        function = getattr(importlib.import_module(module), name)
        act = [None if key is None else function(key) for key in act]
    keys = [None] * len(rows)
    for members in trajectories(rows):
        for at, i in enumerate(members):
            key = {
                "anchor": rows[i].get("anchor"),
                "column": rows[i].get("state_signature"),
                "actions": frozenset(act[j] for j in members[:at] if act[j] is not None),
            }[states]
            here = (rows[i]["group"], ("alone", i) if key is None else ("state", key))
            keys[i] = (here, ("alone", i) if act[i] is None else ("action", act[i]))

    visits, outcomes = {}, {}
    for members in trajectories(rows):
        outcome = rows[members[-1]].get("score", sum(rows[j]["reward"] for j in members))
        outcomes.setdefault(rows[members[0]]["group"], []).append(outcome)
        seen = set()
        for at, i in enumerate(members):
            if keys[i] not in seen:
                seen.add(keys[i])
                visits.setdefault(keys[i], []).append(gamma ** (len(members) - 1 - at) * outcome)

    credit = []
    for i, row in enumerate(rows):
        q = mean(visits[keys[i]])
        alike = [g for (s, _), returns in visits.items() if s == keys[i][0] for g in returns]
        n = len(alike)
        value = (n * mean(alike) + n_prior * mean(outcomes[row["group"]])) / (n + n_prior)
        credit.append(0.0 if same(q, value) else q - value)
    if divide_by_std:
        spread = {}
        for row in rows:
            group = [c for c, other in zip(credit, rows, strict=True) if other["group"] == row["group"]]
            spread[row["group"]] = std(group, "population")
        credit = [
            c / spread[row["group"]] if spread[row["group"]] > 1e-8 else c for c, row in zip(credit, rows, strict=True)
        ]
    return less_penalties(credit, rows)
