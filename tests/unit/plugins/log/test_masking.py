"""What is left out of files that people share."""

from __future__ import annotations

import json

import pytest

from verl_turnkey.plugins.log.masking import masked, masked_json

NAMES = [
    "token",
    "hf_token",
    "WANDB_API_KEY",
    "apikey",
    "password",
    "client-secret",
    "AWS_SECRET_ACCESS_KEY",
    "db_pwd",
    "PGPASSWORD",
    "auth_header",
    "basic_auth",
    "accessToken",
    "clientSecret",
    "dbPassword",
    "OPENAI_KEY",
    "AZURE_SAS",
    "authorization",
]


def test_what_is_kept():
    kept = {
        "max_token_len": 5, "tokenizer_path": "x", "stop_token_ids": [1], "loss_agg_mode": "token-mean",
        "weight_by": "token", "key": "state", "file": "a@b", "token": None, "prompt_key": "prompt", "author": "me",
        "url": "http://host/x?task=5&seed=2", "command": ["--tokenizer", "abc", "--port", "5"],
    }  # fmt: skip
    assert masked(kept) == kept


@pytest.mark.parametrize("name", NAMES)
def test_names_of_secrets(name):
    assert masked({name: "x", "n": 1}) == {name: "***", "n": 1}
    assert masked({name: {"inner": ["x", 2]}}) == {name: {"inner": ["***", 2]}}


def test_addresses_and_options():
    assert masked("https://me:pw@host/x?api_key=1&a=2&sig=3#b") == "https://***@host/x?api_key=***&a=2&sig=***#b"
    assert masked(["run", "--token", "abc", "--api-key", "d", "--n", "3"]) == [
        "run",
        "--token",
        "***",
        "--api-key",
        "***",
        "--n",
        "3",
    ]


def test_texts_that_hold_json():
    task = json.dumps({"env": "x", "kwargs": {"api_key": "sk", "level": 3}})
    assert json.loads(masked_json(task)) == {"env": "x", "kwargs": {"api_key": "***", "level": 3}}
    plain = '{"b": 1,  "a": [2]}'
    assert masked_json(plain) == plain
    assert masked_json("find http://a:b@c") == "find http://***@c"
    assert masked_json("7") == "7"
