"""The database of the shop: customers, orders, the catalogue, and every change that can be made to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
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
