"""StepSearch: the check value, tf-idf against scikit-learn, a slow twin, the final reward."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.envs.rewards import RewardError, RewardStep, compose
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
