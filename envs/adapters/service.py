"""Customer service of a shop: an agent with tools, a policy, a customer, and a database whose end state counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

from verl_turnkey.envs.adapters._shop import KINDS, WINDOW, Case, Kind, Reason, Record, Request, draw, forbidden
from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count, is_number
from verl_turnkey.envs.tools import ToolEnv, call_text, tool
from verl_turnkey.envs.users import EndpointUser, Line

WORDS = {
    "email": r"e-?mail",
    "order": r"which (item|order)|what order|order number",
    "cancel": r"why|reason",
    "address": r"address",
    "payment": r"payment|pay\b|card",
    "exchange": r"colou?r|which one|instead",
    "confirm": r"confirm|shall i|should i|may i (?!ask|have|know|see)|proceed|go ahead|is that right|do you agree",
}
"""expressions for what a message asks for; the names of kinds ask for the detail of such a request"""
DEEDS = {
    "cancel": r"cancel",
    "address": r"address",
    "payment": r"payment|pay\b",
    "return": r"return",
    "exchange": r"exchange",
    "refund": r"refund",
}
"""expressions for the change that a message announces"""
TOOLS: dict[str, str] = {
    "cancel": "cancel_order",
    "address": "change_address",
    "payment": "change_payment",
    "return": "return_item",
    "exchange": "exchange_item",
    "refund": "refund_item",
}
"""the tools that make the changes"""
ORDER = re.compile(r"\bO\d{3}\b", re.IGNORECASE)
EMAIL = re.compile(r"e-?mail address", re.IGNORECASE)
"""which asks for no postal address"""
YES, NO = "Yes, please.", "No, that is not what I want."
PARDON, WHICH = "I do not understand.", "Which order, and which change?"


def announced(message: str) -> set[tuple[str, str]]:
    """Order and change of each pair that a message may ask the customer to confirm."""
    text = EMAIL.sub("email", message.lower())
    orders = {order.upper() for order in ORDER.findall(message)}
    return {(order, kind) for order in orders for kind, deed in DEEDS.items() if re.search(deed, text)}


class RulesCustomer:
    """Answers the last line of a dialogue, whatever was said before; never at random."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def reply(self, scenario: str, dialogue: Sequence[Line]) -> str:
        """As :meth:`verl_turnkey.envs.users.User.reply`; the scenario is the case's."""
        message = dialogue[-1].text
        text = EMAIL.sub("email", message.lower())
        topics = {topic for topic, words in WORDS.items() if re.search(words, text)}
        answers = []
        if "confirm" in topics and (pairs := announced(message)):
            wanted = {(request.order, request.kind) for request in self._case.requests}
            answers.append(YES if pairs & wanted else NO)
            topics &= {"email", "cancel"}  # what else is named belongs to the change
        if "email" in topics:
            answers.append(f"My email address is {self._case.customer['email']}.")
        answers += [words for request in self._case.requests if (words := self._of(request, topics))]
        if not answers:
            answers = [WHICH] if "confirm" in topics else [PARDON, *(request.wish for request in self._case.requests)]
        return " ".join(answers)

    def _of(self, request: Request, topics: set[str]) -> str:
        if request.kind in topics and request.answer:
            others = len(self._case.requests) > 1
            return f"For the {request.label}: {request.answer}" if others else request.answer
        if "order" in topics:
            return f"It is order {request.order}." if self._case.details else f"It is the one with the {request.label}."
        return ""


POLICY = f"""\
You work for the customer service of a shop. You talk to one customer, and change the database by tools.
1. Find the customer by email address before you change anything.
2. Before each change, tell the customer the order number and the change, and ask to confirm it.
3. An order can be cancelled, or get another address or payment method, while it is pending. A gift card must cover \
the total of the order.
4. An item can be returned, exchanged or refunded up to {WINDOW} days after delivery. An item on final sale cannot be \
returned. An exchange is for another colour of the same product that is in stock. A refund is for an item that arrived \
damaged, of its price.
5. Do what the customer asks for and nothing else. What the policy forbids, note with refuse_request.
6. Close the case when nothing is left to do."""

QUESTIONS = {
    "cancel": "Why do you want to cancel the order?",
    "address": "What is the new address?",
    "payment": "Which payment method do you want to use?",
    "exchange": "Which colour would you like?",
}
"""what the oracle asks for the detail of a request"""


class ServiceText(ToolEnv):
    """Do what a customer asks for, as far as the policy allows, and close the case.

    Actions are calls of tools, as JSON or as text (see ``verl_turnkey.envs.tools``); a turn without a call speaks to
    the customer, as the tool ``talk`` does. The seed determines the database, the customer and the requests.

    Args:
        kinds: of requests: cancel, address, payment, return, exchange, refund; null: all.
        requests: how many the customer has, 1 to 3, each about another order.
        orders: of each customer, from ``requests`` to 5.
        forbid: share of requests that the policy forbids, 0 to 1.
        details: whether the customer says email address and order number at once.
        subgoal_reward: reward of each subgoal when it is reached: the customer is found; and of each request the order
            is looked up, the change is confirmed, and it is done (or refused).
        user: who plays the customer. null: rules; or the keys of a model's endpoint (``url``, ``model``,
            ``api_key_env``, ``params``, ``timeout``, ``retries``, ...); ``{"url": "policy"}``: the model that is
            trained, which answers untrained.
        max_steps: steps after which the episode is truncated.

    The reward is 1 for a closed case if the database is as it should be and no rule of the policy was broken, which is
    ``success``, else 0. ``state_key`` is a hash of the database and of what counts beside it: who was found, what was
    confirmed, whether a rule was broken; with a model as the customer also of the dialogue, and with
    ``subgoal_reward`` of the subgoals. ``info["extra"]`` counts ``policy_violations`` and ``user_turns`` of the step.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "thread_safe": True, "memory_mb": 1, "deepcopy": True}

    def __init__(
        self,
        kinds: Sequence[Kind] | None = None,
        requests: int = 1,
        orders: int = 3,
        forbid: float = 0.25,
        details: bool = False,
        subgoal_reward: float = 0.0,
        user: Mapping[str, Any] | None = None,
        max_steps: int | None = 20,
    ) -> None:
        super().__init__(max_steps)
        listed = kinds is None or (isinstance(kinds, list | tuple) and kinds and all(kind in KINDS for kind in kinds))
        check(bool(listed), "kinds", f"null or a list of {', '.join(KINDS)}", kinds)
        check(is_count(requests) and requests <= 3, "requests", "an integer from 1 to 3", requests)
        within = is_count(orders) and requests <= orders <= 5
        check(within, "orders", f"an integer from requests ({requests}) to 5", orders)
        for name, value in (("forbid", forbid), ("subgoal_reward", subgoal_reward)):
            check(is_number(value) and 0 <= value <= 1, name, "a number from 0 to 1", value)
        check(isinstance(details, bool), "details", "true or false", details)
        check(user is None or isinstance(user, Mapping), "user", "null or a mapping with url and model", user)
        self._drawn: dict[str, Any] = {
            "kinds": tuple(kinds or KINDS),
            "requests": requests,
            "orders": orders,
            "forbid": forbid,
            "details": details,
        }
        self._subgoal_reward = subgoal_reward
        self._model = None if user is None else EndpointUser(user)

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self.case: Case = draw(seed, **self._drawn)
        self.shop = deepcopy(self.case.shop)
        self._expected = self.case.expected
        self._customer = RulesCustomer(self.case) if self._model is None else self._model
        self.dialogue = [Line("user", self.case.opening)]
        self.verified: set[str] = set()
        """customers that were found by their email address"""
        self.confirmed: set[tuple[str, str]] = set()
        """order and change"""
        self.known: set[str] = {"email", *(r.order for r in self.case.requests)} if self.case.details else set()
        """what the agent can know: "email", order numbers, "seen ORDER", "detail ORDER", "stock ORDER" """
        self.broken = False
        """a rule of the policy was broken in this episode"""
        self._subgoals: set[str] = set()
        self._counts = {"policy_violations": 0, "user_turns": 0}
        return self.result(f"Customer: {self.case.opening}"), POLICY

    def act(self, action: str) -> StepResult:
        self._counts = {"policy_violations": 0, "user_turns": 0}
        state = super().act(action)
        return replace(state, extra={**state.extra, **self._counts})

    def result(self, observation: str) -> StepResult:
        success = self.ended and not self.broken and self.shop == self._expected
        reached = self._reached() - self._subgoals
        self._subgoals |= reached
        return StepResult(
            observation,
            self._key(),
            reward=float(success) + self._subgoal_reward * len(reached),
            terminated=self.ended,
            success=success,
        )

    def reply(self, text: str) -> str:
        return self.talk(text)

    def _key(self) -> str:
        marks = (sorted(self.verified), sorted(self.confirmed), self.broken, self.ended)
        subgoals = sorted(self._subgoals) if self._subgoal_reward else ()
        return digest(self.case.opening, self.shop.content(), marks, subgoals, self.dialogue if self._model else ())

    def _reached(self) -> set[str]:
        """Subgoals of the present state."""
        customer_id = next(iter(self.shop.customers))
        reached = {"customer"} if customer_id in self.verified else set()
        for request in self.case.requests:
            order = request.order
            parts = {
                "seen": f"seen {order}" in self.known,
                "confirmed": (order, request.kind) in self.confirmed,
                "done": self.shop.orders[order] == self._expected.orders[order],
            }
            reached |= {f"{part} {order}" for part, there in parts.items() if there}
        return reached

    # --- tools: talk and look up --------------------------------------------------------------------------------------

    @tool
    def talk(self, message: str) -> str:
        """Say something to the customer, and get the answer."""
        self._counts["user_turns"] += 1
        self.dialogue.append(Line("agent", message))
        answer = self._customer.reply(self.case.scenario, self.dialogue)
        self.dialogue.append(Line("user", answer))
        if answer.lower().startswith("yes"):
            self.confirmed |= announced(message) & {(order, kind) for order in self.shop.orders for kind in KINDS}
        if self.case.customer["email"] in answer:
            self.known.add("email")
        self.known |= {f"detail {r.order}" for r in self.case.requests if r.answer and r.answer in answer}
        return f"Customer: {answer}"

    @tool
    def find_customer(self, email: str) -> Record:
        """Find a customer by email address: id, name, address, payment methods with the balance of gift cards."""
        customer_id = self.shop.by_email(email)
        self.verified.add(customer_id)
        return {"customer_id": customer_id, **self.shop.customers[customer_id]}

    @tool
    def list_orders(self, customer_id: str) -> list[Record]:
        """List the orders of a customer, with their status and items."""
        listed = []
        for order_id in self.shop.orders_of(customer_id):
            order = self.shop.orders[order_id]
            self.known.add(order_id)
            listed.append(
                {"order_id": order_id, "status": order["status"], "items": [*map(self.shop.label, order["items"])]}
            )
        return listed

    @tool
    def order_details(self, order_id: str) -> Record:
        """Show an order: status, days since delivery, address, payment method, items with id, price and final sale."""
        order = self.shop.order(order_id)
        self.known.add(f"seen {order_id}")
        items = [{"item_id": item, "name": self.shop.label(item), **about} for item, about in order["items"].items()]
        return {"order_id": order_id, **order, "items": items}

    @tool
    def search_catalogue(self, product: str) -> list[Record]:
        """Find products by name: item id, colour, price and stock of each colour."""
        name = product.strip().lower()
        matches = [
            {"item_id": item, **about} for item, about in self.shop.catalogue.items() if name in about["product"]
        ]
        item_ids = {about["item_id"] for about in matches}
        self.known |= {f"stock {r.order}" for r in self.case.requests if r.kind == "exchange" and r.detail in item_ids}
        return matches

    # --- tools: change ------------------------------------------------------------------------------------------------

    @tool
    def cancel_order(self, order_id: str, reason: Reason) -> None:
        """Cancel an order, for the reason that the customer gives."""
        with self._change("cancel", order_id):
            self.shop.cancel(order_id, reason)

    @tool
    def change_address(self, order_id: str, address: str) -> None:
        """Send an order to another address."""
        with self._change("address", order_id):
            self.shop.change_address(order_id, address)

    @tool
    def change_payment(self, order_id: str, payment: str) -> None:
        """Pay for an order with another payment method of the customer."""
        with self._change("payment", order_id, detail=payment):
            self.shop.change_payment(order_id, payment)

    @tool
    def return_item(self, order_id: str, item_id: str) -> None:
        """Take back an item of a delivered order; its price goes back to the payment method of the order."""
        with self._change("return", order_id, item_id):
            self.shop.give_back(order_id, item_id)

    @tool
    def exchange_item(self, order_id: str, item_id: str, new_item_id: str) -> None:
        """Exchange an item of a delivered order for another one."""
        with self._change("exchange", order_id, item_id, new_item_id):
            self.shop.exchange(order_id, item_id, new_item_id)

    @tool
    def refund_item(self, order_id: str, item_id: str, amount: int) -> None:
        """Refund an amount for an item of a delivered order, which the customer keeps."""
        with self._change("refund", order_id, item_id):
            self.shop.refund(order_id, item_id, amount)

    @tool
    def refuse_request(self, order_id: str, request: Kind) -> None:
        """Note that a request of the customer is refused, because the policy forbids it."""
        self.shop.refuse(order_id, request)
        self._broke(self.shop.orders[order_id]["customer"] not in self.verified)

    @tool
    def close_case(self) -> None:
        """End the conversation, when nothing is left to do."""
        self.ended = True

    # --- the policy ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _change(self, kind: Kind, order_id: str, item_id: str = "", detail: str = "") -> Iterator[None]:
        """Counts the rules that a change breaks, unless the database refuses it."""
        before = deepcopy(self.shop)
        yield
        self._broke(before.orders[order_id]["customer"] not in self.verified)
        self._broke((order_id, kind) not in self.confirmed)
        self._broke(forbidden(before, kind, order_id, item_id, detail) is not None)

    def _broke(self, rule_is_broken: bool) -> None:
        self._counts["policy_violations"] += rule_is_broken
        self.broken = self.broken or rule_is_broken

    # --- the oracle ---------------------------------------------------------------------------------------------------

    def oracle(self) -> list[str] | None:
        """Calls that solve the case from the present state: asks and looks up before it acts, as an agent must."""
        plan, email = [], self.case.customer["email"]
        customer_id = next(iter(self.shop.customers))
        if customer_id not in self.verified:
            if "email" not in self.known:
                plan.append(call_text("talk", message="What is your email address?"))
            plan.append(call_text("find_customer", email=email))
        left = [r for r in self.case.requests if self.shop.orders[r.order] != self._expected.orders[r.order]]
        if any(request.order not in self.known for request in left):
            plan.append(call_text("list_orders", customer_id=customer_id))
        for request in left:
            plan += self._solve(request)
        plan.append(call_text("close_case"))
        return plan if self.max_steps is None or self._steps + len(plan) <= self.max_steps else None

    def _solve(self, request: Request) -> Iterator[str]:
        order = request.order
        if f"seen {order}" not in self.known:
            yield call_text("order_details", order_id=order)
        if request.answer and request.depends_on_detail and f"detail {order}" not in self.known:
            yield call_text("talk", message=QUESTIONS[request.kind])
        if request.kind == "exchange" and request.depends_on_detail and f"stock {order}" not in self.known:
            yield call_text("search_catalogue", product=self.shop.catalogue[request.item]["product"])
        if request.why_not:
            yield call_text("refuse_request", order_id=order, request=request.kind)
            return
        if (order, request.kind) not in self.confirmed:
            yield call_text("talk", message=f"Please confirm: {request.kind} for order {order}.")
        yield call_text(TOOLS[request.kind], order_id=order, **request.arguments)
