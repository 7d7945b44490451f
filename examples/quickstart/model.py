"""A language model small enough to train in minutes on a CPU, and a tokenizer made for what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

# A piece is a verb, a quantity with its words ("2 steps forward and"), a thing with its article ("a locked yellow
# door"), other words up to the next of these, or a mark. Merges stay inside a piece: prompts become short, a thing is
# the same token wherever it stands, and an action of two words is two tokens.
_PIECES = r" ?(?:{verbs})\b| ?\d+(?: [a-z]+)*| ?[A-Za-z]+(?: (?!an? )[A-Za-z]+)*|[^ A-Za-z0-9]| +"


def build_tokenizer(
    texts: Iterable[str],
    actions: Iterable[str],
    vocab_size: int = 1024,
    pieces: str = _PIECES,
    special: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template; any text has an encoding.

    Args:
        texts: prompts, in which frequent pieces become one token each.
        actions: what the model shall say; each word becomes a token.
        pieces: expression for what merges stay inside, with the field ``{verbs}``.
        special: further tokens that no text is cut into, such as those around an image.
    """
    words = [action.split() for action in actions]
    verbs = "|".join(sorted({first for first, *_ in words}))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces.format(verbs=verbs)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alone = [space + word for action in words for word in action for space in ("", " ")]
    tokenizer.train_from_iterator(
        [*texts, *alone * 2],  # twice: a pair that occurs once is not merged
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[PAD, START, END, *special],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, *special],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def sizes(tokenizer: PreTrainedTokenizerFast, layers: int, width: int) -> dict[str, Any]:
    """Settings of a tiny Qwen3. ``head_dim`` is 32, the least that vLLM's CPU attention takes."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }


def build_model(tokenizer: PreTrainedTokenizerFast, layers: int = 2, width: int = 64) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights."""
    return Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **sizes(tokenizer, layers, width)))
