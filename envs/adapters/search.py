"""Questions to be answered with a search engine, as in Search-R1 (Jin et al. 2025, arXiv:2503.09516).

Questions and passages are those of a generated fictional world, or files of the user's; passages come from BM25 in this
process, or from a server that speaks Search-R1's wire format.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar, cast

from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count
from verl_turnkey.envs.errors import EnvironmentKwargsError, MissingPackageError
from verl_turnkey.envs.http import ServerError, check_url, post_json
from verl_turnkey.envs.model_texts import f1 as words_f1
from verl_turnkey.envs.model_texts import same

_ONSETS = ("b", "br", "c", "d", "dr", "f", "g", "gl", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "st", "t", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_ENDS = {
    "country": ("land", "stan", "via", "mark", "onia"),
    "city": ("burg", "ton", "ford", "polis", "haven"),
    "person": ("sen", "wick", "mond", "ric", "lin"),
    "river": ("ra", "sel", "mer"),
    "currency": ("ar", "o", "ek"),
    "first name": ("a", "us", "en", "is"),
}
_INSTRUMENTS = ("violin", "flute", "harp", "cello", "trumpet", "oboe", "lute", "drum", "organ", "clarinet")
_GOODS = ("glass", "pottery", "cheese", "clocks", "silk", "paper", "salt", "ropes", "bells", "honey", "amber")
_FIELDS = ("astronomy", "botany", "geometry", "medicine", "grammar", "poetry", "engineering", "geology", "law")
COUNTRIES = 100


@dataclass(frozen=True)
class Question:
    """A question and what counts as its answer. ``searches``: queries that find it, one per hop; empty: not known."""

    text: str
    answers: tuple[str, ...]
    searches: tuple[str, ...] = ()

    @property
    def hops(self) -> int:
        return len(self.searches)


@dataclass(frozen=True)
class KnowledgeBase:
    passages: tuple[str, ...]
    """each with its title in the first line, in quotes, as in the corpus of Search-R1"""
    questions: tuple[Question, ...]


@lru_cache(maxsize=4)
def generate(seed: int = 0) -> KnowledgeBase:
    """A fictional world: 100 countries, their capitals and their founders, 600 passages, 600 one-hop and 400 two-hop
    questions in random order. The same for the same seed, in every process and Python version.
    """
    rng = Random(seed)
    names: dict[str, None] = {}

    def pick(choices: Any) -> Any:
        return choices[int(rng.random() * len(choices))]  # the algorithm of `choice` may differ between Python versions

    def name(kind: str) -> str:
        while True:
            syllables = [pick(_ONSETS) + pick(_VOWELS) for _ in range(1 if kind == "first name" else 2)]
            new = ("".join(syllables) + pick(_ENDS[kind])).capitalize()
            if kind == "first name":
                return new
            if new not in names:
                names[new] = None
                return new

    passages: list[str] = []
    questions: list[Question] = []
    for _ in range(COUNTRIES):
        country, city, river, currency = name("country"), name("city"), name("river"), name("currency")
        founder = f"{name('first name')} {name('person')}"
        birthplace = name("city")
        year, people = 1500 + int(rng.random() * 400), 10 + int(rng.random() * 990)
        instrument, goods, field = pick(_INSTRUMENTS), pick(_GOODS), pick(_FIELDS)
        passages += [
            f'"{country}"\n{country} is a country whose capital is {city}. Its currency is the {currency}.',
            f'"History of {country}"\n{country} became independent in {year}. It was founded by {founder}.',
            f'"{city}"\nThe city of {city} lies on the river {river}. It has {people} thousand inhabitants.',
            f'"Economy of {city}"\nThe workshops of {city} are known for their {goods}.',
            f'"{founder}"\n{founder} was born in the town of {birthplace} and became a scholar of {field}.',
            f'"Leisure of {founder}"\nIn the evenings {founder} played the {instrument}.',
        ]
        capital_of, founder_of = f"capital of {country}", f"who founded {country}"
        facts = [
            (f"What is the capital of {country}?", city, (capital_of,)),
            (f"What is the currency of {country}?", currency, (f"currency of {country}",)),
            (f"Who founded {country}?", founder, (founder_of,)),
            (f"In which year did {country} become independent?", str(year), (f"{country} became independent",)),
            (f"What is the city of {city} known for?", goods, (f"{city} known for",)),
            (f"Of what was {founder} a scholar?", field, (f"{founder} scholar",)),
            (f"On which river does the capital of {country} lie?", river, (capital_of, f"city of {city} river")),
            (f"What is the capital of {country} known for?", goods, (capital_of, f"{city} known for")),
            (f"Where was the founder of {country} born?", birthplace, (founder_of, f"{founder} born")),
            (f"Which instrument did the founder of {country} play?", instrument, (founder_of, f"{founder} played")),
        ]
        questions += [Question(text, (answer,), searches) for text, answer, searches in facts]
    order = sorted(range(len(questions)), key=[rng.random() for _ in questions].__getitem__)
    return KnowledgeBase(tuple(passages), tuple(questions[i] for i in order))


def load_passages(path: str) -> tuple[str, ...]:
    """A corpus as JSON lines with ``contents``, or ``title`` and ``text``, as for Search-R1."""
    passages = tuple(passage_text(row, f"{path}, line {line}") for line, row in _rows(path, "corpus"))
    if not passages:
        raise EnvironmentKwargsError(f"corpus: {path} holds no passages")
    return passages


def passage_text(document: Any, where: str) -> str:
    """The text of a passage in one of the usual forms; ``where`` names its source in the error."""
    if isinstance(document, str):
        return document
    if isinstance(document, dict):
        if isinstance(document.get("contents"), str):
            return document["contents"]
        if isinstance(document.get("text"), str):
            return f'"{document["title"]}"\n{document["text"]}' if document.get("title") else document["text"]
    raise EnvironmentKwargsError(f"{where}: a passage has a text `contents` or `text`, {str(document)[:200]!r} came")


@lru_cache(maxsize=4)
def load_questions(path: str) -> tuple[Question, ...]:
    """Questions from JSON lines or parquet with the columns ``question`` and ``golden_answers`` (a list of text)."""
    questions = []
    for line, row in _rows(path, "questions"):
        text, answers = row.get("question"), row.get("golden_answers")
        answers = [answers] if isinstance(answers, str) else answers
        if not isinstance(text, str) or not text or answers is None or not len(answers):
            raise EnvironmentKwargsError(
                f"questions: {path}, row {line}: `question` must be text and `golden_answers` a list of text, "
                f"{str(row)[:200]!r} came"
            )
        questions.append(Question(text, tuple(str(answer) for answer in answers)))
    if not questions:
        raise EnvironmentKwargsError(f"questions: {path} holds no questions")
    return tuple(questions)


def _rows(path: str, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows of a file; ``key`` is the argument that named it."""
    if not Path(path).is_file():
        raise EnvironmentKwargsError(f"{key}: there is no file {path!r} on this machine")
    if path.endswith(".parquet"):
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f'{key}: reading parquet needs pandas and pyarrow: pip install "verl-turnkey[verl]", or use JSON lines'
            ) from error
        yield from enumerate(cast("list[dict[str, Any]]", pd.read_parquet(path).to_dict("records")), 1)
        return
    with open(path, "rb") as file:  # of a size that is read line by line
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text.decode("utf-8-sig" if line == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise EnvironmentKwargsError(f"{key}: {path}, line {line}: expected text in UTF-8: {error}") from None
            except ValueError as error:
                raise EnvironmentKwargsError(f"{key}: {path}, line {line} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise EnvironmentKwargsError(f"{key}: {path}, line {line} must be a JSON object, not {str(row)[:80]!r}")
            yield line, row


_BUILDING = threading.Lock()


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


@lru_cache(maxsize=4)
def bm25_over(corpus: str | None, world: int) -> BM25:
    """The index over the corpus file, or over the generated world."""
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


REWARDS = ("em", "f1")
SPLITS = ("all", "train", "test")
HOW = "Write `search: what to look for` or `answer: the answer`."
_TAG = re.compile(r"<(search|answer)>(.*?)</\1>", re.IGNORECASE | re.DOTALL)
_WORD = re.compile(r"\s*(search|answer)\s*:(.*)", re.IGNORECASE | re.DOTALL)


class SearchText(TextEnv):
    """One question; search as often as needed, then answer. The episode ends with the answer.

    Actions are ``search: <query>`` and ``answer: <text>``; Search-R1's ``<search>...</search>`` and
    ``<answer>...</answer>`` work too; of several the last one counts. Anything else is invalid and changes nothing.

    Args:
        url: a retriever with Search-R1's wire format; null: BM25 in this process.
        corpus: JSON lines of passages for BM25; null: a generated fictional world.
        questions: JSON lines or parquet with ``question`` and ``golden_answers``; null: those of the generated world.
        split: ``train`` leaves out every fifth question, ``test`` has only those, ``all`` has all.
        hops: 1 or 2: only generated questions that take this many searches; null: both.
        topk: passages per search.
        reward: ``em`` gives 1 for an exact match with one of the answers, else 0; ``f1`` gives the best F1 score of
            words, 0 to 1. Both compare in lower case, without punctuation and articles.
        world: seed of the generated world.
        timeout: seconds for one answer of the retriever server.
        max_steps: steps before truncation; null: never.

    ``info["extra"]["gold_answers"]`` are the right answers. ``success`` is an exact match.
    ``state_key`` is a hash of the question and the set of passages seen.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": True, "memory_mb": 1}

    def __init__(
        self,
        url: str | None = None,
        corpus: str | None = None,
        questions: str | None = None,
        split: str = "all",
        hops: int | None = None,
        topk: int = 3,
        reward: str = "em",
        world: int = 0,
        timeout: float = 10.0,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(max_steps)
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        check(split in SPLITS, "split", f"one of {', '.join(SPLITS)}", split)
        check(hops is None or (is_count(hops) and hops < 3), "hops", "1, 2 or null", hops)
        check(is_count(topk), "topk", "a positive integer", topk)
        if url and corpus:
            raise EnvironmentKwargsError("url and corpus exclude each other: either a server searches, or BM25 here")
        if not questions and (url or corpus):
            raise EnvironmentKwargsError(
                "url and corpus need questions of their own: the generated ones ask about the generated world. "
                "Set turnkey.env.kwargs.questions to a JSON lines or parquet file"
            )
        if questions and hops:
            raise EnvironmentKwargsError("hops is known for the generated questions only: leave it out, or questions")
        everything = load_questions(questions) if questions else generate(world).questions
        self._questions = [
            question
            for i, question in enumerate(everything)
            if (hops is None or question.hops == hops) and (split == "all" or (i % 5 == 4) == (split == "test"))
        ]
        if not self._questions:
            raise EnvironmentKwargsError(
                f"split={split!r} of questions={questions!r} is empty: the file has {len(everything)} questions, of "
                "which every fifth is for test and the others are for train. Give five or more, or a file of its own "
                "for each with split='all'"
            )
        with _BUILDING:  # an index is built once per process
            self._retrieve = HTTPRetriever(url, timeout) if url else bm25_over(corpus, world)
        self._topk = topk
        self._score = exact_match if reward == "em" else f1
        self._question = self._questions[0]
        self._seen: set[str] = set()

    def task_ids(self) -> list[str]:
        """A digest of each question and its answers."""
        return [digest(question.text, question.answers) for question in self._questions]

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self._question = self._questions[seed % len(self._questions)]
        self._seen = set()
        return self._result(HOW), self._question.text

    def act(self, action: str) -> StepResult:
        kind, text = read_action(action)
        if kind == "search":
            passages = self._retrieve(text, self._topk)
            self._seen.update(passages)
            numbered = "\n".join(f"[{i}] {passage}" for i, passage in enumerate(passages, 1))
            return self._result(numbered or "Nothing was found.")
        if kind == "answer":
            success = exact_match(text, self._question.answers) == 1.0
            observation = "That is right." if success else "That is not right."
            reward = self._score(text, self._question.answers)
            return self._result(observation, reward=reward, terminated=True, success=success)
        return self._result(f"That is neither a search nor an answer. {HOW}", invalid=True)

    def oracle(self) -> list[str]:
        """The searches that find the answer, where they are known, and an answer."""
        searches = [f"search: {query}" for query in self._question.searches]
        return [*searches, f"answer: {self._question.answers[0]}"]

    @property
    def question(self) -> Question:
        """The question of this episode."""
        return self._question

    def _result(self, observation: str, **what: Any) -> StepResult:
        extra = {"gold_answers": list(self._question.answers)}
        return StepResult(observation, digest(self._question.text, sorted(self._seen)), extra=extra, **what)


def read_action(action: str) -> tuple[str | None, str]:
    """``("search" | "answer", its text)``, or ``(None, "")``. An empty query or answer is none."""
    tags = _TAG.findall(action)
    kind, text = tags[-1] if tags else match.groups() if (match := _WORD.match(action)) else ("", "")
    text = " ".join(text.split())
    return (kind.lower(), text) if text else (None, "")


def exact_match(answer: str, golden: tuple[str, ...]) -> float:
    """1.0 when ``answer`` has the words of one of ``golden``, else 0.0."""
    return float(any(same(answer, right) for right in golden))


def f1(answer: str, golden: tuple[str, ...]) -> float:
    """Harmonic mean of precision and recall of the words, the best over ``golden``."""
    return max(words_f1(answer, right) for right in golden)
