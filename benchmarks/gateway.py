"""What the gateway costs: CPU per turn without tokenization, seconds until a reply, memory of a waiting episode.

    python benchmarks/gateway.py --tokenizer FOLDER
    python benchmarks/gateway.py --tokenizer FOLDER --episodes 8 --turns 5 --prompt 30000
    python benchmarks/gateway.py --tokenizer FOLDER --episodes 2 --turns 100 --prompt 100000 --memory

Real clients over loopback, the model's own tokenizer and chat template, a scripted model.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import time
import tracemalloc
from typing import Any

import httpx
from verl.utils import hf_tokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.gateway.server import Gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import Limits
from verl_turnkey.plugins.rollout.episode import Generated, Prompt

WORD = "word "


class TimedCodec(Codec):
    """Sums up its CPU seconds."""

    seconds = 0.0

    def first(self, *args: Any, **kwargs: Any) -> list[int]:
        return self._timed(super().first, *args, **kwargs)

    def continued(self, *args: Any, **kwargs: Any) -> list[int] | None:
        return self._timed(super().continued, *args, **kwargs)

    def split(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().split, *args, **kwargs)

    def _timed(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - started


async def measured(codec: TimedCodec, options: argparse.Namespace) -> dict[str, float]:
    """Play all episodes at the same time."""
    turn = [*codec.tokenizer.encode("I go on.", add_special_tokens=False), codec.tokenizer.eos_token_id]
    waiting: list[float] = []

    async def generate(request_id: str, prompt: Prompt, sampling: dict[str, Any]) -> Generated:
        await asyncio.sleep(options.latency)
        return Generated(turn, [-0.1] * len(turn), "I go on.", {}, 0, options.latency)

    server = Gateway()
    await server.start()
    limits = Limits(room=10**6, turn=64, turns=10**4)
    sessions = [Session(codec, generate, {"temperature": 1.0}, limits) for _ in range(options.episodes)]
    limit = httpx.Limits(max_connections=None)

    async def play(session: Session) -> None:
        url = f"http://127.0.0.1:{server.port}/{session.secret}/v1/chat/completions"
        messages = [{"role": "user", "content": WORD * options.prompt}]
        async with httpx.AsyncClient(timeout=600, limits=limit) as client:
            for _ in range(options.turns):
                body = json.dumps({"model": "policy", "messages": messages})
                started = time.perf_counter()
                reply = (await client.post(url, content=body)).json()["choices"][0]["message"]
                waiting.append(time.perf_counter() - started)
                messages += [reply, {"role": "user", "content": "The door is shut. What now?"}]

    for session in sessions:
        server.add(session)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    codec.seconds, started, cpu = 0.0, time.perf_counter(), time.process_time()
    await asyncio.gather(*map(play, sessions))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    assert all(len(session.turns) == options.turns for session in sessions)
    await server.stop()
    turns = options.episodes * options.turns
    numbers = {"turns": turns, "prompt tokens of the last turn": len(sessions[0].turns[-1].prompt.ids)}
    if options.memory:
        return {**numbers, "MiB of an episode that waits": traced / 2**20 / options.episodes}
    return {
        **numbers,
        "wall ms per turn": 1000 * seconds / turns,
        "CPU ms per turn, client included": 1000 * cpu / turns,
        "of these rendering and reading": 1000 * codec.seconds / turns,
        "all else": 1000 * (cpu - codec.seconds) / turns,
        "median ms until a reply": 1000 * sorted(waiting)[len(waiting) // 2],
        "MiB per episode at the peak, client included": memory / 1024 / options.episodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder or name of a model's tokenizer")
    parser.add_argument("--model-type", default="qwen3", help="model_type of its configuration")
    parser.add_argument("--episodes", type=int, default=64, help="at the same time")
    parser.add_argument("--turns", type=int, default=20, help="of each episode")
    parser.add_argument("--prompt", type=int, default=200, help="words of the first prompt")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of the model's turn")
    parser.add_argument("--memory", action="store_true", help="trace what waiting episodes hold; times get longer")
    options = parser.parse_args()
    tokenizer = hf_tokenizer(options.tokenizer)
    builder = create_continuous_token_builder(
        tokenizer, hf_model_type=options.model_type, chat_template_kwargs={}, mm_processor_kwargs={}, processor=None
    )
    codec, warm_up = TimedCodec(tokenizer, builder), argparse.Namespace(**{**vars(options), "episodes": 1, "turns": 2})
    asyncio.run(measured(codec, warm_up))
    if options.memory:
        tracemalloc.start()
    for name, value in asyncio.run(measured(codec, options)).items():
        print(f"{name:44} {value:10.2f}")


if __name__ == "__main__":
    main()
