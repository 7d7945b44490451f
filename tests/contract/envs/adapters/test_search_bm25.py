"""Search QA with the real bm25s: recall over the generated world, oracle, threads, a corpus of the user's."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_turnkey.envs import EnvironmentKwargsError, make
from verl_turnkey.envs.adapters.search import BM25, generate

ID = "turnkey/Search-v0"
WORLD = generate(0)


@pytest.fixture(scope="module")
def search():
    return BM25(WORLD.passages)


def recall(search, questions, query):
    return sum(any(q.answers[0] in text for text in search(query(q), 3)) for q in questions) / len(questions)


def test_one_search_answers_one_hop_and_not_two(search):
    single = [question for question in WORLD.questions if question.hops == 1]
    two = [question for question in WORLD.questions if question.hops == 2]
    assert (len(single), len(two)) == (600, 400)
    assert recall(search, single, lambda q: q.text) >= 0.9
    assert recall(search, two, lambda q: q.text) <= 0.2  # or the second search would be for nothing
    assert recall(search, two, lambda q: q.searches[-1]) >= 0.9


@pytest.mark.parametrize("query", ["", "the of", "?!", "qqqqq", "\x00", "\ud83d", "a" * 100_000])
def test_queries_that_find_nothing(search, query):
    assert search(query, 3) == []


def test_more_passages_wanted_than_there_are():
    search = BM25(["red house", "blue sea"])
    assert search("red house", 10) == ["red house"]


@pytest.mark.parametrize("hops", [1, 2])
def test_the_oracle_wins_and_searches_lead_to_shared_states(hops):
    env = make(ID, {"hops": hops})
    for seed in range(20):
        env.reset(seed=seed)
        plan = env.unwrapped.oracle()
        assert len(plan) == hops + 1
        env.reset(seed=seed)
        *before, last = [env.step(action) for action in plan]
        assert all((reward, over) == (0.0, False) for _, reward, over, _, _ in before)
        assert len({info["state_key"] for *_, info in before}) == hops
        assert (last[1], last[2], last[4]["success"]) == (1.0, True, True)


def test_threads_of_one_process_find_the_same(search):
    questions = WORLD.questions[:400]
    alone = [search(question.text, 3) for question in questions]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda question: search(question.text, 3), questions))
    assert together == alone


def test_a_corpus_and_questions_of_ones_own(tmp_path):
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "questions.parquet"
    rows = [{"id": "0", "contents": '"Ada"\nAda wrote the first program.'}, {"title": "Zuse", "text": "Built the Z3."}]
    corpus.write_text("\n".join(map(json.dumps, rows)))
    import pandas as pd

    pd.DataFrame([{"question": "Who built the Z3?", "golden_answers": ["Zuse", "Konrad Zuse"]}]).to_parquet(questions)
    env = make(ID, {"corpus": str(corpus), "questions": str(questions)})
    assert env.reset(seed=9)[1]["task"] == "Who built the Z3?"
    assert env.step("search: Z3")[0] == '[1] "Zuse"\nBuilt the Z3.'
    assert env.step("answer: Konrad Zuse")[1] == 1.0
    with pytest.raises(EnvironmentKwargsError, match="there is no file"):
        make(ID, {"corpus": f"{corpus}x", "questions": str(questions)})
    (tmp_path / "bad.jsonl").write_text('{"contents": 3}')
    with pytest.raises(EnvironmentKwargsError, match="line 1: a passage has a text"):
        make(ID, {"corpus": str(tmp_path / "bad.jsonl"), "questions": str(questions)})
