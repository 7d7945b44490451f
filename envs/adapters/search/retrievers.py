"""Where passages come from: BM25 in this process, or a server that speaks Search-R1's wire format."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from verl_turnkey.envs.adapters.search.data import generate, load_passages, passage_text
from verl_turnkey.envs.rpc import ServerError, check_url, post_json

_BUILDING = threading.Lock()


class Retriever(Protocol):
    def __call__(self, query: str, topk: int) -> list[str]:
        """At most ``topk`` passages, the best first."""
        ...


class BM25:
    """BM25 over ``passages`` with the package ``bm25s``. Safe in threads once it is built."""

    def __init__(self, passages: Sequence[str]) -> None:
        import bm25s

        self._passages = passages
        self._tokenize: Callable[..., Any] = bm25s.tokenize
        self._index = bm25s.BM25()
        self._index.index(self._tokenize(list(passages), show_progress=False), show_progress=False)

    def __call__(self, query: str, topk: int) -> list[str]:
        words = self._tokenize([query], return_ids=False, show_progress=False)
        if not words[0]:  # nothing but stop words and punctuation
            return []
        indices, scores = self._index.retrieve(words, k=min(topk, len(self._passages)), show_progress=False)
        return [self._passages[int(i)] for i, score in zip(indices[0], scores[0], strict=True) if score > 0]


def bm25_over(corpus: str | None, world: int) -> BM25:
    """The index over the corpus file, or over the generated world; built once per process."""
    with _BUILDING:
        return _bm25_over(corpus, world)


@lru_cache(maxsize=4)
def _bm25_over(corpus: str | None, world: int) -> BM25:
    return BM25(load_passages(corpus) if corpus else generate(world).passages)


class HTTPRetriever:
    """A retriever server with the wire format of Search-R1 (Jin et al. 2025).

    ``{"queries": [...], "topk": k, "return_scores": true}`` goes to ``url``, and
    ``{"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}`` comes back.

    Args:
        url: the whole address, such as ``http://127.0.0.1:8000/retrieve``.
        timeout: seconds for one answer; a call without one is repeated, three calls in all.
    """

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        self._url = check_url(url, "turnkey.env.kwargs.url")
        self._timeout = timeout

    def __call__(self, query: str, topk: int) -> list[str]:
        answer = post_json(
            self._url,
            {"queries": [query], "topk": topk, "return_scores": True},
            timeout=self._timeout,
            key="turnkey.env.kwargs.url",
            repeatable=True,
        )
        try:
            (hits,) = answer["result"]
            documents = [hit["document"] for hit in hits]
        except (KeyError, TypeError, ValueError):
            raise ServerError(
                f'the retriever at {self._url} must answer {{"result": [[{{"document": {{"contents": ...}}}}]]}} '
                f"with one list per query, got {str(answer)[:200]!r}"
            ) from None
        return [passage_text(document, f"the retriever at {self._url}") for document in documents][:topk]
