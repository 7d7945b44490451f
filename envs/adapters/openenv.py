"""Any environment behind an OpenEnv server: the package's own client, and a mapping between its fields and text.

An OpenEnv server holds one environment per WebSocket session. Actions and observations are objects whose fields differ
from environment to environment; arguments say what each field holds. ``tools: true`` is for environments whose actions
are calls of MCP tools.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]

from verl_turnkey.envs.base import StepResult, TextEnv, check, check_name, digest, is_number
from verl_turnkey.envs.http import ServerError, check_url, on_this_machine
from verl_turnkey.envs.variables import without_proxy

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
        fields: dotted paths into the observation, any of ``observation`` (text, or anything that is shown as JSON;
            absent: all fields), ``task`` (after a reset), ``success`` (or ``won``; absent: ended with a reward above
            0), ``truncated`` (absent: never), ``admissible``, ``invalid``, ``state_key`` (absent: all fields). "All
            fields" leaves out ``metadata``; a path may lead into it.
        tools: the actions are calls of MCP tools, written as ``{"name": ..., "arguments": {...}}``. The server's list
            of tools becomes part of the task. Without a field for it, ``state_key`` is then a hash of all calls and
            answers so far, since one answer does not show the state.
        reset: further arguments of the server's ``reset``, beside the seed.
        headers: HTTP headers of the connection, such as an authorization.
        timeout: seconds to wait for an answer.
        max_steps: steps before truncation.

    The seed determines the start only where the server's environment takes ``seed`` in its ``reset``.
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
        if on_this_machine(self._url):  # its client takes proxies from variables alone
            os.environ.update(without_proxy())
        whole = isinstance(action, Mapping) and PLACE in json.dumps(action)
        known = action is None or whole or (isinstance(action, str) and action != "")
        check(known, "action", f"a field's name, an action with {PLACE!r} in it, or null", action)
        check(is_number(timeout) and timeout > 0, "timeout", "a positive number of seconds", timeout)
        self._fields = {"success" if name == "won" else name: path for name, path in (fields or {}).items()}
        for name in self._fields:
            check_name(name, FIELDS, "fields has an unknown entry", "It takes")
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
            answer = self._ask("reset", seed=seed, **self._reset_arguments)  # the server may have been restarted
        task = str(self._find(answer.observation, "task") or "")
        if self._with_tools:
            listed = self._ask("step", {"type": "list_tools"}).observation
            self._tools = [tool["name"] for tool in listed.get("tools", [])]
            task = "\n".join([task, "Tools:", *map(_described, listed.get("tools", []))]).strip()
        self._past = [_plain(answer.observation)]
        return self._now(answer), task

    def act(self, action: str) -> StepResult:
        payload = self._payload(action)
        if payload is None:
            return self.refused()
        # A lone surrogate, which a tokenizer can decode to, is not valid UTF-8.
        payload = json.loads(json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace"))
        try:
            answer = self._ask("step", payload)
        except _RefusedError:
            return self.refused()
        if not _failed(answer.observation):
            self._past += [payload, _plain(answer.observation)]
        return self._now(answer)

    def close(self) -> None:
        """End the session on the server. A further reset opens a new one."""
        client, self._client, self._running = self._client, None, False
        if client is not None:
            with contextlib.suppress(Exception):  # the server may be gone already
                client.close()

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the server. Any error ends the session, except the refusal of a malformed action."""
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
            reason = f"{type(error).__name__}: {error}"
            hint = next((hint for mark, hint in HINTS.items() if mark in reason), "")
            raise ServerError(f"the OpenEnv server at {self._url} failed: {reason}{hint}") from error

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
        """The value at the path ``fields[name]``; None without such a path or value."""
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
        plain = _plain(seen)
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


def _plain(seen: Mapping[str, Any]) -> dict[str, Any]:
    """An observation without what servers say about it, such as the time: equal states have to be equal."""
    return {key: value for key, value in seen.items() if key != "metadata"}


class _RefusedError(Exception):
    """The server refused an action as malformed and did not pass it to its environment."""


def _filled(template: Any, action: str) -> Any:
    """``template`` with every ``{action}`` replaced."""
    if isinstance(template, str):
        return template.replace(PLACE, action)
    if isinstance(template, Mapping):
        return {key: _filled(value, action) for key, value in template.items()}
    if isinstance(template, Sequence):
        return [_filled(value, action) for value in template]
    return template


def _text(value: Any) -> str:
    """Text unchanged; an object as a line per field, a single field without its name; anything else as JSON."""
    if isinstance(value, Mapping):
        texts = {name: part if isinstance(part, str) else json.dumps(part, default=str) for name, part in value.items()}
        return "\n".join(texts.values() if len(texts) == 1 else (f"{name}: {part}" for name, part in texts.items()))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _described(tool: Mapping[str, Any]) -> str:
    schema = tool.get("input_schema", {})
    return f"- {tool['name']}: {' '.join(tool.get('description', '').split())} Arguments: {json.dumps(schema)}"


def _failed(seen: Mapping[str, Any]) -> bool:
    """Whether the observation is an error of a tool call."""
    return "tool_name" in seen and bool(seen.get("error"))


def _answer(seen: Mapping[str, Any]) -> str:
    """The answer of a tool, or the error of the call, as text."""
    if _failed(seen):
        return f"Error: {seen['error'].get('message', seen['error'])}"
    result = seen.get("result")
    parts = result.get("content") if isinstance(result, Mapping) else None
    if isinstance(parts, Sequence) and parts and all(isinstance(part, Mapping) and "text" in part for part in parts):
        return "\n".join(part["text"] for part in parts)
    return _text(result)
