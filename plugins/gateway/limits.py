"""What the gateway does with each parameter of a request, as a table that all APIs share.

A reply is one sample of the policy as the rollout samples it. A parameter that asks for other samples cannot be obeyed:
the actor recomputes the log-probabilities of what was sampled at ``actor_rollout_ref.rollout.temperature``, without
constraints. Sampling parameters are ignored and counted (``agent/overruled/<name>``), since agents send them by habit.
What an agent relies on, such as a schema of the reply, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl_turnkey.plugins.gateway.messages import GatewayError, Request

Api = Literal["chat", "responses", "messages"]
Treatment = Literal["read", "no effect", "ignored", "refused"]
"""obeyed; accepted, since the text of a reply does not depend on it; ignored and counted; answered with an error"""

UNSUPPORTED = "turnkey.agent.unsupported"
CONSTRAINED = "constrained decoding would change the policy that is trained"
NO_LOG_PROBS = (
    "only training with actor_rollout_ref.rollout.calculate_log_probs=true has log-probabilities, not turnkey eval and "
    "turnkey agent"
)
UNKEPT = "the gateway keeps nothing beyond the episode"


@dataclass(frozen=True)
class Parameter:
    """A row of the table.

    Args:
        name: of the parameter; ``text.format`` is the key ``format`` in the mapping ``text``.
        why: reason of a refusal.
        harmless: values with which the parameter asks for nothing, besides null.
        api: the only API that the row holds for; None: all.
    """

    name: str
    treatment: Treatment
    why: str = ""
    harmless: tuple[Any, ...] = ()
    api: Api | None = None


def _rows(treatment: Treatment, names: str, why: str = "") -> tuple[Parameter, ...]:
    return tuple(Parameter(name, treatment, why) for name in names.split())


PARAMETERS: tuple[Parameter, ...] = (
    *_rows("read", "messages input system instructions previous_response_id model tools tool_choice"),
    *_rows("read", "max_tokens max_completion_tokens max_output_tokens stop stop_sequences"),
    *_rows("read", "stream stream_options.include_usage logprobs include"),
    *_rows("no effect", "metadata client_metadata user safety_identifier service_tier inference_geo speed diagnostics"),
    *_rows("no effect", "prompt_cache_key prompt_cache_options prompt_cache_retention cache_control"),
    *_rows("no effect", "stream_options.include_obfuscation reasoning.summary reasoning.generate_summary"),
    *_rows("ignored", "temperature top_p top_k min_p seed repetition_penalty reasoning_effort thinking prediction"),
    *_rows(
        "ignored", "reasoning.effort reasoning.context verbosity text.verbosity output_config.effort max_tool_calls"
    ),
    Parameter("frequency_penalty", "ignored", harmless=(0,)),
    Parameter("presence_penalty", "ignored", harmless=(0,)),
    Parameter("logit_bias", "ignored", harmless=({},)),
    Parameter("parallel_tool_calls", "ignored", harmless=(True,)),
    Parameter("truncation", "ignored", harmless=("disabled",)),
    Parameter("n", "refused", "each request is one turn, so send one request per sample", (1,)),
    Parameter("best_of", "refused", "each request is one turn", (1,)),
    Parameter("response_format", "refused", CONSTRAINED, ({"type": "text"},)),
    Parameter("text.format", "refused", CONSTRAINED, ({"type": "text"},)),
    *_rows("refused", "output_config.format guided_json guided_regex guided_choice guided_grammar", CONSTRAINED),
    Parameter("structured_outputs", "refused", CONSTRAINED, ({},)),
    Parameter("logits_processors", "refused", "they would change the policy that is trained", ([],)),
    Parameter("top_logprobs", "refused", "the rollout keeps the log-probabilities of sampled tokens alone", (0,)),
    Parameter("functions", "refused", "it is deprecated: send tools", ([],)),
    Parameter("function_call", "refused", "it is deprecated: send tool_choice"),
    Parameter("audio", "refused", "the model writes text"),
    Parameter("modalities", "refused", "the model writes text", (["text"],)),
    # The Responses API stores replies unless told otherwise; here previous_response_id finds those of the episode.
    Parameter("store", "read", api="responses"),
    Parameter("store", "refused", UNKEPT, (False,)),
    Parameter("background", "refused", UNKEPT, (False,)),
    Parameter("conversation", "refused", UNKEPT),
    Parameter("prompt", "refused", "the gateway has no stored prompts: send instructions and input"),
)
"""Parameters that are not listed are ignored and counted."""

_TABLE = {(row.name, row.api): row for row in PARAMETERS}
_NESTED = {row.name.partition(".")[0] for row in PARAMETERS if "." in row.name}


def parameter(name: str, api: Api) -> Parameter:
    """The row of a parameter."""
    return _TABLE.get((name, api)) or _TABLE.get((name, None)) or Parameter(name, "ignored")


@dataclass
class Reading:
    """What is ignored while a request of ``api`` is read.

    Args:
        unsupported: ``refuse`` answers with an error what cannot be obeyed; ``ignore`` counts it like the rest.
    """

    api: Api
    unsupported: Literal["refuse", "ignore"]
    overruled: list[str] = field(default_factory=list)
    pixels: int = 0
    """of the images so far"""

    def ignore(self, name: str) -> None:
        """Count ``name`` once."""
        if name not in self.overruled:
            self.overruled.append(name)

    def refuse(self, name: str, why: str, value: Any = None) -> None:
        """Raise an error about a parameter, or a part of a message, unless it is to be ignored."""
        if self.unsupported == "ignore":
            return self.ignore(name)
        sent = name if value is None else f"{name}={_short(value)}"
        words = (
            f"{sent} is not supported: {why}. Leave it out of the agent's requests, or set {UNSUPPORTED}=ignore: "
            f"the model then answers without it, and the metric agent/overruled/{name} counts such requests"
        )
        raise GatewayError(400, "unsupported_parameter", words, {"param": name})

    def parameters(self, body: Mapping[str, Any]) -> None:
        """Sort out all parameters of a body."""
        for name, value in _flat(body):
            row = parameter(name, self.api)
            if value is None or any(_same(value, harmless) for harmless in row.harmless):
                continue
            if row.treatment == "refused":
                self.refuse(name, row.why, value)
            elif row.treatment == "ignored":
                self.ignore(name)


def without_log_probs(request: Request, unsupported: Literal["refuse", "ignore"]) -> Request:
    """The request to a model whose turns come without log-probabilities.

    Raises:
        GatewayError: it asks for them.
    """
    if not request.log_probs:
        return request
    reading = Reading("chat", unsupported, [*request.overruled])
    reading.refuse("logprobs", NO_LOG_PROBS)
    return replace(request, log_probs=False, overruled=tuple(reading.overruled))


def _flat(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in body.items():
        if name in _NESTED and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _same(value: Any, harmless: Any) -> bool:
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def _short(value: Any, longest: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= longest else f"{text[:longest]}..."
