import math
import re
import zlib

import numpy as np

from naive.common import less_penalties, mean, trajectories

PRIORS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


def loo_td(rows, gamma=1.0, lam=0.6, horizon=None, prior=None, lone=1.0, scale="rms", text="words"):
    """Dictionaries and recursions by turns left; the fit on words by sums over steps."""
    paths = sorted(trajectories(rows), key=lambda path: rows[path[0]]["trajectory"])
    groups = {}
    for path in paths:
        groups.setdefault(rows[path[0]]["group"], []).append(path)
    limits = turn_limits(rows, groups, horizon)
    facts = {}
    for name, members in groups.items():
        facts |= of_group(rows, members, limits[name], gamma)
    key = ("return", "start", "position", "left")
    f, tau = fit(rows, paths, {i: {k: facts[i][k] for k in key} for i in facts}, gamma, prior == "averaged", text)

    priors = [prior] if isinstance(prior, float | int) else PRIORS
    tried = [baselines(rows, paths, facts, f, kappa, gamma) for kappa in priors]
    misses = [math.fsum((facts[i]["return"] - b[i]) ** 2 for i in facts) for b, _ in tried]
    alone = [
        facts[i]["others"] == 0 for members in groups.values() if len(members) > 1 for path in members for i in path
    ]
    share_alone = sum(alone) / len(alone) if alone else 0.0
    rest = share_alone + (1 - share_alone) * tau
    credit = [0.0] * len(rows)
    for part, kappa, (b, e) in zip(shares(misses, len(paths), prior == "averaged"), priors, tried, strict=True):
        for path in paths:
            target = 0.0
            for at, i in reversed(list(enumerate(path))):
                target, w = rows[i]["reward"] + gamma * target, 0.0
                if at < len(path) - 1:
                    j = path[at + 1]
                    m = facts[j]["others"] + 1 if facts[j]["others"] else 0
                    w = (1 - lam) * (m + kappa * tau) / (m + kappa)
                    v = (m * facts[i]["after"] + kappa * tau * e[j]) / max(m + kappa * tau, 1e-12)
                    target = rows[i]["reward"] + gamma * (w * v + (1 - w) * (target - rows[i]["reward"]) / gamma)
                n = facts[i]["others"]
                credit[i] += part * (target - b[i]) * ((n + lone * rest) / (n + lone) if lone else 1.0)
    largest = max((abs(facts[i]["return"]) for i in facts), default=0.0)
    credit = [0.0 if abs(c) <= 1e-12 * largest else c for c in credit]
    size = math.sqrt(mean([c * c for c in credit])) if scale == "rms" and any(credit) else 1.0
    return less_penalties([c / size for c in credit], rows)


def ended_by_limit(rows, path):
    return not rows[path[-1]].get("terminated", False)


def turn_limits(rows, groups, horizon):
    longest = {name: max(map(len, members)) for name, members in groups.items()}
    stopped = {name: any(ended_by_limit(rows, path) for path in members) for name, members in groups.items()}
    everywhere = max(longest.values()) * (1 if any(stopped.values()) else 2)
    limits = {}
    for name, members in groups.items():
        if horizon is not None:
            limits[name] = max(longest[name], horizon)
        elif "turn_limit" in rows[0]:
            limits[name] = max(longest[name], *(int(rows[path[0]]["turn_limit"]) for path in members))
        else:
            limits[name] = longest[name] if stopped[name] else everywhere
    return limits


def state_of(rows, i, column="anchor"):
    return ("alone", i, column) if rows[i][column] is None else ("state", rows[i][column])


def of_group(rows, members, limit, gamma):
    def cut(path):
        return ended_by_limit(rows, path) and len(path) == limit

    def leads_to(path, at):
        if at == len(path) - 1 and not cut(path):
            return None
        if rows[path[at]].get("next_anchor") is not None:
            return state_of(rows, path[at], "next_anchor")
        return state_of(rows, path[at + 1] if at < len(path) - 1 and "next_anchor" not in rows[path[at]] else path[at])

    moves, tips, known = {}, {}, {}
    for number, path in enumerate(members):
        for at, i in enumerate(path):
            moves.setdefault(state_of(rows, i), []).append((number, rows[i]["reward"], leads_to(path, at)))
        if cut(path):
            tips.setdefault(leads_to(path, len(path) - 1), []).append(state_of(rows, path[-1]))

    def average(state, turns, without=None):
        terms = [r + gamma * value(there, turns - 1) for who, r, there in moves[state] if who != without]
        return mean(terms) if terms else 0.0

    def value(state, turns):
        if turns == 0 or state is None:
            return 0.0
        if (state, turns) not in known:
            if state in moves:
                known[state, turns] = average(state, turns)
            else:
                before = tips.get(state, [])
                known[state, turns] = mean([value(s, turns) for s in before]) if before else 0.0
        return known[state, turns]

    outcomes = [math.fsum(gamma**at * rows[i]["reward"] for at, i in enumerate(path)) for path in members]
    facts = {}
    for number, path in enumerate(members):
        others = [outcome for other, outcome in enumerate(outcomes) if other != number]
        for at, i in enumerate(path):
            facts[i] = {
                "return": math.fsum(gamma**k * rows[j]["reward"] for k, j in enumerate(path[at:])),
                "start": mean(others) if others else outcomes[number],
                "before": average(state_of(rows, i), limit - at, without=number),
                "after": value(leads_to(path, at), limit - at - 1),
                "others": len({who for who, _, _ in moves[state_of(rows, i)]} - {number}),
                "position": at,
                "left": limit - at,
            }
    return facts


def baselines(rows, paths, facts, f, kappa, gamma):
    b, e = {}, {}
    for path in paths:
        for at, i in enumerate(path):
            if at == 0:
                e[i] = facts[i]["start"]
            else:
                last = path[at - 1]
                e[i] = (b[last] - rows[last]["reward"]) / gamma
                if f is not None:
                    e[i] += f[i] - (f[last] - rows[last]["reward"]) / gamma
            n = facts[i]["others"]
            b[i] = (n * facts[i]["before"] + kappa * e[i]) / (n + kappa)
    return b, e


def shares(misses, n, averaged):
    best = min(misses)
    if not averaged:
        return [float(k == misses.index(best)) for k in range(len(misses))]
    if best <= 0:
        return [(miss <= 0) / sum(m <= 0 for m in misses) for miss in misses]
    likelihood = [(miss / best) ** (-n / 2) for miss in misses]
    return [part / sum(likelihood) for part in likelihood]


def fit(rows, paths, facts, gamma, averaged, text):
    if text == "none" or len(paths) < 2 or not any(row.get("text") for row in rows):
        return None, 0.0
    x = features(rows, paths, facts)
    plain, width, fold_of = {}, len(next(iter(x.values()))), {}
    for number, path in enumerate(paths):
        paid = 0.0
        for at, i in enumerate(path):
            plain[i] = (facts[i]["start"] - paid) / gamma**at
            paid += gamma**at * rows[i]["reward"]
            fold_of[i] = number % min(8, len(paths))
    fits = [plain]
    for ridge in (0.1, 1.0, 10.0):
        values = {}
        for fold in set(fold_of.values()):
            a, c = ridge * np.eye(width), np.zeros(width)
            for path in paths:
                z = np.zeros(width)
                for at, i in enumerate(path):
                    z = x[i] + gamma * 0.5 * z
                    if fold_of[i] != fold:
                        following = x[path[at + 1]] if at < len(path) - 1 else np.zeros(width)
                        a += np.outer(z, x[i] - gamma * following)
                        c += z * rows[i]["reward"]
            theta = np.linalg.solve(a, c)
            values |= {i: float(x[i] @ theta) for i in x if fold_of[i] == fold}
        fits.append(values)
    first = {i: path[0] for path in paths for i in path}

    def predicted(f, i):
        return f[i] + (facts[i]["start"] - f[first[i]]) / gamma ** facts[i]["position"]

    misses = [math.fsum((facts[i]["return"] - predicted(f, i)) ** 2 for i in x) for f in fits]
    share = shares(misses, len(paths), averaged)
    if share[0] == 1:
        return None, 0.0
    f = {i: sum(part * values[i] for part, values in zip(share, fits, strict=True)) for i in x}
    missed = math.fsum((facts[path[-1]]["return"] - predicted(f, path[-1])) ** 2 for path in paths)
    variance = math.fsum((facts[path[0]]["return"] - facts[path[0]]["start"]) ** 2 for path in paths)
    return f, min(1.0, max(0.0, 1 - missed / max(variance, 1e-300)))


def features(rows, paths, facts):
    def words(i):
        single = re.findall(r"\w+", (rows[i]["text"] or "").lower())
        return single + [f"{word}_{following}" for word, following in zip(single, single[1:])]  # noqa: B905, RUF007

    readers = {}
    for number, path in enumerate(paths):
        for i in path:
            for word in words(i):
                readers.setdefault(word, set()).add(number)
    bags = {}
    for i in facts:
        bags[i] = np.zeros(128)
        for word in words(i):
            if len(readers[word]) > 1:
                code = zlib.crc32(word.encode())
                bags[i][code % 128] += -1 if (code >> 16) & 1 else 1
    common = sum((bag != 0).astype(int) for bag in bags.values())
    weighted = {i: unit(bag * np.log1p(len(rows) / np.maximum(common, 1))) for i, bag in bags.items()}
    names, x = sorted({rows[i]["group"] for i in facts}), {}
    for path in paths:
        past = np.zeros(128)
        for i in path:
            share = facts[i]["left"] / (facts[i]["left"] + facts[i]["position"])
            of_group = [3.0 * (rows[i]["group"] == name) for name in names]
            moments = [share, share**2, share**0.5, *of_group]
            x[i] = np.concatenate([weighted[i], weighted[i] * (2 * share - 1), 0.5 * unit(past), moments])
            past = 0.7 * past + weighted[i]
    return x


def unit(vector):
    return vector / max(math.sqrt(math.fsum(vector**2)), 1e-9)
