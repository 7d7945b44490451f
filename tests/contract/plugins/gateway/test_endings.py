"""Retries, lost connections, limits, side calls and ends of an episode, with real clients."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import httpx
import pytest
import torch
from gateway_parts import ASKED, LIMITS, LOOK, anthropic, ask, called, chats, openai, posts, rows, run, spelled
from openai import BadRequestError

from verl_turnkey.envs.agents.base import AgentFailure, AgentResult
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.gateway.exchange import Exchange
from verl_turnkey.plugins.gateway.session import Retries
from verl_turnkey.plugins.gateway.turns import Aborted, Limits


@dataclass
class Watched:
    """The episode that is played, for agents that wait for it."""

    calls: tuple[int, ...] = ()
    """the model answers only once so many calls have begun"""
    session: Any = None
    script: Any = None

    async def together(self) -> None:
        begun = len(self.script.prompts)
        needed = min((number for number in self.calls if number >= begun), default=0)
        while len(self.script.prompts) < needed:
            await asyncio.sleep(0.01)


def steps_of(row: Any) -> list[dict[str, Any]]:
    return row.extra_fields["turnkey"]["steps"]


def aborts(*calls: bool) -> Any:
    """A model that the server stops in these calls."""
    fails = iter(calls)

    async def model() -> None:
        if next(fails):
            raise Aborted("while the weights change")

    return model


def later(reply: Any, text: str = "And now?") -> list[Any]:
    return [*ASKED, spelled(reply.message), {"role": "user", "content": text}]


def test_a_client_that_gives_up_and_asks_again_gets_the_same_turn() -> None:
    watched = Watched()

    async def model() -> None:
        while not watched.session.counts.get("retried"):
            await asyncio.sleep(0.01)

    played = chats(ask, ["Here."], wait=model, watch=watched, client={"timeout": 1.0, "max_retries": 6})
    assert played.value.message.content == "Here."
    assert len(played.script.prompts) == len(played.session.turns) == 1
    assert played.session.counts["retried"] >= 1


def test_an_equal_request_is_another_sample() -> None:
    async def agent(client: Any) -> Any:
        first = await asyncio.gather(ask(client), ask(client))
        return [*first, await ask(client, later(first[1]))]

    played = chats(agent, ["One.", "Two.", "Three."])
    assert {choice.message.content for choice in played.value} == {"One.", "Two.", "Three."}
    assert len(played.rows) == 2
    assert sum(len(row.extra_fields["turnkey"]["steps"]) for row in played.rows) == 3


@pytest.mark.parametrize("header", ["x-stainless-retry-count", "idempotency-key"])
def test_equal_requests_whose_clients_give_up_stay_as_many_turns(header: str) -> None:
    """Two clients ask the same at the same time, give up, and ask again: each gets the turn of one call."""
    gate = asyncio.Event()

    async def agent(url: str) -> Any:
        body = {"model": "policy", "messages": ASKED}

        async def once(web: httpx.AsyncClient, name: str, attempt: int) -> Any:
            value = name if header == "idempotency-key" else str(attempt)
            return (await web.post(f"{url}/chat/completions", json=body, headers={header: value})).json()["id"]

        async with httpx.AsyncClient() as web:
            first = [asyncio.ensure_future(once(web, name, 0)) for name in ("a", "b")]
            while len(watched.script.prompts) < 2:
                await asyncio.sleep(0.01)
            for call in first:
                call.cancel()
            await asyncio.gather(*first, return_exceptions=True)
            while watched.session.bodies.bytes:  # until the gateway has noticed
                await asyncio.sleep(0.01)
            gate.set()
            again = await asyncio.gather(*(once(web, name, 1) for name in ("a", "b")))
            return again, await once(web, "c", 0)

    watched = Watched()
    played = run(agent, ["One.", "Two.", "Three."], wait=gate.wait, watch=watched)
    (first_id, second_id), third_id = played.value
    assert len({first_id, second_id, third_id}) == len(played.session.turns) == len(played.script.prompts) == 3
    assert played.session.counts["retried"] == 2


def test_a_retry_of_a_call_that_was_refused_is_a_new_call() -> None:
    """The one before it had an equal body, and was answered."""

    async def agent(client: Any) -> Any:
        return [(await ask(client)).message.content for _ in range(2)]

    played = chats(agent, ["One.", "lost", "Two."], wait=aborts(False, True, False), client={"max_retries": 1})
    assert played.value == ["One.", "Two."]


@pytest.mark.parametrize("named", [None, b"body"])
def test_a_call_that_fails_once_its_client_has_left_is_made_anew(named: bytes | None) -> None:
    async def second() -> Any:
        retries, call = Retries(), asyncio.create_task(aborts(True)())
        retries.began(b"key", call, named)
        retries.ended(b"key", call, answered=False)
        await asyncio.wait([call])
        return retries.earlier(b"key", True, named)

    assert asyncio.run(second()) is None


def test_a_lost_connection_leaves_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, noticed, close = asyncio.Event(), asyncio.Event(), Exchange.close
    monkeypatch.setattr(Exchange, "close", lambda self: noticed.set() or close(self))

    async def agent(url: str) -> Any:
        async with openai(url, max_retries=0) as client:
            call = asyncio.ensure_future(ask(client))
            await begun.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        async with openai(url) as client:
            return await ask(client)

    async def model() -> None:
        begun.set()
        await noticed.wait()

    played = run(agent, ["Lost.", "Here."], wait=model)
    assert played.value.message.content == "Here."
    assert [turn.reply.text for turn in played.session.turns] == ["Here."]


def test_sampling_parameters_of_a_client_are_ignored_and_counted() -> None:
    played = chats(
        lambda client: ask(client, temperature=0, top_p=0.5, max_tokens=5, stop=["."]),
        ["Here. Or there, or elsewhere."],
    )
    (params,) = played.script.params
    assert params == {"temperature": 1.0, "logprobs": True, "max_tokens": 5, "stop": ["."]}
    assert played.session.counts == {"overruled/temperature": 1, "overruled/top_p": 1}
    assert played.value.message.content == "Here", "the text without the stop string"
    assert len(played.rows[0].response_ids) == 5, "the row has all that was sampled"


def test_log_probabilities_that_no_turn_has_are_refused_or_counted() -> None:
    def asks(client: Any) -> Any:
        return ask(client, logprobs=True)

    played = chats(asks, ["Here."])
    assert [token.logprob for token in played.value.logprobs.content] == [0.0, -0.01, -0.02]
    without = {"temperature": 1.0, "logprobs": False}  # as turnkey eval samples
    ignored = chats(asks, ["Here."], sampling=without, limits=replace(LIMITS, unsupported="ignore"))
    assert ignored.value.logprobs is None
    assert ignored.session.counts == {"overruled/logprobs": 1}

    async def refused(client: Any) -> None:
        with pytest.raises(BadRequestError, match="logprobs is not supported: only training with") as error:
            await ask(client, logprobs=True)
        assert (error.value.code, error.value.param) == ("unsupported_parameter", "logprobs")
        await ask(client)

    assert len(chats(refused, ["Here."], sampling=without).script.prompts) == 1, "no generation is spent"


def test_a_turn_that_was_cut_ends_with_length() -> None:
    async def agent(client: Any) -> Any:
        cut = await ask(client, max_tokens=2)
        return [cut, await ask(client, later(cut, "Go on."))]

    played = chats(agent, ["It is here, I think.", "Yes."])
    assert [choice.finish_reason for choice in played.value] == ["length", "stop"]
    assert played.breaks == ["first"], "the tokens that end a turn are appended, masked"


def test_a_malformed_call_is_text() -> None:
    broken = 'I call.\n<tool_call>\n{"name": "look", "arguments": {"place": \n</tool_call>'
    played = chats(lambda client: ask(client, tools=[LOOK]), [broken])
    assert played.value.message.tool_calls is None
    assert played.value.message.content == broken
    (step,) = played.steps
    assert not step["valid"]
    assert played.session.counts == {"unparsed": 1}


def test_a_call_inside_thoughts_is_none() -> None:
    thoughts = "<think>\nPerhaps" + called('{"place": "cave"}') + "\n</think>\n\n"
    played = chats(lambda client: ask(client, tools=[LOOK]), [thoughts + "No."])
    assert played.value.message.tool_calls is None
    assert played.value.message.content == "No."


def test_a_full_context_is_an_error_on_which_agents_compact() -> None:
    async def agent(client: Any) -> Any:
        reply = await ask(client)
        with pytest.raises(BadRequestError, match="maximum context length") as error:
            await ask(client, later(reply, "word " * 3900))
        assert error.value.code == "context_length_exceeded"
        return await ask(client, [*ASKED, {"role": "user", "content": "So far: nothing."}])

    played = chats(agent, ["Here.", "There."])
    assert played.breaks == ["first", "history"]
    first, second = played.steps
    assert first["extra"]["chain"] == second["extra"]["chain"] == 0, "the same conversation, in other words"
    assert first["extra"]["next_anchor"] == second["anchor"]


def test_a_first_prompt_that_does_not_fit_names_the_numbers() -> None:
    async def agent(client: Any) -> Any:
        with pytest.raises(BadRequestError, match="maximum context length is 300 tokens"):
            await ask(client, [{"role": "user", "content": "word " * 300}])

    played = chats(agent, [], limits=Limits(room=300, turn=100))
    with pytest.raises(AgentFailure, match=r"first prompt takes 30\d tokens, and a turn of 100 .* fit into 300"):
        rows(played.session, AgentResult(reward=1.0))


def test_a_turn_too_many_truncates_the_episode() -> None:
    async def agent(client: Any) -> Any:
        await ask(client)
        with pytest.raises(BadRequestError, match="turn limit reached"):
            await ask(client)

    played = chats(agent, ["Here."], limits=Limits(room=4000, turn=100, turns=1))
    (step,) = played.steps
    assert (step["truncated"], step["terminated"]) == (True, False)


def test_an_edited_reply_begins_a_row() -> None:
    async def agent(client: Any) -> Any:
        reply = await ask(client, tools=[LOOK])
        sent = spelled(reply.message)
        sent["tool_calls"][0]["function"]["arguments"] = '{"place": "elsewhere"}'
        result = {"role": "tool", "tool_call_id": reply.message.tool_calls[0].id, "content": "dark"}
        return await ask(client, [*ASKED, sent, result], tools=[LOOK])

    played = chats(agent, [called('{"place": "cave"}'), "Dark."])
    assert played.breaks == ["first", "edited"]


def test_side_calls_are_answered_and_left_out() -> None:
    async def agent(client: Any) -> Any:
        plan = await ask(client, [{"role": "user", "content": "A plan for: Where is it?"}])
        other = await client.chat.completions.create(model="small", messages=ASKED, tools=[LOOK])
        return [plan, other.choices[0], await ask(client, tools=[LOOK]), await ask(client)]

    played = chats(agent, ["I look.", "Small.", "I see it.", "Here."])
    assert [choice.message.content for choice in played.value] == ["I look.", "Small.", "I see it.", "Here."]
    actions = [step["action"] for step in played.steps]
    assert actions == ["I look.", "I see it.", "Here."], "plans and answers need no tools"


def test_a_turn_that_may_call_no_tool_is_no_side_call() -> None:
    async def agent(client: Any) -> Any:
        reply = await ask(client, tools=[LOOK])
        return await ask(client, later(reply, "Sum up."), tools=[LOOK], tool_choice="none")

    played = chats(agent, ["Here.", called('{"place": "cave"}')], outcome=AgentResult(reward=2.0))
    assert played.value.message.tool_calls is None, "the prompt shows no tools"
    assert [step["reward"] for step in played.steps] == [0.0, 2.0]


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
    async def agent(client: Any) -> None:
        system = {"role": "system", "content": "You are a title generator."}
        await ask(client, [system, {"role": "user", "content": "Where is it?"}])
        await client.chat.completions.create(model="small", messages=ASKED, tools=[LOOK])
        await ask(client, [{"role": "system", "content": "You look."}, *ASKED], tools=[LOOK])

    played = chats(agent, ["A title.", "Small.", "Here."], limits=replace(LIMITS, leave_out=rules))
    assert [step["action"] for step in played.steps] == actions


def test_an_episode_without_a_trained_call_fails() -> None:
    session = chats(ask, ["Here."], limits=replace(LIMITS, leave_out=[{"no_tools": False}])).session
    assert len(rows(session, AgentResult(reward=1.0))) == 1
    session.limits = replace(LIMITS, leave_out=[{"no_tools": True}])
    with pytest.raises(AgentFailure, match=r"turnkey\.agent\.leave_out leaves out every call"):
        rows(session, AgentResult(reward=1.0))


def test_a_reward_of_a_call_that_is_left_out_is_not_lost_in_silence() -> None:
    async def agent(client: Any) -> None:
        await ask(client, [{"role": "user", "content": "A title for: Where is it?"}])
        await ask(client, tools=[LOOK])

    session = chats(agent, ["A title.", "Here."], limits=replace(LIMITS, leave_out=[{"no_tools": True}])).session
    (row,) = rows(session, AgentResult(turn_rewards={0: 0.0, 1: 0.5}))
    assert [step["reward"] for step in row.extra_fields["turnkey"]["steps"]] == [0.5]
    with pytest.raises(AgentFailure, match="a reward of turn 0, which is not trained"):
        rows(session, AgentResult(turn_rewards={0: 0.5, 1: 0.5}))


def test_all_calls_of_another_name_are_trained() -> None:
    assert len(chats(lambda client: client.chat.completions.create(model="gpt-5", messages=ASKED), ["Here."]).rows) == 1


def test_what_an_agent_reports_does_not_count_beside_tests_of_its_work() -> None:
    async def cheats(client: Any, post: Any) -> None:
        await ask(client)
        for body in ({"reward": 1.0}, {"reward": 5.0, "turn": 0}):
            assert (await post("reward", **body)).status_code == 200

    session = posts(cheats, ["Here."]).session
    for verified, reward in ((False, 5.0), (True, 0.0)):
        (row,) = rows(session, AgentResult(reward=0.0, verified=verified))
        assert [step["reward"] for step in steps_of(row)] == [reward]


def test_a_returned_reward_of_a_turn_counts_before_a_posted_one() -> None:
    async def agent(client: Any, post: Any) -> None:
        for turn in range(2):
            await ask(client)
            assert (await post("reward", reward=5.0, turn=turn)).status_code == 200

    session = posts(agent, ["Here.", "There."]).session
    for verified, rewards in ((False, [0.25, 5.0]), (True, [0.25, 0.0])):
        played = rows(session, AgentResult(reward=0.0, turn_rewards={0: 0.25}, verified=verified))
        assert [step["reward"] for row in played for step in steps_of(row)] == rewards


def test_without_requests_or_a_reward_an_episode_fails() -> None:
    async def nothing(url: str) -> None: ...

    with pytest.raises(AgentFailure, match="the agent made no request"):
        rows(run(nothing, []).session, AgentResult(reward=1.0))
    session = chats(ask, ["Here."]).session
    for outcome, words in (
        (AgentResult(), "the agent gave no reward"),
        (AgentResult(1.0, turn_rewards={1: 0.5}), "a reward of turn 1, but the episode has 1, counted from 0"),
        (AgentResult(reason="KeyError: 'x' (agent.py:3)"), "KeyError"),
    ):
        with pytest.raises(AgentFailure, match=words):
            rows(session, outcome)


def test_a_state_outlives_a_turn_that_fails() -> None:
    async def agent(client: Any, post: Any) -> None:
        for number in range(2):
            await post("state", key=f"room {number}")
            if number:
                with pytest.raises(BadRequestError, match="maximum context length"):
                    await ask(client, [{"role": "user", "content": "word " * 3900}])
            await ask(client)
        await ask(client)

    model = aborts(True, False, False, False)
    played = posts(agent, ["Here."] * 4, client={"max_retries": 1}, wait=model)
    assert [turn.state for turn in played.session.turns] == ["room 0", "room 1", None]


def test_a_newer_state_outlives_an_older_one_whose_turn_fails() -> None:
    began, posted = asyncio.Event(), asyncio.Event()

    async def model() -> None:
        if not began.is_set():
            began.set()
            await posted.wait()
            raise Aborted("while the weights change")

    async def agent(client: Any, post: Any) -> None:
        await post("state", key="old")
        call = asyncio.create_task(ask(client))
        await began.wait()
        await post("state", key="new")
        posted.set()
        await call

    played = posts(agent, ["Here."] * 2, client={"max_retries": 1}, wait=model)
    assert [turn.state for turn in played.session.turns] == ["new"]


def test_an_agent_reports_rewards_and_states() -> None:
    wrong: list[dict[str, Any]] = [{"reward": value} for value in ("much", True, 10**400)]
    wrong += [{"reward": 1, "turn": 2}, {}, {"reward": 1, "turn": 0, "role": "a"}, {"reward": 1, "role": 3}]

    async def agent(client: Any, post: Any) -> Any:
        for number in range(2):
            await post("state", key=f"room {number}")
            await ask(client)
        assert (await post("reward", reward=0.25, turn=0)).status_code == 200
        assert (await post("reward", reward=2)).status_code == 200
        refused = [await post("reward", **body) for body in wrong] + [
            await post("state"),
            await post("state", key=None),
        ]
        return [answer.status_code for answer in refused]

    played = posts(agent, ["Here.", "There."], outcome=AgentResult())
    assert played.value == [400] * 9
    assert [(step["anchor"], step["reward"]) for step in played.steps] == [("room 0", 0.25), ("room 1", 2.0)]


def test_replies_carry_their_number_and_turns_are_named_by_the_ids_of_their_replies() -> None:
    """Every API, streamed or not; a state and a reward go to the turn that they name, and outcomes name it alike."""

    async def agent(url: str) -> Any:
        root = url.removesuffix("/v1")
        async with openai(url) as client, anthropic(url) as other, httpx.AsyncClient() as web:
            chat = await client.chat.completions.create(model="policy", messages=ASKED)
            chunks = await client.chat.completions.create(model="policy", messages=ASKED, stream=True)
            streamed, *_ = [chunk async for chunk in chunks]
            message = await other.messages.create(model="policy", max_tokens=9, messages=ASKED[1:])
            response = await client.responses.create(model="policy", input=ASKED)
            replies = [chat, streamed, message, response]
            for reply in replies:
                for what, body in (("reward", {"reward": reply.turn}), ("state", {"key": f"room {reply.turn}"})):
                    sent = await web.post(f"{root}/{what}", json=body | {"turn": reply.id})
                    assert sent.status_code == 200
            return [reply.turn for reply in replies], [reply.id for reply in replies]

    played = run(agent, ["A.", "B.", "C.", "D."], outcome=AgentResult(reward=0.0))
    numbers, ids = played.value
    assert numbers == [0, 1, 2, 3]
    assert sorted((step["reward"], step["anchor"]) for step in played.steps) == [(n, f"room {n}") for n in numbers]
    rewards: Any = {**dict(zip(ids[1:], (1.0, 2.0, 3.0), strict=True)), 0: 7.0}
    again = [s for row in rows(played.session, AgentResult(0.0, turn_rewards=rewards)) for s in steps_of(row)]
    assert sorted(step["reward"] for step in again) == [1.0, 2.0, 3.0, 7.0]
    with pytest.raises(AgentFailure, match="a reward of turn resp_other, but the episode has 4"):
        rows(played.session, AgentResult(0.0, turn_rewards={"resp_other": 1.0}))


USE_THE_ID = "calls of (this|the) episode ran at the same time: name the turn by the id of its reply, turn=reply.id"


def test_numbers_and_states_for_the_next_turn_are_refused_once_calls_ran_at_the_same_time() -> None:
    async def agent(client: Any, post: Any) -> Any:
        await post("state", key="start")
        await ask(client, [*ASKED, {"role": "user", "content": "First."}])
        assert (await post("reward", reward=0.5, turn=0)).status_code == 200
        sample, _ = await asyncio.gather(
            *(client.chat.completions.create(model="policy", messages=ASKED) for _ in "ab")
        )
        bodies = [("reward", {"reward": 1, "turn": 0}), ("state", {"key": "x"}), ("state", {"key": "x", "turn": 0})]
        for what, body in bodies:
            answer = await post(what, **body)
            assert answer.status_code == 400
            assert re.search(USE_THE_ID, answer.text)
        for what, body in (("reward", {"reward": 0.25}), ("state", {"key": "here"})):
            assert (await post(what, **body, turn=sample.id)).status_code == 200

    watched = Watched((1, 3))
    played = posts(agent, ["First.", "A.", "B."], wait=watched.together, watch=watched, outcome=AgentResult(reward=1.0))
    steps = sorted(played.steps, key=lambda s: s["step"])
    assert sorted(step["reward"] for step in steps[1:]) in ([0.25, 1.0], [0.0, 1.25])
    assert (steps[0]["reward"], steps[0]["anchor"]) == (0.5, "start")
    assert [step["anchor"] for step in steps].count("here") == 1
    with pytest.raises(AgentFailure, match=f"a reward of a turn by its number, but {USE_THE_ID}"):
        rows(played.session, AgentResult(reward=1.0, turn_rewards={0: 1.0}))


@pytest.mark.parametrize("what", ["state", "reward"])
def test_what_was_posted_while_another_call_ran_is_not_guessed(what: str) -> None:
    """Nobody knows yet that calls will have run at the same time: the episode fails with the reason."""

    async def agent(client: Any, post: Any) -> None:
        await ask(client)
        slow = asyncio.ensure_future(ask(client, [*ASKED, {"role": "user", "content": "Slow."}]))
        while len(watched.script.prompts) < 2:
            await asyncio.sleep(0.01)
        body: dict[str, Any] = {"key": "room"} if what == "state" else {"reward": 1.0, "turn": 0}
        assert (await post(what, **body)).status_code == 200
        gate.set()
        await slow
        await ask(client)

    async def model() -> None:
        if len(watched.script.prompts) == 2:
            await gate.wait()

    gate, watched = asyncio.Event(), Watched()
    words = "a state for the next turn" if what == "state" else "a reward of a turn by its number"
    with pytest.raises(AgentFailure, match=f"{words}, but {USE_THE_ID}"):
        posts(agent, ["A.", "B.", "C."], wait=model, watch=watched)


def test_samples_of_a_request_and_workers_have_credit_by_conversation() -> None:
    """A planner takes eight samples at once and goes on from one; two workers at once; all get the outcome."""

    async def agent(client: Any) -> None:
        samples = await asyncio.gather(*(ask(client) for _ in range(8)))
        past = later(samples[3])

        async def work(name: str, turns: int) -> None:
            messages: list[Any] = [{"role": "system", "content": f"You are {name}."}, ASKED[1]]
            for _ in range(turns):
                reply = await ask(client, messages)
                messages += [spelled(reply.message), {"role": "user", "content": "And now?"}]

        await asyncio.gather(work("Ada", 3), work("Bob", 1), ask(client, past))

    numbers, watched = count(), Watched((8, 11))
    played = chats(agent, lambda prompt: f"Reply {next(numbers)}.", wait=watched.together, watch=watched)
    steps = played.steps
    read = read_rows(
        [f"task_0_{n}" for n in range(len(played.rows))],
        [{}] * len(played.rows),
        [row.extra_fields for row in played.rows],
        torch.nested.nested_tensor([torch.tensor(row.response_mask) for row in played.rows], layout=torch.jagged),
    )
    returns = dict(zip(read.steps.step.tolist(), read.steps.returns(0.5).tolist(), strict=True))
    assert len(steps) == 13
    by_request: dict[int, list[Any]] = {}
    for step in steps:
        by_request.setdefault(step["request"], []).append(step)
    eight = max(by_request.values(), key=len)
    assert [returns[step["step"]] for step in eight] == [0.5] * 8
    rest = sorted(returns[step["step"]] for step in steps if step not in eight)
    assert rest == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert sum(step["reward"] for step in steps) == 1.0
    unused = [step for step in eight if step["extra"]["next_anchor"] == "(end)"]
    assert len(unused) == 7
    assert len({step["extra"]["chain"] for step in eight}) == 8


@pytest.mark.parametrize("named", [True, False])
def test_a_sub_agent_counts_its_steps_along_the_reply_that_began_it(named: bool) -> None:
    """Named by a header in the id of any API, or by the task in its call; the planner goes on meanwhile."""
    task = "the red door"

    async def agent(client: Any) -> None:
        plan = await client.chat.completions.create(model="policy", messages=ASKED, tools=[LOOK])
        header = {"X-Turnkey-Parent": plan.id} if named else {}
        with pytest.raises(BadRequestError, match="X-Turnkey-Parent: this episode has no reply 'other'"):
            await ask(client, [ASKED[1]], extra_headers={"X-Turnkey-Parent": "other"})

        async def work() -> None:
            messages: list[Any] = [{"role": "user", "content": "Work." if named else f"Look at {task}."}]
            for _ in range(3):
                reply = await ask(client, messages, extra_headers=header)
                messages += [spelled(reply.message), {"role": "user", "content": "And now?"}]

        result = {"role": "tool", "tool_call_id": plan.choices[0].message.tool_calls[0].id, "content": "done"}
        after = [*ASKED, spelled(plan.choices[0].message), result]
        await asyncio.gather(work(), ask(client, after, tools=[LOOK]))

    numbers, watched = count(), Watched((1, 3))

    def model(prompt: str) -> str:
        return called(f'{{"place": "{task}"}}') if next(numbers) == 0 else "Fine."

    played = chats(agent, model, wait=watched.together, watch=watched)
    steps = sorted(played.steps, key=lambda step: step["step"])
    work = [step for step in steps if "look" not in step["action"] and step["extra"]["chain"] == 1]
    (answer,) = (step for step in steps if step["extra"]["chain"] == 0 and step["step"])
    assert [step["after"] for step in work] == [0, *(step["step"] for step in work[:2])]
    assert (answer["after"], answer["extra"]["depth"]) == (0, 1)
    assert steps[0]["extra"]["next_anchor"] == answer["anchor"]
    assert [step["extra"]["depth"] for step in work] == [0, 1, 2]


@pytest.mark.parametrize("how", ["train", "mask"])
def test_replies_that_the_agent_did_not_use_are_trained_or_masked(how: Any) -> None:
    """A reward that was reported for one is left out with it."""

    async def agent(client: Any, post: Any) -> None:
        samples = [await client.chat.completions.create(model="policy", messages=ASKED) for _ in range(3)]
        await post("reward", reward=0.25, turn=samples[0].id)
        await ask(client, later(samples[1].choices[0]))

    played = posts(agent, ["A.", "B.", "C.", "D."], limits=replace(LIMITS, discarded=how))
    trained = ["B.", "D."] if how == "mask" else ["A.", "B.", "C.", "D."]
    assert sorted(step["action"] for step in played.steps) == trained
    assert sum(step["reward"] for step in played.steps) == (1.0 if how == "mask" else 1.25)
