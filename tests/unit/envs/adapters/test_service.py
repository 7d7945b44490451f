"""Customer service of a shop."""

import copy
import json

import pytest
from judge_server import JudgeServer

from verl_turnkey.envs import EnvironmentFailure, make
from verl_turnkey.envs.adapters._shop import KINDS, draw, forbidden
from verl_turnkey.envs.adapters.service import NO, PARDON, WHICH, YES, RulesCustomer, ServiceText
from verl_turnkey.envs.hosting.runner import EnvRunner
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.tools import call_text, read_turn
from verl_turnkey.envs.users import Line

ID = "turnkey/Service-v0"
DRAWN = {"kinds": KINDS, "requests": 1, "orders": 3, "forbid": 0.25, "details": False}
LONG = {"requests": 3, "orders": 5, "forbid": 0.5, "max_steps": None}


def service(kwargs=(), seed=0) -> ServiceText:
    env = make(ID, dict(kwargs)).unwrapped
    env.reset(seed=seed)
    return env


def of_kind(kind: str, denied: bool = False, **kwargs) -> ServiceText:
    return service({"kinds": [kind], "forbid": float(denied), "max_steps": None, **kwargs})


def run(env: ServiceText, actions: list[str]) -> list[tuple]:
    return [env.step(action) for action in actions]


@pytest.mark.parametrize("kwargs", [{}, LONG, {"details": True}, *({"kinds": [kind], "forbid": 0.5} for kind in KINDS)])
def test_the_oracle_wins_without_breaking_a_rule(kwargs):
    for seed in range(40):
        env = service(kwargs, seed)
        answers = run(env, env.oracle())
        assert [answer[4]["success"] for answer in answers[:-1]] == [False] * (len(answers) - 1)
        _, reward, terminated, truncated, info = answers[-1]
        assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
        assert not any(answer[4]["invalid"] or answer[4]["extra"]["policy_violations"] for answer in answers)


@pytest.mark.parametrize(("requests", "fewest", "most"), [(1, 6, 9), (2, 8, 14), (3, 10, 18)])
def test_the_oracle_takes_as_many_turns_as_the_page_says(requests, fewest, most):
    lengths = [len(service({"requests": requests}, seed).oracle()) for seed in range(100)]
    assert (min(lengths), max(lengths)) == (fewest, most)


def test_the_oracle_goes_on_from_where_the_episode_is():
    env = service({"kinds": ["exchange"], "forbid": 0.0})
    steps = 0
    while not env.ended:
        *_, info = env.step(env.oracle()[0])
        steps += 1
    assert info["success"]
    assert steps == len(service({"kinds": ["exchange"], "forbid": 0.0}).oracle())
    assert service({"max_steps": 3}).oracle() is None


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_customers_yes_a_change_breaks_the_policy_and_costs_the_success(kind):
    env = of_kind(kind)
    plan = env.oracle()
    [confirm] = [action for action in plan if "confirm" in action]
    answers = run(env, [action for action in plan if action != confirm])
    assert env.shop == env.case.expected
    assert sum(answer[4]["extra"]["policy_violations"] for answer in answers) == 1
    assert answers[-1][1:3] == (0.0, True)
    assert not answers[-1][4]["success"]


def test_a_change_for_somebody_who_was_not_found_breaks_the_policy():
    env = of_kind("return", details=True)
    plan = env.oracle()
    assert plan[0].startswith("find_customer")
    answers = run(env, plan[1:])
    assert sum(answer[4]["extra"]["policy_violations"] for answer in answers) == 1
    assert not answers[-1][4]["success"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_policy_forbids_must_be_refused(kind):
    env = of_kind(kind, denied=True)
    assert env.case.requests[0].why_not
    plan = env.oracle()
    assert any(action.startswith("refuse_request") for action in plan)
    refused = run(env, plan)
    assert refused[-1][4]["success"]
    ignored = of_kind(kind, denied=True)
    assert not run(ignored, [action for action in plan if not action.startswith("refuse_request")])[-1][4]["success"]


def test_doing_what_is_forbidden_is_possible_counted_and_lost():
    env = of_kind("refund", denied=True)
    request = env.case.requests[0]
    run(env, env.oracle()[:-2])
    confirm = call_text("talk", message=f"May I confirm the refund for order {request.order}?")
    refund = call_text("refund_item", order_id=request.order, item_id=request.item, amount=int(request.detail))
    answers = run(env, [confirm, refund, "close_case()"])
    assert answers[0][0] == f"Customer: {YES}"
    assert answers[1][4]["extra"]["policy_violations"] == 1
    assert not answers[1][4]["invalid"]
    assert not answers[2][4]["success"]


def test_a_wrong_amount_is_a_side_effect_that_costs_the_success():
    env = of_kind("refund")
    plan = env.oracle()
    request = env.case.requests[0]
    wrong = call_text("refund_item", order_id=request.order, item_id=request.item, amount=int(request.detail) + 1)
    answers = run(env, [*plan[:-2], wrong, plan[-1]])
    assert sum(answer[4]["extra"]["policy_violations"] for answer in answers) == 0
    assert answers[-1][2]
    assert not answers[-1][4]["success"]


def test_a_change_that_nobody_asked_for_costs_the_success():
    env = of_kind("cancel")
    other = next(order for order in env.shop.orders if order != env.case.requests[0].order)
    plan = env.oracle()
    extra = call_text("refuse_request", order_id=other, request="refund")
    assert not run(env, [*plan[:-1], extra, plan[-1]])[-1][4]["success"]


@pytest.mark.parametrize(
    "action",
    [
        call_text("cancel_order", order_id="O0", reason="no longer needed"),
        call_text("change_payment", order_id="{order}", payment="cash"),
        call_text("return_item", order_id="{order}", item_id="I0"),
        call_text("find_customer", email="nobody@mail.com"),
        call_text("list_orders", customer_id="C0"),
        call_text("order_details", order_id=""),
        call_text("cancel_order", order_id="{order}", reason="because"),
    ],
)
def test_what_the_database_refuses_changes_nothing_and_breaks_no_rule(action):
    env = of_kind("cancel")
    before = env.step("nonsense")[4]["state_key"]
    *_, info = env.step(action.replace("{order}", env.case.requests[0].order))
    assert info["invalid"]
    assert info["results"][0]["is_error"]
    assert info["extra"]["policy_violations"] == 0
    assert info["state_key"] == before


@pytest.mark.parametrize("kind", ["return", "refund", "exchange"])
def test_an_item_is_given_back_once(kind):
    env = of_kind(kind)
    plan = env.oracle()
    run(env, plan[:-1])
    *_, info = env.step(plan[-2])
    assert info["results"][0]["is_error"]
    assert env.shop == env.case.expected


def test_looking_something_up_leaves_the_state_as_it_was():
    env = service()
    keys = {env.step("nonsense")[4]["state_key"]}
    customer, order = next(iter(env.shop.customers)), next(iter(env.shop.orders))
    for action in (
        call_text("list_orders", customer_id=customer),
        call_text("order_details", order_id=order),
        call_text("search_catalogue", product="mug"),
        call_text("talk", message="Hello, what can I do for you?"),
    ):
        keys.add(env.step(action)[4]["state_key"])
    assert len(keys) == 1


def test_every_change_leads_to_another_state():
    env = service({"requests": 3, "forbid": 0.0, "max_steps": None})
    plan = env.oracle()
    keys = [env.step(action)[4]["state_key"] for action in plan]
    reading = ("talk", "list_orders", "order_details", "search_catalogue")
    changes = [n for n, action in enumerate(plan) if not action.startswith(reading)]
    assert len({keys[n] for n in changes}) == len(changes)


def test_subgoals_pay_once_and_are_part_of_the_state():
    env = of_kind("exchange", subgoal_reward=0.05)
    plan = env.oracle()
    rewards = [answer[1] for answer in run(env, [action for action in plan for _ in range(1 + ("talk" in action))])]
    assert sum(rewards) == pytest.approx(1 + 4 * 0.05)
    paying, plain = of_kind("exchange", subgoal_reward=0.05), of_kind("exchange")
    assert paying.oracle() == plan
    seen = call_text("order_details", order_id=paying.case.requests[0].order)
    keys = [env.step(action)[4]["state_key"] for env in (paying, plain) for action in ("nonsense", seen)]
    assert keys[0] != keys[1]
    assert keys[2] == keys[3]


def test_the_template_names_every_tool_and_its_parameters():
    template = load_template("service")
    for tool in ServiceText.tools():
        function = tool["function"]
        assert f"{function['name']}({', '.join(function['parameters']['properties'])})" in template
        for parameter in function["parameters"]["properties"].values():
            assert all(f'"{choice}"' in template for choice in parameter.get("enum", ()))
    example = template.split("such as ")[1].split(". ")[0]
    assert read_turn(example)[0].name == "order_details"


def ask(case, message: str) -> str:
    return RulesCustomer(case).reply(case.scenario, [Line("agent", message)])


def test_what_the_customer_answers_and_confirms():
    case = draw(0, **{**DRAWN, "kinds": ("address",), "forbid": 0.0})
    request = case.requests[0]
    email = f"My email address is {case.customer['email']}."
    assert ask(case, "May I have your email address, please?") == email
    assert ask(case, "To which address shall we send it?") == request.answer
    assert ask(case, "Tell me your e-mail and the new address.") == f"{email} {request.answer}"
    assert ask(case, "Which order is it?") == f"It is the one with the {request.label}."
    assert ask(case, "Lovely weather!") == f"{PARDON} {request.wish}"
    assert ask(case, "Why?") == f"{PARDON} {request.wish}"
    case = draw(0, **{**DRAWN, "kinds": ("address",), "forbid": 0.0})
    order = case.requests[0].order
    assert ask(case, f"Shall I change the address of order {order.lower()}?") == YES
    assert ask(case, f"Shall I cancel order {order}?") == NO
    assert ask(case, "Please confirm: address for order O000.") == NO
    assert ask(case, "Shall I go ahead?") == WHICH
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
        env = service({"kinds": ["return"], "forbid": 0.0, "user": {"url": server.url, "model": "m"}, "details": True})
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
        env = service({"user": {"url": server.url, "model": "m"}})
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
