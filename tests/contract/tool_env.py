"""An environment with tools, for the hosts to import through ``turnkey.modules``."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import gymnasium


def function(name: str, required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*required]}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}


TOOLS = [
    function(
        "put",
        ("thing",),
        thing={"type": "string", "minLength": 1},
        times={"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None},
    ),
    function("look"),
    function("drop", ("thing",), thing={"type": "string", "enum": ["cup", "pen"]}),
]


class Shelf(gymnasium.Env[str, str]):
    """Things on a shelf, one reward for each that is put there; words end the episode.

    ``results``: how a step answers calls: ``each`` with one result per call, ``none`` without, ``first`` with one only.
    """

    metadata: ClassVar[dict[str, Any]] = {"thread_safe": True, "deepcopy": True}

    def __init__(self, results: str = "each", tools: Any = "own") -> None:
        self.results, self.tools = results, TOOLS if tools == "own" else tools

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.things: list[str] = []
        return "an empty shelf", {"task": "tidy up", "tools": self.tools, **self._state()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        turn = json.loads(action)
        if "text" in turn:
            return f"you said {turn['text']}", 0.0, turn["text"] == "done", False, self._state()
        before = len(self.things)
        results = [self._run(call["name"], **call["arguments"]) for call in turn["calls"]]
        info = {"each": {"results": results}, "none": {}, "first": {"results": results[:1]}}[self.results]
        seen = f"on the shelf: {' '.join(self.things)}"
        return seen, float(len(self.things) - before), False, False, {**info, **self._state()}

    def _run(self, name: str, thing: str = "", times: int | None = None) -> dict[str, Any]:
        if name == "put":
            self.things += [thing] * (times or 1)
            return {"content": f"{thing} is there", "is_error": False}
        if name == "look":
            return {"content": f"{len(self.things)} things", "is_error": False}
        return {"content": "nothing drops", "is_error": True}

    def _state(self) -> dict[str, Any]:
        return {"state_key": " ".join(self.things), "extra": {"things": len(self.things)}}


if "contract/Shelf-v0" not in gymnasium.registry:
    gymnasium.register("contract/Shelf-v0", entry_point=Shelf)
