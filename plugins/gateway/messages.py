"""What a request to the model and its reply hold, whichever API the agent speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a message of the model."""

    name: str
    arguments: Mapping[str, Any]
    id: str
    """``call_<episode>_<turn>_<position>`` if the gateway made it"""
    written: str = field(default="", compare=False)
    """the id that the model wrote, under which its prompts show the call and the result; empty: it wrote none"""


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    """of an assistant"""
    reasoning: str | None = None
    """of an assistant; None: the client did not send it"""
    call_id: str | None = None
    """the call whose result a tool message is"""
    error: bool = False
    """a tool message that the client marks as an error"""
    item_id: str | None = None
    """the gateway's id of an assistant's message or thought, in APIs whose clients send it back"""
    images: tuple[Any, ...] = ()
    """PIL images"""

    @property
    def pictures(self) -> list[str]:
        """Its images as a report shows them."""
        return [f"[image {image.width}x{image.height}]" for image in self.images]


@dataclass(frozen=True)
class Request:
    """One call of the model."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """function tools, each ``{"type": "function", "function": {"name", "description", "parameters"}}``, as sent"""
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """whether a stream ends with the numbers of tokens"""
    log_probs: bool = False
    previous: str | None = None
    """id of the reply that the messages continue"""
    overruled: tuple[str, ...] = ()
    """names of parameters that were sent and are ignored"""
    instructions: bool = False
    """whether the first message holds for this request alone, not for those that name its reply as ``previous``"""
    begun_by: str | None = None
    """id of the reply that began the conversation, as of a sub-agent, or that goes before, where the client says it"""
    hides_tools: bool = False
    """whether tools were sent, of which the model sees none"""

    @property
    def offers_tools(self) -> bool:
        """Whether tools were sent, shown to the model or not."""
        return self.hides_tools or bool(self.tools)

    @property
    def call_ids(self) -> set[str]:
        """The ids of the calls in its messages."""
        return {call.id for message in self.messages for call in message.calls}


@dataclass(frozen=True)
class Reply:
    """The model's turn."""

    id: str
    """``<episode>_<turn>``, from which the dialects make the ids of messages"""
    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    finish: Literal["stop", "length"] = "stop"
    """``stop`` also where it ends with calls"""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    log_probs: Sequence[tuple[str, float]] = ()
    """text and log-probability of each token, if the request asked for them"""
    cached_tokens: int = 0
    number: int = 0
    """turns of the episode that were answered before it"""
    stop: str | None = None
    """the request's stop string at which it ends, which its text does not include"""

    @property
    def message(self) -> Message:
        """The reply as a message of the conversation."""
        return Message("assistant", self.text, self.calls, self.reasoning, item_id=self.id)


@dataclass
class GatewayError(Exception):
    """A request that is answered with an error in the form of its API."""

    status: int
    """400 for what must not be sent again, 404 for an episode that has ended, 503 for what may be"""
    code: str
    """``context_length_exceeded``, ``unsupported_parameter``, ``invalid_request``, ``turn_limit``, ``episode_over``,
    ``overloaded``; of other models ``model_not_found``, ``model_failed``"""
    message: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def invalid(message: str, **extra: Any) -> GatewayError:
    """The error for a request that is wrong as it stands: sending it again does not help."""
    return GatewayError(400, "invalid_request", message, extra)


class Dialect(Protocol):
    """One API of models: pure functions between its JSON and the classes above."""

    path: str
    """below ``/{secret}/v1``, such as ``/chat/completions``"""

    def parse(self, body: Mapping[str, Any], *, unsupported: Literal["refuse", "ignore"]) -> Request:
        """The request in a body.

        Raises:
            GatewayError: the body is malformed, or asks for what would change the policy.
        """
        ...

    def render(self, reply: Reply, request: Request) -> dict[str, Any]:
        """The JSON body of a reply."""
        ...

    def stream(self, reply: Reply, request: Request) -> list[str]:
        """The reply as server-sent events, each with its ``event:`` and ``data:`` lines and the blank line."""
        ...

    def error(self, error: GatewayError) -> dict[str, Any]:
        """The JSON body of an error."""
        ...
