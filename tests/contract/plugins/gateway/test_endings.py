"""Retries, lost connections, limits, side calls and ends of an episode, with real clients."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from gateway_parts import LIMITS, LOOK, called, openai, rows, run
from openai import BadRequestError
from test_clients import ASKED, spelled

from verl_turnkey.envs.agents.base import AgentFailure, Outcome
from verl_turnkey.plugins.gateway.exchange import Exchange
from verl_turnkey.plugins.gateway.turns import Aborted, Limits


async def ask(client: Any, messages: Any = ASKED, **options: Any) -> Any:
    return (await client.chat.completions.create(model="policy", messages=messages, **options)).choices[0]


def later(reply: Any, text: str = "And now?") -> list[Any]:
    return [*ASKED, spelled(reply.message), {"role": "user", "content": text}]


def test_a_client_that_gives_up_and_asks_again_gets_the_same_turn() -> None:
    async def agent(url: str) -> Any:
        async with openai(url, timeout=0.3, max_retries=3) as client:
            return await ask(client)

    played = run(agent, ["Here."], wait=lambda: asyncio.sleep(0.8))
    assert played.value.message.content == "Here."
    assert len(played.script.prompts) == len(played.session.turns) == 1
    assert played.session.counts["retried"] >= 1


def test_an_equal_request_is_another_sample() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            first = await asyncio.gather(ask(client), ask(client))
            return [*first, await ask(client, later(first[1]))]

    played = run(agent, ["One.", "Two.", "Three."])
    assert {choice.message.content for choice in played.value} == {"One.", "Two.", "Three."}
    assert len(played.rows) == 2
    assert sum(len(row.extra_fields["turnkey"]["steps"]) for row in played.rows) == 3


def test_a_lost_connection_leaves_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed, close = asyncio.Event(), Exchange.close
    monkeypatch.setattr(Exchange, "close", lambda self: noticed.set() or close(self))

    async def agent(url: str) -> Any:
        async with openai(url, timeout=0.2, max_retries=0) as client:
            with pytest.raises(Exception, match="timed out"):
                await ask(client)
        async with openai(url) as client:
            return await ask(client)

    played = run(agent, ["Lost.", "Here."], wait=noticed.wait)
    assert played.value.message.content == "Here."
    assert [turn.reply.text for turn in played.session.turns] == ["Here."]


def test_sampling_parameters_of_a_client_are_ignored_and_counted() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            return await ask(client, temperature=0, top_p=0.5, max_tokens=5, stop=["."])

    played = run(agent, ["Here. Or there, or elsewhere."])
    (params,) = played.script.params
    assert params == {"temperature": 1.0, "logprobs": True, "max_tokens": 5, "stop": ["."]}
    assert played.session.counts == {"overruled/temperature": 1, "overruled/top_p": 1}
    assert played.value.message.content == "Here", "the text without the stop string"
    assert len(played.rows[0].response_ids) == 5, "the row has all that was sampled"


def test_log_probabilities_that_no_turn_has_are_refused_or_counted() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            return await ask(client, logprobs=True)

    played = run(agent, ["Here."])
    assert [token.logprob for token in played.value.logprobs.content] == [0.0, -0.01, -0.02]
    without = {"temperature": 1.0, "logprobs": False}  # as turnkey eval samples
    ignored = run(agent, ["Here."], sampling=without, limits=replace(LIMITS, unsupported="ignore"))
    assert ignored.value.logprobs is None
    assert ignored.session.counts == {"overruled/logprobs": 1}

    async def refused(url: str) -> None:
        async with openai(url) as client:
            with pytest.raises(BadRequestError, match="logprobs is not supported: only training with") as error:
                await ask(client, logprobs=True)
            assert (error.value.code, error.value.param) == ("unsupported_parameter", "logprobs")
            await ask(client)

    assert len(run(refused, ["Here."], sampling=without).script.prompts) == 1, "no generation is spent"


def test_a_turn_that_was_cut_ends_with_length() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            cut = await ask(client, max_tokens=2)
            whole = await ask(client, [*ASKED, spelled(cut.message), {"role": "user", "content": "Go on."}])
            return [cut, whole]

    played = run(agent, ["It is here, I think.", "Yes."])
    assert [choice.finish_reason for choice in played.value] == ["length", "stop"]
    assert played.breaks == ["first"], "the tokens that end a turn are appended, masked"


def test_a_malformed_call_is_text() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            return await ask(client, tools=[LOOK])

    broken = 'I call.\n<tool_call>\n{"name": "look", "arguments": {"place": \n</tool_call>'
    played = run(agent, [broken])
    assert played.value.message.tool_calls is None
    assert played.value.message.content == broken
    (step,) = played.rows[0].extra_fields["turnkey"]["steps"]
    assert not step["valid"]
    assert played.session.counts == {"unparsed": 1}


def test_a_call_inside_thoughts_is_none() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            return await ask(client, tools=[LOOK])

    thoughts = "<think>\nPerhaps" + called('{"place": "cave"}') + "\n</think>\n\n"
    played = run(agent, [thoughts + "No."])
    assert played.value.message.tool_calls is None
    assert played.value.message.content == "No."


def test_a_full_context_is_an_error_on_which_agents_compact() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            reply = await ask(client)
            with pytest.raises(BadRequestError, match="maximum context length") as error:
                await ask(client, later(reply, "word " * 3900))
            assert error.value.code == "context_length_exceeded"
            return await ask(client, [*ASKED, {"role": "user", "content": "So far: nothing."}])

    played = run(agent, ["Here.", "There."])
    assert played.breaks == ["first", "history"]
    (first, second) = (row.extra_fields["turnkey"]["steps"][0] for row in played.rows)
    assert first["extra"]["chain"] == second["extra"]["chain"] == 0, "the same conversation, in other words"
    assert first["extra"]["next_anchor"] == second["anchor"]


def test_a_first_prompt_that_does_not_fit_names_the_numbers() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            with pytest.raises(BadRequestError, match="maximum context length is 300 tokens"):
                await ask(client, [{"role": "user", "content": "word " * 300}])

    played = run(agent, [], limits=Limits(room=300, turn=100))
    with pytest.raises(AgentFailure, match=r"first prompt takes 30\d tokens, and a turn of 100 .* fit into 300"):
        rows(played.session, Outcome(reward=1.0))


def test_a_turn_too_many_truncates_the_episode() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            await ask(client)
            with pytest.raises(BadRequestError, match="turn limit reached"):
                await ask(client)

    played = run(agent, ["Here."], limits=Limits(room=4000, turn=100, turns=1))
    (step,) = played.rows[0].extra_fields["turnkey"]["steps"]
    assert step["truncated"]
    assert not step["terminated"]


def test_an_edited_reply_begins_a_row() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            reply = await ask(client, tools=[LOOK])
            sent = spelled(reply.message)
            sent["tool_calls"][0]["function"]["arguments"] = '{"place": "elsewhere"}'
            result = {"role": "tool", "tool_call_id": reply.message.tool_calls[0].id, "content": "dark"}
            return await ask(client, [*ASKED, sent, result], tools=[LOOK])

    played = run(agent, [called('{"place": "cave"}'), "Dark."])
    assert played.breaks == ["first", "edited"]


def test_side_calls_are_answered_and_left_out() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            plan = await ask(client, [{"role": "user", "content": "A plan for: Where is it?"}])
            other = await client.chat.completions.create(model="small", messages=ASKED, tools=[LOOK])
            return [plan, other.choices[0], await ask(client, tools=[LOOK]), await ask(client)]

    played = run(agent, ["I look.", "Small.", "I see it.", "Here."])
    assert [choice.message.content for choice in played.value] == ["I look.", "Small.", "I see it.", "Here."]
    steps = [step for row in played.rows for step in row.extra_fields["turnkey"]["steps"]]
    assert [step["action"] for step in steps] == ["I look.", "I see it.", "Here."], "plans and answers need no tools"


def test_a_turn_that_may_call_no_tool_is_no_side_call() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            reply = await ask(client, tools=[LOOK])
            return await ask(client, later(reply, "Sum up."), tools=[LOOK], tool_choice="none")

    played = run(agent, ["Here.", called('{"place": "cave"}')], outcome=Outcome(reward=2.0))
    assert played.value.message.tool_calls is None, "the prompt shows no tools"
    steps = [step for row in played.rows for step in row.extra_fields["turnkey"]["steps"]]
    assert [step["reward"] for step in steps] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("rules", "actions"),
    [
        ([], ["A title.", "Here."]),
        ([{"no_tools": True}], ["Here."]),
        ([{"no_tools": False}], ["A title."]),
        ([{"system": "title generator"}], ["Here."]),
        ([{"system": "title generator", "no_tools": False}], ["A title.", "Here."]),
        ([{"model": "small"}, {"system": "You look"}], ["A title."]),
    ],
)
def test_what_is_left_out_can_be_said(rules: list[dict[str, Any]], actions: list[str]) -> None:
    async def agent(url: str) -> None:
        async with openai(url) as client:
            system = {"role": "system", "content": "You are a title generator."}
            await ask(client, [system, {"role": "user", "content": "Where is it?"}])
            await client.chat.completions.create(model="small", messages=ASKED, tools=[LOOK])
            await ask(client, [{"role": "system", "content": "You look."}, *ASKED], tools=[LOOK])

    played = run(agent, ["A title.", "Small.", "Here."], limits=replace(LIMITS, leave_out=rules))
    assert [step["action"] for row in played.rows for step in row.extra_fields["turnkey"]["steps"]] == actions


def test_an_episode_without_a_trained_call_fails() -> None:
    async def agent(url: str) -> None:
        async with openai(url) as client:
            await ask(client)

    session = run(agent, ["Here."], limits=replace(LIMITS, leave_out=[{"no_tools": False}])).session
    assert len(rows(session, Outcome(reward=1.0))) == 1
    session.limits = replace(LIMITS, leave_out=[{"no_tools": True}])
    with pytest.raises(AgentFailure, match=r"turnkey\.agent\.leave_out leaves out every call"):
        rows(session, Outcome(reward=1.0))


def test_a_reward_of_a_call_that_is_left_out_is_not_lost_in_silence() -> None:
    async def agent(url: str) -> None:
        async with openai(url) as client:
            await ask(client, [{"role": "user", "content": "A title for: Where is it?"}])
            await ask(client, tools=[LOOK])

    session = run(agent, ["A title.", "Here."], limits=replace(LIMITS, leave_out=[{"no_tools": True}])).session
    (row,) = rows(session, Outcome(turn_rewards={0: 0.0, 1: 0.5}))
    assert [step["reward"] for step in row.extra_fields["turnkey"]["steps"]] == [0.5]
    with pytest.raises(AgentFailure, match="a reward of turn 0, which is not trained"):
        rows(session, Outcome(turn_rewards={0: 0.5, 1: 0.5}))


def test_all_calls_of_another_name_are_trained() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            return await client.chat.completions.create(model="gpt-5", messages=ASKED)

    assert len(run(agent, ["Here."]).rows) == 1


def test_what_an_agent_reports_does_not_count_beside_tests_of_its_work() -> None:
    async def cheats(url: str) -> None:
        async with openai(url) as client, httpx.AsyncClient(base_url=url.removesuffix("/v1")) as http:
            await ask(client)
            for body in ({"reward": 1.0}, {"reward": 5.0, "turn": 0}):
                assert (await http.post("/reward", json=body)).status_code == 200

    session = run(cheats, ["Here."]).session
    for verified, reward in ((False, 5.0), (True, 0.0)):
        (row,) = rows(session, Outcome(reward=0.0, verified=verified))
        (step,) = row.extra_fields["turnkey"]["steps"]
        assert step["reward"] == reward


def test_a_returned_reward_of_a_turn_counts_before_a_posted_one() -> None:
    async def posts(url: str) -> None:
        async with openai(url) as client, httpx.AsyncClient(base_url=url.removesuffix("/v1")) as http:
            for turn in range(2):
                await ask(client)
                assert (await http.post("/reward", json={"reward": 5.0, "turn": turn})).status_code == 200

    session = run(posts, ["Here.", "There."]).session
    for verified, rewards in ((False, [0.25, 5.0]), (True, [0.25, 0.0])):
        played = rows(session, Outcome(reward=0.0, turn_rewards={0: 0.25}, verified=verified))
        assert [step["reward"] for row in played for step in row.extra_fields["turnkey"]["steps"]] == rewards


def test_without_requests_or_a_reward_an_episode_fails() -> None:
    async def nothing(url: str) -> None: ...

    async def asks(url: str) -> None:
        async with openai(url) as client:
            await ask(client)

    with pytest.raises(AgentFailure, match="the agent made no request"):
        rows(run(nothing, []).session, Outcome(reward=1.0))
    with pytest.raises(AgentFailure, match="the agent gave no reward"):
        rows(run(asks, ["Here."]).session, Outcome())
    with pytest.raises(AgentFailure, match="a reward of turn 1, but the episode has 1, counted from 0"):
        rows(run(asks, ["Here."]).session, Outcome(reward=1.0, turn_rewards={1: 0.5}))
    with pytest.raises(AgentFailure, match="KeyError"):
        rows(run(asks, ["Here."]).session, Outcome(reason="KeyError: 'x' (agent.py:3)"))


def test_a_state_outlives_a_turn_that_fails() -> None:
    fails = iter((True, False, False, False))

    async def model() -> None:
        if next(fails):
            raise Aborted("while the weights change")

    async def agent(url: str) -> None:
        root = url.removesuffix("/v1")
        async with openai(url, max_retries=1) as client, httpx.AsyncClient() as web:
            for number in range(2):
                await web.post(f"{root}/state", json={"key": f"room {number}"})
                if number:
                    with pytest.raises(BadRequestError, match="maximum context length"):
                        await ask(client, [{"role": "user", "content": "word " * 3900}])
                await ask(client)
            await ask(client)

    played = run(agent, [*["Here."] * 4], wait=model)
    assert [turn.state for turn in played.session.turns] == ["room 0", "room 1", None]


def test_an_agent_reports_rewards_and_states() -> None:
    async def agent(url: str) -> Any:
        root = url.removesuffix("/v1")
        async with openai(url) as client, httpx.AsyncClient() as web:
            for number in range(2):
                await web.post(f"{root}/state", json={"key": f"room {number}"})
                await ask(client)
            assert (await web.post(f"{root}/reward", json={"reward": 0.25, "turn": 0})).status_code == 200
            assert (await web.post(f"{root}/reward", json={"reward": 2})).status_code == 200
            return [
                (await web.post(f"{root}/reward", json=body)).status_code
                for body in ({"reward": "much"}, {"reward": 1, "turn": 2}, {}, {"reward": True}, {"reward": 10**400})
            ] + [(await web.post(f"{root}/state", json=body)).status_code for body in ({}, {"key": None})]

    played = run(agent, ["Here.", "There."], outcome=Outcome())
    assert played.value == [400] * 7
    steps = [step for row in played.rows for step in row.extra_fields["turnkey"]["steps"]]
    assert [(step["anchor"], step["reward"]) for step in steps] == [("room 0", 0.25), ("room 1", 2.0)]
