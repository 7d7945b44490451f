"""verl's continuous-token builders, which render messages as token ids, in all supported versions of verl.

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
IMAGES = "images" in inspect.signature(continuous_token.ContinuousTokenBuilder.build_initial_tokens).parameters
"""whether this verl renders images"""
_NAMES = {"glm4_moe": "glm-4.7", "glm_moe_dsa": "glm-5"}
"""``model_type`` -> the name by which verl 0.9.0 knows the model, where they differ"""
_ANEW = getattr(continuous_token, "DeepSeekVL2ContinuousTokenBuilder", ())


class ContinuousTokenBuilder(continuous_token.ContinuousTokenBuilder):
    """verl's builder of unknown models, also for templates in which user and model must alternate (Gemma 3, Mistral).

    verl takes the ids of a message from a render in which it follows a user message, which such templates refuse.
    """

    _BEFORE = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})

    def _tokenize_single_non_tool(self, message: dict[str, Any], **kwargs: Any) -> list[int]:
        with suppress(Exception):  # verl retries a refusal of the template in another way, which may raise anything
            return super()._tokenize_single_non_tool(message, **kwargs)
        return self.render_delta_token_id([*self._BEFORE], [message], **kwargs)


class _Once(logging.Filter):
    """Lets each message through once: verl logs the fallback of every episode's builder."""

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
        ConfigError: the model's tokenizer does not suit the builder that verl chooses by ``model_type``.
    """
    try:
        return _suited(_builder_of(config, tokenizer, processor, model_type))
    except ValueError as error:
        raise ConfigError(
            f"verl renders the prompts of model_type={model_type} with a builder that this model's tokenizer does not "
            f"suit ({error}): no episode could begin. Use a tokenizer with the tokens of that family "
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
    """The builder of an agent loop, which in verl 0.9.0 may lack one."""
    builder = loop.continuous_token_builder
    return builder_of(loop.config, loop.tokenizer, None, None) if builder is None else _suited(builder)


def _suited(builder: Any) -> Any:
    if type(builder) is not continuous_token.ContinuousTokenBuilder:
        return builder
    return ContinuousTokenBuilder(builder.tokenizer, chat_template_kwargs=builder.chat_template_kwargs)


def check_takes_images(loop: Any) -> None:
    """Check that the model of an agent loop takes images.

    Raises:
        ValueError: it does not, or this verl cannot render images.
    """
    if not IMAGES:
        raise ValueError("prompts with images need verl 0.9.1")
    loop._assert_mm_supported(True)


def takes_images(builder: Any) -> bool:
    """Whether a builder renders images."""
    return IMAGES and builder.supports_multimodal() and builder.processor is not None


def first_tokens(builder: Any, messages: Messages, tools: Any, images: list[Any] | None = None) -> list[int]:
    """The ids of a prompt."""
    multimodal = {"images": images} if IMAGES else {}
    return list(builder.build_initial_tokens(messages, tools=tools, **multimodal))


def appended_tokens(builder: Any, past: Messages, after: Messages, ids: Sequence[int], tools: Any) -> list[int]:
    """``ids``, which render the messages ``past``, with the new messages of ``after`` and the generation prompt."""
    merge = getattr(builder, "merge_context_tokens", None) or builder.merge_non_assistant_tokens
    return list(merge(past, after, list(ids), tools=tools).token_ids)


def renders_anew(builder: Any) -> bool:
    """Whether the builder renders the whole conversation again when messages are appended."""
    return isinstance(builder, _ANEW)
