"""The customer of the customer service, and the cases that seeds draw."""

from __future__ import annotations

import copy
import json

import pytest
from judge_server import JudgeServer

from verl_turnkey.envs import EnvironmentFailure, make
from verl_turnkey.envs.adapters.service.cases import draw
from verl_turnkey.envs.adapters.service.customer import NO, PARDON, WHICH, YES, RulesCustomer
from verl_turnkey.envs.adapters.service.env import ServiceText
from verl_turnkey.envs.adapters.service.shop import KINDS, forbidden
from verl_turnkey.envs.hosting.runner import EnvRunner
from verl_turnkey.envs.tools import call_text
from verl_turnkey.envs.users import Line

DRAWN = {"kinds": KINDS, "requests": 1, "orders": 3, "forbid": 0.25, "details": False}


def service(**kwargs) -> ServiceText:
    env = make("turnkey/Service-v0", kwargs).unwrapped
    env.reset(seed=0)
    return env


def ask(case, message: str) -> str:
    return RulesCustomer(case).reply(case.scenario, [Line("agent", message)])


def test_the_customer_answers_what_is_asked():
    case = draw(0, **{**DRAWN, "kinds": ("address",), "forbid": 0.0})
    request = case.requests[0]
    email = f"My email address is {case.customer['email']}."
    assert ask(case, "May I have your email address, please?") == email
    assert ask(case, "To which address shall we send it?") == request.answer
    assert ask(case, "Tell me your e-mail and the new address.") == f"{email} {request.answer}"
    assert ask(case, "Which order is it?") == f"It is the one with the {request.label}."
    assert ask(case, "Lovely weather!") == f"{PARDON} {request.wish}"
    assert ask(case, "Why?") == f"{PARDON} {request.wish}"


def test_the_customer_confirms_what_they_want_and_nothing_else():
    case = draw(0, **{**DRAWN, "kinds": ("address",), "forbid": 0.0})
    order = case.requests[0].order
    assert ask(case, f"Shall I change the address of order {order.lower()}?") == YES
    assert ask(case, f"Shall I cancel order {order}?") == NO
    assert ask(case, "Please confirm: address for order O000.") == NO
    assert ask(case, "Shall I go ahead?") == WHICH


def test_a_question_that_sounds_like_a_confirmation_is_answered():
    case = draw(0, **{**DRAWN, "kinds": ("cancel",), "forbid": 0.0})
    request, email = case.requests[0], f"My email address is {case.customer['email']}."
    assert ask(case, f"To confirm who you are for order {request.order}: what is your email address?") == email
    assert ask(case, f"May I ask why you want to cancel order {request.order}?") == request.answer
    assert ask(case, f"Shall I cancel order {request.order}, and why?") == f"{YES} {request.answer}"


def test_a_customer_with_several_requests_says_which_an_answer_belongs_to():
    case = draw(3, **{**DRAWN, "kinds": ("address",), "requests": 2, "forbid": 0.0})
    answer = ask(case, "What is the new address?")
    assert answer == " ".join(f"For the {request.label}: {request.answer}" for request in case.requests)


def test_with_details_the_customer_begins_with_them():
    case = draw(0, **{**DRAWN, "details": True})
    assert case.customer["email"] in case.opening
    assert case.requests[0].order in case.opening
    assert case.customer["email"] not in draw(0, **DRAWN).opening


@pytest.mark.parametrize("form", ["talk", "text"])
def test_a_turn_without_a_call_is_said_to_the_customer(form):
    env = service()
    message = "What is your email address?"
    action = call_text("talk", message=message) if form == "talk" else json.dumps({"text": message})
    observation, *_, info = env.step(action)
    assert observation == f"Customer: My email address is {env.case.customer['email']}."
    assert info["extra"]["user_turns"] == 1
    assert not info["invalid"]


def test_a_model_can_play_the_customer():
    def answer(question):
        message = question["messages"][-1]["content"]
        return "Yes, do." if "confirm" in message else f"I am {question['messages'][0]['content'][8:11]}"

    with JudgeServer(answer) as server:
        env = service(kinds=["return"], forbid=0.0, user={"url": server.url, "model": "m"}, details=True)
        plan = env.oracle()
        clone = copy.deepcopy(env)
        for played in (env, clone):
            assert [played.step(action)[4]["success"] for action in plan][-1]
        assert server.calls == 2  # one question of each
    first = server.questions[0]["messages"]
    assert first[0]["content"].startswith(f"You are {env.case.customer['name']}, a customer")
    assert env.case.requests[0].order in first[0]["content"]
    assert first[1] == {"role": "assistant", "content": env.case.opening}


def test_what_was_said_is_part_of_the_state_of_a_customer_that_a_model_plays():
    with JudgeServer(lambda question: "I see.") as server:
        env = service(user={"url": server.url, "model": "m"})
        keys = {env.step(call_text("talk", message=message))[4]["state_key"] for message in ("Hello!", "Hello?")}
    assert len(keys) == 2


def test_a_customer_that_does_not_answer_is_a_failure_of_the_environment_and_no_reward():
    with JudgeServer() as server:
        server.replies = [(500, {}, "out of memory")] * 9
        user = {"url": server.url, "model": "m", "retries": 1, "backoff": 0.001}
        runner = EnvRunner()  # as hosts play it
        runner.start("turnkey/Service-v0", {"user": user}, 0)
        with pytest.raises(EnvironmentFailure, match=r"the simulated user .* in 2 attempts") as failure:
            runner.step('{"text": "Hello!"}')
    assert failure.value.kind == "user"


# --- the tasks --------------------------------------------------------------------------------------------------------


def test_seeds_are_different_tasks():
    cases = [draw(seed, **DRAWN) for seed in range(2000)]
    assert len({(case.opening, case.shop.content()) for case in cases}) == len(cases)


def test_a_share_of_the_requests_is_forbidden_of_every_kind():
    requests = [draw(seed, **DRAWN).requests[0] for seed in range(1200)]
    for kind in KINDS:
        denied = [request.why_not is not None for request in requests if request.kind == kind]
        assert len(denied) > 100
        assert 0.15 < sum(denied) / len(denied) < 0.35
    assert not any(draw(seed, **{**DRAWN, "forbid": 0.0}).requests[0].why_not for seed in range(200))
    assert all(draw(seed, **{**DRAWN, "forbid": 1.0}).requests[0].why_not for seed in range(200))


def test_what_was_made_up_for_one_request_is_known_to_the_others():
    for seed in range(200):
        case = draw(seed, kinds=("payment", "exchange"), requests=3, orders=3, forbid=0.5, details=False)
        for request in case.requests:
            why_not = forbidden(case.shop, request.kind, request.order, request.item, request.detail)
            assert request.why_not == why_not


def test_an_item_names_one_order_of_a_customer():
    for seed in range(100):
        case = draw(seed, **{**DRAWN, "orders": 5})
        for customer in case.shop.customers:
            items = [item for order in case.shop.orders_of(customer) for item in case.shop.orders[order]["items"]]
            assert len({case.shop.label(item) for item in items}) == len(items)
