"""What the APIs have in common: contents of messages, tools, arguments of calls, server-sent events."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from verl_turnkey.envs.answers import MOST_PIXELS
from verl_turnkey.plugins.gateway.limits import Reading
from verl_turnkey.plugins.gateway.messages import GatewayError, Message, Reply, ToolCall, invalid

CREATED = 0
"""Time of every reply, in seconds: equal replies are equal bytes."""
RAW = "_raw"
"""key that holds arguments of a call which are not a JSON object"""
_TEXTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_IMAGES = ("image_url", "input_image", "image")


def malformed(where: str, expected: str, value: Any) -> NoReturn:
    """Raise the error about a body that does not have the form of its API."""
    raise invalid(f"{where}: expected {expected}, got {type(value).__name__}", param=where)


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else malformed(where, "an object", value)


def items(value: Any, where: str) -> list[Mapping[str, Any]]:
    """A list of objects; empty if null."""
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        malformed(where, "a list", value)
    return [mapping(item, f"{where}[{number}]") for number, item in enumerate(value)]


def string(value: Any, where: str) -> str:
    return value if isinstance(value, str) else malformed(where, "a string", value)


def limit(body: Mapping[str, Any], *names: str) -> int | None:
    """The smallest of several limits of tokens."""
    values = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise invalid(f"{name}: expected a positive integer, got {value!r}")
    return min(values.values(), default=None)


def stops(value: Any, where: str) -> tuple[str, ...]:
    """Texts at which the model stops: one, a list, or null."""
    if value is None or isinstance(value, str):
        return (value,) if value else ()
    if not isinstance(value, Sequence):
        malformed(where, "a string or a list of strings", value)
    return tuple(string(text, where) for text in value if text)


def content(value: Any, reading: Reading, where: str) -> tuple[str, tuple[Any, ...]]:
    """Text and images of a message's content; the texts of a list are joined by newlines."""
    if value is None or isinstance(value, str):
        return value or "", ()
    texts, images = [], []
    for number, part in enumerate(value if isinstance(value, Sequence) else malformed(where, "text or a list", value)):
        place = f"{where}[{number}]"
        kind = "text" if isinstance(part, str) else mapping(part, place).get("type") or "text"
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXTS:
            texts.append(string(part.get("text", part.get("refusal")), place))
        elif kind in _IMAGES:
            images += _image(part, kind, reading, place)
        else:
            reading.refuse(f"content/{kind}", "the model reads text and images")
    return "\n".join(texts), tuple(images)


def _image(part: Mapping[str, Any], kind: str, reading: Reading, place: str) -> list[Any]:
    if kind == "image":
        source = mapping(part.get("source"), place)
        data = source.get("data") if source.get("type") == "base64" else None
    else:
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        head, _, data = url.partition(",") if isinstance(url, str) else ("", "", None)
        data = data if head.startswith("data:") and head.endswith(";base64") else None
    if not isinstance(data, str):
        reading.refuse(f"content/{kind}", "workers download nothing: send the image as base64 data")
        return []
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))  # reads its size alone
        reading.pixels += image.width * image.height
        if reading.pixels > MOST_PIXELS:
            raise invalid(f"{place}: the images of a request may have {MOST_PIXELS} pixels together")
        return [image.convert("RGB")]
    except (binascii.Error, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise invalid(f"{place}: not a base64 image ({error})") from None


def tools(
    schemas: Sequence[Mapping[str, Any]], choice: Any, reading: Reading, key: str = "parameters"
) -> dict[str, Any]:
    """``tools`` and ``hides_tools`` of a request, from entries ``{"type", "name", "description", "parameters"}``.

    Tools of other types are left out and counted. ``choice``: the request's ``tool_choice``, whose ``none`` hides all
    tools; other demands cannot be enforced on what the model samples. ``key``: the API's name for the parameters.
    """
    functions = []
    for number, schema in enumerate(schemas):
        if (kind := string(schema.get("type"), f"tools[{number}].type")) != "function":
            reading.ignore(f"tools/{kind}")
            continue
        if schema.get("strict"):
            reading.ignore("strict")
        functions.append({"type": "function", "function": _function(schema, f"tools[{number}]", key)})
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use"):
        reading.ignore("parallel_tool_calls")
    if kind == "none":
        return {"tools": (), "hides_tools": bool(functions)}
    if kind not in (None, "auto"):
        reading.ignore("tool_choice")
    return {"tools": tuple(functions)}


def _function(schema: Mapping[str, Any], where: str, key: str) -> dict[str, Any]:
    """A function as chat templates read it: some expect all three keys. ``key``: see :func:`tools`."""
    parameters = {} if schema.get("parameters") is None else mapping(schema["parameters"], f"{where}.{key}")
    if parameters.get("properties") is not None:
        mapping(parameters["properties"], f"{where}.{key}.properties")
    return {
        "name": string(schema.get("name"), f"{where}.name"),
        "description": string(schema.get("description") or "", f"{where}.description"),
        "parameters": parameters or {"type": "object", "properties": {}},
    }


def arguments(value: Any) -> Mapping[str, Any]:
    """Arguments of a call, sent as JSON text or as an object."""
    try:
        parsed = json.loads(value) if isinstance(value, str) and value.strip() else value or {}
    except (ValueError, RecursionError):
        parsed = value
    return parsed if isinstance(parsed, Mapping) else {RAW: value}


def spelled(call: ToolCall) -> str:
    """Arguments of a call as JSON text."""
    if call.arguments.keys() == {RAW} and isinstance(call.arguments[RAW], str):
        return call.arguments[RAW]
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, checked: something to answer has to be there."""
    if not messages:
        raise invalid("the request has no messages")
    if messages[-1].role == "assistant":
        raise invalid(
            "the last message is the assistant's: the policy is trained on whole turns of its own. "
            "End the messages with one of the user or a tool"
        )
    return tuple(messages)


def reply_id(wire_id: Any, prefix: str, numbered: bool = False) -> str | None:
    """The id of our reply in an id that was made of it, with a number behind it or not; None: it is another's."""
    if not isinstance(wire_id, str) or not wire_id.startswith(prefix):
        return None
    return (wire_id.rpartition("_")[0] if numbered else wire_id)[len(prefix) :] or None


def event(data: Mapping[str, Any] | str, name: str | None = None) -> str:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def openai_error(error: GatewayError) -> dict[str, Any]:
    """The body of an error in OpenAI's APIs. Agents recognize a full context by its words."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = _with_words(error, "maximum context length")
    return {"error": {"message": message, "type": kind, "param": error.extra.get("param"), "code": error.code}}


def anthropic_error(error: GatewayError) -> dict[str, Any]:
    """The body of an error in Anthropic's API."""
    kind = {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error"}.get(error.status)
    message = _with_words(error, "prompt is too long")
    return {"type": "error", "error": {"type": kind or "api_error", "message": message}}


def _with_words(error: GatewayError, words: str) -> str:
    if error.code != "context_length_exceeded" or words in error.message:
        return error.message
    return f"{words}: {error.message}"


def log_probs(reply: Reply) -> list[dict[str, Any]]:
    """The log-probability of each token, as OpenAI's APIs have them."""
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in reply.log_probs
    ]


def total_tokens(reply: Reply) -> int:
    return reply.prompt_tokens + reply.completion_tokens
