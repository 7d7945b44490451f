"""R1-Router's step rewards (arXiv:2505.22095, read from its code): the query, the knowledge base, and the answer.

The paper trains on single steps of gold traces. Here each step is compared with what the environment says is right in
the state that it was taken in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.errors import RewardError
from verl_turnkey.envs.http import Endpoint, EndpointConfig, finite
from verl_turnkey.envs.model_texts import words
from verl_turnkey.envs.rewards.components import RewardStep, Steps, Values, call_own, register_reward
from verl_turnkey.envs.user_modules import load_function

SHORT = 5  # words of a gold answer up to which it has to be there as a whole
Vectors = Sequence[Sequence[float]]


def recall(answer: str, gold: str) -> float:
    """Share of the words of ``gold``, as often as they occur, that ``answer`` has; after SQuAD's normalisation."""
    meant = Counter(words(gold))
    return (meant & Counter(words(answer))).total() / meant.total() if meant else 0.0


def answer_reward(answer: str, golds: Sequence[str]) -> float:
    """The recall of one long gold answer; for a short one, or the best of several, 1 if it is 1, else 0."""
    best = max(recall(answer, gold) for gold in golds)
    long = len(golds) == 1 and len(golds[0].split()) > SHORT
    return best if long else float(best == 1.0)


def retrieval_reward(cosine: float, chosen: Sequence[str], gold: Sequence[str]) -> float:
    """0.5 times the cosine of the queries, plus 0.5 if exactly one knowledge base is chosen, the first gold one."""
    return 0.5 * cosine + 0.5 * (list(chosen) == list(gold[:1]))


@register_reward("r1_router")
@dataclass(frozen=True)
class R1Router(EndpointConfig):
    """R1-Router's reward of a retrieval step and of an answer step.

    In ``info["extra"]`` the environment gives, on the state that the step is taken in, ``gold_query`` and
    ``gold_knowledge_bases`` (a list, of which the first counts) or ``gold_answers`` (a list), and after the step what
    the agent did: ``query`` and ``knowledge_bases`` (a list), or ``answer``. A step that is not valid, and one that did
    neither, gets 0.
    """

    url: str | None = None
    """base URL of an API with ``/embeddings``, such as http://host:8000/v1"""
    model: str | None = None
    """name of the embedding model there"""
    cache_size: int = 100
    """answers kept in memory, each with the vectors of an episode; the oldest go first"""
    embed: str | None = None
    """instead of url: module:function of yours from a list of texts to a list of vectors, may be async"""

    def __post_init__(self) -> None:
        check((self.url is None) != (self.embed is None), "url", "either url and model, or embed", self.url)
        if self.url is not None:
            super().__post_init__()
            check(bool(self.model), "model", "the name of the embedding model", self.model)
        elif self.embed is not None:
            load_function(self.embed, "embed")  # a missing function is an error at the start

    async def __call__(self, steps: Steps) -> Values:
        pairs = [_queries(step) for step in steps]
        texts = list(dict.fromkeys(text for pair in pairs if pair is not None and _both(pair) for text in pair))
        vectors = dict(zip(texts, await self._vectors(texts), strict=True)) if texts else {}
        rewards = []
        for t, (step, pair) in enumerate(zip(steps, pairs, strict=True)):
            reward, answer = 0.0, step.brought.get("answer")
            if pair is not None:
                chosen, gold = step.brought.get("knowledge_bases") or (), _texts(step.extra, "gold_knowledge_bases", t)
                cosine = _cosine(*(vectors[text] for text in pair)) if _both(pair) else 0.0
                reward = retrieval_reward(cosine, chosen, gold)
            elif step.valid and answer is not None:
                reward = answer_reward(str(answer), _texts(step.extra, "gold_answers", t))
            rewards.append(reward)
        return rewards

    async def _vectors(self, texts: list[str]) -> Vectors:
        if self.embed is None:
            vectors: Any = await self._endpoint.ask({"input": texts}, values=len(texts))
        else:
            vectors = await call_own(load_function(self.embed, "embed"), texts)
        if len(vectors) != len(texts):
            raise RewardError(f"expected {len(texts)} vectors from {self.embed}, got {len(vectors)}")
        return vectors

    @cached_property
    def _endpoint(self) -> Endpoint[list[list[float]]]:
        expected = "data with embeddings"
        return Endpoint(self, "/embeddings", who="the embedding model", expected=expected, read=_embeddings)


def _queries(step: RewardStep) -> tuple[str, str] | None:
    """The query of a valid step and the gold one; None where there is no retrieval, or none that is asked for."""
    query, gold = step.brought.get("query"), step.extra.get("gold_query")
    return None if not step.valid or query is None or gold is None else (str(query), str(gold))


def _both(pair: tuple[str, str]) -> bool:
    """Whether neither text is empty: servers refuse empty texts, which are similar to nothing."""
    return all(text.strip() for text in pair)


def _texts(extra: Any, key: str, t: int) -> list[str]:
    value = extra.get(key)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
        raise RewardError(f"step {t}: expected info['extra'][{key!r}] to be a list of texts, got {value!r}")
    return list(value)


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    left, right = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    size = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / size if size else 0.0


def _embeddings(answer: Any) -> list[list[float]] | None:
    rows = sorted(answer["data"], key=lambda row: row["index"])
    vectors = [[finite(number) for number in row["embedding"]] for row in rows]
    return None if any(None in vector for vector in vectors) else cast("list[list[float]]", vectors)
