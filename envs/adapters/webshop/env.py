"""WebShop (Yao et al. 2022, arXiv:2207.01206): find and buy the product that an instruction describes.

WebShop needs an interpreter of its own. ``webshop_server.py`` runs in it, and this adapter calls that server; a shop
that can be imported in this process works too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from verl_turnkey.envs.adapters.webshop.server import Shops, load_factory
from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, words
from verl_turnkey.envs.errors import EnvironmentKwargsError
from verl_turnkey.envs.http import check_url, post_json

REWARDS = ("score", "success")
_ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)
_INSTRUCTION = re.compile(r"Instruction:\s*(?:\[SEP\])?\s*(.+?)\s*(?:\[SEP\]|\n|$)")

Call = Callable[[str, dict[str, Any]], Any]


class WebShopText(TextEnv):
    """A shop with a search bar, pages of results, products with options, and one purchase that ends the episode.

    Actions are ``search[words]`` on the page with the search bar and ``click[name]`` elsewhere. ``admissible`` lists
    the clicks, and is None on pages with the search bar. An action that the page does not allow is invalid and not sent
    to the shop, nor is a query that begins with ``<``, which WebShop takes for a command of its own.

    Args:
        url: a running ``webshop_server.py``.
        factory: instead of ``url``, a ``module:function`` that makes a shop in this process. Calls run one at a time.
        goals: the first goal and the one after the last, such as ``[500, 1500]``; null: all goals of the shop.
        reward: ``score`` gives WebShop's own at the purchase, 0 to 1; ``success`` gives 1 for a full score, else 0.
        timeout: seconds for one answer of the server.
        max_steps: steps before truncation; null: never.

    The seed chooses the goal. ``success`` is a full score. The observation is the page without the instruction, which
    is the task. ``state_key`` is a hash of goal, page and chosen options (the page may not show these).
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": True, "memory_mb": 1}

    def __init__(
        self,
        url: str | None = None,
        factory: str | None = None,
        goals: Sequence[int] | None = None,
        reward: str = "score",
        timeout: float = 60.0,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(max_steps)
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        if (url is None) == (factory is None):
            raise EnvironmentKwargsError(
                "WebShop needs turnkey.env.kwargs.url, the address of a running webshop_server.py, or "
                f"turnkey.env.kwargs.factory, and not both; got url={url!r} and factory={factory!r}"
            )
        if goals is not None:
            good = len(goals) == 2 and all(type(goal) is int for goal in goals) and 0 <= goals[0] < goals[1]
            check(good, "goals", "two integers, the first and the one after the last, such as [500, 1500]", goals)
        self._goals = None if goals is None else (goals[0], goals[1])
        self._only_success = reward == "success"
        self._call = _remote(url, timeout) if url is not None else _in_process(factory or "")
        self._id: str | None = None
        self._session = 0
        self._task = ""
        self._page: dict[str, Any] = {}

    def task_ids(self) -> list[str]:
        """The numbers of the goals in WebShop's order."""
        return [f"goal-{goal}" for goal in range(*self._range())]

    def _range(self) -> tuple[int, int]:
        """The first goal and the one after the last."""
        if self._goals is None:
            number = self._call("/info", {})["goals"]
            check(bool(number), "goals", "given, since this shop does not tell how many there are", number)
            self._goals = (0, number)
        return self._goals

    def begin(self, seed: int) -> tuple[StepResult, str]:
        first, end = self._range()
        self._session = first + seed % (end - first)
        page = self._call("/reset", {"session": self._session, "id": self._id})
        self._id = page["id"]
        instruction = _INSTRUCTION.search(page["observation"])
        if instruction is None:
            raise ValueError(
                "the first page of the shop has no `Instruction:`: it must be made with observation_mode='text' or "
                f"'text_rich'. It is {page['observation'][:200]!r}"
            )
        self._task = instruction[1]
        return self._result(page), self._task

    def act(self, action: str) -> StepResult:
        command = self._command(action)
        if command is None:
            return self.refused()
        return self._result(self._call("/step", {"id": self._id, "action": command}))

    def _command(self, action: str) -> str | None:
        """``action`` in the shop's spelling, or None when it is not possible on this page."""
        match = _ACTION.fullmatch(action)
        if match is None:
            return None
        argument = words(match[2].replace("[", " ").replace("]", " ") if match[1].lower() == "search" else match[2])
        if match[1].lower() == "click":
            return next((f"click[{name}]" for name in _buttons(self._page) if words(name) == argument), None)
        possible = self._page["has_search_bar"] and argument and not argument.startswith("<")
        return f"search[{argument}]" if possible else None

    def _result(self, page: dict[str, Any]) -> StepResult:
        self._page = page
        text = page["observation"]
        instruction = _INSTRUCTION.search(text)
        # The instruction is the task, and left out of pages. That of a product ("Care Instruction: ...") stays.
        if instruction is not None and instruction[1] == self._task:
            text = text[instruction.end() :].strip()
        clicks = [f"click[{name}]" for name in _buttons(page)]
        score = page["reward"]
        return StepResult(
            observation="\n".join([text, ", ".join(["search[words]", *clicks])]) if page["has_search_bar"] else text,
            state_key=digest(self._session, text, sorted(page["options"].items())),
            admissible=None if page["has_search_bar"] else clicks,
            reward=float(score >= 1.0) if self._only_success else score,
            success=page["done"] and score >= 1.0,
            terminated=page["done"],
        )


def _buttons(page: dict[str, Any]) -> list[str]:
    """What can be clicked, without the button `search`, which WebShop lists and which has no effect."""
    return [name for name in page["clickables"] if words(name) != "search"]


def _remote(url: str, timeout: float) -> Call:
    base = check_url(url, "turnkey.env.kwargs.url")

    def call(path: str, payload: dict[str, Any]) -> Any:
        # A reset can be repeated; a repeated step would be another step.
        return post_json(
            base + path, payload, timeout=timeout, key="turnkey.env.kwargs.url", repeatable=path != "/step"
        )

    return call


_LOADING = threading.Lock()
_SHOPS: dict[str, Shops] = {}


def _in_process(factory: str) -> Call:
    """The shops of ``factory``; all instances in this process share them, since a catalogue is large."""
    with _LOADING:
        if factory not in _SHOPS:
            try:
                _SHOPS[factory] = Shops(load_factory(factory))
            except ValueError as error:
                raise EnvironmentKwargsError(f"turnkey.env.kwargs.factory: {error}") from error
        return _SHOPS[factory].call
