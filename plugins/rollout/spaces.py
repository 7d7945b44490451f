"""A check that a tokenizer keeps the spaces of a text."""

from __future__ import annotations

from typing import Any

from verl_turnkey.advantage import ConfigError

SAMPLE = "go to the red door"


def check_spaces(tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer joins words, since the model would read them so.

    transformers 5 does this without a warning if ``tokenizer_config.json`` names a class that ``tokenizer.json`` is
    not made for: ``LlamaTokenizerFast`` for DeepSeek's tokenizer, in a model of another family.
    """
    text = tokenizer.decode(tokenizer.encode(SAMPLE, add_special_tokens=False))
    if text == SAMPLE.replace(" ", ""):
        raise ConfigError(
            f"the model's tokenizer loses spaces: {SAMPLE!r} comes back as {text!r}. transformers loaded it as "
            f'{type(tokenizer).__name__}, which its tokenizer.json is not made for: set "tokenizer_class" to '
            '"PreTrainedTokenizerFast" in the tokenizer_config.json of the model (or of '
            "actor_rollout_ref.model.tokenizer_path)"
        )
