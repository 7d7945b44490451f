"""Search QA over HTTP: wire format, actions, rewards, state keys, files of questions, errors."""

import json
import os
import subprocess
import sys

import pytest
from gymnasium.utils.env_checker import check_env
from loopback import serve

from verl_turnkey.envs import EnvironmentKwargsError, EpisodeOverError, make
from verl_turnkey.envs.adapters.search import exact_match, f1, generate, load_questions, read_action
from verl_turnkey.envs.http import ServerError

ID = "turnkey/Search-v0"
WORLD = generate(0)


def retriever(payload):
    """Word overlap over the generated passages, in the wire format of Search-R1."""

    def words(text):
        return set(text.lower().replace(".", " ").replace('"', " ").split())

    ranked = []
    for query in payload["queries"]:
        scored = [(len(words(query) & words(passage)), passage) for passage in WORLD.passages]
        best = sorted((pair for pair in scored if pair[0]), reverse=True)[: payload["topk"]]
        ranked.append([{"document": {"id": "7", "contents": text}, "score": score} for score, text in best])
    return {"result": ranked}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Keyword arguments of an environment with a retriever on loopback and the generated questions in a file."""
    file = tmp_path_factory.mktemp("search") / "questions.jsonl"
    rows = [{"id": i, "question": q.text, "golden_answers": list(q.answers)} for i, q in enumerate(WORLD.questions)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    with serve({"/retrieve": retriever}) as (url, requests):
        yield {"url": f"{url}/retrieve", "questions": str(file)}, requests


def test_an_episode_and_the_wire_format(server):
    kwargs, requests = server
    env = make(ID, {**kwargs, "topk": 2})
    seed = next(i for i, q in enumerate(WORLD.questions) if q.hops == 2)
    question = WORLD.questions[seed]
    observation, info = env.reset(seed=seed)
    assert info["task"] == question.text
    assert info["admissible"] is None
    assert "search:" in observation
    requests.clear()
    observation, reward, terminated, truncated, info = env.step(f"search: {question.searches[0]}")
    assert requests == [("/retrieve", {"queries": [question.searches[0]], "topk": 2, "return_scores": True})]
    assert observation.startswith('[1] "')
    assert observation.count("\n[") == 1
    assert (reward, terminated, truncated, info["success"], info["invalid"]) == (0.0, False, False, False, False)
    observation, reward, terminated, truncated, info = env.step(f"answer: The {question.answers[0].upper()}!")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    with pytest.raises(EpisodeOverError):
        env.step("answer: again")


def test_gymnasium_accepts_it(server):
    check_env(make(ID, server[0]).unwrapped, skip_render_check=True)


def test_the_key_is_what_is_known_and_not_how_it_was_found(server):
    env = make(ID, server[0])

    def key_after(seed, *actions):
        _, info = env.reset(seed=seed)
        for action in actions:
            *_, info = env.step(action)
        return info["state_key"]

    a, b = "search: capital of " + WORLD.passages[0].split('"')[1], "search: " + WORLD.passages[8].split('"')[1]
    assert key_after(3, a, b) == key_after(3, b, a) == key_after(3, a, "search: " + b, b, a)
    assert key_after(3, a) not in (key_after(3), key_after(3, b), key_after(4, a))
    assert key_after(3, "nonsense") == key_after(3) == key_after(3, "search: qqqqq")


def test_what_is_no_action_changes_nothing(server):
    env = make(ID, {**server[0], "max_steps": 12})
    _, start = env.reset(seed=0)
    for action in (
        "",
        "what?",
        "search:",
        "answer:   ",
        "<search></search>",
        "x" * 100_000,
        "\x00\ud83d\ude00",
        "search",
    ):
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["invalid"], info["state_key"]) == (0.0, False, True, start["state_key"])
    for truncated in (False, False, False, True):
        assert env.step("search: zzz")[3] is truncated


@pytest.mark.parametrize(
    ("action", "read"),
    [
        ("search: who founded X", ("search", "who founded X")),
        ("  ANSWER :\n the  harp ", ("answer", "the harp")),
        ("<think>a</think> <search> a\nb </search>", ("search", "a b")),
        ("<search>a</search> <answer>b</answer>", ("answer", "b")),
        ("search: a <answer>b</answer>", ("answer", "b")),
        ("<search>a</answer>", (None, "")),
        ("I search: a", (None, "")),
    ],
)
def test_reading_actions(action, read):
    assert read_action(action) == read


def test_rewards(server):
    assert exact_match("the Harp", ("a harp",)) == 1.0
    assert exact_match("harp lute", ("harp", "lute")) == 0.0
    assert f1("red old harp", ("harp", "old harp")) == pytest.approx(2 * 2 / (3 + 2))
    assert f1("violin", ("harp",)) == 0.0
    assert f1("the", ("an",)) == 0.0  # nothing is left of either, and they are not the same
    env = make(ID, {**server[0], "reward": "f1"})
    env.reset(seed=0)
    _, reward, _, _, info = env.step(f"answer: {WORLD.questions[0].answers[0]} perhaps")
    assert reward == pytest.approx(2 / 3)
    assert not info["success"]


def test_seeds_choose_questions_and_splits_do_not_overlap(server):
    tasks = {}
    for split in ("all", "train", "test"):
        env = make(ID, {**server[0], "split": split})
        tasks[split] = [env.reset(seed=seed)[1]["task"] for seed in range(1000)]
        assert env.reset(seed=5)[1]["task"] == tasks[split][5]
    assert tasks["all"] == [question.text for question in WORLD.questions]
    assert len(set(tasks["test"])) == 200
    assert len(set(tasks["train"])) == 800
    assert not set(tasks["train"]) & set(tasks["test"])


@pytest.mark.parametrize(("number", "empty"), [(4, True), (5, False)])
def test_a_split_without_questions_is_refused_by_number(tmp_path, number, empty):
    file = tmp_path / "own.jsonl"
    file.write_text("".join(f'{{"question": "q{i}?", "golden_answers": ["a{i}"]}}\n' for i in range(number)))
    kwargs = {"questions": str(file), "corpus": None, "split": "test"}
    if empty:
        with pytest.raises(EnvironmentKwargsError, match=r"has 4 questions, of which every fifth .* split='all'"):
            make(ID, kwargs)
    else:
        assert make(ID, kwargs).reset(seed=0)[1]["task"] == "q4?"
    assert make(ID, {**kwargs, "split": "train"}).reset(seed=0)[1]["task"] == "q0?"


def test_the_world_is_the_same_in_every_process():
    code = "from verl_turnkey.envs.adapters.search import generate; import hashlib; w = generate(5); "
    code += "print(hashlib.sha1(repr((w.passages, w.questions)).encode()).hexdigest())"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    ]
    assert outputs[0] == outputs[1]
    assert generate(5) != WORLD
    assert (len(WORLD.passages), len(WORLD.questions)) == (600, 1000)
    assert len(set(WORLD.passages)) == 600
    assert len({question.text for question in WORLD.questions}) == 1000


def test_the_last_search_of_a_question_asks_for_a_passage_with_the_answer():
    for question in WORLD.questions:
        subject = next(word for word in question.searches[-1].split() if word[0].isupper())
        assert any(subject in text and question.answers[0] in text for text in WORLD.passages)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no questions"),
        ("{oops", "line 1 is not JSON"),
        ("[1]\n", "line 1 must be a JSON object"),
        ('{"question": "a", "golden_answers": []}', "row 1: `question` must be text"),
        ('\n{"question": 3, "golden_answers": ["x"]}', "row 2: `question` must be text"),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "q.jsonl"
    file.write_text(text)
    with pytest.raises(EnvironmentKwargsError, match=message):
        load_questions(str(file))


@pytest.mark.parametrize("answer", [{"results": []}, {"result": [[{"score": 1}]]}, [], {"result": [[], []]}])
def test_a_server_that_speaks_something_else(server, answer):
    with serve({"/": lambda payload: answer}) as (url, _):
        env = make(ID, {**server[0], "url": url})
        env.reset(seed=0)
        with pytest.raises(ServerError, match=r'must answer \{"result"'):
            env.step("search: a")
