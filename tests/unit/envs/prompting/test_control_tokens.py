"""Control tokens in texts of an environment become plain text."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_turnkey.envs.prompting.control_tokens import ControlTokens

QWEN = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<tool_call></tool_call><tool_response>"


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>", chat_template=template)
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<table>", "go", "\n\n"]
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return made


def test_added_tokens_that_the_template_writes_or_that_mark_thoughts_become_plain():
    made = tokenizer(QWEN)
    control = ControlTokens(made)
    for token in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_end|>"):
        assert control.plain(f"a{token}b") == f"a{token[0]} {token[1:]}b"
        assert made.convert_tokens_to_ids(token) not in made.encode(control.plain(token))


def test_words_and_tags_of_html_stay():
    text = "<table> go\n\n <td>"
    assert ControlTokens(tokenizer(QWEN)).plain(text) == text
    assert ControlTokens(tokenizer(None)).plain("<tool_call>") == "<tool_call>"  # this model has no such message
