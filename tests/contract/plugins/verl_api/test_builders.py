"""Builders of prompts: what verl says while it makes them."""

from __future__ import annotations

import logging

import pytest
from verl.utils.tokenizer.continuous_token_wiring import infer_continuous_token_model_family

from verl_turnkey.plugins.verl_api import builders  # noqa: F401 - quiets verl


def test_a_fallback_is_logged_once_for_each_kind_of_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for model_type in ("unheard_of", "unheard_of", "another"):
            infer_continuous_token_model_family(hf_model_type=model_type)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "'unheard_of'" in messages[0]
    assert "'another'" in messages[1]
