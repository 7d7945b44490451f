"""The component ``scorer`` against a server on a loopback port: both protocols, retries, answers of another form."""

import json

import pytest
from judge_server import JudgeServer

from verl_turnkey.envs.rewards import JudgeError, RewardError, RewardStep, compose

STEPS = [
    RewardStep("a door", "open", text="I open it", task="Leave."),
    RewardStep("a hall", None, valid=False, text="hm", task="Leave."),
    RewardStep("a garden", "wait", text="wait", task="Leave.", reward=1.0),
]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server():
    with JudgeServer() as running:
        yield running


def ok(answer):
    return 200, {}, json.dumps(answer)


def classes(*scores, order=None):
    rows = [{"index": i, "label": "x", "probs": [1.0 - s, s], "num_classes": 2} for i, s in enumerate(scores)]
    return ok({"object": "list", "data": [rows[i] for i in order or range(len(rows))]})


def scored(server, steps=STEPS, path="/classify", **options):
    entry = {"name": "scorer", "url": server.root + path, "backoff": 0.01, "column": "turn_score", **options}
    return compose([{"name": "step"}, entry])(steps)


def test_one_request_per_episode_as_vllm_and_verl_have_it(server):
    server.replies = [classes(0.1, 0.2, 0.9, order=[2, 0, 1])]
    shaped = scored(server, model="prm", params={"use_activation": False}, weight=2)
    assert shaped.columns == {"turn_score": [0.2, 0.4, 1.8]}
    assert shaped.rewards == [0.0, 0.0, 1.0]
    assert server.paths == ["/classify"]
    [question] = server.questions
    texts = question.pop("input")
    assert question == {"model": "prm", "use_activation": False}
    assert texts[0] == "Leave.\n\nObservation 1: a door\nAgent 1: I open it"
    assert texts[1] == texts[0] + "\n\nObservation 2: a hall\nAgent 2: hm"
    assert texts[2] == texts[1] + "\n\nObservation 3: a garden\nAgent 3: wait"


def test_the_text_of_a_step_and_its_length(server):
    server.replies = [classes(0, 0, 1), classes(0, 0, 1)]
    scored(server, text="{observation}: {action}")
    assert server.questions[0] == {"input": ["a door: open", "a hall: hm", "a garden: wait"]}
    scored(server, text="{transcript}", max_chars=20)
    assert "characters left out" in server.questions[1]["input"][2]


def test_a_server_of_ones_own(server):
    server.replies = [ok({"scores": [1, -0.5, 2e3]})]
    assert scored(server, path="/prm", api="turns").columns == {"turn_score": [1.0, -0.5, 2000.0]}
    assert server.paths == ["/prm"]
    turn = {"observation": "a hall", "text": "hm", "action": None, "valid": False}
    assert server.questions[0]["turns"][1] == turn
    assert {**server.questions[0], "turns": 3} == {"task": "Leave.", "turns": 3}


def test_asked_again_kept_and_given_up(server, tmp_path):
    server.replies = [(503, {}, "busy"), classes(0, 0, 1)]
    options = {"cache": str(tmp_path), "retries": 1}
    assert scored(server, **options).columns == scored(server, **options).columns == {"turn_score": [0.0, 0.0, 1.0]}
    assert len(server.questions) == 2, "the second episode is the first one's answer, from the folder"
    server.replies = [(500, {}, "out of memory")] * 2
    with pytest.raises(
        JudgeError, match=r"\(scorer\): the scorer at http.*/classify gave no .* 2 .*500\): 'out of mem"
    ):
        scored(server, STEPS[:2], **options)


@pytest.mark.parametrize(
    ("api", "answer", "message"),
    [
        ("classify", {"data": [{"index": 0, "probs": [0.5]}]}, r"gave 1 values instead of 3 \(status 200\)"),
        ("classify", {"data": [{"index": i, "probs": []} for i in range(3)]}, r"else than data with probs"),
        ("classify", {"data": [{"index": i, "probs": ["0.5"]} for i in range(3)]}, r"else than data with probs"),
        ("classify", {"scores": [1, 2, 3]}, r"else than data with probs.*\(status 200\)"),
        ("turns", {"scores": [1, 2, None]}, r"else than scores, one number per step \(status 200\)"),
        ("turns", {"scores": [1, 2, float("nan")]}, r"else than scores"),
        ("turns", [1, 2, 3], r"else than scores"),
        ("turns", {"scores": [1, 2]}, r"gave 2 values instead of 3"),
    ],
)
def test_other_answers_cost_the_episode(server, api, answer, message):
    server.replies = [ok(answer)]
    with pytest.raises(RewardError, match=message) as caught:
        scored(server, api=api)
    assert server.root in str(caught.value)


def test_a_wrong_number_of_scores_is_not_kept(server, tmp_path):
    server.replies = [classes(0, 1), classes(0, 0, 1)]
    with pytest.raises(JudgeError, match=r"gave 2 values instead of 3"):
        scored(server, cache=str(tmp_path))
    assert not [*tmp_path.rglob("*.json")]
    assert scored(server, cache=str(tmp_path)).columns == {"turn_score": [0.0, 0.0, 1.0]}
    [file] = tmp_path.rglob("*.json")
    file.write_text(json.dumps({"answer": [0.0, 1.0]}))  # as a former version kept it
    server.replies = [classes(0.5, 0.5, 0.5)]
    assert scored(server, cache=str(tmp_path)).columns == {"turn_score": [0.5] * 3}
