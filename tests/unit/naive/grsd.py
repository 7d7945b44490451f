import math

from naive.common import mean, peers, solved


def grsd(rows, base, lam=0.5, eta=0.0, bound=0.2, success=None):
    def term(j):
        gaps = rows[j]["gaps"]
        sign = (base[j] > 0) - (base[j] < 0)
        return math.exp(min(max(sign * sum(gaps) / len(gaps), -20.0), 20.0)) - 1

    result = []
    for i, advantage in enumerate(base):
        group = peers(rows, i)
        valid = [j for j in group if rows[j]["gaps"] and rows[j]["has_text"]]
        wins = {solved(rows, j, success) for j in group}
        if i not in valid or len(wins) < 2:
            result.append(advantage)
            continue
        n = term(i) / (mean([abs(term(j)) for j in valid]) + 1e-6)
        n = n if abs(n) > eta else 0.0
        result.append(advantage * max(0.1, 1 + lam * min(max(n, -bound), bound)))
    return result
