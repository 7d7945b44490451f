"""Builders of prompts: what verl says while it makes them."""

from __future__ import annotations

import logging
import os
from unittest.mock import patch

import pytest
from typer.testing import CliRunner
from verl.utils.tokenizer.continuous_token_wiring import infer_continuous_token_model_family

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.verl_api import builders

LOGGER = builders.continuous_token_wiring.logger.name


def test_a_fallback_is_logged_once_for_each_kind_of_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        for model_type in ("unheard_of", "unheard_of", "another"):
            infer_continuous_token_model_family(hf_model_type=model_type)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "'unheard_of'" in messages[0]
    assert "'another'" in messages[1]


def test_verls_variable_silences_it(caplog: pytest.LogCaptureFixture) -> None:
    """It is ERROR in these tests, and in ``turnkey check`` and ``turnkey eval``."""
    with caplog.at_level(logging.INFO):
        infer_continuous_token_model_family(hf_model_type="a_third")
    assert not caplog.records


@pytest.mark.parametrize(("before", "after"), [({}, "ERROR"), ({"VERL_LOGGING_LEVEL": "WARN"}, "WARN")])
def test_an_evaluation_silences_it_unless_the_user_sets_the_variable(before: dict[str, str], after: str) -> None:
    with patch.dict(os.environ, before):
        if not before:
            del os.environ["VERL_LOGGING_LEVEL"]
        CliRunner().invoke(app, ["eval"])
        assert os.environ["VERL_LOGGING_LEVEL"] == after
