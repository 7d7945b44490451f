"""verl's continuous-token builders, which render messages as token ids, as the supported versions of verl have them.

0.9.0 has builders for text only, chooses them by the name of the model's folder, and gives a loop one only where
``data.continuous_token.enable`` is set. Later versions choose by ``model_type`` and render images. Before 0.9.1 the
method that appends messages had another name.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.tokenizer import continuous_token, continuous_token_wiring
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_turnkey.advantage import ConfigError

Messages = list[dict[str, Any]]

BY_TYPE = "hf_model_type" in inspect.signature(create_continuous_token_builder).parameters
_IMAGES = "images" in inspect.signature(continuous_token.ContinuousTokenBuilder.build_initial_tokens).parameters
_NAMES = {"glm4_moe": "glm-4.7", "glm_moe_dsa": "glm-5"}
"""by which verl 0.9.0 knows models whose ``model_type`` is not like their name"""
_ANEW = getattr(continuous_token, "DeepSeekVL2ContinuousTokenBuilder", ())


class ContinuousTokenBuilder(continuous_token.ContinuousTokenBuilder):
    """verl's builder of unknown models, also for templates in which user and model must alternate (Gemma 3, Mistral).

    verl takes the ids of a message from a render in which it follows one of the user, which such templates refuse.
    """

    _BEFORE = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})

    def _tokenize_single_non_tool(self, message: dict[str, Any], **kwargs: Any) -> list[int]:
        with suppress(Exception):  # verl retries a template's refusal in another way, whose error may be any
            return super()._tokenize_single_non_tool(message, **kwargs)
        return self.render_delta_token_id([*self._BEFORE], [message], **kwargs)


class _Once(logging.Filter):
    """Lets each message through once: verl says of every episode's builder which one it falls back to."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._messages
        self._messages.add(message)
        return new


continuous_token_wiring.logger.addFilter(_Once())
continuous_token_wiring.logger.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "WARN"))  # as verl's other loggers


def model_type(worker: Any) -> str | None:
    """``model_type`` of the model of an agent-loop worker."""
    name = getattr(worker.model_config.hf_config, "model_type", None)
    return name if isinstance(name, str) else None


def builder_of(config: DictConfig, tokenizer: Any, processor: Any, model_type: str | None) -> Any:
    """The builder of a model, as an agent loop gets it.

    Raises:
        ConfigError: verl chooses one by the ``model_type`` that the model's tokenizer does not suit.
    """
    try:
        return _suited(_builder_of(config, tokenizer, processor, model_type))
    except ValueError as error:
        raise ConfigError(
            f"verl makes the prompts of model_type={model_type} with a builder that this model's tokenizer does not "
            f"suit ({error}): no episode could begin. Take a tokenizer with the tokens of that family "
            "(actor_rollout_ref.model.tokenizer_path), or another model"
        ) from error


def _builder_of(config: DictConfig, tokenizer: Any, processor: Any, model_type: str | None) -> Any:
    kwargs = config.data.get("apply_chat_template_kwargs", {})
    if not BY_TYPE:
        return create_continuous_token_builder(
            tokenizer,
            model_family=OmegaConf.select(config, "data.continuous_token.model_family", default="auto"),
            model_path=OmegaConf.select(config, "actor_rollout_ref.model.path"),
            tokenizer_name_or_path=_NAMES.get(str(model_type), model_type),
            chat_template_kwargs=kwargs,
        )
    return create_continuous_token_builder(
        tokenizer,
        hf_model_type=model_type,
        chat_template_kwargs=kwargs,
        mm_processor_kwargs=config.data.get("mm_processor_kwargs", {}),
        processor=processor,
    )


def builder_of_loop(loop: Any) -> Any:
    """The builder of an agent loop; in verl 0.9.0 it may have none."""
    builder = loop.continuous_token_builder
    return builder_of(loop.config, loop.tokenizer, None, None) if builder is None else _suited(builder)


def _suited(builder: Any) -> Any:
    if type(builder) is not continuous_token.ContinuousTokenBuilder:
        return builder
    return ContinuousTokenBuilder(builder.tokenizer, chat_template_kwargs=builder.chat_template_kwargs)


def check_takes_images(loop: Any) -> None:
    """Before images are shown to a model.

    Raises:
        ValueError: this model takes none, or this verl renders none.
    """
    if not _IMAGES:
        raise ValueError("prompts with images need verl 0.9.1")
    loop._assert_mm_supported(True)


def takes_images(builder: Any) -> bool:
    """Whether a builder renders images."""
    return _IMAGES and builder.supports_multimodal() and builder.processor is not None


def first_tokens(builder: Any, messages: Messages, tools: Any, images: list[Any] | None = None) -> list[int]:
    """The ids of a prompt."""
    multimodal = {"images": images} if _IMAGES else {}
    return list(builder.build_initial_tokens(messages, tools=tools, **multimodal))


def appended_tokens(builder: Any, past: Messages, after: Messages, ids: Sequence[int], tools: Any) -> list[int]:
    """``ids``, which hold the messages ``past``, with the further messages of ``after`` and the generation prompt."""
    merge = getattr(builder, "merge_context_tokens", None) or builder.merge_non_assistant_tokens
    return list(merge(past, after, list(ids), tools=tools).token_ids)


def renders_anew(builder: Any) -> bool:
    """Whether the builder renders the whole conversation anew when messages are appended."""
    return isinstance(builder, _ANEW)
