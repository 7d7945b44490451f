"""What a seed draws: a database, a customer, and what this customer wants."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from verl_turnkey.envs.adapters.service.shop import NO_COVER, NO_STOCK, REASONS, WINDOW, Kind, Record, Shop, forbidden

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

    def apply(self, shop: Shop) -> None:
        """Do what the policy says about it."""
        if self.why_not:
            shop.refuse(self.order, self.kind)
        elif self.kind == "cancel":
            shop.cancel(self.order, self.detail)
        elif self.kind == "address":
            shop.change_address(self.order, self.detail)
        elif self.kind == "payment":
            shop.change_payment(self.order, self.detail)
        elif self.kind == "return":
            shop.give_back(self.order, self.item)
        elif self.kind == "exchange":
            shop.exchange(self.order, self.item, self.detail)
        else:
            shop.refund(self.order, self.item, int(self.detail))


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
        known = [f"Your email address is {self.customer['email']}."]
        known += [f"{request.wish} {request.answer}".strip() for request in self.requests]
        known += [f"The {request.label} is in order {request.order}." for request in self.requests if self.details]
        return (
            f"You are {self.customer['name']}, a customer of a shop, and write to its customer service. Your first "
            f"message was: {self.opening}\nWhat you know and want:\n- " + "\n- ".join(known) + "\n"
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
