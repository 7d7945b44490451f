import math

from naive.common import less_penalties, same
from naive.marshal import role_turns


def rae(rows, decay=0.95, gamma=1.0, state=None):
    """Every episode in every place of the order, the other ones of its role before it at random."""
    episodes = role_turns(rows)
    role = [rows[members[0]]["role"] for members in episodes]
    outcome = [rows[members[0]].get("score", math.fsum(rows[i]["reward"] for i in members)) for members in episodes]
    result = [0.0] * len(rows)
    for e, members in enumerate(episodes):
        others = [outcome[k] for k in range(len(episodes)) if role[k] == role[e] and k != e]
        b = (state or {}).get(str(role[e]), 0.0)
        places = range(len(others) + 1)
        expected = [decay**k * b + (1 - decay**k) * (sum(others) / len(others) if others else 0.0) for k in places]
        baseline = math.fsum(expected) / len(expected)
        advantage = 0.0 if same(outcome[e], baseline) else outcome[e] - baseline
        for back, i in enumerate(reversed(members)):
            result[i] = gamma**back * advantage
    return less_penalties(result, rows)
