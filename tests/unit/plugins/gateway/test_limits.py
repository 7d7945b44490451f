"""What the gateway does with the parameters of a request."""

import base64
import io

import anthropic
import openai
import pytest
from PIL import Image
from scripted_api import ONE, WEATHER, ScriptedApi

from verl_turnkey.plugins.gateway.dialects import DIALECTS, Chat, Messages, Responses
from verl_turnkey.plugins.gateway.limits import PARAMETERS, parameter
from verl_turnkey.plugins.gateway.messages import GatewayError

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ANTHROPIC = {**CHAT, "max_tokens": 5}
RESPONSES = {"input": "x"}
FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}


def overruled(dialect, body, unsupported="refuse"):
    return dialect.parse(body, unsupported=unsupported).overruled


def test_each_parameter_has_one_row_for_an_api():
    assert len({(row.name, row.api) for row in PARAMETERS}) == len(PARAMETERS)
    assert all(bool(row.why) == (row.treatment == "refused") for row in PARAMETERS)


@pytest.mark.parametrize(
    ("dialect", "body", "names"),
    [
        (Chat(), {**CHAT, "temperature": 0, "top_p": 0.9, "seed": 1}, ("temperature", "top_p", "seed")),
        (Chat(), {**CHAT, "temperature": None, "frequency_penalty": 0, "n": 1, "store": False}, ()),
        (Chat(), {**CHAT, "frequency_penalty": 0.5, "logit_bias": {"7": 1}}, ("frequency_penalty", "logit_bias")),
        (Chat(), {**CHAT, "parallel_tool_calls": True, "response_format": {"type": "text"}, "user": "u"}, ()),
        (Chat(), {**CHAT, "parallel_tool_calls": False, "an_option_of_tomorrow": 1},
         ("parallel_tool_calls", "an_option_of_tomorrow")),
        (Chat(), {**CHAT, "stream_options": {"include_usage": True, "include_obfuscation": False}}, ()),
        (Chat(), {**CHAT, "n": True, "tool_choice": "auto"}, None),
        (Messages(), {**ANTHROPIC, "temperature": 1, "top_k": 3, "metadata": {}, "thinking": {"type": "disabled"}},
         ("temperature", "top_k", "thinking")),
        (Messages(), {**ANTHROPIC, "output_config": {"effort": "low"}}, ("output_config.effort",)),
        (Responses(), {**RESPONSES, "store": True, "reasoning": {"effort": "low", "summary": "auto"}},
         ("reasoning.effort",)),
        (Responses(), {**RESPONSES, "text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "auto"},
         ("text.verbosity", "truncation")),
    ],
)  # fmt: skip
def test_ignored_and_counted(dialect, body, names):
    if names is None:
        with pytest.raises(GatewayError, match="n=true"):
            overruled(dialect, body)
    else:
        assert overruled(dialect, body) == names


@pytest.mark.parametrize(
    ("dialect", "body", "name"),
    [
        (Chat(), {**CHAT, "n": 2}, "n"),
        (Chat(), {**CHAT, "store": True}, "store"),
        (Chat(), {**CHAT, "top_logprobs": 3}, "top_logprobs"),
        (Chat(), {**CHAT, "response_format": {"type": "json_schema", "json_schema": FORMAT}}, "response_format"),
        (Chat(), {**CHAT, "logits_processors": ["f"]}, "logits_processors"),
        (Chat(), {**CHAT, "functions": [{"name": "f"}]}, "functions"),
        (Chat(), {**CHAT, "modalities": ["text", "audio"]}, "modalities"),
        (Responses(), {**RESPONSES, "text": {"format": FORMAT}}, "text.format"),
        (Responses(), {**RESPONSES, "background": True}, "background"),
        (Responses(), {**RESPONSES, "conversation": "c"}, "conversation"),
        (Messages(), {**ANTHROPIC, "output_config": {"format": FORMAT}}, "output_config.format"),
    ],
)
def test_refused_or_else_counted(dialect, body, name):
    words = f"^{name}=.* is not supported: .*turnkey.agent.unsupported=ignore"
    with pytest.raises(GatewayError, match=words) as caught:
        dialect.parse(body, unsupported="refuse")
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
    assert parameter(name, "chat").why in caught.value.message
    assert overruled(dialect, body, "ignore") == (name,)


def test_the_client_is_told_which_parameter_it_is():
    create = ScriptedApi(Chat(), [ONE]).openai().chat.completions.create
    with pytest.raises(
        openai.BadRequestError,
        match=r"n=3 is not supported: .*each request is one turn, so send one request per sample\. Leave",
    ) as caught:
        create(model="policy", n=3, **CHAT)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format=.* constrained decoding"):
        ScriptedApi(Messages(), [ONE]).anthropic().messages.create(model="policy", output_config=schema, **ANTHROPIC)


FUNCTION = {"name": "weather", "description": "of a city", "parameters": WEATHER}
KEPT = ({"type": "function", "function": FUNCTION},)
CASES = [
    (Chat(), {**CHAT, "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}, {"type": "custom"}]}),
    (Responses(), {**RESPONSES, "tools": [{"type": "function", **FUNCTION, "strict": True}, {"type": "custom"}]}),
    (Messages(), {**ANTHROPIC, "tools": [
        {"name": "weather", "description": "of a city", "input_schema": WEATHER, "strict": True}, {"type": "custom"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "body"), CASES)
def test_tools_that_are_no_functions_are_left_out(dialect, body):
    request = dialect.parse(body, unsupported="refuse")
    assert request.tools == KEPT
    assert request.overruled == ("strict", "tools/custom")


@pytest.mark.parametrize(("dialect", "body"), CASES)
def test_a_tool_without_a_type(dialect, body):
    """It would never reach the model: such as one in the form of another API."""
    with pytest.raises(GatewayError, match=r"tools\[0\]\.type: expected a string, got NoneType"):
        dialect.parse({**body, "tools": [{"name": "weather", "description": "of a city"}]}, unsupported="refuse")
    request = Chat().parse({**CHAT, "tools": [{"function": FUNCTION}]}, unsupported="refuse")
    assert (request.tools, request.overruled) == (KEPT, ())


@pytest.mark.parametrize(
    ("index", "choice", "names", "kept"),
    [
        (0, "auto", (), True),
        (0, None, (), True),
        (0, "none", (), False),
        (0, "required", ("tool_choice",), True),
        (0, {"type": "function", "function": {"name": "weather"}}, ("tool_choice",), True),
        (1, "none", (), False),
        (1, {"type": "function", "name": "weather"}, ("tool_choice",), True),
        (2, {"type": "auto"}, (), True),
        (2, {"type": "none"}, (), False),
        (2, {"type": "any"}, ("tool_choice",), True),
        (2, {"type": "auto", "disable_parallel_tool_use": True}, ("parallel_tool_calls",), True),
    ],
)
def test_choice_of_a_tool(index, choice, names, kept):
    dialect, body = CASES[index]
    request = dialect.parse({**body, "tool_choice": choice}, unsupported="refuse")
    assert request.tools == (KEPT if kept else ())
    assert (request.offers_tools, request.hides_tools) == (True, not kept)
    assert not dialect.parse({**body, "tools": [], "tool_choice": choice}, unsupported="refuse").offers_tools
    assert request.overruled == ("strict", "tools/custom", *names)


def picture() -> str:
    held = io.BytesIO()
    Image.new("RGBA", (3, 2), (255, 0, 0, 255)).save(held, "PNG")
    return base64.b64encode(held.getvalue()).decode()


def with_image(dialect, source: str):
    """A body whose user message holds a text and an image from ``source``, base64 data or a URL."""
    data = f"data:image/png;base64,{source}"
    url = source if source.startswith("http") else data
    if isinstance(dialect, Chat):
        part = {"type": "image_url", "image_url": {"url": url}}
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
    if isinstance(dialect, Responses):
        part = {"type": "input_image", "image_url": url}
        return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "see"}, part]}]}
    held = {"type": "base64", "media_type": "image/png", "data": source}
    block = {"type": "image", "source": {"type": "url", "url": source} if source.startswith("http") else held}
    return {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, block]}]}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_images_come_as_data(dialect):
    (message,) = dialect.parse(with_image(dialect, picture()), unsupported="refuse").messages
    (image,) = message.images
    assert (message.text, image.size, image.mode, image.getpixel((0, 0))) == ("see", (3, 2), "RGB", (255, 0, 0))
    with pytest.raises(GatewayError, match=r"content/.* is not supported: workers download nothing"):
        dialect.parse(with_image(dialect, "https://example.org/a.png"), unsupported="refuse")
    ignoring = dialect.parse(with_image(dialect, "https://example.org/a.png"), unsupported="ignore")
    assert ignoring.messages[0].images == ()
    assert ignoring.overruled[0].startswith("content/")
    with pytest.raises(GatewayError, match="not a base64 image"):
        dialect.parse(with_image(dialect, "bm9uZQ=="), unsupported="refuse")


def test_sound_is_refused():
    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    body = {"messages": [{"role": "user", "content": ["hear", part]}]}
    with pytest.raises(GatewayError, match="content/input_audio is not supported: the model reads text and images"):
        Chat().parse(body, unsupported="refuse")
    assert Chat().parse(body, unsupported="ignore").messages[0].text == "hear"


TOOLS = {
    Chat: lambda function: {**CHAT, "tools": [{"type": "function", "function": function}]},
    Responses: lambda function: {**RESPONSES, "tools": [{"type": "function", **function}]},
    Messages: lambda function: {
        **ANTHROPIC,
        "tools": [{("input_schema" if key == "parameters" else key): value for key, value in function.items()}],
    },
}
EMPTY = {"name": "a", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("dialect", TOOLS)
@pytest.mark.parametrize(
    ("function", "read"),
    [
        ({"name": "a", "parameters": WEATHER}, {"name": "a", "description": "", "parameters": WEATHER}),
        ({"name": "a", "description": None, "parameters": None}, {**EMPTY, "description": ""}),
        ({"name": "a", "description": "A.", "parameters": {}}, {**EMPTY, "description": "A."}),
        ({"name": "a", "parameters": [1]}, "parameters: expected an object, got list"),
        ({"name": "a", "parameters": "{}"}, "parameters: expected an object, got str"),
        ({"name": "a", "parameters": True}, "parameters: expected an object, got bool"),
        ({"name": "a", "parameters": {"properties": []}}, "parameters.properties: expected an object, got list"),
        ({"name": "a", "description": 7, "parameters": {}}, "description: expected a string, got int"),
        ({"name": None, "parameters": {}}, "name: expected a string, got NoneType"),
    ],
)
def test_tools_have_what_templates_read_or_are_refused(dialect, function, read):
    """A template that writes a tool without looking whether it has a description would refuse every request."""
    body = TOOLS[dialect](function)
    if isinstance(read, dict):
        assert dialect().parse(body, unsupported="refuse").tools == ({"type": "function", "function": read},)
    else:
        wanted = f"tools[0].{read}".replace("parameters", "input_schema" if dialect is Messages else "parameters")
        with pytest.raises(GatewayError) as error:
            dialect().parse(body, unsupported="refuse")
        assert (error.value.status, error.value.message) == (400, wanted)


def test_images_of_a_system_text_are_not_dropped():
    drawn = {"type": "image", "source": {"type": "base64", "data": picture()}}
    (system, _) = Messages().parse({**ANTHROPIC, "system": [drawn]}, unsupported="refuse").messages
    assert len(system.images) == 1
