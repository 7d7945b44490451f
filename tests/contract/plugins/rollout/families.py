"""A tokenizer and a chat template for each builder family of verl's, with the markup of the family's models.

:data:`FAMILIES` are built here; :data:`REAL` are published ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import real_tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    """``stop`` is what the model samples to end a turn of text, ``end`` what its template writes there."""

    model_type: str
    builder: str
    special: list[str]
    template: str | None
    stop: str
    end: str
    user: str
    """a user message ``%s`` and the beginning of the model's turn"""
    tool: str
    """a tool's message and the beginning of the model's turn"""
    call: str
    """a tool call as it is sampled"""
    call_end: str = ""
    """what stands between a whole call and the tool's message beside what was sampled"""
    removed: str = ""
    """what the builder takes from the end of a turn, since the next message begins with it"""
    thoughts: tuple[str, str] = ("<think>", "</think>")
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> Any:
        tokens = Tokenizer(models.BPE())
        tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokens.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<pad>", *self.special]
        trainer = trainers.BpeTrainer(
            vocab_size=256 + len(special), special_tokens=special, initial_alphabet=sorted(alphabet)
        )
        tokens.train_from_iterator(["a"], trainer)
        made = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=self.special[0], pad_token="<pad>")
        made.add_special_tokens({"additional_special_tokens": special[1:]})
        made.add_tokens(["<think>", "</think>"])
        made.chat_template = self.template
        return made


def _template(begin: str, tools: str, user: str, assistant: str, tool: str, last: str, system: str = "") -> str:
    """Joined without white space of its own: what stands between the parts is the models'."""
    return (
        f"{begin}{{%- if tools %}}{tools}{{%- endif %}}{{%- for m in messages %}}"
        f"{{%- if m.role == 'system' %}}{system}{{%- elif m.role == 'user' %}}{user}"
        f"{{%- elif m.role == 'assistant' %}}{assistant}{{%- else %}}{tool}{{%- endif %}}{{%- endfor %}}{last}"
    )


def _w(text: str) -> str:
    """An expression that writes ``text``, whose white space jinja leaves alone."""
    return "{{- " + text + " }}"


_SAID = "m.content.split('</think>')[-1].lstrip()"
_EACH = "{%- for c in m.tool_calls or [] %}"
_CHATML = _template(
    "",
    _w("'<|im_start|>system\\n' + tools|tojson + '<|im_end|>\\n'"),
    _w("'<|im_start|>user\\n' + m.content + '<|im_end|>\\n'"),
    _w(f"'<|im_start|>assistant\\n' + {_SAID}")
    + _EACH
    + _w('\'<tool_call>\\n{"name": "act", "arguments": \' + c.function.arguments|tojson + \'}\\n</tool_call>\'')
    + "{%- endfor %}"
    + _w("'<|im_end|>\\n'"),
    _w("'<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n'"),
    "{%- if add_generation_prompt %}"
    + _w("'<|im_start|>assistant\\n'")
    + "{%- if enable_thinking is defined and not enable_thinking %}"
    + _w("'<think>\\n\\n</think>\\n\\n'")
    + "{%- endif %}{%- endif %}",
    _w("'<|im_start|>system\\n' + m.content + '<|im_end|>\\n'"),
)
CHATML_USER = "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"
CHATML_TOOL = CHATML_USER % "<tool_response>\n%s\n</tool_response>"
CHATML_CALL = '<tool_call>\n{"name": "act", "arguments": {"action": "go"}}\n</tool_call><|im_end|>'
_CHATML_FAMILY: dict[str, Any] = {
    "special": ["<|im_end|>", "<|im_start|>"],
    "template": _CHATML,
    "stop": "<|im_end|>",
    "end": "<|im_end|>\n",
    "user": CHATML_USER,
    "tool": CHATML_TOOL,
    "call": CHATML_CALL,
    "call_end": "\n",
}
QWEN = Family("qwen3", "QwenContinuousTokenBuilder", **_CHATML_FAMILY)
NO_THINKING = Family(
    "qwen3",
    "QwenContinuousTokenBuilder",
    **{
        **_CHATML_FAMILY,
        "user": CHATML_USER + "<think>\n\n</think>\n\n",
        "tool": CHATML_TOOL + "<think>\n\n</think>\n\n",
        "kwargs": {"enable_thinking": False},
    },
)
DEFAULT = Family("qwen2_moe", "ContinuousTokenBuilder", **_CHATML_FAMILY)

GLM = Family(
    "glm4_moe",
    "GLMContinuousTokenBuilder",
    special=["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    template=_template(
        _w("'[gMASK]<sop>'"),
        _w("'<|system|>\\n' + tools|tojson"),
        _w("'<|user|>\\n' + m.content"),
        _w(f"'<|assistant|>\\n<think></think>\\n' + {_SAID}")
        + _EACH
        + _w("'\\n<tool_call>act\\n'")
        + "{%- for k, v in c.function.arguments.items() %}"
        + _w("'<arg_key>' + k + '</arg_key>\\n<arg_value>' + v + '</arg_value>\\n'")
        + "{%- endfor %}"
        + _w("'</tool_call>'")
        + "{%- endfor %}",
        _w("'<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>'"),
        "{%- if add_generation_prompt %}" + _w("'<|assistant|>'") + "{%- endif %}",
        _w("'<|system|>\\n' + m.content"),
    ),
    stop="<|user|>",
    end="",
    removed="<|user|>",
    user="<|user|>\n%s<|assistant|>",
    tool="<|observation|>\n<tool_response>\n%s\n</tool_response><|assistant|>",
    call="<tool_call>act\n<arg_key>action</arg_key>\n<arg_value>go</arg_value>\n</tool_call><|observation|>",
)

_D = ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"]
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_OUT = [
    f"<\uff5ctool\u2581{what}\uff5c>"
    for what in ("outputs\u2581begin", "outputs\u2581end", "output\u2581begin", "output\u2581end")
]
_CALLS = [
    f"<\uff5ctool\u2581{what}\uff5c>"
    for what in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end")
]
_SEP = "<\uff5ctool\u2581sep\uff5c>"
DEEPSEEK = Family(
    "deepseek_v3",
    "DeepSeekContinuousTokenBuilder",
    special=[EOS, *_D, *_OUT, *_CALLS, _SEP],
    template=_template(
        _w(f"'{_D[2]}'"),
        _w("tools|tojson"),
        _w(f"'{_D[0]}' + m.content"),
        _w(f"'{_D[1]}' + {_SAID}")
        + _EACH
        + _w(f"'{_CALLS[0]}{_CALLS[2]}function{_SEP}act\\n```json\\n' + c.function.arguments + '\\n```{_CALLS[3]}'")
        + _w(f"'{_CALLS[1]}'")
        + "{%- endfor %}"
        + _w(f"'{EOS}'"),
        _w(f"'{_OUT[0]}{_OUT[2]}' + m.content + '{_OUT[3]}{_OUT[1]}'"),
        "{%- if add_generation_prompt and messages[-1].role != 'tool' %}" + _w(f"'{_D[1]}'") + "{%- endif %}",
        _w("m.content"),
    ),
    stop=EOS,
    end=EOS,
    user=f"{_D[0]}%s{_D[1]}",
    tool=f"{_OUT[0]}{_OUT[2]}%s{_OUT[3]}{_OUT[1]}",
    call=f'{_CALLS[0]}{_CALLS[2]}function{_SEP}act\n```json\n{{"action": "go"}}\n```{_CALLS[3]}{_CALLS[1]}{EOS}',
)
_DSML = "\uff5cDSML\uff5c"
DEEPSEEK_V4 = Family(
    "deepseek_v4",
    "DeepSeekV4ContinuousTokenBuilder",
    special=[EOS, *_D],
    template=None,
    stop=EOS,
    end=EOS,
    user=f"{_D[0]}%s{_D[1]}<think>",
    tool=f"{_D[0]}<tool_result>%s</tool_result>{_D[1]}<think>",
    call=(
        f'\n\n<{_DSML}tool_calls>\n<{_DSML}invoke name="act">\n<{_DSML}parameter name="action" string="true">go'
        f"</{_DSML}parameter>\n</{_DSML}invoke>\n</{_DSML}tool_calls>{EOS}"
    ),
    kwargs={"enable_thinking": True, "drop_thinking": False},
)

MINIMAX = Family(
    "minimax_m2",
    "MiniMaxContinuousTokenBuilder",
    special=["[e~[", "]~!b[", "]~b]"],
    template=_template(
        _w("']~!b['"),
        _w("']~b]system\\n' + tools|tojson + '[e~[\\n'"),
        _w("']~b]user\\n' + m.content + '[e~[\\n'"),
        _w(f"']~b]ai\\n' + {_SAID}")
        + _EACH
        + _w("'\\n<minimax:tool_call>\\n<invoke name=' + '\"act\">\\n'")
        + "{%- for k, v in c.function.arguments.items() %}"
        + _w("'<parameter name=' + k|tojson + '>' + v + '</parameter>\\n'")
        + "{%- endfor %}"
        + _w("'</invoke>\\n</minimax:tool_call>'")
        + "{%- endfor %}"
        + _w("'[e~[\\n'"),
        _w("']~b]tool\\n<response>' + m.content + '</response>[e~[\\n'"),
        "{%- if add_generation_prompt %}" + _w("']~b]ai\\n<think>\\n'") + "{%- endif %}",
        _w("']~b]system\\n' + m.content + '[e~[\\n'"),
    ),
    stop="[e~[",
    end="[e~[\n",
    user="]~b]user\n%s[e~[\n]~b]ai\n<think>\n",
    tool="]~b]tool\n<response>%s</response>[e~[\n]~b]ai\n<think>\n",
    call=(
        '</think>\n<minimax:tool_call>\n<invoke name="act">\n<parameter name="action">go</parameter>\n</invoke>\n'
        "</minimax:tool_call>[e~["
    ),
    call_end="\n",
)

GEMMA = Family(
    "gemma4",
    "Gemma4ContinuousTokenBuilder",
    special=[
        *("<turn|>", "<|turn>", "<bos>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        *("<|channel>", "<channel|>"),
    ],
    template=_template(
        _w("'<bos>'"),
        _w("'<|turn>system\\n' + tools|tojson + '<turn|>\\n'"),
        _w("'<|turn>user\\n' + m.content + '<turn|>\\n'"),
        _w(f"'<|turn>model\\n' + {_SAID}")
        + "{%- if m.tool_calls %}"
        + _w("'<|tool_call>call:act{action:' + m.tool_calls[0].function.arguments|tojson + '}<tool_call|>'")
        + _w("'<|tool_response>'")
        + "{%- else %}"
        + _w("'<turn|>\\n'")
        + "{%- endif %}",
        _w("'response:' + m.name + '{value:' + m.content + '}<tool_response|>'"),
        "{%- if add_generation_prompt and messages[-1].role != 'tool' %}" + _w("'<|turn>model\\n'") + "{%- endif %}",
        _w("'<|turn>system\\n' + m.content + '<turn|>\\n'"),
    ),
    stop="<turn|>",
    end="<turn|>\n",
    user="<|turn>user\n%s<turn|>\n<|turn>model\n",
    tool="<|tool_response>response:act{value:%s}<tool_response|>",
    call='<|tool_call>call:act{action:{"action": "go"}}<tool_call|>',
    thoughts=("<|channel>thought\n", "<channel|>"),
)

START = "<|start|>assistant"
GPT_OSS = Family(
    "gpt_oss",
    "GptOssContinuousTokenBuilder",
    special=["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
    template=_template(
        _w("'<|start|>system<|message|>You are a model.<|end|>'"),
        _w("'<|start|>developer<|message|>' + tools|tojson + '<|end|>'"),
        _w("'<|start|>user<|message|>' + m.content + '<|end|>'"),
        "{%- if m.tool_calls %}"
        + _w(f"'{START} to=functions.act<|channel|>commentary json<|message|>'")
        + _w("m.tool_calls[0].function.arguments|tojson + '<|call|>'")
        + "{%- else %}"
        + _w(f"'{START}<|channel|>final<|message|>' + m.content")
        + _w("'<|return|>' if loop.last and not add_generation_prompt else '<|end|>'")
        + "{%- endif %}",
        "{%- if not m.name %}{{ raise_exception('a tool message needs a name') }}{%- endif %}"
        + _w("'<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>'")
        + _w("m.content|tojson + '<|end|>'"),
        "{%- if add_generation_prompt %}" + _w(f"'{START}'") + "{%- endif %}",
        _w("'<|start|>developer<|message|>' + m.content + '<|end|>'"),
    ),
    stop="<|return|>",
    end="<|end|>",
    user=f"<|start|>user<|message|>%s<|end|>{START}",
    tool=f'<|start|>functions.act to=assistant<|channel|>commentary<|message|>"%s"<|end|>{START}',
    call=' to=functions.act<|channel|>commentary json<|message|>{"action": "go"}<|call|>',
    thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
)

FAMILIES = {
    "default": DEFAULT,
    "qwen": QWEN,
    "qwen without thinking": NO_THINKING,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "deepseek v4": DEEPSEEK_V4,
    "minimax": MINIMAX,
    "gemma": GEMMA,
    "gpt-oss": GPT_OSS,
}


# --- published tokenizers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Real(Family):
    """``thinks``: a turn with the thoughts "I am." and the answer "go north" as the family writes it."""

    package: str = ""
    thinks: str = "<think>\nI am.\n</think>\n\ngo north"

    def tokenizer(self) -> Any:
        return real_tokenizers.tokenizer(self.package)


def _real(package: str, model_type: str, builder: str, stop: str, end: str, user: str, **more: Any) -> Real:
    more = {"tool": "", "call": "", "special": [], "template": None, **more}
    return Real(model_type, f"{builder}ContinuousTokenBuilder", stop=stop, end=end, user=user, package=package, **more)


FINAL = "<|channel|>final<|message|>"
_ANALYSIS = "<|channel|>analysis<|message|>"
_LLAMA = "<|start_header_id|>user<|end_header_id|>\n\n%s<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
_GEMMA = "<start_of_turn>user\n%s<end_of_turn>\n<start_of_turn>model\n"
REAL = {
    "SmolLM2": _real("smollm2", "llama", "", "<|im_end|>", "<|im_end|>\n", CHATML_USER),
    "Qwen3": _real("qwen3", "qwen3", "Qwen", "<|im_end|>", "<|im_end|>\n", CHATML_USER, tool=CHATML_TOOL),
    "Llama 3.1": _real("llama3_1", "llama", "", "<|eot_id|>", "<|eot_id|>", _LLAMA),
    "Llama 3.1 with tools": _real("llama3_1_tools", "llama", "", "<|eot_id|>", "<|eot_id|>", _LLAMA),
    "GPT-OSS": _real(
        *("gptoss", "gpt_oss", "GptOss", "<|return|>", "<|end|>", GPT_OSS.user),
        tool=GPT_OSS.tool,
        thinks=f"{_ANALYSIS}I am.<|end|>{START}{FINAL}go north",
        thoughts=GPT_OSS.thoughts,
    ),
    "DeepSeek V3": _real("deepseek_v3", "deepseek_v3", "DeepSeek", EOS, EOS, DEEPSEEK.user),
    "Gemma 3": _real("gemma3", "gemma3_text", "", "<end_of_turn>", "<end_of_turn>\n", _GEMMA),
    "Mistral Nemo": _real("mistral_nemo", "mistral", "", "</s>", "</s>", "[INST]%s[/INST]"),
}
TOOL_CALLERS = ("Qwen3", "Llama 3.1 with tools", "GPT-OSS")


def read_turn(
    reader: Any, tokenizer: Any, text: str, prompt: Sequence[int] = (), admissible: Any = None, cut: bool = False
) -> Any:
    """What a reader makes of a turn, as the agent loop calls it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return asyncio.run(reader.read(ids, tokenizer.decode(ids, skip_special_tokens=True), admissible, [*prompt], cut))
