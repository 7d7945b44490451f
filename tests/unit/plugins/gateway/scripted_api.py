"""An API that answers the real clients with scripted replies, through one of the gateway's dialects."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import anthropic
import httpx2
import openai

from verl_turnkey.plugins.gateway.messages import Dialect, GatewayError, Message, Reply, Request, ToolCall

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def call(reply: str, number: int, city: str) -> ToolCall:
    return ToolCall("weather", {"city": city}, f"call_{reply}_{number}")


ONE = Reply("e1_0", "Hello.", prompt_tokens=7, completion_tokens=3, cached_tokens=2)
THOUGHT = Reply("e1_1", "Sunny in Zürich.", reasoning="Which city?\n", prompt_tokens=9, completion_tokens=8)
CALL = Reply("e1_2", "", (call("e1_2", 0, "Zürich"),), prompt_tokens=5, completion_tokens=4)
CALLS = Reply("e1_3", "I ask.", (call("e1_3", 0, "Bern"), call("e1_3", 1, "Genf")), "Two of them.", "stop", 11, 12)
CUT = Reply("e1_4", "It is", finish="length", prompt_tokens=3, completion_tokens=2)
STOPPED = Reply("e1_7", "So ", prompt_tokens=3, completion_tokens=3, stop="END")
EMPTY = Reply("e1_5", "", prompt_tokens=3, completion_tokens=1)
TOKENS = Reply("e1_6", "a é", log_probs=[("a", -0.5), (" é", -1.25)], prompt_tokens=1, completion_tokens=2)
REPLIES = (ONE, THOUGHT, CALL, CALLS, CUT, STOPPED, EMPTY, TOKENS)

OVER = GatewayError(404, "episode_over", "the episode has ended")
FULL = GatewayError(400, "context_length_exceeded", "the prompt has 4100 tokens of 4096")
BUSY = GatewayError(503, "overloaded", "weights change")
ERRORS = (OVER, FULL, BUSY)
# As the gateway has them, whatever an API calls them.
FUNCTION = {"name": "weather", "description": "of a city", "parameters": WEATHER}
READ_TOOLS = ({"type": "function", "function": FUNCTION},)
TURN = Message("assistant", "I ask.", CALLS.calls, "Two of them.", item_id="e1_3")


class ScriptedApi:
    """Parses each request, keeps it, and answers it with the next reply, or with an error."""

    def __init__(
        self,
        dialect: Dialect,
        replies: Sequence[Reply | GatewayError],
        unsupported: Literal["refuse", "ignore"] = "refuse",
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[Request] = []
        self._dialect, self._replies, self._unsupported = dialect, list(replies), unsupported

    def _answer(self, http: httpx2.Request) -> httpx2.Response:
        assert http.url.path == f"/v1{self._dialect.path}"
        body = json.loads(http.content)
        self.bodies.append(body)
        try:
            request = self._dialect.parse(body, unsupported=self._unsupported)
            reply = self._replies.pop(0)
            if isinstance(reply, GatewayError):
                raise reply
        except GatewayError as error:
            return httpx2.Response(error.status, json=self._dialect.error(error))
        self.requests.append(request)
        if not request.stream:
            return httpx2.Response(200, json=self._dialect.render(reply, request))
        text = "".join(self._dialect.stream(reply, request))
        return httpx2.Response(200, text=text, headers={"content-type": "text/event-stream"})

    def openai(self) -> openai.OpenAI:
        http = httpx2.Client(transport=httpx2.MockTransport(self._answer))
        return openai.OpenAI(base_url="http://gateway/v1", api_key="secret", max_retries=0, http_client=http)

    def anthropic(self) -> anthropic.Anthropic:
        http = httpx2.Client(transport=httpx2.MockTransport(self._answer))
        return anthropic.Anthropic(base_url="http://gateway", api_key="secret", max_retries=0, http_client=http)
