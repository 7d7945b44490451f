"""R1-Router: queries by the cosine of embeddings, knowledge bases, answers by recall."""

from __future__ import annotations

import json
import math

import pytest
from judge_server import JudgeServer

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.envs.rewards import RewardError, RewardStep, compose, rewards
from verl_turnkey.envs.rewards.r1_router import answer_reward, recall, retrieval_reward

LONG = "the capital city of the old kingdom of France"


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("It is Paris.", ["Paris"], 1.0),
        ("Lyon", ["Paris"], 0.0),
        ("New city", ["New York City"], 0.0),  # two thirds of a short one
        ("the kingdom of France", [LONG], 3 / 7),
        ("in Rome", ["Paris", "Rome"], 1.0),
        ("the kingdom of France", [LONG, "something else that is long, too"], 0.0),  # of several: all or nothing
    ],
)
def test_answers(answer, golds, expected):
    assert answer_reward(answer, golds) == pytest.approx(expected)


def test_recall_by_hand():
    # without articles: capital city of old kingdom of france
    assert recall("the kingdom of France", LONG) == pytest.approx(3 / 7)
    assert recall("of of kingdom, France!", LONG) == pytest.approx(4 / 7)
    assert recall("anything", "the") == 0.0


@pytest.mark.parametrize(
    ("cosine", "chosen", "expected"),
    [
        (1.0, ["wiki"], 1.0),
        (0.4, ["wiki"], 0.7),
        (1.0, ["images"], 0.5),
        (1.0, ["wiki", "images"], 0.5),
        (0.0, [], 0.0),
    ],
)
def test_retrievals(cosine, chosen, expected):
    assert retrieval_reward(cosine, chosen, ["wiki", "images"]) == pytest.approx(expected)


def lengths(texts):
    """As if a text were a vector of its number of letters and of its number of words."""
    return [[len(text.replace(" ", "")), len(text.split())] for text in texts]


async def slow_lengths(texts):
    return lengths(texts)


def few(texts):
    return lengths(texts)[1:]


STEPS = [
    RewardStep(
        "",
        "search",
        extra={"gold_query": "abcd", "gold_knowledge_bases": ["wiki"]},
        next_extra={"query": "a b", "knowledge_bases": ["wiki"]},
    ),
    RewardStep("", "think", extra={"gold_query": "x", "gold_knowledge_bases": ["wiki"]}, next_extra={"seen": 1}),
    RewardStep(
        "", None, valid=False, extra={"gold_query": "x", "gold_knowledge_bases": ["wiki"]}, next_extra={"query": "x"}
    ),
    RewardStep("", "answer", extra={"gold_answers": ["Paris"]}, next_extra={"answer": "paris"}),
]
COSINE = (4 * 2 + 1 * 2) / math.sqrt(17 * 8)


@pytest.mark.parametrize("name", ["lengths", "slow_lengths"])
def test_an_episode(name):
    rewards = compose([{"name": "r1_router", "embed": f"{__name__}:{name}"}])(STEPS).rewards
    assert rewards == pytest.approx([0.5 * COSINE + 0.5, 0.0, 0.0, 1.0])


def test_embeddings_of_a_server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with JudgeServer() as server:
        rows = [{"index": i, "embedding": vector} for i, vector in enumerate(lengths(["a b", "abcd"]))]
        server.replies = [(200, {}, json.dumps({"data": rows[::-1]})), (200, {}, json.dumps({"data": []}))]
        entry = {"name": "r1_router", "url": server.url, "model": "bge", "params": {"dimensions": 2}}
        assert compose([entry])(STEPS).rewards == pytest.approx([0.5 * COSINE + 0.5, 0.0, 0.0, 1.0])
        assert server.paths == ["/v1/embeddings"]
        assert server.questions == [{"model": "bge", "input": ["a b", "abcd"], "dimensions": 2}]
        with pytest.raises(RewardError, match=r"the embedding model at http.* gave 0 values instead of 2"):
            compose([entry])(STEPS)
        assert compose([entry])(STEPS[1:]).rewards == [0.0, 0.0, 1.0], "without a query nobody is asked"
        assert len(server.questions) == 2


@pytest.mark.parametrize(("query", "gold"), [("", "capital"), (" \n", "capital"), ("capital", "")])
def test_an_empty_query_is_like_nothing_and_nobody_is_asked(query, gold):
    step = RewardStep(
        "",
        "search",
        extra={"gold_query": gold, "gold_knowledge_bases": ["wiki"]},
        next_extra={"query": query, "knowledge_bases": ["wiki"]},
    )
    entry = {"name": "r1_router", "url": "http://127.0.0.1:9/v1", "model": "bge", "retries": 0}
    assert compose([entry])([step]).rewards == [0.5]


def test_memory_holds_the_vectors_of_few_episodes():
    assert rewards()["r1_router"].cls(url="http://h/v1", model="bge").cache_size == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"url: expected either url and model, or embed, got None"),
        ({"url": "http://h/v1", "model": "m", "embed": "a:b"}, r"url: expected either"),
        ({"url": "http://h/v1"}, r"model: expected the name of the embedding model"),
        ({"url": "h", "model": "m"}, r"url: expected http"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        compose([{"name": "r1_router", **options}])


def test_what_the_environment_must_give():
    entry = {"name": "r1_router", "embed": f"{__name__}:lengths"}
    with pytest.raises(RewardError, match=r"step 0: expected info\['extra'\]\['gold_answers'\] to be a list of texts"):
        compose([entry])([RewardStep("", "x", next_extra={"answer": "Paris"})])
    with pytest.raises(RewardError, match=r"\['gold_knowledge_bases'\] to be a list of texts, got None"):
        compose([entry])([RewardStep("", "x", extra={"gold_query": "q"}, next_extra={"query": "q"})])
    with pytest.raises(RewardError, match=r"expected 2 vectors from .*few, got 1"):
        compose([{"name": "r1_router", "embed": f"{__name__}:few"}])(STEPS)
