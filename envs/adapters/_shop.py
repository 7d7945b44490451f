"""The shop of the customer service: its database, and the cases that a seed draws."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl_turnkey.envs.errors import ToolError

Record = dict[str, Any]
Kind = Literal["cancel", "address", "payment", "return", "exchange", "refund"]
KINDS: tuple[Kind, ...] = ("cancel", "address", "payment", "return", "exchange", "refund")
Reason = Literal["no longer needed", "ordered by mistake", "found cheaper"]
REASONS: tuple[Reason, ...] = ("no longer needed", "ordered by mistake", "found cheaper")
WINDOW = 30
"""days after delivery in which items can be returned, exchanged or refunded"""
NO_COVER, NO_STOCK = "the gift card does not cover it", "the other one is not in stock"


@dataclass
class Shop:
    """All records by id. The methods refuse what makes no sense, but do what the policy forbids."""

    customers: dict[str, Record] = field(default_factory=dict)
    """name, email, address, payments: method -> balance of a gift card, or null for a bank card"""
    orders: dict[str, Record] = field(default_factory=dict)
    """customer, status, delivered_days_ago, address, payment, items: item -> price, final_sale, state"""
    catalogue: dict[str, Record] = field(default_factory=dict)
    """item -> product, colour, price, stock"""

    def content(self) -> str:
        """Everything as text, equal for equal databases."""
        return json.dumps([self.customers, self.orders, self.catalogue], sort_keys=True)

    def label(self, item: str) -> str:
        """What people call an item: "blue mug"."""
        return f"{self.catalogue[item]['colour']} {self.catalogue[item]['product']}"

    # --- look up ------------------------------------------------------------------------------------------------------

    def customer(self, customer_id: str) -> Record:
        if customer_id not in self.customers:
            raise ToolError(f"there is no customer {customer_id!r}")
        return self.customers[customer_id]

    def by_email(self, email: str) -> str:
        """The id of the customer with this address."""
        for customer_id, customer in self.customers.items():
            if customer["email"] == email.strip().lower():
                return customer_id
        raise ToolError(f"there is no customer with the email address {email!r}")

    def orders_of(self, customer_id: str) -> Iterator[str]:
        self.customer(customer_id)
        return (order_id for order_id, order in self.orders.items() if order["customer"] == customer_id)

    def order(self, order_id: str) -> Record:
        if order_id not in self.orders:
            raise ToolError(f"there is no order {order_id!r}")
        return self.orders[order_id]

    def bought(self, order_id: str, item_id: str) -> Record:
        """An item of an order, as it was bought."""
        items = self.order(order_id)["items"]
        if item_id not in items:
            raise ToolError(f"order {order_id} has no item {item_id!r}; its items are {', '.join(items)}")
        return items[item_id]

    def total(self, order_id: str) -> int:
        return sum(item["price"] for item in self.order(order_id)["items"].values())

    # --- change -------------------------------------------------------------------------------------------------------

    def cancel(self, order_id: str, reason: str) -> None:
        self._open(order_id).update(status="cancelled", reason=reason)

    def change_address(self, order_id: str, address: str) -> None:
        self._open(order_id)["address"] = " ".join(address.replace(",", " ").split()).lower()

    def change_payment(self, order_id: str, payment: str) -> None:
        order = self._open(order_id)
        methods = self.customers[order["customer"]]["payments"]
        if payment not in methods:
            raise ToolError(f"the customer has no payment method {payment!r}; there are {', '.join(methods)}")
        order["payment"] = payment

    def give_back(self, order_id: str, item_id: str) -> None:
        self._kept(order_id, item_id)["state"] = "returned"

    def exchange(self, order_id: str, item_id: str, new_item_id: str) -> None:
        item = self._kept(order_id, item_id)
        if new_item_id not in self.catalogue or new_item_id == item_id:
            raise ToolError(f"there is no other item {new_item_id!r}")
        if self.catalogue[new_item_id]["product"] != self.catalogue[item_id]["product"]:
            raise ToolError(f"{new_item_id} is another product than {item_id}")
        item["state"] = f"exchanged for {new_item_id}"

    def refund(self, order_id: str, item_id: str, amount: int) -> None:
        item = self._kept(order_id, item_id)
        if amount <= 0:
            raise ToolError("the amount must be positive")
        item["state"] = f"refunded {amount}"

    def refuse(self, order_id: str, kind: str) -> None:
        """Note that a request was refused."""
        order = self.order(order_id)
        order["refused"] = sorted({*order.get("refused", ()), kind})

    def _open(self, order_id: str) -> Record:
        order = self.order(order_id)
        if order["status"] == "cancelled":
            raise ToolError(f"order {order_id} is cancelled")
        return order

    def _kept(self, order_id: str, item_id: str) -> Record:
        """An item that the customer has bought and not sent back or been paid for."""
        item = self.bought(order_id, item_id)
        if self.order(order_id)["status"] != "delivered":
            raise ToolError(f"order {order_id} is not delivered")
        if item["state"] != "bought":
            raise ToolError(f"item {item_id} of order {order_id} is {item['state']} already")
        return item


def forbidden(shop: Shop, kind: str, order_id: str, item_id: str = "", detail: str = "") -> str | None:
    """Why the policy forbids a change, or None.

    ``item_id``: of an item that is returned, exchanged or refunded. ``detail``: the payment method or the new item.
    """
    order = shop.orders[order_id]
    if kind in ("cancel", "address", "payment"):
        if order["status"] != "pending":
            return f"it is {order['status']}"
        balance = shop.customers[order["customer"]]["payments"].get(detail) if kind == "payment" else None
        return NO_COVER if balance is not None and balance < shop.total(order_id) else None
    if order["status"] != "delivered" or order["delivered_days_ago"] > WINDOW:
        return f"it was delivered more than {WINDOW} days ago"
    if kind == "return" and order["items"][item_id]["final_sale"]:
        return "it is on final sale"
    if kind == "exchange" and not shop.catalogue[detail]["stock"]:
        return NO_STOCK
    return None


FIRST = (
    "ann",
    "ben",
    "carl",
    "dora",
    "emil",
    "fay",
    "gus",
    "hana",
    "ivan",
    "jane",
    "kim",
    "leo",
    "mia",
    "noor",
    "olga",
)
LAST = (
    "adler",
    "berg",
    "costa",
    "diaz",
    "evans",
    "frost",
    "gray",
    "haas",
    "ito",
    "jung",
    "khan",
    "lund",
    "moss",
    "nagy",
)
STREETS = ("Elm Street", "High Road", "Mill Lane", "Park Row", "Rose Way", "Station Road", "Hill Close", "Lake View")
TOWNS = ("Bath", "Derby", "Ely", "Leeds", "Oxford", "Ripon", "Truro", "Wells", "York")
PRODUCTS = ("backpack", "bottle", "cap", "desk lamp", "jacket", "kettle", "mug", "pillow", "scarf", "watch")
COLOURS = ("black", "blue", "green", "grey", "red", "white")
CUSTOMERS = 3


@dataclass(frozen=True)
class Request:
    """One thing that the customer wants."""

    kind: Kind
    order: str
    item: str
    label: str
    """of the item, by which the customer knows the order"""
    detail: str = ""
    """reason, new address, payment method or new item, as the change needs it"""
    answer: str = ""
    """what the customer says when asked for the detail"""
    why_not: str | None = None
    """why the policy forbids it; None: it is to be done"""

    @property
    def wish(self) -> str:
        return {
            "cancel": f"I want to cancel my order with the {self.label}.",
            "address": f"Please send my order with the {self.label} to another address.",
            "payment": f"Please change the payment method of my order with the {self.label}.",
            "return": f"I want to return the {self.label}.",
            "exchange": f"I want to exchange the {self.label} for another colour.",
            "refund": f"The {self.label} arrived damaged. I keep it and want a refund.",
        }[self.kind]

    @property
    def depends_on_detail(self) -> bool:
        """Whether the detail is needed to do it, or to know that the policy forbids it."""
        return self.why_not in (None, NO_COVER, NO_STOCK)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the change after the order's id, in the order of the shop method's parameters."""
        match self.kind:
            case "cancel":
                return {"reason": self.detail}
            case "address" | "payment":
                return {self.kind: self.detail}
            case "exchange":
                return {"item_id": self.item, "new_item_id": self.detail}
            case "refund":
                return {"item_id": self.item, "amount": int(self.detail)}
        return {"item_id": self.item}

    def apply(self, shop: Shop) -> None:
        """Do what the policy says about it."""
        if self.why_not:
            shop.refuse(self.order, self.kind)
            return
        change = {
            "cancel": shop.cancel,
            "address": shop.change_address,
            "payment": shop.change_payment,
            "return": shop.give_back,
            "exchange": shop.exchange,
            "refund": shop.refund,
        }[self.kind]
        change(self.order, *self.arguments.values())


@dataclass(frozen=True)
class Case:
    """A database at the start, whose first customer is talking, and their requests."""

    shop: Shop
    requests: tuple[Request, ...]
    details: bool
    """the customer says email address and order numbers without being asked"""

    @property
    def customer(self) -> Record:
        return next(iter(self.shop.customers.values()))

    @property
    def opening(self) -> str:
        """What the customer says first."""
        wishes = [request.wish for request in self.requests]
        if self.details:
            wishes = [f"{request.wish} It is order {request.order}." for request in self.requests]
        email = [f"My email address is {self.customer['email']}."] if self.details else []
        return " ".join(["Hello!", *wishes, *email])

    @property
    def expected(self) -> Shop:
        """The database as it should be in the end."""
        shop = deepcopy(self.shop)
        for request in self.requests:
            request.apply(shop)
        return shop

    @property
    def scenario(self) -> str:
        """Instructions for a model that plays the customer."""
        facts = [f"Your email address is {self.customer['email']}."]
        facts += [f"{request.wish} {request.answer}".strip() for request in self.requests]
        facts += [f"The {request.label} is in order {request.order}." for request in self.requests if self.details]
        return (
            f"You are {self.customer['name']}, a customer of a shop, and write to its customer service. Your first "
            f"message was: {self.opening}\nWhat you know and want:\n- " + "\n- ".join(facts) + "\n"
            "Answer in one or two short sentences. Say only what you are asked for, in the words that stand here; you "
            "know no other numbers. When you are asked to confirm a change, begin with Yes if it is what you want, and "
            "with No if it is not. If a request is refused, accept it."
        )


def draw(seed: int, *, kinds: Sequence[Kind], requests: int, orders: int, forbid: float, details: bool) -> Case:
    """The case of a seed. ``orders``: of each customer, at least ``requests``. ``forbid``: share of such requests."""
    rng = random.Random(seed)
    shop = Shop()
    _stock(shop, rng)
    emails = rng.sample([(first, last) for first in FIRST for last in LAST], CUSTOMERS)
    order_ids = iter([f"O{number}" for number in rng.sample(range(100, 1000), CUSTOMERS * orders)])
    for number, (first, last) in zip(rng.sample(range(10, 100), CUSTOMERS), emails, strict=True):
        customer_id = f"C{number}"
        card, gift = rng.sample(range(10, 100), 2)
        shop.customers[customer_id] = {
            "name": f"{first.title()} {last.title()}",
            "email": f"{first}.{last}@mail.com",
            "address": _address(rng),
            "payments": {f"card-{card}": None, f"gift-{gift}": 500},
        }
        bought = iter(rng.sample(list(shop.catalogue), 2 * orders))  # each item at most once: it names the order
        for _ in range(orders):
            items = [next(bought) for _ in range(rng.choice((1, 2)))]
            shop.orders[next(order_ids)] = {
                "customer": customer_id,
                "status": rng.choice(("pending", "shipped", "delivered")),
                "delivered_days_ago": None,
                "address": shop.customers[customer_id]["address"],
                "payment": rng.choice((f"card-{card}", f"gift-{gift}")),
                "items": {
                    item: {"price": shop.catalogue[item]["price"], "final_sale": rng.random() < 0.2, "state": "bought"}
                    for item in items
                },
            }
    customer_id = next(iter(shop.customers))
    of_customer = [order for order in shop.orders if shop.orders[order]["customer"] == customer_id]
    wanted = [
        _request(shop, rng, rng.choice(kinds), order, rng.random() < forbid)
        for order in rng.sample(of_customer, requests)
    ]
    for order in shop.orders.values():
        if order["status"] == "delivered" and order["delivered_days_ago"] is None:
            order["delivered_days_ago"] = rng.randint(1, 90)
    # At the end: what was made up for one request may concern another one.
    judged = [replace(r, why_not=forbidden(shop, r.kind, r.order, r.item, r.detail)) for r in wanted]
    return Case(shop, tuple(judged), details)


def _stock(shop: Shop, rng: random.Random) -> None:
    for product in sorted(rng.sample(PRODUCTS, 6)):
        price = rng.randint(5, 60)
        for colour in sorted(rng.sample(COLOURS, 3)):
            item = f"I{rng.randint(100, 999)}"
            while item in shop.catalogue:
                item = f"I{rng.randint(100, 999)}"
            shop.catalogue[item] = {"product": product, "colour": colour, "price": price, "stock": rng.randint(1, 9)}


def _address(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(STREETS)}, {rng.choice(TOWNS)}"


def _request(shop: Shop, rng: random.Random, kind: Kind, order_id: str, forbid: bool) -> Request:
    """A request about an order, for which the policy is made to forbid it, or to allow it."""
    order = shop.orders[order_id]
    item = rng.choice(list(order["items"]))
    if kind in ("cancel", "address", "payment"):
        order["status"] = "shipped" if forbid else "pending"
    else:
        late = forbid and (kind == "refund" or rng.random() < 0.5)
        order.update(status="delivered", delivered_days_ago=rng.randint(*((WINDOW + 1, 90) if late else (1, WINDOW))))
        order["items"][item]["final_sale"] = kind == "return" and forbid and not late
    detail = answer = ""
    if kind == "cancel":
        detail = rng.choice(REASONS)
        answer = {
            "no longer needed": "I no longer need it.",
            "ordered by mistake": "I ordered it by mistake.",
            "found cheaper": "I found it cheaper elsewhere.",
        }[detail]
    elif kind == "address":
        detail = _address(rng)
        answer = f"The new address is {detail}."
    elif kind == "payment":
        payments = shop.customers[order["customer"]]["payments"]
        detail = next(method for method in payments if method != order["payment"])
        answer = f"I want to pay with {detail}."
        if forbid and payments[detail] is not None:
            order["status"] = "pending"
            payments[detail] = rng.randint(0, shop.total(order_id) - 1)
    elif kind == "exchange":
        product = shop.catalogue[item]["product"]
        others = [other for other, about in shop.catalogue.items() if about["product"] == product and other != item]
        detail = rng.choice(others)
        answer = f"I would like the {shop.label(detail)}."
        if forbid and order["delivered_days_ago"] <= WINDOW:
            shop.catalogue[detail]["stock"] = 0
    elif kind == "refund":
        detail = str(order["items"][item]["price"])
    return Request(kind, order_id, item, shop.label(item), detail, answer)
