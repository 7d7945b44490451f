"""Plays samples with the agent loop of training: its prompts, parsers, limits, memory and rewards."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopWorker,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks.run import AGENT
from verl_turnkey.plugins.eval.completions import Completions, SeededTurns
from verl_turnkey.plugins.eval.identity import text_digest
from verl_turnkey.plugins.gateway import process as agents
from verl_turnkey.plugins.log.schema import COMPONENT
from verl_turnkey.plugins.log.segments import new_segment
from verl_turnkey.plugins.rollout import worker
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.verl_api import builders

LOOP = "turnkey_env"


class Player:
    """Plays an episode per call, in this process.

    Environments run in hosts, for which Ray must have been started; a user's own agent runs as its runner defines.

    Args:
        config: verl's configuration; sampling parameters are those of ``actor_rollout_ref.rollout``.

    Raises:
        ConfigError: the model's tokenizer or template does not suit the configuration.
    """

    server: Completions
    """must be set before the first episode"""

    def __init__(self, config: DictConfig) -> None:
        try:
            with redirect_stdout(sys.stderr):  # verl prints to stdout
                self._worker = AgentLoopWorker(config, llm_client=None)  # pyright: ignore[reportArgumentType]
        except (OSError, ValueError) as error:  # transformers' errors about a folder or a name
            path = config.actor_rollout_ref.model.path
            raise ConfigError(f"no tokenizer and configuration of the model in {path!r}: {error}") from error
        worker.prepare(self._worker)
        if config.actor_rollout_ref.rollout.agent.default_agent_loop == "turnkey_agent":
            agents.prepare(self._worker)
        self._config = config
        rollout = config.actor_rollout_ref.rollout
        self._sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
        self._sampling |= {"repetition_penalty": 1.0, "logprobs": False}

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
        return outcome(outputs) if failed is None else failed

    async def stop(self) -> None:
        """Close what agents keep open between episodes; on the event loop that played them."""
        if agents._process is not None:
            await agents._process.runner.close()

    def close(self) -> None:
        """Flush the trajectory log, and drop the state that episodes share."""
        worker.finish(None)
        worker._process = agents._process = None


def outcome(outputs: list[Any]) -> dict[str, Any]:
    """The result of a played episode, from its rows: ``success``, ``env_return``, ``composed_return`` and the sum of
    each component, turns, rates, tokens of the model, their digest (equal for equal responses), and seconds."""
    info = outputs[-1].extra_fields["reward_extra_info"]
    steps = [step for row in outputs for step in row.extra_fields["turnkey"]["steps"]]
    last = max(steps, key=lambda step: step["step"])  # each conversation of an agent has rows of its own
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
    OmegaConf.update(config, "turnkey.log", {"segment": new_segment(), "share": 1.0, "episodes_per_step": None})
    return config
