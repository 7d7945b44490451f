"""Values of steps by the words of their observations: a linear fit over all groups of a batch, out of fold."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage.group_ops import Floats, Ints
from verl_turnkey.advantage.methods._turns_left import Paths

WIDTH = 128  # places that words are hashed to
FOLDS = 8
TRACE = 0.5  # lambda of the least-squares TD fit
MEMORY = 0.7  # decay of earlier words per step
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

    ``texts`` (S,): the observation at each step, in the order of ``paths``; None: no values. Words that occur in only
    one trajectory are ignored. Costs O(S WIDTH^2): the groups' features are eliminated before the system is solved.

    Source: least-squares TD (Bradtke and Barto, 1996) on hashed words, cross-fitted.
    """
    if texts is None or paths.n_trajectories < 2 or not any(texts):
        return None, 0.0
    x = _features(paths, _hashed(texts, paths))
    first = np.repeat(paths.begin, paths.length)
    keep = gamma ** -paths.position.astype(float)
    paid = np.cumsum(paths.reward / keep) - paths.reward / keep
    expected = np.repeat(start, paths.length)
    plain = (expected - paid + paid[first]) * keep  # the return to come, without a fit
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
    text, term, names = _terms([*distinct])
    n = len(distinct)
    # Steps come trajectory by trajectory, so the first and the last that read a text tell whether several did.
    first_reader, last_reader = np.full(len(names), len(texts)), np.full(len(names), -1)
    last_step = len(texts) - 1 - np.unique(text_of_step[::-1], return_index=True)[1]
    np.minimum.at(first_reader, term, trajectory[np.unique(text_of_step, return_index=True)[1]][text])
    np.maximum.at(last_reader, term, trajectory[last_step][text])
    shared = np.flatnonzero(first_reader < last_reader)
    codes = np.zeros(len(names), dtype=np.int64)
    codes[shared] = [zlib.crc32(names[k].encode(errors="replace")) for k in shared.tolist()]
    keep = (first_reader < last_reader)[term]
    sign = 1.0 - 2 * ((codes[term[keep]] >> 16) & 1)
    bags = np.bincount(text[keep] * WIDTH + codes[term[keep]] % WIDTH, sign, n * WIDTH).reshape(n, WIDTH)
    steps_with = np.bincount(text_of_step, minlength=n) @ (bags != 0)
    return _unit(bags * np.log1p(len(texts) / np.maximum(steps_with, 1)))[text_of_step]


def _terms(texts: Sequence[Any]) -> tuple[Ints, Ints, list[str]]:
    """The words and pairs of neighbours: of each occurrence its text and its term, and the names of the terms."""
    numbers: dict[str, int] = {}
    spelled = [[numbers.setdefault(w, len(numbers)) for w in re.findall(r"\w+", str(t or "").lower())] for t in texts]
    text = np.repeat(np.arange(len(texts)), [len(words) for words in spelled])
    word = np.array([number for words in spelled for number in words], dtype=np.int64)
    neighbours = np.flatnonzero(text[1:] == text[:-1])
    pairs, pair = np.unique(word[neighbours] * len(numbers) + word[neighbours + 1], return_inverse=True)
    words = [*numbers]
    names = words + [f"{words[p // len(words)]}_{words[p % len(words)]}" for p in pairs.tolist()]
    text, term = np.append(text, text[neighbours]), np.append(word, len(words) + pair.reshape(-1))
    if any("_" in word for word in words):  # then a word and a pair may be written alike
        alike: dict[str, int] = {}
        term = np.array([alike.setdefault(name, len(alike)) for name in names])[term]
        names = [*alike]
    return text, term, names


def _features(paths: Paths, words: Floats) -> Floats:
    """x (S, 3 WIDTH + 3) without the features of the groups."""
    past = np.zeros_like(words)
    for k in range(1, paths.length.max()):
        _, row = paths.at(k)
        past[row] = MEMORY * past[row - 1] + words[row - 1]
    share = (paths.left / (paths.left + paths.position))[:, None]
    return np.hstack([words, words * (2 * share - 1), 0.5 * _unit(past), share, share**2, share**0.5])


def _unit(rows: Floats) -> Floats:
    return rows / np.maximum(np.sqrt((rows * rows).sum(1, keepdims=True)), 1e-9)


def _out_of_fold(paths: Paths, x: Floats, gamma: float) -> Sequence[Floats]:
    """For each ridge the values (S,) of all steps.

    A step has one feature of a group, so the part of the matrix that belongs to the groups is diagonal, and the
    system is solved for the other features, with that part's Schur complement.
    """
    x = np.column_stack([x, np.full(len(x), OF_GROUP)])  # the last column: the step's group
    z, change = x.copy(), x - gamma * np.where(paths.last[:, None], 0.0, np.roll(x, -1, axis=0))
    for k in range(1, paths.length.max()):
        _, row = paths.at(k)
        z[row] += gamma * TRACE * z[row - 1]
    n, groups, width = min(FOLDS, paths.n_trajectories), int(paths.group.max()) + 1, x.shape[1] - 1
    fold = np.repeat(np.arange(paths.n_trajectories) % n, paths.length)

    def by_group(values: Floats) -> Floats:
        """Sums over the steps of each fold and group: (folds, groups, columns)."""
        code = fold * groups + paths.group
        order = np.argsort(code, kind="stable")
        at = np.flatnonzero(np.diff(code[order], prepend=-1))
        sums = np.zeros((n * groups, values.shape[1]))
        sums[code[order][at]] = np.add.reduceat(values[order], at)
        return sums.reshape(n, groups, -1)

    inside = [fold == k for k in range(n)]
    a = np.stack([z[rows, :width].T @ change[rows, :width] for rows in inside])
    c = np.stack([z[rows, :width].T @ paths.reward[rows] for rows in inside])
    right = by_group(z[:, :width] * change[:, width:])  # A[other, group]
    below = by_group(z[:, width:] * np.column_stack([change, paths.reward]))  # A of group and other, A and c of group
    parts = [part.sum(0) - part for part in (a, c, right, below)]  # without each fold
    values = [np.empty(len(x)) for _ in RIDGES]
    for ridge, f in zip(RIDGES, values, strict=True):
        for k, (a_k, c_k, right_k, below_k) in enumerate(zip(*parts, strict=True)):
            diagonal = below_k[:, width, None] + ridge
            left_k, gain = below_k[:, :width] / diagonal, below_k[:, width + 1] / diagonal[:, 0]
            theta = np.linalg.solve(a_k + ridge * np.eye(width) - right_k.T @ left_k, c_k - right_k.T @ gain)
            of_group = OF_GROUP * (gain - left_k @ theta)
            f[inside[k]] = x[inside[k], :width] @ theta + of_group[paths.group[inside[k]]]
    return values
