"""Any environment behind an OpenEnv server: the package's own client, and a mapping between its fields and text.

An OpenEnv server holds one environment per WebSocket session. Its actions and observations are objects with fields of
the environment's choosing; which of them hold what is said by arguments. Environments whose actions are calls of MCP
tools speak the same protocol: ``tools: true``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openenv.core import GenericEnvClient

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.base import StepResult, TextEnv, check, digest
from verl_turnkey.envs.errors import EnvironmentKwargsError
from verl_turnkey.envs.rpc import ServerError, check_url

FIELDS = ("observation", "task", "success", "truncated", "admissible", "invalid", "state_key")
PLACE = "{action}"
HINTS = {
    "CAPACITY_REACHED": ": it has as many sessions as it allows; raise max_concurrent_envs there (and mark the "
    "environment's class with SUPPORTS_CONCURRENT_SESSIONS), or lower the number of instances here",
    "ConnectionError": ": is it running? Its address is the argument url",
}


class OpenEnvText(TextEnv):
    """An environment of an OpenEnv server.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        action: how an action is sent: the name of the field that takes its text; or a whole action, in which every
            text ``{action}`` is replaced by it, such as ``{"command": "{action}", "timeout": 5}``; or None: the action
            is itself the JSON of one.
        fields: where in the observation things are, as dotted paths, any of ``observation`` (text, or anything that
            is shown as JSON; absent: all fields), ``task`` (after a reset), ``success`` (or ``won``; absent: ended
            with a reward above 0), ``truncated`` (absent: never), ``admissible``, ``invalid``, ``state_key`` (absent:
            all fields). Of ``metadata`` only what a path leads to is read.
        tools: the actions are calls of MCP tools, written as ``{"name": ..., "arguments": {...}}``. The server's list
            of tools becomes part of the task. Without a field for it, ``state_key`` is then made of all calls and
            answers so far: what a single answer shows is no state.
        reset: further arguments of the server's ``reset``, beside the seed.
        headers: HTTP headers of the connection, such as an authorization.
        timeout: seconds to wait for an answer.
        max_steps: steps before truncation.

    A seed is one start only if the server's environment takes ``seed`` in its ``reset``: others ignore it.
    """

    metadata = {**TextEnv.metadata, "thread_safe": True, "memory_mb": 20}  # noqa: RUF012 - gymnasium's own attribute

    def __init__(
        self,
        url: str,
        action: str | Mapping[str, Any] | None = "message",
        fields: Mapping[str, str] | None = None,
        tools: bool = False,
        reset: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(max_steps)
        self._url = check_url(url, "url")
        whole = isinstance(action, Mapping) and PLACE in json.dumps(action)
        known = action is None or whole or (isinstance(action, str) and action != "")
        check(known, "action", f"a field's name, an action with {PLACE!r} in it, or null", action)
        seconds = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0
        check(seconds, "timeout", "a positive number of seconds", timeout)
        self._fields = {"success" if name == "won" else name: path for name, path in (fields or {}).items()}
        for name in self._fields:
            if name not in FIELDS:
                raise EnvironmentKwargsError(
                    f"fields has an unknown entry {name!r}{did_you_mean(name, FIELDS) or '.'} "
                    f"It takes {', '.join(FIELDS)}"
                )
        self._template: Any = {action: PLACE} if isinstance(action, str) else action
        self._with_tools, self._tools = tools, []
        self._reset_arguments = dict(reset or {})
        self._headers, self._timeout = dict(headers or {}), timeout
        self._client: Any = None
        self._past: list[Any] = []

    def begin(self, seed: int) -> tuple[StepResult, str]:
        fresh = self._client is None
        try:
            answer = self._ask("reset", seed=seed, **self._reset_arguments)
        except ServerError:
            if fresh:
                raise
            answer = self._ask("reset", seed=seed, **self._reset_arguments)  # a server that was started anew
        task = str(self._find(answer.observation, "task") or "")
        if self._with_tools:
            listed = self._ask("step", {"type": "list_tools"}).observation
            self._tools = [tool["name"] for tool in listed.get("tools", [])]
            task = "\n".join([task, "Tools:", *map(_described, listed.get("tools", []))]).strip()
        self._past = [answer.observation]
        return self._now(answer), task

    def act(self, action: str) -> StepResult:
        payload = self._payload(action)
        if payload is None:
            return self.refused()
        # Half a surrogate pair, which a decoder can leave in a text, is nothing that servers expect.
        payload = json.loads(json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace"))
        try:
            answer = self._ask("step", payload)
        except _RefusedError:
            return self.refused()
        if not _failed(answer.observation):
            self._past += [payload, answer.observation]
        return self._now(answer)

    def close(self) -> None:
        """End the session on the server. A further reset opens a new one."""
        client, self._client, self._running = self._client, None, False
        if client is not None:
            with contextlib.suppress(Exception):  # the server may be gone already
                client.close()

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the server. Whatever goes wrong ends the session, except an action that it finds malformed."""
        try:
            if self._client is None:
                client = GenericEnvClient(self._url, message_timeout_s=self._timeout, headers=self._headers or None)
                self._client = client.sync()
                self._client.connect()
            return getattr(self._client, method)(*args, **kwargs)
        except Exception as error:
            if "code: VALIDATION_ERROR" in str(error) and method == "step":
                raise _RefusedError from None
            self.close()
            found = f"{type(error).__name__}: {error}"
            hint = next((hint for mark, hint in HINTS.items() if mark in found), "")
            raise ServerError(f"the OpenEnv server at {self._url} failed: {found}{hint}") from error

    def _payload(self, action: str) -> Any:
        """The action as the server takes it; None when it cannot be read as one."""
        if self._template is not None and not self._with_tools:
            return _filled(self._template, action)
        try:
            read = json.loads(action)
        except (ValueError, RecursionError):
            return None
        if not isinstance(read, dict):
            return None
        if not self._with_tools:
            return read
        name, arguments = read.get("name"), read.get("arguments", {})
        if name not in self._tools or not isinstance(arguments, dict):
            return None
        return {"type": "call_tool", "tool_name": name, "arguments": arguments}

    def _find(self, observation: Any, name: str) -> Any:
        """What a path of ``fields`` leads to; None when there is no path of that name, or nothing there."""
        place = observation
        for key in self._fields[name].split(".") if name in self._fields else ():
            place = place.get(key) if isinstance(place, Mapping) else None
        return place if name in self._fields else None

    def _flag(self, seen: Mapping[str, Any], name: str) -> bool:
        value = self._find(seen, name)
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"fields={{{name!r}: {self._fields[name]!r}}} must be true or false, not {value!r}")
        return bool(value)

    def _now(self, answer: Any) -> StepResult:
        seen = answer.observation
        plain = {key: value for key, value in seen.items() if key != "metadata"}
        if "observation" in self._fields:
            text = _text(self._find(seen, "observation"))
        else:
            text = _answer(seen) if "tool_name" in seen and self._with_tools else _text(plain)
        marked = "state_key" in self._fields
        state = self._find(seen, "state_key") if marked else self._past if self._with_tools else plain
        reward = float(answer.reward or 0)
        done, truncated = bool(answer.done), self._flag(seen, "truncated")
        admissible = self._find(seen, "admissible")
        return StepResult(
            observation=text,
            state_key=digest(json.dumps(state, sort_keys=True, default=str)),
            admissible=admissible if isinstance(admissible, Sequence) and not isinstance(admissible, str) else None,
            reward=reward,
            success=self._flag(seen, "success") if "success" in self._fields else done and not truncated and reward > 0,
            terminated=done and not truncated,
            truncated=done and truncated,
            invalid=self._flag(seen, "invalid") or _failed(seen),
        )


class _RefusedError(Exception):
    """The server finds an action malformed; its environment has not seen it."""


def _filled(template: Any, action: str) -> Any:
    """``template`` with the action in its place, or places."""
    if isinstance(template, str):
        return template.replace(PLACE, action)
    if isinstance(template, Mapping):
        return {key: _filled(value, action) for key, value in template.items()}
    if isinstance(template, Sequence):
        return [_filled(value, action) for value in template]
    return template


def _text(value: Any) -> str:
    """Text as it is; the fields of an object a line each, a single one without its name; anything else as JSON."""
    if isinstance(value, Mapping):
        shown = {name: part if isinstance(part, str) else json.dumps(part, default=str) for name, part in value.items()}
        return "\n".join(shown.values() if len(shown) == 1 else (f"{name}: {part}" for name, part in shown.items()))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _described(tool: Mapping[str, Any]) -> str:
    schema = tool.get("input_schema", {})
    return f"- {tool['name']}: {' '.join(tool.get('description', '').split())} Arguments: {json.dumps(schema)}"


def _failed(seen: Mapping[str, Any]) -> bool:
    """Whether a tool was called in a way that it cannot be."""
    return "tool_name" in seen and bool(seen.get("error"))


def _answer(seen: Mapping[str, Any]) -> str:
    """What a tool answered: its text, where it is text."""
    if _failed(seen):
        return f"Error: {seen['error'].get('message', seen['error'])}"
    result = seen.get("result")
    parts = result.get("content") if isinstance(result, Mapping) else None
    if isinstance(parts, Sequence) and parts and all(isinstance(part, Mapping) and "text" in part for part in parts):
        return "\n".join(part["text"] for part in parts)
    return _text(result)
