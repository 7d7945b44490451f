"""A tiny shop with WebShop's text interface, as it behaves when upstream's code is run: pages of text joined by [SEP],
ten results a page, options that do not show in the text, actions in lower case, no effect of what is impossible.
"""

import random

COLORS, SIZES = ("red", "blue", "green"), ("small", "large")
KINDS = ("shirt", "lamp", "mug", "chair")
TRAITS = ("cotton", "oak", "vintage", "folding", "waterproof", "handmade")


def catalogue() -> list[dict]:
    rng = random.Random(0)
    products = []
    for i in range(60):
        kind, trait = KINDS[i % len(KINDS)], rng.choice(TRAITS)
        options = {"color": COLORS, "size": SIZES} if i % 3 else {}
        products.append(
            {"asin": f"b{i:03d}", "kind": kind, "trait": trait, "price": rng.randrange(5, 90), "options": options}
        )
    return products


class Shop:
    products = catalogue()
    goals = len(products)

    def reset(self, session: int) -> tuple[str, None]:
        product = self.products[session]  # out of range is an error, as it is upstream
        rng = random.Random(session)
        self.goal = {
            "kind": product["kind"],
            "trait": product["trait"],
            "price": product["price"] + 10,
            "options": {name: rng.choice(values) for name, values in product["options"].items()},
        }
        self._home()
        return self.page(), None

    def _home(self) -> None:
        self.where, self.hits, self.number, self.item = "home", [], 1, None
        self.options: dict[str, str] = {}

    def get_available_actions(self) -> dict:
        if self.where == "home":
            return {"has_search_bar": True, "clickables": ["search"]}
        if self.where == "results":
            moves = ["back to search", *(["< prev"] if self.number > 1 else []), "next >"]
            return {"has_search_bar": False, "clickables": [*moves, *(p["asin"] for p in self._results())]}
        if self.where == "item":
            values = [value for choices in self.item["options"].values() for value in choices]
            buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
            return {"has_search_bar": False, "clickables": [*buttons, *values]}
        return {"has_search_bar": False, "clickables": ["back to search", "< prev"] if self.where == "sub" else []}

    def step(self, action: str) -> tuple[str, float, bool, None]:
        kind, _, argument = action.partition("[")
        argument = argument.rstrip("]").lower()
        reward, done = 0.0, False
        if kind == "search" and argument:
            self.hits = self._search(argument)
            self.where, self.number, self.item, self.options = "results", 1, None, {}
        elif kind == "click" and argument in self.get_available_actions()["clickables"] and argument != "search":
            if argument == "buy now":
                self.where, reward, done = "done", self._reward(), True
            elif argument == "back to search":
                self._home()
            elif argument in ("next >", "< prev") and self.where == "results":
                self.number += 1 if argument == "next >" else -1
            elif argument == "< prev" and self.where == "item":
                self.where, self.item, self.options = "results", None, {}
            elif argument == "< prev":
                self.where = "item"
            elif argument in ("description", "features", "reviews"):
                self.where = "sub"
            elif self.where == "results":
                self.where, self.item = "item", next(p for p in self.products if p["asin"] == argument)
            else:
                name = next(name for name, values in self.item["options"].items() if argument in values)
                self.options[name] = argument
        return self.page(), reward, done, None

    def _search(self, query: str) -> list[dict]:
        scored = [(sum(w in (p["kind"], p["trait"]) for w in query.split()), p) for p in self.products]
        return [p for score, p in sorted(scored, key=lambda s: -s[0]) if score][:50]

    def _results(self) -> list[dict]:
        return self.hits[(self.number - 1) * 10 : self.number * 10]

    def _reward(self) -> float:
        goal, item = self.goal, self.item
        right = sum(self.options.get(name) == value for name, value in goal["options"].items())
        right += (item["trait"] == goal["trait"]) + (item["price"] <= goal["price"])
        return right / (len(goal["options"]) + 2) * (item["kind"] == goal["kind"])

    def page(self) -> str:
        goal = self.goal
        wishes = "".join(f", {name}: {value}" for name, value in goal["options"].items())
        wish = f"i want a {goal['trait']} {goal['kind']}{wishes}, and price lower than {goal['price']}.00 dollars"
        head = ["Instruction:", wish]
        if self.where == "home":
            return " [SEP] ".join(["WebShop", *head, "Search"])
        if self.where == "done":
            return " [SEP] ".join(["Thank you for shopping with us!", "Your code:", "None"])
        parts = [*head, "Back to Search"]
        if self.where == "results":
            parts.append(f"Page {self.number} (Total results: {len(self.hits)})")
            parts += ["< Prev"] * (self.number > 1) + ["Next >"]
            for p in self._results():
                parts += [p["asin"].upper(), f"{p['trait']} {p['kind']}", f"${p['price']}.0"]
        elif self.where == "item":
            parts.append("< Prev")
            for name, values in self.item["options"].items():
                parts += [name, *values]
            parts += [f"{self.item['trait']} {self.item['kind']}", f"Price: ${self.item['price']}.0"]
            parts += ["Description", "Features", "Reviews", "Buy Now"]
        else:
            parts += ["< Prev", f"A {self.item['trait']} {self.item['kind']}."]
        return " [SEP] ".join(parts)

    def plan(self) -> list[str]:
        """Actions that buy the right thing from the first page."""
        goal = self.goal
        query = f"{goal['trait']} {goal['kind']}"
        hits = self._search(query)
        wanted = next(n for n, p in enumerate(hits) if self._fits(p))
        options = [f"click[{value}]" for value in goal["options"].values()]
        return [
            f"search[{query}]", *["click[Next >]"] * (wanted // 10), f"click[{hits[wanted]['asin']}]", *options,
            "click[buy now]",
        ]  # fmt: skip

    def _fits(self, product: dict) -> bool:
        goal = self.goal
        same = product["kind"] == goal["kind"] and product["trait"] == goal["trait"]
        return same and product["price"] <= goal["price"] and product["options"].keys() >= goal["options"].keys()


class BrokenShop(Shop):
    def step(self, action: str) -> tuple[str, float, bool, None]:
        raise IndexError("list index out of range")


class SilentShop(Shop):
    goals = None

    def page(self) -> str:
        return "<html>"


class CareShop(Shop):
    """Its last page tells how to care for the product, and nothing of the wish."""

    def page(self) -> str:
        page = super().page()
        return page if self.where != "done" else f"{page} [SEP] Care Instruction: wash cold [SEP] Bye"
