"""StepSearch (arXiv:2505.15107, read from its code): the information gain of each search, and the final reward.

A round is one search with the documents it found. Its reward is ``scale * (gain - redundancy)``: the gain is how much
closer than in any earlier round the documents are to the gold passages, the redundancy the share of documents that an
earlier round had already found.

The paper's scale is 0.6. The released code adds 0.6 times the step rewards to a tensor that already holds them, so that
they count 1.6 times, and gives them only to episodes whose text ends with an answer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.errors import RewardError
from verl_turnkey.envs.model_texts import after_thoughts, f1, normalize
from verl_turnkey.envs.rewards.components import Steps, Values, register_reward

_TERMS = re.compile(r"\b\w\w+\b")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tfidf_cosines(document: str, passages: Sequence[str]) -> list[float]:
    """Cosine of ``document`` with each of ``passages``, over tf-idf weights fitted on these very texts.

    Terms are words of two and more characters, idf is ``1 + ln((1 + n) / (1 + df))``: scikit-learn's defaults.
    """
    counts = [Counter(_TERMS.findall(text.lower())) for text in (document, *passages)]
    df = Counter(term for count in counts for term in count)
    idf = {term: 1 + math.log((1 + len(counts)) / (1 + n)) for term, n in df.items()}
    vectors = [{term: n * idf[term] for term, n in count.items()} for count in counts]
    first, *others = vectors
    return [_dot(first, other) / (math.sqrt(_dot(first, first) * _dot(other, other)) or 1.0) for other in others]


def _dot(a: dict[str, float], b: dict[str, float]) -> float:
    return sum(value * b.get(term, 0.0) for term, value in a.items())


def closeness(rounds: Sequence[Sequence[str]], passages: Sequence[str]) -> np.ndarray:
    """(rounds, passages): the best cosine that a document of the round has with the passage, 0 without documents."""
    golds = [normalize(passage) for passage in passages]
    best = np.zeros((len(rounds), len(golds)))
    for k, documents in enumerate(rounds):
        for document in documents:
            best[k] = np.maximum(best[k], tfidf_cosines(normalize(document), golds))
    return best


def gains(close: ArrayLike) -> np.ndarray:
    """(rounds,) from :func:`closeness`, or another one: the rise above all earlier rounds, mean over the passages."""
    close = np.asarray(close, dtype=float)
    best = np.maximum.accumulate(np.vstack([np.zeros(close.shape[1]), close]), axis=0)
    return np.diff(best, axis=0).mean(axis=1)


def redundancies(rounds: Sequence[Sequence[str]]) -> np.ndarray:
    """(rounds,): the share of the round's documents that an earlier round found, word for word; 0 without documents.

    The released code also counts a document that comes twice in one round; a retriever does not do that.
    """
    seen: set[str] = set()
    shares = []
    for documents in rounds:
        shares.append(sum(document in seen for document in documents) / max(1, len(documents)))
        seen.update(documents)
    return np.array(shares)


def round_rewards(gain: ArrayLike, redundancy: ArrayLike, scale: float = 0.6) -> list[float]:
    """``scale * (gain - redundancy)`` per round."""
    return (scale * (np.asarray(gain, dtype=float) - np.asarray(redundancy, dtype=float))).tolist()


def token_f1(text: str, golds: Sequence[str]) -> float:
    """F1 of the words (as often as they occur) with the best of ``golds``, see :mod:`verl_turnkey.envs.model_texts`."""
    return max((f1(text, gold) for gold in golds), default=0.0)


def key_score(queries: Sequence[str], gold_queries: Sequence[Sequence[str]]) -> float:
    """How well the searches cover the gold queries: each of these is a list of wordings.

    Each search goes to the gold query it is likest to (token F1, the first one on a tie), which keeps the best score;
    the mean over the gold queries. The released code keeps the last score instead, so that a worse repetition undoes a
    good search.
    """
    best = [0.0] * len(gold_queries)
    for query in queries:
        scores = [token_f1(query, wordings) for wordings in gold_queries]
        if scores:
            j = max(range(len(scores)), key=scores.__getitem__)
            best[j] = max(best[j], scores[j])
    return sum(best) / len(best) if best else 0.0


def last_answer(text: str) -> str | None:
    """What the last ``<answer>...</answer>`` after the thoughts holds; None without one, or with text after it."""
    text = after_thoughts(text) or ""
    answers = list(_ANSWER.finditer(text))
    return answers[-1][1] if answers and not text[answers[-1].end() :].strip() else None


def final_reward(
    text: str,
    gold_answers: Sequence[str],
    queries: Sequence[str] = (),
    gold_queries: Sequence[Sequence[str]] = (),
    *,
    key_weight: float = 0.618,
) -> float:
    """Token F1 of the last ``<answer>...</answer>`` in ``text`` plus ``key_weight`` times :func:`key_score`.

    -1 when there is no answer or anything but white space follows it.
    """
    answer = last_answer(text)
    if answer is None:
        return -1.0
    return token_f1(answer, gold_answers) + key_weight * key_score(queries, gold_queries)


@register_reward("stepsearch")
@dataclass(frozen=True)
class StepSearch:
    """StepSearch's reward of each search: information gain minus redundancy.

    In ``info["extra"]`` the environment gives ``gold_passages``, a list of texts, at reset, and after each search
    ``documents``, the texts it found. A step without documents gets 0. The final reward is :func:`final_reward`, for
    an environment or a component of your own.
    """

    scale: float = 0.6
    """factor of the difference: 0.6 in the paper, 1.6 in effect in the released code"""
    needs_answer: bool = False
    """an episode without an answer gets 0, as in the released code; an answer is ``<answer>...</answer>`` at the end
    of the last turn, or the ``answer`` that the environment gives after it"""

    def __post_init__(self) -> None:
        check(0 <= self.scale < math.inf, "scale", "a finite number >= 0", self.scale)

    def __call__(self, steps: Steps) -> Values:
        passages = steps[0].extra.get("gold_passages")
        if not passages:
            raise RewardError(
                "expected the environment's reset to give info['extra']['gold_passages'], a list of texts"
            )
        end = steps[-1]
        if self.needs_answer and last_answer(end.content) is None and end.brought.get("answer") is None:
            return [0.0] * len(steps)
        rounds = [list(step.brought.get("documents") or ()) for step in steps]
        return round_rewards(gains(closeness(rounds, passages)), redundancies(rounds), self.scale)
