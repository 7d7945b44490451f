"""The remote judge against a server on a loopback port: retries, deadlines, cache, scores, secrets."""

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator

import pytest
from judge_server import JudgeServer

from verl_turnkey.envs.http import LONGEST_WAIT, Endpoint
from verl_turnkey.envs.rewards import Judge, JudgeConfig, JudgeError, RewardError, RewardStep, compose

ASK = [{"role": "user", "content": "How good is this?"}]
SECRET = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as running:
        yield running


def judge(server: JudgeServer, **options) -> Judge:
    return Judge(JudgeConfig(**{"url": server.url, "model": "m", "backoff": 0.01, **options}))


def score(judge: Judge, *questions: str) -> list[float]:
    async def ask():
        conversations = [[{"role": "user", "content": question}] for question in questions] or [ASK]
        return await asyncio.gather(*(judge.score(messages) for messages in conversations))

    return asyncio.run(ask())


def test_the_request(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", f" {SECRET}\n")
    params = {"temperature": 0.5, "max_tokens": 9}
    assert score(judge(server, api_key_env="MY_KEY", params=params, url=server.url + "/")) == [7.0]
    assert server.paths == ["/v1/chat/completions"]
    assert server.questions == [{"model": "m", "messages": ASK, **params}]
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    score(judge(server))
    assert "Authorization" not in server.headers[1]
    assert server.questions[1] == {"model": "m", "messages": ASK, "temperature": 0}


@pytest.mark.parametrize(("edge", "factor"), [(min, 0.75), (max, 1.25)])
def test_busy_then_answered(server, monkeypatch, edge, factor):
    waits = []

    async def noted(seconds):
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", noted)
    monkeypatch.setattr(random.Random, "uniform", lambda self, *bounds: edge(bounds))
    server.replies = [(429, {"Retry-After": "7"}, "busy"), (503, {}, ""), (408, {"Retry-After": "999"}, "")]
    assert score(judge(server, backoff=1.0)) == [7.0]
    assert server.calls == 4
    requested, doubled, longest = waits
    assert requested == 7.0, "the server said how long to wait"
    assert doubled == 2 * factor, "within a quarter of twice the first wait"
    assert longest == LONGEST_WAIT


def test_broken_until_given_up(server):
    server.replies = [(500, {}, "oh " * 200)] * 9
    with pytest.raises(JudgeError) as caught:
        score(judge(server, retries=2))
    text = str(caught.value)
    assert f"{server.url}/chat/completions gave no answer in 3 attempts (status 500): 'oh oh " in text
    assert len(text) < 200 + 150
    assert server.calls == 3


def test_what_asking_again_does_not_help(server):
    server.replies = [(400, {}, '{"error": "no such model"}')]
    with pytest.raises(JudgeError, match=r"in 1 attempt \(status 400\): .*no such model"):
        score(judge(server))
    assert server.calls == 1


def test_too_slow(server):
    server.delay = 30.0
    with pytest.raises(JudgeError, match=r"gave no answer in 2 attempts \(no status\): 'TimeoutError: timed out'"):
        score(judge(server, timeout=3.0, retries=1))
    assert server.calls == 2
    assert server.at_once == 2, "neither answer was waited for"


def test_a_body_that_never_ends(server):
    """Every byte comes in time, the answer does not."""
    server.drip = 0.02
    with pytest.raises(JudgeError, match=r"no status.*TimeoutError: the answer took too long"):
        score(judge(server, timeout=1.0, retries=0))
    server.replies = [(200, {"Content-Length": "500"}, '{"choices": [')]
    assert score(judge(server)) == [7.0]
    server.replies = [(200, {"Content-Length": "500"}, "{")]
    with pytest.raises(JudgeError, match=r"no status.*ConnectionError: the answer broke off"):
        score(judge(server, retries=0))


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"  # where nobody listens
        with pytest.raises(JudgeError, match=rf"{url}/chat/completions gave no answer in 2 .*ConnectionRefusedError"):
            score(Judge(JudgeConfig(url, "m", retries=1, backoff=0)))


@pytest.mark.parametrize(
    "body", ["<html>", "[]", "{}", '{"choices": []}', '{"choices": [{"message": {"content": null}}]}', "[" * 100_000]
)
def test_malformed_answers(server, body):
    server.replies = [(200, {}, body)]
    with pytest.raises(JudgeError, match=r"something else than a chat completion \(status 200\)"):
        score(judge(server))
    assert server.calls == 1


def test_a_redirect_is_not_followed(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    server.replies = [(302, {"Location": f"{server.root}/elsewhere"}, "moved")]
    with pytest.raises(JudgeError, match=r"status 302\): 'moved'"):
        score(judge(server, api_key_env="MY_KEY"))
    assert server.calls == 1


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        ("Score: 7", {}, 7.0),
        ("score 3, no.\n**Score**: -4.5 points", {}, -4.5),
        ("Scores vary.\n- Final score = +2", {}, 2.0),
        ("Score: .5", {}, 0.5),
        ("Score: 7.", {}, 7.0),
        ("Score: 10", {}, 10.0),
        ("Score: 7\nScore:\n3 steps failed", {}, 7.0),
        ("**Score:** 8", {}, 8.0),
        ("Score: 7\nThe score: because this score is low, step 3 failed", {}, 7.0),
        ("Score: 7, I gave this score because step 3 failed", {}, 7.0),
        ("final\nSCORE = 4.5", {}, 4.5),
        ("Score: -2", {}, -2.0),
        ("Score: 3\n## Score: 4", {}, 4.0),
        ("I say 8/10", {"score_pattern": r"(\d+)/10"}, 8.0),
        ('{"score": 1} then {"score": 2, "why": {"x": [1]}}', {"score_key": "score"}, 2.0),
        ('```json\n{"a": {"b": 1}, "grade": "0.25"}\n```', {"score_key": "grade"}, 0.25),
        ("Score: 7", {"score_range": (0, 10)}, 0.7),
        ("Score: 2", {"score_range": (5, 1)}, 0.75),
    ],
)
def test_scores(server, answer, options, expected):
    server.answer = lambda question: answer
    assert score(judge(server, **options)) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("answer", "options", "message"),
    [
        ("It is good.", {}, r"gave no score: expected a match of score_pattern .*, got 'It is good\.'"),
        ("Score: " + "9" * 400, {}, "gave no score"),
        ("Score (0-10): 7", {}, "gave no score"),
        ("Score: (0-10) 7", {}, "gave no score"),
        ("Score: 10-20", {}, "gave no score"),
        ('{"score": 1' + "0" * 400 + "}", {"score_key": "score"}, "numbers under score, got"),
        ('{"score": "good"} {"score": true} {"score": NaN}', {"score_key": "score"}, r"numbers under score, got"),
        ("{" * 300, {"score_key": "score"}, "a JSON object with numbers under score"),
        ("Score: 11", {"score_range": (0, 10)}, r"gave the score 11\.0, outside of 0 to 10"),
    ],
)
def test_answers_without_a_score(server, answer, options, message):
    server.answer = lambda question: answer
    with pytest.raises(JudgeError, match=message) as caught:
        score(judge(server, **options))
    assert server.url in str(caught.value)
    assert isinstance(caught.value, RewardError), "costs its episode, not the run"


def test_a_binary_score_is_the_probability_of_one(server, tmp_path):
    server.answer = lambda question: {"1": 0.5, " 1": 0.1, "0": 0.2, "01": 0.1, "yes": 0.1}
    for _ in range(2):
        binary = judge(server, binary=True, params={"max_tokens": 9}, score_range=(0, 10), cache=str(tmp_path))
        assert score(binary) == [pytest.approx(0.75)]
    one_token = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    assert server.questions == [{"model": "m", "messages": ASK, **one_token}], "the second time from the folder"
    server.answer = lambda question: {"0": 0.9, "no": 0.1}
    assert score(judge(server, binary=True)) == [0.0], "1 is not among the likely tokens"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("1", "something else than a chat completion with logprobs, which binary needs"),
        ({"Score": 0.6, "Yes": 0.4}, "answers neither 1 nor 0: its likeliest tokens are 'Score', 'Yes'"),
    ],
)
def test_a_binary_question_without_an_answer(server, answer, message):
    server.answer = lambda question: answer
    with pytest.raises(JudgeError, match=message) as caught:
        score(judge(server, binary=True))
    assert server.url in str(caught.value)


def test_equal_questions_are_asked_once(server):
    server.delay = 0.05
    model = judge(server)
    assert score(model, "a", "a", "b", "a") == [7.0] * 4
    assert server.calls == 2, "a question under way is waited for"
    assert score(model, "b", "a") == [7.0] * 2
    assert server.calls == 2
    score(judge(server, params={"temperature": 1}), "a")
    score(judge(server, model="n"), "a")
    assert server.calls == 4, "other params and another model are another question"


def test_another_url_is_another_judge(server, tmp_path):
    with JudgeServer(lambda question: "Score: 1") as other:
        answers = [score(judge(endpoint, cache=str(tmp_path))) for endpoint in (server, other, server, other)]
    assert answers == [[7.0], [1.0], [7.0], [1.0]]
    assert (server.calls, other.calls) == (1, 1)


def test_a_failure_is_not_kept(server):
    server.replies = [(400, {}, "")]
    model = judge(server)
    with pytest.raises(JudgeError):
        score(model)
    assert score(model) == [7.0]
    assert server.calls == 2


def test_memory_is_bounded(server):
    model = judge(server, cache_size=2)
    score(model, "a"), score(model, "b"), score(model, "c"), score(model, "b")
    assert server.calls == 3
    score(model, "a")
    assert server.calls == 4, "the oldest went"


def test_a_folder_that_takes_no_answers_is_said_once_and_costs_nothing(server, tmp_path, caplog):
    (tmp_path / "full").write_text("a file, where folders cannot be made")
    assert score(judge(server, cache=str(tmp_path / "full")), "a", "b") == [7.0, 7.0]
    [warning] = caplog.messages
    assert warning.startswith(f"cache: answers of the judge are not kept in {tmp_path}/full: ")


def test_answers_are_read_beside_the_event_loop():
    """A long one, such as vectors, would hold up all rollouts of the process."""
    threads = []

    def read(answer):
        threads.append(threading.current_thread())
        return answer["choices"][0]["message"]["content"]

    with JudgeServer() as server:
        endpoint = Endpoint(JudgeConfig(url=server.url, model="m"), "/x", who="it", expected="x", read=read)
        assert asyncio.run(endpoint.ask({})) == "Score: 7"
    assert threads
    assert threading.main_thread() not in threads


def test_a_cache_on_disk(server, tmp_path):
    folder = str(tmp_path / "cache")
    assert score(judge(server, cache=folder), "a", "b") == [7.0, 7.0]
    server.answer = lambda question: "Score: 1"
    assert score(judge(server, cache=folder), "a", "b") == [7.0, 7.0]
    assert server.calls == 2
    files = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(files) == 2
    assert len([path for path in (tmp_path / "cache").rglob("*") if path.is_file()]) == 2, (
        "nothing half-written is left"
    )
    assert json.loads(files[0].read_text()) == {"model": "m", "answer": "Score: 7"}
    for file in files:
        file.write_text(file.read_text()[:5])
    assert score(judge(server, cache=folder), "a") == [1.0], "a broken file is no answer"
    assert score(judge(server, cache=folder), "a") == [1.0]
    assert server.calls == 3


@pytest.mark.parametrize("bound", [1, 3])
def test_requests_at_once(server, bound):
    together = threading.Barrier(bound, timeout=60.0)  # no answer before so many have been asked
    server.answer = lambda question: f"Score: {7 + 0 * together.wait()}"
    assert score(judge(server, concurrency=bound, retries=0), *map(str, range(9))) == [7.0] * 9
    assert server.calls == 9
    assert server.most_at_once == bound


def test_waiting_keeps_nobody_from_asking(server):
    server.replies = [(429, {"Retry-After": "60"}, "")]

    async def both():
        model = judge(server, concurrency=1)
        waiting = asyncio.ensure_future(model.score([{"role": "user", "content": "first"}]))
        await asyncio.sleep(0)  # it asks first
        return await model.score(ASK), waiting.done()

    assert asyncio.run(both()) == (7.0, False)
    assert server.calls == 2


def test_who_gives_up_takes_nothing_from_the_others(server):
    server.delay = 0.2

    async def both():
        model = judge(server)
        hasty, patient = (asyncio.ensure_future(model.score(ASK)) for _ in range(2))
        await asyncio.sleep(0.05)
        hasty.cancel()
        return await patient

    assert asyncio.run(both()) == 7.0
    assert server.calls == 1


def test_a_key_is_never_shown(server, monkeypatch):
    options = {"api_key_env": "MY_KEY", "retries": 0}
    monkeypatch.delenv("MY_KEY", raising=False)
    for value in (None, "", "two\nlines", "schlüssel"):
        if value is not None:
            monkeypatch.setenv("MY_KEY", value)
        with pytest.raises(JudgeError, match="needs an API key: set the environment variable MY_KEY") as caught:
            score(judge(server, **options))
        assert not value or value not in str(caught.value)
    assert server.calls == 0
    monkeypatch.setenv("MY_KEY", SECRET)
    server.replies = [(401, {}, f"bad key {SECRET}, Bearer {SECRET}")]
    with pytest.raises(JudgeError, match=r"bad key \*\*\*, Bearer \*\*\*") as caught:
        score(judge(server, **options))
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error!r}"
        error = error.__cause__ or error.__context__
    assert SECRET not in repr(judge(server, **options).config)


# --- the component ------------------------------------------------------------------------------------------------
def episode() -> list[RewardStep]:
    return [
        RewardStep("a {action} door", "open", text="<action>open</action>", task="Get {transcript} out."),
        RewardStep("a hall", "leave"),
    ]


def test_an_episode_is_judged(server):
    entry = {"name": "judge", "url": server.url, "model": "m", "weight": 2}
    assert compose([entry])(episode()).rewards == pytest.approx([0.0, 1.4])
    [message] = server.questions[0]["messages"]
    assert "this task:\nGet {transcript} out.\n" in message["content"]
    assert (
        "Observation 1: a {action} door\nAgent 1: <action>open</action>\n\nObservation 2: a hall\nAgent 2: leave\n"
        in message["content"]
    )


def test_every_step_is_judged(server):
    server.answer = lambda question: f'{{"p": {question["messages"][1]["content"].count("Observation") / 4}}}'
    entry = {"name": "judge", "url": server.url, "model": "prm", "per": "step", "score_key": "p", "score_range": None}
    entry |= {"prompt": "{transcript} | {observation} | {action}", "system": "Be fair.", "label": "prm"}
    shaped = compose([{"name": "step"}, entry])(episode())
    assert shaped.parts == {"step": [0.0, 0.0], "prm": [0.25, 0.5]}
    prompts = sorted((question["messages"] for question in server.questions), key=lambda m: len(m[1]["content"]))
    assert prompts[0][0] == {"role": "system", "content": "Be fair."}
    assert prompts[0][1]["content"].endswith("</action> | a {action} door | open")
    assert prompts[1][1]["content"].endswith("Agent 2: leave | a hall | leave")


def test_a_binary_judge_asks_whether_the_task_will_be_solved(server):
    server.answer = lambda question: {"1": 0.5 if "leave" in question["messages"][0]["content"] else 0.25, "0": 0.5}
    entry = {"name": "judge", "url": server.url, "model": "prm", "per": "step", "binary": True}
    assert compose([entry])(episode()).rewards == pytest.approx([1 / 3, 1 / 2])
    assert all("Answer 1 for yes or 0 for no." in q["messages"][0]["content"] for q in server.questions)
    compose([{**entry, "per": "episode", "prompt": "Solved by {action}?"}])(episode())
    assert server.questions[-1]["messages"][0]["content"] == "Solved by leave?"


def test_a_long_transcript_loses_its_middle(server):
    steps = [RewardStep(f"{number} {'x' * 50}", "go") for number in range(100)]
    entry = {"name": "judge", "url": server.url, "model": "m", "prompt": "{transcript}"}
    for options in ({}, {"max_chars": 100}):
        compose([{**entry, **options}])(steps)
    whole, part = (question["messages"][0]["content"] for question in server.questions)
    left_out = len(whole) - 100
    assert part == f"{whole[:50]}\n[{left_out} characters left out]\n{whole[-50:]}"
    assert whole.startswith("Observation 1: 0 x")
    assert whole.endswith("Agent 100: go")


@pytest.mark.parametrize(
    ("step", "prompt"),
    [
        (RewardStep("a hall", "leave", text="<think>stay</think>leave"), "leave"),
        (RewardStep("a hall", None, text="<think>stay</think>fly"), "fly"),
        (RewardStep("a hall", None, text="<think>stay"), "(no action)"),
        (RewardStep("a hall", None, text="stay", content=""), "(no action)"),  # the prompt opened the thoughts
    ],
)
def test_thoughts_are_not_judged_as_the_action(server, step, prompt):
    compose([{"name": "judge", "url": server.url, "model": "m", "prompt": "{action}"}])([step])
    assert server.questions[0]["messages"][0]["content"] == prompt


def test_the_score_is_not_read_from_the_thoughts_of_the_judge(server):
    server.answer = lambda question: "<think>Score: 3? It wrote <think>.</think>\nScore: 7"
    assert score(judge(server)) == [7.0]
    server.answer = lambda question: "<think>\nScore: 3\nbut"
    with pytest.raises(JudgeError, match="ends before its thoughts do; raise max_tokens in params"):
        score(judge(server), "another question")


def test_a_judge_that_fails_names_its_component(server):
    server.replies = [(400, {}, "too long")]
    composition = compose([{"name": "judge", "url": server.url, "model": "m"}])
    with pytest.raises(JudgeError, match=r"^turnkey\.rewards\[0\] \(judge\): the judge at .*too long"):
        composition(episode())


def test_a_gain_is_what_the_score_rose_by(server):
    server.answer = lambda question: f"Score: {[3, 9][question['messages'][0]['content'].count('Observation') - 1]}"
    entry = {"name": "judge", "url": server.url, "model": "prm", "per": "gain"}
    assert compose([entry])(episode()).rewards == pytest.approx([0.3, 0.6])
