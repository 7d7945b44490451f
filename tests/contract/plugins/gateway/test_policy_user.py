"""The model that is trained as the customer of turnkey/Service-v0: it answers over HTTP, and no row holds its turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import real_tokenizers
from contract_tools import Compose
from gateway_parts import loop_of_verl
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks import probe
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.rollout import worker as loop_worker

ASKS = "What is your email address?"
TALK = f'talk(message="{ASKS}")'
SIZES = (
    "turnkey.rollout.action_format=plain",
    "data.max_prompt_length=1500",
    "data.max_response_length=1500",
    "turnkey.rollout.max_tokens_per_turn=40",
)


class Model:
    """verl's client: asks the customer as the agent, and answers with a number as the customer."""

    def __init__(self, tokenizer: Any, silent: bool, fails: bool) -> None:
        self.tokenizer, self.silent, self.fails = tokenizer, silent, fails
        self.as_customer: list[str] = []
        self.params: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any) -> TokenOutput:
        prompt, text = self.tokenizer.decode(prompt_ids), TALK
        if "You are" in prompt and "a customer of a shop" in prompt:
            self.as_customer.append(prompt)
            self.params.append(sampling_params)
            if self.fails:
                raise ValueError("the server is gone")
            text = "" if self.silent else f"Answer {len(self.as_customer)}."
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        versions = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7, "num_cached_tokens": 0}
        return TokenOutput(token_ids=ids, log_probs=[-0.1] * len(ids), extra_fields=versions)


@pytest.fixture
def play(compose: Compose, ray_queue, monkeypatch):
    """``play(episodes, silent)``: the rows of each, and the model."""

    def run(episodes: int, silent: bool = False, fails: bool = False) -> tuple[list[list[Any]], Model]:
        config = compose("+turnkey=gigpo", "+turnkey/env=service", "turnkey.rollout.max_turns=3", *SIZES)
        monkeypatch.setattr(loop_worker, "_process", None)
        tokenizer = real_tokenizers.tokenizer("qwen3")
        model = Model(tokenizer, silent, fails)
        task = {"env_id": "turnkey/Service-v0", "seed": 3, "kwargs": {"user": {"url": "policy"}}}

        async def episode(session: int) -> list[Any]:
            loop = loop_of_verl("turnkey_env", config, model, tokenizer)
            row = {"uid": "u", "session_id": session, "global_steps": 7, "turnkey_task": json.dumps(task)}
            return await loop.run({"temperature": 0.7, "logprobs": True}, **row)

        async def group() -> list[list[Any]]:
            return list(await asyncio.gather(*map(episode, range(episodes))))

        rows = asyncio.run(group())
        loop_worker.finish(None)
        return rows, model

    return run


def test_the_policy_answers_and_is_not_trained_on_it(play) -> None:
    episodes, model = play(2)
    assert len(model.as_customer) == 6
    assert {params["temperature"] for params in model.params} == {0.7}
    assert sorted(prompt.count(ASKS) for prompt in model.as_customer) == [1, 1, 2, 2, 3, 3]
    for rows in episodes:
        steps = [step for row in rows for step in row.extra_fields["turnkey"]["steps"]]
        assert [step["action"] for step in steps] == [TALK] * 3
        for row in rows:
            sampled = [token for token, bit in zip(row.response_ids, row.response_mask, strict=True) if bit]
            assert "Answer" not in model.tokenizer.decode(sampled)
    assert any("Customer: Answer" in model.tokenizer.decode(row.prompt_ids + row.response_ids) for row in episodes[0])


def test_nothing_said_is_an_answer(play) -> None:
    ((row,),), model = play(1, silent=True)
    assert row.extra_fields["turnkey"]["failed"] is None
    assert "Customer: ..." in model.tokenizer.decode(row.prompt_ids + row.response_ids)


def test_every_episode_asks_anew_and_no_failure_shows_the_address(play) -> None:
    _, model = play(2)
    _, again = play(2)
    assert len(model.as_customer) == len(again.as_customer) == 6
    ((row,), (other,)), _ = play(2, fails=True)
    for failed in (row.extra_fields["turnkey"]["failed"], other.extra_fields["turnkey"]["failed"]):
        assert "the simulated user" in failed
        assert "at policy" in failed
        assert "/v1" not in failed


@pytest.mark.parametrize("seed", range(6))
def test_the_probe_plays_with_a_user_who_always_answers(compose: Compose, seed: int) -> None:
    """With two of these seeds random steps speak to the customer."""
    config = compose("+turnkey=gigpo", "+turnkey/env=service", "+turnkey.env.kwargs.user={url: policy}", *SIZES)
    turnkey = turnkey_config(config)
    observation, _, _ = asyncio.run(probe.play(turnkey, probe._configured(Task("turnkey/Service-v0", seed), turnkey)))
    assert "Customer: Hello!" in observation
