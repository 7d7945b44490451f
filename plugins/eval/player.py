"""Plays samples with the agent loop of training (prompts, parsers, limits, memory, rewards) and a model on a server.

The server is OpenAI-compatible and is called as verl's agent loops call one: token ids in, token ids out. Text would
not do: encoded again, a response may have other ids than those that the model wrote, and so may the next prompt. Only
images go another way, in messages (:class:`ChatCompletions`): no such server takes them beside token ids.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from textwrap import shorten
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import plain_text
from verl_turnkey.envs.http import Endpoint, EndpointConfig
from verl_turnkey.envs.rewards import JudgeError
from verl_turnkey.plugins.checks.run import AGENT
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.eval.result import text_digest
from verl_turnkey.plugins.gateway import process as agents
from verl_turnkey.plugins.log.schema import COMPONENT
from verl_turnkey.plugins.log.writer import new_segment
from verl_turnkey.plugins.rollout import worker
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION, data_url
from verl_turnkey.plugins.verl_api import builders
from verl_turnkey.plugins.view.traces import warn_of_unsent

LOOP = "turnkey_env"


class Player:
    """Plays an episode per call, in this process.

    Environments run in hosts, for which Ray must have been started; a user's own agent runs as its runner defines.

    Args:
        config: verl's configuration; sampling parameters are those of ``actor_rollout_ref.rollout``.

    Raises:
        ConfigError: the model's tokenizer or template does not suit the configuration.
    """

    server: Completions | ChatCompletions
    """must be set before the first episode"""

    def __init__(self, config: DictConfig) -> None:
        try:
            with redirect_stdout(sys.stderr):  # verl prints to stdout
                self._worker = AgentLoopWorker(config, llm_client=None)  # pyright: ignore[reportArgumentType]
        except (OSError, ValueError) as error:  # transformers' errors about a folder or a name
            path = config.actor_rollout_ref.model.path
            reason = shorten(str(error), 500)
            raise ConfigError(f"no tokenizer and configuration of the model in {path!r}: {reason}") from error
        worker.prepare(self._worker)
        if config.actor_rollout_ref.rollout.agent.default_agent_loop == "turnkey_agent":
            agents.prepare(self._worker)
        self._config, self._policy = config, turnkey_config(config).agent.model
        rollout = config.actor_rollout_ref.rollout
        self._sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
        self._sampling |= {"repetition_penalty": 1.0, "logprobs": False}

    @property
    def tokenizer(self) -> Any:
        return self._worker.tokenizer

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template."""
        template = getattr(self._worker.processor or self._worker.tokenizer, "chat_template", None)
        return None if template is None else str(template)

    async def play(self, key: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
        """Play the sample ``key`` of the data row ``row``, which has ``uid`` and ``session_id``.

        Returns:
            Its result for JSON (:func:`outcome`), or the reason why the episode failed.
        """
        loop = hydra.utils.instantiate(
            config=_agent_loop_registry[self._config.actor_rollout_ref.rollout.agent.default_agent_loop],
            trainer_config=DictConfigWrap(config=self._config),
            server_manager=SeededTurns(self.server, key),
            tokenizer=self._worker.tokenizer,
            processor=self._worker.processor,
            hf_model_type=builders.model_type(self._worker),
            dataset_cls=self._worker.dataset_cls,
            data_config=DictConfigWrap(self._config.data),
            tools=ToolListWrap(self._worker.tools),
        )
        outputs = await loop.run(dict(self._sampling), **row, **{VALIDATION: True}, global_steps=0)
        failed = outputs[0].extra_fields["turnkey"]["failed"]
        return outcome(outputs, self._policy) if failed is None else failed

    async def stop(self) -> None:
        """Close what agents keep open between episodes; on the event loop that played them."""
        if agents._process is not None:
            await agents._process.runner.close()

    def close(self) -> None:
        """Flush the trajectory log, and drop the state that episodes share."""
        warn_of_unsent(worker.finish(None), OmegaConf.select(self._config, "turnkey.log.otlp"))
        worker._process = agents._process = None


def outcome(outputs: list[Any], policy: str = "policy") -> dict[str, Any]:
    """The result of a played episode, from its rows: ``success``, ``env_return``, ``composed_return`` and the sum of
    each component, turns, rates, tokens of the model, their digest (equal for equal responses), seconds, and the
    outcome of each role that the model played, where there are several. ``policy``: the role of a turn that names none
    (``turnkey.agent.model``)."""
    info = outputs[-1].extra_fields["reward_extra_info"]
    steps = [step for row in outputs for step in row.extra_fields["turnkey"]["steps"]]
    last = max(steps, key=lambda step: step["step"])  # each conversation of an agent has rows of its own
    extras = [step["extra"] for step in steps]
    outcomes = {str(extra.get("role", policy)): extra["role_outcome"] for extra in extras if "role_outcome" in extra}
    written = [token for row in outputs for token, own in zip(row.response_ids, row.response_mask, strict=True) if own]
    return {
        "success": bool(info["acc"]),
        "env_return": info["env_return"],
        "composed_return": outputs[-1].reward_score,
        **{name: value for name, value in info.items() if name.startswith(COMPONENT)},
        "turns": int(info["episode_length"]),
        "truncated": bool(last["truncated"]),
        "invalid_rate": info["invalid_rate"],
        "unparsed_rate": info["unparsed_rate"],
        "tokens": len(written),
        "digest": text_digest(str(written)),
        **({"outcomes": outcomes} if outcomes else {}),
        "seconds": round(sum(output.metrics.generate_sequences + output.metrics.tool_calls for output in outputs), 3),
    }


def for_evaluation(config: DictConfig) -> DictConfig:
    """A copy of ``config`` for a single process that only plays.

    It uses all hosts of the machine, requests no log-probabilities, and logs every episode in a segment of its own.
    """
    config = config.copy()
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.rollout.agent.num_workers = 1
    config.actor_rollout_ref.rollout.calculate_log_probs = False
    config.actor_rollout_ref.rollout.agent.default_agent_loop = AGENT if config.turnkey.agent.run else LOOP
    segment = new_segment(OmegaConf.select(config, "turnkey.log.trajectories"))
    OmegaConf.update(config, "turnkey.log", {"segment": segment, "share": 1.0, "episodes_per_step": None})
    return config


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


class ChatCompletions:
    """``/v1/chat/completions`` of a server, which renders messages by its own template; images are data URLs.

    Args:
        tokenizer: of the answers' ids; it need not be the server's.
        further: as of :class:`Completions`.
    """

    def __init__(self, url: str, model: str, tokenizer: Any, *, concurrency: int, api_key_env: str | None) -> None:
        self._tokenizer = tokenizer
        config = EndpointConfig(url, model, api_key_env, timeout=TIMEOUT, concurrency=concurrency, cache_size=0)
        self._endpoint = Endpoint(
            config, "/chat/completions", who="the server", expected="a chat completion with a text", read=_chosen
        )

    async def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any], seed: int) -> list[int]:
        """The ids of the answer to ``messages``, with the end of the turn unless a limit cut it.

        Raises:
            JudgeError: no answer after all attempts, or one without a text.
        """
        request = {
            name: sampling[name]
            for name in ("temperature", "top_p", "max_tokens", "stop_token_ids")
            if sampling.get(name)
        }
        request |= {"top_k": sampling["top_k"]} if sampling["top_k"] > 0 else {}  # not every server has it
        request |= {"temperature": sampling["temperature"], "seed": seed}
        request["messages"] = [{"role": m["role"], "content": _with_data_urls(m["content"])} for m in messages]
        choice = await self._endpoint.ask(request)
        text = choice["text"]  # servers would drop the stop string, with which the policy's turns end
        ends = [text.index(stop) + len(stop) for stop in sampling.get("stop") or () if stop in text]
        ids = self._tokenizer.encode(text[: min(ends, default=len(text))], add_special_tokens=False)
        return ids if choice["finish"] == "length" and not ends else [*ids, self._tokenizer.eos_token_id]

    async def check(self, prompt: int = 0, response: int = 0) -> None:
        """Ask for a token about a picture; the server alone knows how many tokens an image has.

        Raises:
            ConfigError: the server does not answer, lacks the model, or does not take images.
        """
        from PIL import Image

        content = [{"type": "image", "image": Image.new("RGB", (56, 56))}, {"type": "text", "text": "Hello"}]
        sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 1}
        try:
            await self.answer([{"role": "user", "content": content}], sampling, 0)
        except JudgeError as error:
            raise ConfigError(f"--server: a message with an image: {error}") from None


def _with_data_urls(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": data_url(part["image"])}} if part["type"] == "image" else part
        for part in content
    ]


def _chosen(answer: Any) -> dict[str, Any] | None:
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    return {"text": plain_text(text), "finish": choice.get("finish_reason")} if isinstance(text, str) else None


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

    def __init__(self, server: Completions | ChatCompletions, key: str) -> None:
        self._server, self._key, self._turn = server, key, 0
        self.takes_messages = isinstance(server, ChatCompletions)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """verl's interface.

        Raises:
            EnvironmentFailure: of the kind ``server``: no answer. The episode fails, and is tried again.
            ConfigError: the prompt has images, and the server gets token ids.
        """
        if image_data and messages is None:
            raise ConfigError("turnkey eval sends token ids alone, and this prompt has images")
        seed, self._turn = turn_seed(self._key, self._turn), self._turn + 1
        try:
            if messages is not None and isinstance(self._server, ChatCompletions):
                ids = await self._server.answer(messages, sampling_params, seed)
            else:
                assert isinstance(self._server, Completions)
                ids = await self._server.generate(list(prompt_ids), sampling_params, seed)
        except JudgeError as error:
            raise EnvironmentFailure("server", str(error)) from None
        # Weights have no version here; verl's client has the same fields before it gets its first weights.
        unknown: dict[str, Any] = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"))
        return TokenOutput(token_ids=ids, stop_reason="completed", extra_fields=unknown)


def turn_seed(key: str, turn: int) -> int:
    """A seed below 2**63 for a turn of the sample ``key``."""
    return int.from_bytes(hashlib.sha256(f"{key}/{turn}".encode()).digest()[:8], "big") >> 1
