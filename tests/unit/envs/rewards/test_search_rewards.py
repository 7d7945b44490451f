"""The rewards of searches: stepsearch and r1_router."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import JudgeServer

from verl_turnkey.envs.rewards import RewardError, RewardStep, compose
from verl_turnkey.envs.rewards.r1_router import answer_reward, recall, retrieval_reward
from verl_turnkey.envs.rewards.stepsearch import (
    closeness,
    final_reward,
    gains,
    key_score,
    redundancies,
    round_rewards,
    tfidf_cosines,
    token_f1,
)

WORDS = st.lists(st.sampled_from(["red", "blue", "house", "river", "x", "sea"]), max_size=6).map(" ".join)


def test_rounds_by_hand():
    close = [[0.5, 0.2], [0.6, 0.1]]
    assert gains(close) == pytest.approx([0.35, 0.05])
    assert round_rewards(gains(close), [0, 1 / 3]) == pytest.approx([0.21, -0.17])
    assert redundancies([["a", "b", "c"], ["a", "d", "e"], [], ["d", "d"]]) == pytest.approx([0, 1 / 3, 0, 1])
    assert redundancies([["a", "a"]]) == pytest.approx([0.0]), "of earlier rounds"


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_gains_as_in_slow_loops(close):
    best, expected = [0.0] * 3, []
    for row in close:
        expected.append(sum(max(m - b, 0.0) for m, b in zip(row, best, strict=True)) / 3)
        best = [max(m, b) for m, b in zip(row, best, strict=True)]
    assert gains(close) == pytest.approx(expected)
    assert sum(gains(close)) == pytest.approx(sum(best) / 3), "what is known in the end, whatever the order"


@settings(deadline=None, max_examples=60)
@given(WORDS, st.lists(WORDS, min_size=1, max_size=4))
def test_tfidf_as_in_scikit_learn(document, passages):
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import, and collecting does it once a worker
    from sklearn.metrics.pairwise import cosine_similarity

    texts = [document, *passages]
    if all(len(word) < 2 for text in texts for word in text.split()):
        assert tfidf_cosines(document, passages) == [0.0] * len(passages)
        return
    vectors = TfidfVectorizer().fit_transform(texts)
    assert tfidf_cosines(document, passages) == pytest.approx(cosine_similarity(vectors[0], vectors[1:])[0])


def test_closeness_takes_the_best_document():
    passages = ["The river is red.", "a blue house"]
    close = closeness([["a RED river is", "sea"], [], ["blue!", "blue house"]], passages)
    assert close[0] == pytest.approx([1.0, 0.0])
    assert close[1] == pytest.approx([0.0, 0.0])
    assert close[2] == pytest.approx([0.0, 1.0])


def test_words():
    assert token_f1("the red red house", ["red river", "red"]) == pytest.approx(0.5)
    assert token_f1("red house", ["House, red"]) == 1.0
    assert token_f1("", ["x"]) == token_f1("the", ["an"]) == token_f1("x", []) == 0.0


def test_gold_queries():
    golds = [["capital of France", "France capital"], ["river in Rome"]]
    assert key_score(["capital of france"], golds) == pytest.approx(0.5)
    assert key_score(["France capital", "rome river in"], golds) == pytest.approx(1.0)
    assert key_score(["France capital", "france"], golds) == pytest.approx(0.5), "the best search counts"
    assert key_score(["nothing"], golds) == key_score([], golds) == key_score(["x"], []) == 0.0


def test_the_final_reward():
    golds = [["capital of France"]]
    text = "<search>capital</search> <answer>Rome</answer> no: <answer>Paris</answer>\n"
    assert final_reward(text, ["paris", "city of paris"]) == 1.0
    assert final_reward(text, ["paris"], ["capital of france"], golds) == pytest.approx(1.618)
    assert final_reward(text, ["paris"], ["france"], golds, key_weight=1.0) == pytest.approx(1.5)
    assert final_reward(text + "and", ["paris"]) == final_reward("Paris", ["paris"]) == -1.0


def test_the_component():
    old = {"documents": ["sea"]}
    steps = [
        RewardStep(
            "", "q", extra={"gold_passages": ["red river", "blue house"]}, next_extra={"documents": ["red river"]}
        ),
        RewardStep("", None, extra=old, next_extra=old),
        RewardStep("", "q", next_extra={"documents": ["red river", "blue house"]}),
        RewardStep("", "answer", next_extra={}),
    ]
    assert compose([{"name": "stepsearch"}])(steps).rewards == pytest.approx([0.3, 0.0, 0.6 * (0.5 - 0.5), 0.0])
    assert compose([{"name": "stepsearch", "scale": 1}])(steps).rewards[0] == pytest.approx(0.5)
    with pytest.raises(RewardError, match=r"reset to give info\['extra'\]\['gold_passages'\], a list of texts"):
        compose([{"name": "stepsearch"}])(steps[1:])


def test_the_released_code_pays_only_episodes_with_an_answer():
    """And 1.6 times, where the paper says 0.6."""
    search = RewardStep("", "q", extra={"gold_passages": ["red river"]}, next_extra={"documents": ["red river"]})
    answers = [
        (RewardStep("", "x", text="<answer>a</answer>\n"), True),
        (RewardStep("", "x", text="<answer>a</answer> or so"), False),
        (RewardStep("", "x", text="a"), False),
        (RewardStep("", "x", text="a", next_extra={"answer": "a"}), True),
        (RewardStep("", "x", text="<think>b?</think><answer>a</answer>"), True),
        (RewardStep("", "x", text="<think>Perhaps <answer>a</answer>"), False),
        (RewardStep("", "x", text="Perhaps <answer>a</answer>", content=""), False),  # the prompt opened the thoughts
    ]
    for last, paid in answers:
        released = compose([{"name": "stepsearch", "scale": 1.6, "needs_answer": True}])
        assert released([search, last]).rewards == pytest.approx([1.6 if paid else 0.0, 0.0])
        assert compose([{"name": "stepsearch"}])([search, last]).rewards == pytest.approx([0.6, 0.0])


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


def test_what_the_environment_must_give():
    entry = {"name": "r1_router", "embed": f"{__name__}:lengths"}
    with pytest.raises(RewardError, match=r"step 0: expected info\['extra'\]\['gold_answers'\] to be a list of texts"):
        compose([entry])([RewardStep("", "x", next_extra={"answer": "Paris"})])
    with pytest.raises(RewardError, match=r"\['gold_knowledge_bases'\] to be a list of texts, got None"):
        compose([entry])([RewardStep("", "x", extra={"gold_query": "q"}, next_extra={"query": "q"})])
    with pytest.raises(RewardError, match=r"expected 2 vectors from .*few, got 1"):
        compose([{"name": "r1_router", "embed": f"{__name__}:few"}])(STEPS)
