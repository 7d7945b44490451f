"""A local vLLM server for a checkpoint, with the engine settings of ``actor_rollout_ref.rollout``."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.http import opener
from verl_turnkey.plugins.ports import free_port

NAME = "checkpoint"
KEY = "VLLM_API_KEY"
"""environment variable with the server's key, which keeps other users of the machine out"""
FROM_CONFIG = (
    *("dtype", "quantization", "seed", "data_parallel_size", "gpu_memory_utilization", "enforce_eager"),
    *("enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs"),
)
"""keys of ``actor_rollout_ref.rollout`` that are vLLM's options"""
START_SECONDS, STOP_SECONDS = 3600.0, 20.0


class Server:
    """A running server; ``url`` is the base of its API, ``key`` its API key."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, key: str, log: Path) -> None:
        self.process, self.url, self.key, self._log = process, url, key, log

    def check_alive(self) -> None:
        """Raise ConfigError, with the end of the log, if the server has ended."""
        if (code := self.process.poll()) is not None:
            raise ConfigError(f"the vLLM server of the checkpoint ended with code {code}; {self._end_of_log()}")

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Wait for at most ``seconds`` until the server answers: a large model loads for minutes.

        Raises:
            ConfigError: it ended, or did not answer in time; the message has the end of the log.
        """
        ends, http = time.monotonic() + seconds, opener(self.url)
        while True:
            self.check_alive()
            with suppress(OSError), http.open(f"{self.url[:-3]}/health", timeout=5):
                return
            if time.monotonic() > ends:
                raise ConfigError(
                    f"the vLLM server of the checkpoint did not answer for {seconds:g} seconds; {self._end_of_log()}. "
                    "Start a server of your own and name it with --server"
                )
            time.sleep(0.5)

    def _end_of_log(self) -> str:
        return f"{self._log} ends with\n{self._log.read_text(errors='replace')[-3000:]}"


@contextmanager
def serve(model: Path, config: DictConfig, log: Path) -> Iterator[Server]:
    """Context: a local vLLM server for the folder ``model``; its output goes to ``log``.

    Raises:
        ConfigError: it ended before it answered, or did not answer in time.
    """
    port = free_port()
    key = secrets.token_hex(16)
    command = [sys.executable, "-m", "verl_turnkey.plugins.eval.vllm_main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME, *engine_arguments(config)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        # In a process group of its own: the engine's processes end with it, and Ctrl-C reaches only this process.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**_variables(config), KEY: key},
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}/v1", key, log)
    try:
        server.wait()
        yield server
    finally:
        _stop(process)


def engine_arguments(config: DictConfig) -> list[str]:
    """vLLM's options, as verl passes them to the servers of a training run."""
    plain: Any = OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=True)
    options = {key: plain.get(key) for key in FROM_CONFIG}
    options["tensor_parallel_size"] = plain.get("tensor_model_parallel_size")
    options["max_model_len"] = plain.get("max_model_len") or plain["prompt_length"] + plain["response_length"]
    if config.trainer.device == "cpu":
        # A chunked prefill draws a token too many and rewinds the request's generator, which torch cannot do on a CPU.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], options["max_model_len"])
    options["trust_remote_code"] = bool(config.actor_rollout_ref.model.get("trust_remote_code"))
    return cli_words({**options, **((plain.get("engine_kwargs") or {}).get("vllm") or {})})


def cli_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words: a switch for a bool, JSON for a dict or list; None is left out."""
    words: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def _variables(config: DictConfig) -> dict[str, str]:
    """The environment variables of the server: this process's, and those that a run passes to its workers."""
    variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    return {**{name: str(value) for name, value in variables.items()}, **os.environ}


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # remaining processes of its engine
    process.wait()
