"""A model behind an OpenAI-compatible server, called as verl's agent loops call one: token ids in, token ids out.

Text would not do: encoded again, a response may have other ids than those that the model wrote, and so may the next
prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.http import Endpoint, EndpointConfig
from verl_turnkey.envs.rewards import JudgeError

TIMEOUT = 1800.0
"""seconds that a turn may take, including the wait in the server's queue"""
EXPECTED = (
    "a completion with token ids: this server does not take `return_token_ids` on /v1/completions, as vLLM 0.10.2 and "
    "later do. Serve the model with vLLM, or give its folder with --checkpoint"
)


class Completions:
    """``/v1/completions`` of a server.

    Args:
        url: such as http://host:8000/v1.
        model: its name on the server.
        concurrency: most concurrent requests.
        api_key_env: environment variable with the key; None: no key is sent.
        key: the key itself, instead of ``api_key_env``.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int,
        api_key_env: str | None = None,
        key: str | None = None,
        retries: int = 4,
    ) -> None:
        self._endpoint = Endpoint(
            # No cache: the seed is part of a request, so no request is sent twice.
            EndpointConfig(
                url, model, api_key_env, timeout=TIMEOUT, retries=retries, concurrency=concurrency, cache_size=0
            ),
            "/completions",
            who="the server",
            expected=EXPECTED,
            read=_read,
            key=key,
        )

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any], seed: int) -> list[int]:
        """The ids that continue ``prompt_ids``, including the end of the turn.

        Args:
            sampling: verl's sampling parameters.
            seed: of the sampling; below 2**63.

        Raises:
            JudgeError: no answer after all attempts, or an answer without ids.
        """
        request = {name: value for name, value in sampling.items() if name != "logprobs"}
        request |= {"prompt": prompt_ids, "min_p": 0.0, "seed": seed, "return_token_ids": True}
        answer = await self._endpoint.ask(request)
        if answer["prompt"] not in (None, prompt_ids):
            raise JudgeError(f"the server at {self._endpoint.address} did not read the prompt ids that were sent")
        return answer["ids"]

    async def check(self, prompt: int = 0, response: int = 0) -> None:
        """Request a single token, and check the model's limit on the tokens of prompt and response together.

        Args:
            prompt: most tokens of a prompt.
            response: most tokens of a response.

        Raises:
            ConfigError: the server does not answer, lacks the model, does not take and return token ids, or has no room
                for such a prompt and response.
        """
        try:
            room = _room(await self._endpoint.look_up("/models"), self._endpoint.config.model)
            if room is not None and room < prompt + response:
                raise ConfigError(
                    f"--server: the model takes {room} tokens (max_model_len of {self._endpoint.config.url}), fewer "
                    f"than a prompt of {prompt} (data.max_prompt_length) and a response of {response} "
                    "(data.max_response_length, turnkey.rollout.max_tokens_per_turn): lower one of these, or start "
                    f"vLLM with --max-model-len {prompt + response}"
                )
            await self.generate([0], {"max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1}, 0)
        except JudgeError as error:
            raise ConfigError(f"--server: {error}") from None


def _read(answer: Any) -> dict[str, Any] | None:
    choice = answer["choices"][0]
    ids, prompt = choice["token_ids"], choice.get("prompt_token_ids")
    return {"ids": [int(i) for i in ids], "prompt": prompt} if isinstance(ids, list) else None


def _room(answer: Any, model: str) -> int | None:
    """``max_model_len`` of ``model`` in the answer of ``/v1/models``; None if the server does not state it."""
    try:
        room = next(entry for entry in answer["data"] if entry["id"] == model)["max_model_len"]
    except (LookupError, TypeError, StopIteration):
        return None
    return room if isinstance(room, int) else None


class SeededTurns:
    """The client that the agent loop of an episode gets in place of verl's.

    The seed of a turn depends only on the sample's key and the turn's number, so that an interrupted evaluation draws
    the same tokens as any other.
    """

    def __init__(self, server: Completions, key: str) -> None:
        self._server, self._key, self._turn = server, key, 0

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """verl's interface.

        Raises:
            EnvironmentFailure: of the kind ``server``: no answer. The episode fails, and is tried again.
            ConfigError: the prompt has images.
        """
        if image_data:
            raise ConfigError("turnkey eval sends token ids alone, and this prompt has images")
        seed, self._turn = turn_seed(self._key, self._turn), self._turn + 1
        try:
            ids = await self._server.generate(list(prompt_ids), sampling_params, seed)
        except JudgeError as error:
            raise EnvironmentFailure("server", str(error)) from None
        # Weights have no version here; verl's client has the same fields before it gets its first weights.
        unknown: dict[str, Any] = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"))
        return TokenOutput(token_ids=ids, stop_reason="completed", extra_fields=unknown)


def turn_seed(key: str, turn: int) -> int:
    """A seed below 2**63 for a turn of the sample ``key``."""
    return int.from_bytes(hashlib.sha256(f"{key}/{turn}".encode()).digest()[:8], "big") >> 1
