"""Questions to be answered with a search engine, as in Search-R1 (Jin et al. 2025, arXiv:2503.09516)."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from verl_turnkey.envs import squad
from verl_turnkey.envs.adapters.search.data import Question, generate, load_questions
from verl_turnkey.envs.adapters.search.retrievers import HTTPRetriever, bm25_over
from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count
from verl_turnkey.envs.errors import EnvironmentKwargsError

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
        return self._known(HOW), self._question.text

    def act(self, action: str) -> StepResult:
        kind, text = read_action(action)
        if kind == "search":
            passages = self._retrieve(text, self._topk)
            self._seen.update(passages)
            numbered = "\n".join(f"[{i}] {passage}" for i, passage in enumerate(passages, 1))
            return self._known(numbered or "Nothing was found.")
        if kind == "answer":
            success = exact_match(text, self._question.answers) == 1.0
            observation = "That is right." if success else "That is not right."
            reward = self._score(text, self._question.answers)
            return self._known(observation, reward=reward, terminated=True, success=success)
        return self._known(f"That is neither a search nor an answer. {HOW}", invalid=True)

    def oracle(self) -> list[str]:
        """The searches that find the answer, where they are known, and an answer."""
        searches = [f"search: {query}" for query in self._question.searches]
        return [*searches, f"answer: {self._question.answers[0]}"]

    @property
    def question(self) -> Question:
        """The question of this episode."""
        return self._question

    def _known(self, observation: str, **what: Any) -> StepResult:
        extra = {"gold_answers": list(self._question.answers)}
        return StepResult(observation, digest(self._question.text, sorted(self._seen)), extra=extra, **what)


def read_action(action: str) -> tuple[str | None, str]:
    """``("search" | "answer", its text)``, or ``(None, "")``. An empty query or answer is none."""
    tags = _TAG.findall(action)
    kind, text = tags[-1] if tags else match.groups() if (match := _WORD.match(action)) else ("", "")
    text = " ".join(text.split())
    return (kind.lower(), text) if text else (None, "")


def exact_match(answer: str, golden: tuple[str, ...]) -> float:
    """1.0 when ``answer`` has the words of one of ``golden`` (:func:`~verl_turnkey.envs.squad.same`), else 0.0."""
    return float(any(squad.same(answer, right) for right in golden))


def f1(answer: str, golden: tuple[str, ...]) -> float:
    """Harmonic mean of precision and recall of the words, the best over ``golden``."""
    return max(squad.f1(answer, right) for right in golden)
