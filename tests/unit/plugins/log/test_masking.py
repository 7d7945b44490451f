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
    "GITHUB_PAT",
    "SLACK_WEBHOOK",
    "SENTRY_DSN",
    "db.pass",
]


def test_what_is_kept():
    kept = {
        "max_token_len": 5, "tokenizer_path": "x", "stop_token_ids": [1], "loss_agg_mode": "token-mean",
        "weight_by": "token", "key": "state", "file": "a@b", "token": None, "prompt_key": "prompt", "author": "me",
        "url": "http://host/x?task=5&seed=2", "command": ["--tokenizer", "abc", "--max-tokens", "512", "-u", "me"],
        "at": "http://host:80/x@y", "text": "tokens=5 and path=/x --n 3", "run": "agents.py:play", 
        "own_token_len": "${.n}",
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


AWS = f"AKIA{'A1' * 8}"
JWT = f"eyJ{'a1' * 6}.eyJ{'b2' * 6}.c"
FORMS = {
    "postgres://me:p@ss@db/x": "postgres://***@db/x",
    "postgres://me:p/ss@db:5432/x": "postgres://***@db:5432/x",
    "Server=db;Password=abc;Database=x": "Server=db;Password=***;Database=x",
    "me:pw@proxy:3128": "***@proxy:3128",
    "https://hooks.slack.com/services/T0/B0/abc": "https://hooks.slack.com/***",
    "https://discord.com/api/webhooks/1/abc": "https://discord.com/api/webhooks/***",
    "agent --token=abc --n=3": "agent --token=*** --n=3",
    "agent --quiet API_KEY=abc --token abc x": "agent --quiet API_KEY=*** --token *** x",
    "curl -H 'Authorization: Bearer abc' u": "curl -H 'Authorization: ***' u",
    "got Bearer abcdefgh12 back": "got Bearer *** back",
    f"clone ghp_{'a1' * 10} and {AWS}": "clone *** and ***",
    f"{JWT} sk-{'a1' * 8} xoxb-1234567890-a": "*** *** ***",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx": "***\nx",
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FORMS.items())
def test_forms_of_secrets(text, expected):
    assert masked({"note": text}) == {"note": expected}


def test_a_field_says_whether_it_is_a_secret():
    servers = {"pad": {"command": "serve", "env": {"LEVEL": "x"}}}
    node = {"agent": {"env": {"LEVEL": "x"}}, "mcp": {"servers": servers}, "mutual_information": {"tokens": "response"}}
    hidden = {**node, "agent": {"env": {"LEVEL": "***"}}}
    hidden["mcp"] = {"servers": {"pad": {"command": "serve", "env": {"LEVEL": "***"}}}}
    assert masked({"turnkey": node}) == {"turnkey": hidden}
    flat = {"turnkey.agent.env.LEVEL": "x", "turnkey.agent.env": {"LEVEL": "x"}, "turnkey.prm.head_bias": "x"}
    assert masked(flat) == {**flat, "turnkey.agent.env.LEVEL": "***", "turnkey.agent.env": {"LEVEL": "***"}}


def test_words_of_commands():
    assert masked(["run", "--token=abc", "-u", "me:pw", "--x", "y"]) == ["run", "--token=***", "-u", "***", "--x", "y"]


def test_a_secret_is_hidden_wherever_it_stands(monkeypatch):
    """Beside its name, in the configuration or in the environment of this process."""
    value = {"api_key": "correct-horse-7", "kind": {"pass": "response"}, "run": ["play", "x=correct-horse-7"]}
    assert masked(value) == {"api_key": "***", "kind": {"pass": "***"}, "run": ["play", "x=***"]}
    monkeypatch.setenv("MY_PAT", "battery-staple-9")
    assert masked("failed: 401 for battery-staple-9, response") == "failed: 401 for ***, response"


def test_texts_that_hold_json():
    task = json.dumps({"env": "x", "kwargs": {"api_key": "sk", "level": 3}})
    assert json.loads(masked_json(task)) == {"env": "x", "kwargs": {"api_key": "***", "level": 3}}
    plain = '{"b": 1,  "a": [2]}'
    assert masked_json(plain) == plain
    assert masked_json("find http://a:b@c") == "find http://***@c"
    assert masked_json("7") == "7"
