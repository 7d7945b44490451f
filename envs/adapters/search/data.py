"""Questions and passages for search: a generated fictional world, or files of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, cast

from verl_turnkey.envs.errors import EnvironmentKwargsError, MissingPackageError

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
