"""A user that a model plays."""

import copy

import pytest
from judge_server import JudgeServer

from verl_turnkey.envs import EnvironmentFailure, EnvironmentKwargsError
from verl_turnkey.envs.users import EndpointUser, Line, UserConfig, asks_policy, with_policy

DIALOGUE = [Line("user", "Hello!"), Line("agent", "What is your name?")]


def user(server: JudgeServer, **config) -> EndpointUser:
    return EndpointUser({"url": server.url, "model": "m", "backoff": 0.001, **config})


def test_the_model_is_told_the_scenario_and_sees_the_agent_as_its_user():
    with JudgeServer(lambda question: "<think>who am I?</think> I am Ann.\n") as server:
        assert user(server).reply("You are Ann.", DIALOGUE) == "I am Ann."
    [question] = server.questions
    assert question["messages"] == [
        {"role": "system", "content": "You are Ann."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is your name?"},
    ]
    assert question["temperature"] == 0


@pytest.mark.parametrize("answer", ["", "  ", "<think>who am I?"])
def test_an_empty_answer_is_a_failure_of_the_user(answer):
    with JudgeServer(lambda question: answer) as server, pytest.raises(EnvironmentFailure) as failure:
        user(server).reply("You are Ann.", DIALOGUE)
    assert failure.value.kind == "user"
    assert "max_tokens" in failure.value.message


def test_a_server_that_is_down_is_a_failure_of_the_user_after_all_attempts():
    with JudgeServer() as server:
        server.replies = [(503, {}, "busy")] * 3
        with pytest.raises(EnvironmentFailure, match=r"the simulated user at .* in 3 attempts") as failure:
            user(server).reply("You are Ann.", DIALOGUE)
        assert server.calls == 3
        assert failure.value.kind == "user"


def test_the_policy_answers_only_where_an_agent_loop_gives_its_address():
    kwargs = {
        "user": {"url": "policy", "params": {"max_tokens": 8}},
        "judge": {"url": "http://h/v1"},
        "level": "policy",
    }
    assert asks_policy(kwargs)
    with pytest.raises(EnvironmentFailure, match="only in episodes of the agent loop turnkey_env"):
        EndpointUser(kwargs["user"]).reply("", DIALOGUE)
    with JudgeServer(lambda question: "Yes.") as server:
        played = with_policy(kwargs, server.url)
        assert EndpointUser(played["user"]).reply("", DIALOGUE) == "Yes."
    [question] = server.questions
    assert (question["model"], question["max_tokens"]) == ("policy", 8)
    assert "temperature" not in question
    assert not asks_policy(played)
    assert {name: played[name] for name in ("judge", "level")} == {name: kwargs[name] for name in ("judge", "level")}
    assert kwargs["user"]["url"] == "policy"


def test_all_attempts_stay_below_the_deadline_of_a_step():
    config = UserConfig("http://localhost:1", "m")
    waits = sum(1.25 * config.backoff * 2**n for n in range(config.retries))
    assert (config.retries + 1) * config.timeout + waits < 30


def test_a_copy_asks_on_its_own():
    with JudgeServer(lambda question: "Yes.") as server:
        original = user(server)
        clone = copy.deepcopy(original)
        assert clone.reply("", DIALOGUE) == original.reply("", DIALOGUE) == "Yes."
    assert clone._endpoint is not original._endpoint


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": "m"}, "user.url"),
        ({"url": "http://h/v1", "model": "m", "retry": 1}, "did you mean 'retries'"),
        ({"url": "h/v1", "model": "m"}, "user.url: expected http"),
        ({"url": "http://h/v1", "model": "m", "timeout": 0}, "user.timeout"),
    ],
)
def test_bad_keys(config, words):
    with pytest.raises(EnvironmentKwargsError, match=words):
        EndpointUser(config)
