"""Values of steps by the words of their observations: a linear fit over all groups of a batch, out of fold."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage.group_ops import Floats
from verl_turnkey.advantage.methods._turns_left import Paths

WIDTH = 128  # places that words are hashed to
FOLDS = 8
TRACE = 0.5  # lambda of the least-squares TD fit
MEMORY = 0.7  # what is left of earlier words from step to step
OF_GROUP = 3.0  # feature of the group: its mean is hardly shrunk
RIDGES = (0.1, 1.0, 10.0)


def word_values(
    paths: Paths, texts: NDArray[np.object_] | None, returns: Floats, start: Floats, gamma: float, averaged: bool
) -> tuple[Floats | None, float]:
    """Values f(t) (S,) of the steps, fitted without their own trajectory, and the trust in them, from 0 to 1.

    ::

        h(t) = signed hashes of the words and pairs of words of the text, each weighted by its rarity; length 1
        p(t) = 0.7 p(t-1) + h(t-1);  l = L / (L + t)
        x(t) = [h, (2 l - 1) h, p / |p| / 2, l, l^2, sqrt(l), 3 (the group is g), ...]
        z(t) = x(t) + gamma 0.5 z(t-1)
        f(t) = x(t)' (sum z (x - gamma x')' + ridge I)^-1 (sum z r)   over the trajectories of the other 7 folds

    ``ridge`` is the one of 0.1, 1, 10 whose f(t) + (e(0) - f(0)) / gamma^t predict the returns best, or no fit is used
    if none predicts better than e(0), ``start``, does; with ``averaged`` all four, by their likelihood. The trust is
    the share of the outcomes' variance that the prediction at the last step has found out.

    ``texts`` (S,): what was observed at each step, in the order of ``paths``; None: no values. Words that one
    trajectory alone has are left out. Costs O(S (3 WIDTH + groups)^2).

    Source: least-squares TD (Bradtke and Barto, 1996) on hashed words, cross-fitted.
    """
    if texts is None or paths.n_trajectories < 2 or not any(texts):
        return None, 0.0
    x = _features(paths, _hashed(texts, paths))
    first = np.repeat(paths.begin, paths.length)
    keep = gamma ** -paths.position.astype(float)
    paid = np.cumsum(paths.reward / keep) - paths.reward / keep
    expected = np.repeat(start, paths.length)
    plain = (expected - paid + paid[first]) * keep  # what was left to expect, without a fit
    fits = [plain, *_out_of_fold(paths, x, gamma)]
    predictions = [f + (expected - f[first]) * keep for f in fits]
    misses = np.array([np.sum((returns - c) ** 2) for c in predictions])
    share = fit_shares(misses, paths.n_trajectories, averaged)
    if share[0] == 1:
        return None, 0.0
    values: Floats = np.tensordot(share, fits, 1)
    prediction = np.tensordot(share, predictions, 1)
    missed = np.sum((returns - prediction)[paths.last] ** 2)
    variance = np.sum((returns[paths.begin] - start) ** 2)
    return values, float(np.clip(1 - missed / max(variance, 1e-300), 0.0, 1.0))


def fit_shares(misses: Floats, n: int, averaged: bool) -> Floats:
    """The share of each fit, by its sum of squared errors: all to the first best one, or by likelihood.

    ``averaged``: errors of ``n`` independent trajectories, normal with a variance of their own in each fit, have the
    likelihood ``misses ** (-n / 2)``.
    """
    best = misses.min()
    if not averaged:
        return (np.arange(len(misses)) == np.argmin(misses)).astype(float)
    if best <= 0:
        return (misses <= 0) / np.count_nonzero(misses <= 0)
    likelihood = np.exp(-n / 2 * np.log(misses / best))
    return likelihood / likelihood.sum()


def _hashed(texts: NDArray[np.object_], paths: Paths) -> Floats:
    """Signed hashes (S, WIDTH) of words and pairs of words; those of one trajectory alone are left out."""
    distinct: dict[Any, int] = {}
    text_of_step = np.array([distinct.setdefault(text, len(distinct)) for text in texts])
    trajectory = np.repeat(np.arange(paths.n_trajectories), paths.length)
    terms = [_terms(text) for text in distinct]
    reader: dict[str, int] = {}  # term -> the only trajectory that has it, or -1
    for text, who in set(zip(text_of_step.tolist(), trajectory.tolist(), strict=True)):
        for term in terms[text]:
            if reader.setdefault(term, who) != who:
                reader[term] = -1
    bags = np.zeros((len(distinct), WIDTH))
    for bag, counts in zip(bags, terms, strict=True):
        for term, count in counts.items():
            if reader[term] == -1:
                code = zlib.crc32(term.encode(errors="replace"))
                bag[code % WIDTH] += count * (1 - 2 * ((code >> 16) & 1))
    steps_with = np.bincount(text_of_step, minlength=len(distinct)) @ (bags != 0)
    return _unit(bags * np.log1p(len(texts) / np.maximum(steps_with, 1)))[text_of_step]


def _terms(text: Any) -> Counter[str]:
    words = re.findall(r"\w+", str(text or "").lower())
    return Counter([*words, *(f"{a}_{b}" for a, b in zip(words, words[1:]))])  # noqa: B905, RUF007


def _features(paths: Paths, words: Floats) -> Floats:
    past = np.zeros_like(words)
    for k in range(1, paths.length.max()):
        _, row = paths.at(k)
        past[row] = MEMORY * past[row - 1] + words[row - 1]
    share = (paths.left / (paths.left + paths.position))[:, None]
    groups = OF_GROUP * (paths.group[:, None] == np.arange(paths.group.max() + 1))
    return np.hstack([words, words * (2 * share - 1), 0.5 * _unit(past), share, share**2, share**0.5, groups])


def _unit(rows: Floats) -> Floats:
    return rows / np.maximum(np.sqrt((rows * rows).sum(1, keepdims=True)), 1e-9)


def _out_of_fold(paths: Paths, x: Floats, gamma: float) -> Sequence[Floats]:
    """For each ridge the values (S,) of all steps."""
    z, change = x.copy(), x - gamma * np.where(paths.last[:, None], 0.0, np.roll(x, -1, axis=0))
    for k in range(1, paths.length.max()):
        _, row = paths.at(k)
        z[row] += gamma * TRACE * z[row - 1]
    n = min(FOLDS, paths.n_trajectories)
    fold = np.repeat(np.arange(paths.n_trajectories) % n, paths.length)
    a = [z[fold == k].T @ change[fold == k] for k in range(n)]
    c = [z[fold == k].T @ paths.reward[fold == k] for k in range(n)]
    all_a, all_c = sum(a), sum(c)
    values = [np.empty(len(x)) for _ in RIDGES]
    for ridge, f in zip(RIDGES, values, strict=True):
        for k in range(n):
            theta = np.linalg.solve(all_a - a[k] + ridge * np.eye(x.shape[1]), all_c - c[k])
            f[fold == k] = x[fold == k] @ theta
    return values
