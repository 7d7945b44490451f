"""Metrics of the episodes of a training step. verl's own are means over rows: episodes with more rows weigh more.

Decision density of arXiv:2606.22164 is the share of turns whose action changes the distribution of the return. The
paper has it exactly, in one small MDP; from played episodes it can be estimated where a group took different actions in
the same state, which is the estimate of this package.

Signals of trouble in an episode follow rules, without a model: Signals, arXiv:2604.00356, and its released port. The
port reads tool calls and what users write. Of its signals, those of the execution and of the environment can be told
from the turns of an episode, and they are here. A call that is made again counts if the state is the same as well: an
agent that goes forward three times does nothing wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from verl_turnkey.advantage.group_ops import Floats, Ints, joint_codes, next_values
from verl_turnkey.plugins.credit.rows import BREAK, CACHED, Rows, split_key
from verl_turnkey.plugins.log.schema import COMPONENT
from verl_turnkey.plugins.notices import failure_kind, warn_once

ERRORS = 2.0
"""standard errors by which two means have to differ"""
LEAST = 2
"""episodes with the turn's action, and with another one, that the state must have been visited by"""


def decision_density(state: Ints, action: Ints, trajectory: Ints, ahead: Floats) -> tuple[float, float]:
    """``(density, covered)`` of N turns; the density is nan where no turn is covered.

    ::

        a turn is covered       where LEAST episodes took its action a in its state s, and LEAST another one
        a turn is a decision    where |mean G(s, a) - mean G(s, other)| > ERRORS sqrt(var(s, a)/n + var(s, other)/m)

    ``covered``: the share of turns that are; ``density``: the share of these that are decisions.

    Args:
        state, action, trajectory: (N,) equal for equal ones, the turns of each episode in order.
        ahead: (N,) what the episode earns from the turn on, G. Of an episode one turn in the state counts for the
            action, and one for all others, the first of each: later ones are not independent of it.
    """
    state = np.unique(state, return_inverse=True)[1]
    choice, n_choices = joint_codes(state, action)
    first = np.sort(np.unique(joint_codes(trajectory, choice)[0], return_index=True)[1])
    visit = joint_codes(trajectory[first], state[first])[0]  # an episode's turns in one state
    opening = np.unique(visit, return_index=True)[1]
    later = np.setdiff1d(np.arange(len(first)), opening)
    second = later[np.unique(visit[later], return_index=True)[1]]  # the first turn with another action than the first
    ahead = ahead - (np.bincount(state, ahead) / np.bincount(state))[state]  # variances by sums lose digits far from 0
    of_choice = np.zeros(n_choices, np.int64)
    of_choice[choice] = state
    chosen = choice[first]
    sums, others = [], []
    for power in (np.ones(len(first)), ahead[first], ahead[first] ** 2):
        sums.append(np.bincount(chosen, power))
        of_state = np.bincount(of_choice[chosen[opening]], power[opening])[of_choice]
        not_other = np.bincount(chosen[opening], power[opening], n_choices)
        instead = np.bincount(chosen[opening][visit[second]], power[second], n_choices)
        others.append(of_state - not_other + instead)
    (n, mean, error), (m, other, further) = (_moments(*totals) for totals in (sums, others))
    covered = (n >= LEAST) & (m >= LEAST)
    decides = covered & (np.abs(mean - other) > ERRORS * np.sqrt(error + further) + 1e-9)
    density = decides[choice].sum() / covered[choice].sum() if covered.any() else np.nan
    return float(density), float(covered[choice].mean())


def _moments(number: Floats, total: Floats, squares: Floats) -> tuple[Floats, Floats, Floats]:
    """Number, mean and squared standard error of the mean."""
    mean = total / np.maximum(number, 1)
    variance = np.maximum(squares - number * mean**2, 0.0) / np.maximum(number - 1, 1)
    return number, mean, variance / np.maximum(number, 1)


def decision_metrics(rows: Rows) -> dict[str, float]:
    """Of the played episodes, without branches; none where the rows do not say states and actions."""
    steps, first = rows.steps, np.flatnonzero(rows.branch == 0)
    if not {"anchor", "action"} <= {*steps.given} or not len(first):
        return {}
    at = first[np.lexsort((steps.step[first], steps.trajectory[first]))]
    trajectory = np.unique(steps.trajectory[at], return_inverse=True)[1]
    ahead = steps.replaced(reward=rows.reward_before_kl).returns(1.0)[at]
    state, _ = joint_codes(steps.group[at], steps.anchor[at])
    density, covered = decision_density(state, steps.action[at], trajectory, ahead)
    metrics = {"episode/decisions/covered": covered}
    return metrics if np.isnan(density) else metrics | {"episode/decisions/density": density}


REPEATS, CYCLES = 3, 3
"""turns in a row with the same call that are a loop; rounds of two calls in turn that are one"""
START, FAILURE, LOOP, EXHAUSTION = 50.0, 8.0, 5.0, 3.0
"""where the score of an episode starts, and what each signal takes from it"""


class Signals(NamedTuple):
    """Of one episode."""

    failures: int
    """turns without a valid action"""
    loops: int
    """stretches of turns that repeat a call, or two calls in turn"""
    exhausted: bool
    """a limit ended it"""

    @property
    def score(self) -> float:
        return max(0.0, START - FAILURE * self.failures - LOOP * self.loops - EXHAUSTION * self.exhausted)


def signals(calls: Sequence[int], valid: Sequence[bool], exhausted: bool) -> Signals:
    """``calls``: for each turn a number, equal where state and action are the same."""
    repeats = [a == b for a, b in pairwise(calls)]
    alternations = [calls[t] == calls[t - 2] != calls[t - 1] for t in range(2, len(calls))]
    loops = _stretches(repeats, REPEATS - 1) + _stretches(alternations, 2 * CYCLES - 2)
    return Signals(len(valid) - sum(valid), loops, bool(exhausted))


def _stretches(marks: Sequence[bool], least: int) -> int:
    """How many stretches of at least ``least`` marks in a row there are."""
    count = length = 0
    for mark in marks:
        length = length + 1 if mark else 0
        count += length == least
    return count


def signal_metrics(rows: Rows) -> dict[str, float]:
    """Means over the played episodes; none where the rows do not say which actions were taken.

    Of a rollout that forked its first trajectory counts alone.
    """
    steps, first = rows.steps, np.flatnonzero(rows.branch == 0)
    if "action" not in steps.given or not len(first):
        return {}
    pairs = np.stack([steps.anchor if "anchor" in steps.given else np.zeros_like(steps.action), steps.action], axis=1)
    calls = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    following = next_values(np.arange(len(steps)), steps.runs, -1).tolist()
    begins = np.setdiff1d(first, following)
    per_episode = dict.fromkeys(steps.trajectory[begins].tolist(), Signals(0, 0, False))
    for row in begins.tolist():  # of a tree of steps each way from a step that no other goes on to
        way = [row]
        while (row := following[row]) >= 0:
            way.append(row)
        failures, loops, exhausted = signals(
            calls[way].tolist(), steps.valid[way].tolist(), bool(steps.truncated[way].any())
        )
        episode = int(steps.trajectory[way[0]])
        so_far = per_episode[episode]
        per_episode[episode] = Signals(so_far.failures + failures, so_far.loops + loops, so_far.exhausted or exhausted)
    episodes = per_episode.values()
    values = {name: [getattr(episode, name) for episode in episodes] for name in Signals._fields}
    values |= {"share": [any(episode) for episode in episodes], "score": [episode.score for episode in episodes]}
    return {f"episode/signals/{name}": float(np.mean(numbers)) for name, numbers in values.items()}


LEARNED = "turnkey_observation"
"""column of the queue: (B, L) nested, 1 / N on the N tokens of a batch's observations that are learned, else 0"""
BREAKS = "rows/break/"
"""prefix of the counts of rows by ``turnkey_break``"""
BRANCHING = "branching/"
"""prefix of what a rollout says of its branches, in verl's ``reward_extra_info`` and as metrics"""
AGENT = "turnkey_agent"
"""extra field of a row: counts of an agent's calls in its episode; the metrics ``agent/<name>`` are their means"""
OF_EPISODES = ("episode/", "rows/", "credit/", BRANCHING, "agent/", "importance/")
"""prefixes of the metrics of this module, of the methods and of importance weights"""
FAILED = "episode/failed/"
"""prefix of the counts of failed episodes by kind"""


def reward_metrics(rows: Rows, keys: Sequence[str], extra_fields: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the played episodes: the sum of each reward component, ``unparsed_rate``, and of branches."""
    reward_info: dict[str, Mapping[str, Any]] = {}
    for row in rows.row[rows.branch == 0].tolist():
        reward_info.setdefault(split_key(keys[int(row)])[1], extra_fields[row].get("reward_extra_info") or {})
    metrics = {}
    for name in sorted({name for info in reward_info.values() for name in info}):
        if name.startswith((COMPONENT, BRANCHING)) or name == "unparsed_rate":
            metric = name if name.startswith(BRANCHING) else f"episode/{name}"
            metric += "/mean" if name.startswith(COMPONENT) else ""
            metrics[metric] = float(np.mean([info[name] for info in reward_info.values() if name in info]))
    return metrics


def agent_metrics(rows: Rows, keys: Sequence[str], extra_fields: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the played episodes of the counts in :data:`AGENT`; empty where no agent of the user's own plays."""
    counts: dict[str, Mapping[str, float]] = {}
    for row in rows.row.tolist():
        if AGENT in extra_fields[row]:
            counts.setdefault(split_key(keys[int(row)])[1], extra_fields[row][AGENT])
    names = sorted({name for count in counts.values() for name in count})
    return {f"agent/{name}": float(np.mean([count.get(name, 0.0) for count in counts.values()])) for name in names}


def warn_of_branches(metrics: Mapping[str, float]) -> None:
    """Say it where all branches of a batch failed: estimates by branches are then without any, and credit is 0."""
    failed, *ended = (metrics.get(f"{BRANCHING}{name}", 0.0) for name in ("failed", "trained", "measured"))
    if failed and not any(ended):
        warn_once(
            "all branches of a batch failed (branching/failed), so that turnkey.rollout.strategy gave its method "
            "nothing; the agent-loop workers name the reasons"
        )


CUT_EARLY = 0.1
"""share of episodes cut before their turn limit that is worth a warning: most groups of eight then have one"""
LARGE_PRIOR, MANY_MET = 10.0, 0.5
"""a large ``credit/prior`` of ``loo_td``, and a share of steps with states that other episodes visited that is many"""


def warn_of_turn_limit(metrics: Mapping[str, float], fitted: bool = True) -> None:
    """Say it, once each, where the metrics of ``loo_td`` point to a wrong turn limit or state key.

    ``fitted``: whether the method chose its prior itself.
    """
    cut, limit = metrics.get("credit/share_cut_early", 0.0), metrics.get("credit/turn_limit", 0.0)
    if cut > CUT_EARLY:
        warn_once(
            f"{cut:.0%} of the episodes of a batch were cut before the turn limit that their values count with, on "
            f"average {limit:.1f} turns (credit/share_cut_early): the method takes the future after such an end for "
            "worth nothing. Where tokens end episodes, raise data.max_prompt_length or data.max_response_length, or "
            "lower turnkey.rollout.max_turns to the turns that fit; where the environment or the agent has a limit of "
            'its own, give it as info["extra"]["turn_limit"] (an agent: in `extra`), or set turnkey.rollout.max_turns '
            "to it; and leave turnkey.credit.horizon at null",
            "cut early",
        )
    prior, met = metrics.get("credit/prior", 0.0), metrics.get("credit/share_steps_met", 0.0)
    if fitted and prior >= LARGE_PRIOR and met >= MANY_MET:
        warn_once(
            f"other episodes visited the states of {met:.0%} of a batch's steps, but the values of states do not "
            f"predict how episodes go on (credit/prior is {prior:g}): check the turn limit (credit/turn_limit is "
            f"{limit:.1f}) and that the environment's state_key differs wherever the state does",
            "large prior",
        )


def episode_metrics(rows: Rows) -> dict[str, float]:
    """Per-episode figures of a training batch.

    A failed episode counts as not solved; it has no length and no return. Without records success and validity are
    unknown and not reported. Of a rollout that forked its first trajectory counts alone: branches begin late.
    """
    steps, first = rows.steps, rows.branch == 0
    names, index = np.unique(steps.trajectory[first], return_inverse=True)
    played, failed = len(names), len(rows.failed)
    if played + failed == 0:
        return {}
    metrics = {"episode/count": float(played + failed), "episode/failed": float(failed)}
    for kind, number in sorted(Counter(map(failure_kind, rows.failed.values())).items()):
        metrics[f"{FAILED}{kind}"] = float(number)
    if "success" in steps.given:
        solved = np.bincount(index, weights=steps.success[first]) > 0
        metrics["episode/success_rate"] = float(solved.sum() / (played + failed))
    if played:
        length = np.bincount(index)
        metrics |= {
            "episode/length/mean": float(length.mean()),
            "episode/length/max": float(length.max()),
            "episode/composed_return/mean": float(np.bincount(index, weights=rows.reward_before_kl[first]).mean()),
        }
    if played and rows.reward is not None:
        metrics["episode/env_return/mean"] = float(np.bincount(index, weights=rows.reward[first]).mean())
    if played and "valid" in steps.given:
        metrics["episode/invalid_rate"] = float(1.0 - steps.valid[first].mean())
    return metrics


def row_metrics(
    rows: Rows, tags: Sequence[Mapping[str, Any]], extra_fields: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Metrics of the rows of played episodes. ``trained`` tokens are the model's, ``masked`` ones all others."""
    held = np.unique(rows.row).tolist()
    if not held:
        return {}
    reasons = Counter(str(why) for row in held if (why := extra_fields[row].get(BREAK)) not in (None, "first"))
    trained = float(rows.steps.tokens.sum())
    cached = [share for row in held for share in extra_fields[row].get(CACHED) or ()]
    first = rows.steps.first_rows
    begins = rows.row[first[rows.branch[first] > 0]].tolist()  # rows of trained branches that begin at their fork
    forked = [share for row in begins for share in (extra_fields[row].get(CACHED) or ())[:1]]
    return {
        "rows/per_episode": len(held) / len(np.unique(rows.steps.trajectory[rows.branch == 0])),
        "rows/trained_tokens": trained,
        "rows/masked_tokens": sum(tags[row]["seq_len"] for row in held) - trained,
        **({"rows/cached_prompt_share": float(np.mean(cached))} if cached else {}),
        **({f"{BRANCHING}cached_prompt_share": float(np.mean(forked))} if forked else {}),
        **{f"{BREAKS}{why}": float(number) for why, number in sorted(reasons.items())},
    }


COUNTS = ("episode/count", "episode/failed", "episode/missing", "rows/trained_tokens", "rows/masked_tokens")


def combine(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several batches into those of one; those of a single batch are returned unchanged.

    verl would weight each batch by its rows, average counts, and treat every name that contains "min" or "max" as an
    extreme. Standard deviations are averaged, which leaves out the deviation between batches.
    """
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _combined(name, [part for part in parts if name in part]) for name in names}


def _combined(name: str, parts: Sequence[Mapping[str, float]]) -> float:
    values = [part[name] for part in parts]
    last = name.rsplit("/", 1)[-1]
    groups = last == "groups" or (last.endswith("_groups") and not last.startswith("share_"))
    if groups or name in COUNTS or name.startswith((FAILED, BREAKS)):
        return float(sum(values))
    if name.endswith("/max"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    weights = [_weight(name, part) for part in parts]
    return float(np.average(values, weights=weights if any(weights) else None))


def _weight(name: str, part: Mapping[str, float]) -> float:
    """The number of groups, episodes, played episodes or steps that the metric is a mean over."""
    groups = f"{name.removesuffix('_size/mean')}s"  # of credit/anchor_group_size/mean: credit/anchor_groups
    if name.endswith("_group_size/mean") and groups in part:
        return part[groups]
    count = part.get("episode/count", 0.0)
    if name == "episode/success_rate":
        return count
    played = count - part.get("episode/failed", 0.0)
    steps = played * part.get("episode/length/mean", 0.0)
    if name == "episode/decisions/density":
        return steps * part.get("episode/decisions/covered", 0.0)
    of_steps = name.startswith("credit/") or name in ("episode/invalid_rate", "episode/decisions/covered")
    return steps if of_steps else played
