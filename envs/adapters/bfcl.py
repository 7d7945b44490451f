"""BFCL, the multi-turn part (Patil et al. 2025, Berkeley Function Calling Leaderboard v4): APIs used for a user.

The package ``bfcl-eval`` brings tasks, simulated APIs, right calls and checker; it is imported with the first episode.
"""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count, is_number
from verl_turnkey.envs.tools import Call, ToolEnv, ToolResult, calls_text, no_tool, tool_names, words_text

CATEGORIES = ("base", "long_context", "miss_param", "miss_func")
SPLITS: Mapping[str, range] = {"train": range(6), "val": range(6, 8), "test": range(8, 10), "all": range(10)}
"""last digits of the tasks' numbers: the same number is the same task in all categories"""
TYPES = {"dict": "object", "float": "number"}
"""BFCL's types that JSON Schema calls otherwise"""
TASK = (
    "Do what the user asks by calling tools, several in a turn where you like. When nothing is left to call, or what "
    "you need is missing, say so without a call: then the user goes on."
)
NEW_TOOLS = "You have more tools now. Can you do it with them?"

Entry = dict[str, Any]


class BfclText(ToolEnv):
    """A conversation of several requests to simulated APIs: files, a car, stocks, travel, messages, tickets, ...

    Actions are calls of the task's tools, see ``verl_turnkey.envs.tools``. A turn without a call ends the user's turn:
    the benchmark's checker compares the APIs' state with that after the right calls, and looks for the right calls'
    results among those of the episode. A user's turn that is not right ends the episode.

    Args:
        categories: of tasks: base, long_context, miss_param, miss_func; null: all. In ``miss_func``
            ``info["tools"]`` of a step brings the tools that were missing.
        split: train, val, test or all, by the tasks' numbers: variants of a task are in the same split.
        turn_reward: reward of each user's turn that needs calls and was right.
        turn_steps: steps with calls in a user's turn; one more loses the episode, as in the benchmark.
        max_steps: steps before truncation; null: never.

    The reward is 1, which is ``success``, when all of the user's turns are right. The seed chooses the task.
    ``state_key`` is a hash of the APIs' state, the user's turn, and the results that count. ``info["extra"]`` has
    ``right_turns``.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "memory_mb": 80}  # a call may hang: 10 ** 10 ** 10

    def __init__(
        self,
        categories: Sequence[str] | None = None,
        split: str = "train",
        turn_reward: float = 0.0,
        turn_steps: int = 20,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(max_steps)
        names = CATEGORIES if categories is None else categories
        listed = isinstance(names, list | tuple) and names and all(name in CATEGORIES for name in names)
        check(bool(listed), "categories", f"null or a list of {', '.join(CATEGORIES)}", categories)
        check(isinstance(split, str) and split in SPLITS, "split", f"one of {', '.join(SPLITS)}", split)
        check(is_number(turn_reward) and 0 <= turn_reward <= 1, "turn_reward", "a number from 0 to 1", turn_reward)
        check(is_count(turn_steps), "turn_steps", "a positive integer", turn_steps)
        self._entries = [entry for name in dict.fromkeys(names) for entry in _entries(name, split)]
        self._turn_reward, self._turn_steps = turn_reward, turn_steps

    def task_ids(self) -> list[str]:
        """BFCL's own ids."""
        return [entry["id"] for entry in self._entries]

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self._entry = self._entries[seed % len(self._entries)]
        self._apis, self._right_apis = _load(self._entry), _load(self._entry)
        self._tools = {tool["function"]["name"]: tool for name in self._apis for tool in _schemas(name)}
        self._missing = {int(turn): names for turn, names in self._entry.get("missed_function", {}).items()}
        self._turn = 0
        """of the user"""
        self._calls = self._call_steps = 0
        """in the user's turn"""
        self._seen: list[str] = []
        """results of all calls"""
        self._counted: list[str] = []
        """those that are not errors, which no right call gives"""
        self._reward, self._won = 0.0, False
        return self.result(self._request()), TASK

    def available(self) -> list[dict[str, Any]]:
        hidden = {name for turn, names in self._missing.items() if turn > self._turn for name in names}
        return [tool for name, tool in self._tools.items() if name not in hidden]

    def act(self, action: str) -> StepResult:
        self._reward = 0.0
        return super().act(action)

    def call(self, call: Call) -> ToolResult:
        self._calls += 1
        if call.name not in self._tools:  # those that are still missing run, too, as in the benchmark
            return no_tool(call.name, tool_names(self.available()))
        if not isinstance(call.arguments, dict):
            return ToolResult(f"Error: the arguments of {call.name} must be an object", is_error=True)
        text, failed = _run(self._apis, call.name, call.positional, call.arguments)
        self._seen.append(text)
        if not failed:
            self._counted.append(text)
        return ToolResult(text, failed)

    def reply(self, text: str) -> str:
        """End the user's turn; what the user says next."""
        right = self._is_right()
        if right and self._entry["right"][self._turn]:
            self._reward += self._turn_reward
        self._turn += right
        self._calls = self._call_steps = 0
        self._won = self._turn == len(self._entry["question"])
        if self._won or not right:
            self._reward += self._won
            self.ended = True
            return "That was all." if self._won else "That is not what I wanted."
        self.tools_changed = self._turn in self._missing
        return self._request()

    def result(self, observation: str) -> StepResult:
        self._call_steps += bool(self._results)
        self.ended = self.ended or self._call_steps > self._turn_steps
        state = [_state(api) for api in self._apis.values()]
        return StepResult(
            observation,
            digest(self._entry["id"], self._turn, self._calls > 0, self.ended, sorted(self._counted), state),
            reward=self._reward,
            terminated=self.ended,
            success=self._won,
            extra={"right_turns": self._turn},
        )

    def oracle(self) -> list[str] | None:
        plan = []
        for turn in self._entry["right"]:
            if turn:
                calls = [
                    (name, {**dict(zip(self._parameters(name), args, strict=False)), **kwargs})
                    for name, args, kwargs in map(_read, turn)
                ]
                plan.append(calls_text(calls))
            plan.append(words_text("Done."))
        return plan if self.max_steps is None or len(plan) <= self.max_steps else None

    def _parameters(self, name: str) -> Iterator[str]:
        return iter(self._tools[name]["function"]["parameters"]["properties"])

    def _request(self) -> str:
        return "\n".join(message["content"] for message in self._entry["question"][self._turn]) or NEW_TOOLS

    def _is_right(self) -> bool:
        """The benchmark's verdict on the user's turn (``multi_turn_checker``), which also makes the right calls."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

        right_calls = self._entry["right"][self._turn]
        wanted = [_run(self._right_apis, *call)[0] for call in map(_read, right_calls)]
        if not right_calls:
            return True
        return bool(
            self._calls
            and state_checker(self._apis, self._right_apis)["valid"]
            and response_checker(self._seen, wanted, self._turn)["valid"]
        )


@cache
def _package() -> Path:
    import bfcl_eval
    import mpmath  # noqa: F401 - of one of its APIs, and comes with torch

    return Path(bfcl_eval.__path__[0])


@cache
def _entries(category: str, split: str) -> list[Entry]:
    """The tasks of a category; ``right`` are the right calls of each of the user's turns."""
    data = _package() / "data"
    name = f"BFCL_v4_multi_turn_{category}.json"
    right = {line["id"]: line["ground_truth"] for line in _lines(data / "possible_answer" / name)}
    digits = SPLITS[split]
    entries = [entry for entry in _lines(data / name) if int(entry["id"].rpartition("_")[2]) % 10 in digits]
    return [{**entry, "right": right[entry["id"]]} for entry in entries]


def _lines(path: Path) -> list[Any]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@cache
def _schemas(api: str) -> list[dict[str, Any]]:
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING as FILES

    tools = _lines(_package() / "data/multi_turn_func_doc" / FILES[api])
    keys = ("name", "description", "parameters")
    return [{"type": "function", "function": _json_schema({key: tool[key] for key in keys})} for tool in tools]


def _json_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: TYPES.get(value, value) if key == "type" and isinstance(value, str) else _json_schema(value)
        for key, value in node.items()
    }


@cache
def _read(call: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Name and arguments of a right call, which the benchmark writes as Python."""
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    by_name = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return node.func.id, tuple(map(ast.literal_eval, node.args)), by_name


def _load(entry: Entry) -> dict[str, Any]:
    """The APIs of a task as it begins, by name."""
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES

    apis = {}
    for name in entry["involved_classes"]:
        apis[name] = api = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in STATELESS_CLASSES:
            config = deepcopy(entry["initial_config"].get(name, {}))
            api._load_scenario(config, long_context="long_context" in entry["id"])
    return apis


def _run(apis: Mapping[str, Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, bool]:
    """The result of a call as the benchmark writes it, and whether it is an error. Nothing is evaluated as code."""
    method = next(method for api in apis.values() if (method := getattr(api, name, None)) is not None)
    try:
        result = method(*deepcopy(args), **deepcopy(kwargs))
    except Exception as error:  # an API may raise anything on arguments of other types
        return f"Error during execution: {error}", True
    failed = isinstance(result, dict) and "error" in result
    if isinstance(result, dict):
        try:
            return json.dumps(result), failed
        except (TypeError, ValueError):
            pass
    return str(result), failed


def _state(node: Any) -> Any:
    """An API's state, private attributes included, as plain values."""
    if isinstance(node, dict):
        return {key: _state(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_state(value) for value in node]
    if isinstance(node, Random):
        return hash(node.getstate()[1])
    if not hasattr(node, "__dict__"):
        return node
    return {
        name: _place(value) if name == "_current_dir" else _state(value)
        for name, value in vars(node).items()
        if name not in ("parent", "_last_modified", "_api_description")
    }


def _place(folder: Any) -> list[str]:
    """The path of a folder, from the root."""
    return [*_place(folder.parent), folder.name] if folder is not None else []
