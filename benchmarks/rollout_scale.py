"""Many episodes at once through the real agent loop and real hosts, with a scripted model and environment.

    python benchmarks/rollout_scale.py                                    # threads: 32 to 2,048 episodes, ten minutes
    python benchmarks/rollout_scale.py --place process --episodes 64,256  # a process for each environment
    python benchmarks/rollout_scale.py --episodes 2048 --workers 2        # dealt to two agent-loop workers

A turn of the model takes a log-normal time (median ``--turn-seconds``, one in twenty ``STRAGGLES`` times as long), a
step of the environment sleeps 1 to 50 ms. All times are drawn beforehand from one seed, so two numbers are known
without playing: the *ideal*, the slowest single episode, and *lock-step*, where in each turn all episodes wait for the
slowest answer and then for the slowest environment; both assume no overhead. Each worker is a Ray actor with an event
loop and hosts of its own, as verl's agent-loop workers are. The first wave makes all environments; the second finds
warm hosts and environments, as every training step but the first does.

CPU of the loop excludes the tokenizer and what verl needs to make an agent loop for each episode, which has its own
column; CPU of the hosts includes their environments. Memory of the loop: the rise of its peak during the wave. Memory
of the hosts: their use after it, with the environments that stay open.
"""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

os.environ.update(TURNKEY_DEVICE="cpu", VERL_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import gymnasium
import numpy as np

RUN = "TURNKEY_ROLLOUT_SCALE"
STRAGGLES = 5.0
STRAGGLERS = 0.05
SIGMA = 0.5
ENV_SECONDS = (0.001, 0.050)
OBSERVATION = "You are in a room. " * 26 + "Exit."
ADMISSIBLE = [f"take object {n}" for n in range(12)]


def env_seconds(seed: int, turns: int) -> np.ndarray:
    """(turns,) seconds of the steps of the environment with this seed."""
    return np.random.default_rng([seed, 1]).uniform(*ENV_SECONDS, turns)


def model_seconds(seed: int, turns: int, median: float) -> np.ndarray:
    """(turns,) seconds of the model's answers in the episode with this seed."""
    rng = np.random.default_rng([seed, 0])
    return median * rng.lognormal(0.0, SIGMA, turns) * np.where(rng.random(turns) < STRAGGLERS, STRAGGLES, 1.0)


class Sleeper(gymnasium.Env[str, str]):
    """Sleeps in each step; its episode ends after ``turns`` steps."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.seconds = list(env_seconds(int(seed or 0), self.turns))
        return OBSERVATION, {"state_key": "start", "admissible": ADMISSIBLE, "task": "wait"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds.pop(0))
        return OBSERVATION, 0.0, not self.seconds, False, {"state_key": len(self.seconds), "admissible": ADMISSIBLE}


class SleeperInThreads(Sleeper):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": True, "memory_mb": 1}


PLACES = {"thread": "bench/SleeperInThreads-v0", "process": "bench/Sleeper-v0"}
for env_id, entry_point in zip(PLACES.values(), (SleeperInThreads, Sleeper), strict=True):
    if env_id not in gymnasium.registry:  # hosts import the file a second time, as the user module it is
        gymnasium.register(env_id, entry_point=entry_point)


class Script:
    """The model server's client of one episode: always the same answer, after the drawn seconds."""

    def __init__(self, ids: list[int], seconds: np.ndarray) -> None:
        self._ids, self._seconds = ids, list(seconds)

    async def generate(self, request_id: str, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        await asyncio.sleep(self._seconds.pop(0))
        versions = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
        return TokenOutput(token_ids=self._ids, log_probs=[0.0] * len(self._ids), extra_fields=versions)


class Spent:
    """CPU seconds spent in the wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        setattr(owner, name, timed)


def tokenizer_and_config(folder: Path, settings: Settings, episodes: int) -> tuple[Any, Any]:
    """A tokenizer with one token per byte, and the configuration of a run that plays ``episodes`` at once."""
    from hydra import compose, initialize_config_module
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from verl_turnkey.plugins.config.overrides import override

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens.train_from_iterator(
        ["a"], trainers.BpeTrainer(vocab_size=259, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=special[0], pad_token=special[2])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    overrides = [
        "+turnkey=gigpo",
        "+turnkey/device=cpu",
        override("turnkey.modules", [__file__]),
        f"turnkey.env.hosts={settings.hosts}",
        f"turnkey.env.calls_per_host={settings.calls}",
        f"turnkey.env.instances_per_host={episodes}",
        f"turnkey.rollout.max_turns={settings.turns}",
        "turnkey.rollout.max_tokens_per_turn=64",
        "data.max_prompt_length=8192",
        "data.max_response_length=64",
        override("actor_rollout_ref.model.path", folder),
        f"actor_rollout_ref.rollout.agent.num_workers={settings.workers}",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return tokenizer, compose("ppo_trainer", overrides=overrides)


def usage(pids: list[int]) -> tuple[float, float]:
    """CPU seconds and MB of the processes and their descendants; shared memory counts once (PSS)."""
    import psutil

    seconds = memory = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
                seconds += times.user + times.system
                memory += process.memory_full_info().pss / 1e6
            except psutil.NoSuchProcess:
                continue
    return seconds, memory


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`main` that a row does not change."""

    place: str
    turns: int
    turn_seconds: float
    hosts: str
    calls: int
    workers: int


@dataclass
class Used:
    """Of one worker in a wave, or of all: CPU seconds, MB, failed episodes."""

    loop_cpu: float
    hosts_cpu: float
    making_cpu: float
    loop_memory: float
    hosts_memory: float
    failed: int


class Worker:
    """An agent-loop worker, run as a Ray actor: an agent loop per episode, all in one event loop."""

    def __init__(self, config: Any, tokenizer: Any, settings: Settings) -> None:
        import hydra
        import ray
        import verl  # noqa: F401  loads the plugin

        from verl_turnkey.plugins.rollout import worker

        self._config, self._tokenizer, self._settings = config, tokenizer, settings
        self._pool = worker.shared(config).pool
        self._hosts = [host["process"] for host in ray.get(self._pool.measure())]
        self._tokenizing, self._making = Spent(), Spent()
        for name in ("decode", "apply_chat_template", "encode"):
            self._tokenizing.wrap(tokenizer, name)
        self._making.wrap(hydra.utils, "instantiate")

    async def wave(self, seeds: list[int]) -> Used:
        """Play the episodes of these seeds at once."""
        import psutil

        answer = [*self._tokenizer.encode(ADMISSIBLE[3]), self._tokenizer.eos_token_id]
        turns, median = self._settings.turns, self._settings.turn_seconds
        clients = {seed: Script(answer, model_seconds(seed, turns, median)) for seed in seeds}
        self._tokenizing.seconds = self._making.seconds = 0.0
        before, memory = usage(self._hosts), psutil.Process().memory_info().rss
        cpu = time.process_time()
        failed = await self._play(clients)
        cpu = time.process_time() - cpu - self._tokenizing.seconds - self._making.seconds
        after, most = usage(self._hosts), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Used(
            loop_cpu=cpu,
            hosts_cpu=after[0] - before[0],
            making_cpu=self._making.seconds,
            loop_memory=max(0.0, most - memory) / 1e6,
            hosts_memory=after[1] - before[1],
            failed=failed,
        )

    async def _play(self, clients: dict[int, Script]) -> int:
        played = await asyncio.gather(*(self._episode(seed, client) for seed, client in clients.items()))
        return sum(not completed for completed in played)

    async def _episode(self, seed: int, client: Script) -> bool:
        """Play one episode as verl's worker does."""
        import hydra
        from verl.experimental.agent_loop import agent_loop
        from verl.utils.dataset.rl_dataset import RLHFDataset

        from verl_turnkey.envs.tasks import Task

        loop = hydra.utils.instantiate(
            config=agent_loop._agent_loop_registry["turnkey_env"],
            trainer_config=agent_loop.DictConfigWrap(config=self._config),
            server_manager=client,
            tokenizer=self._tokenizer,
            processor=None,
            hf_model_type="qwen3",
            dataset_cls=RLHFDataset,
            data_config=agent_loop.DictConfigWrap(self._config.data),
            tools=agent_loop.ToolListWrap([]),
        )
        row = {"uid": str(seed), "session_id": 0, "global_steps": 1}
        task = Task(PLACES[self._settings.place], seed, {"turns": self._settings.turns})
        rows = await loop.run({"temperature": 1.0, "logprobs": True}, **row, turnkey_task=task.to_json())
        return rows[0].extra_fields["turnkey"]["failed"] is None

    def close(self) -> None:
        """End the hosts."""
        import ray

        for host in self._pool._hosts:
            ray.kill(host.actor)


COLUMNS = (
    "episodes",
    "environments",
    "wall s",
    "ideal s",
    "wall / ideal",
    "lock-step / wall",
    "CPU of the loop, ms a turn",
    "of the hosts, ms a turn",
    "of verl, ms an episode",
    "loop, MB an episode",
    "hosts, MB an episode",
    "failed",
)


def play_waves(config: Any, tokenizer: Any, settings: Settings, count: int, waves: int) -> None:
    """Print rows of the table: ``waves`` waves of ``count`` episodes in new workers."""
    import ray

    actor = ray.remote(num_cpus=0)(Worker)
    workers = [actor.remote(config, tokenizer, settings) for _ in range(settings.workers)]
    ray.get([worker.__ray_ready__.remote() for worker in workers])
    for wave in range(waves):
        seeds = list(range(wave * count, (wave + 1) * count))
        drawn = np.stack([model_seconds(seed, settings.turns, settings.turn_seconds) for seed in seeds])
        environment = np.stack([env_seconds(seed, settings.turns) for seed in seeds])
        ideal = (drawn + environment).sum(1).max()
        lock_step = (drawn.max(0) + environment.max(0)).sum()
        began = time.perf_counter()
        of_workers = ray.get([worker.wave.remote(seeds[n :: len(workers)]) for n, worker in enumerate(workers)])
        wall = time.perf_counter() - began
        used = Used(*map(sum, zip(*map(astuple, of_workers), strict=True)))
        per_turn = 1e3 / count / settings.turns
        cells = (
            f"{count}",
            "warm" if wave else "new",
            f"{wall:.1f}",
            f"{ideal:.1f}",
            f"{wall / ideal:.2f}",
            f"{lock_step / wall:.1f}",
            f"{used.loop_cpu * per_turn:.2f}",
            f"{used.hosts_cpu * per_turn:.2f}",
            f"{1e3 * used.making_cpu / count:.1f}",
            f"{used.loop_memory / count:.2f}",
            f"{used.hosts_memory / count:.2f}",
            f"{used.failed}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    ray.get([worker.close.remote() for worker in workers])
    for worker in workers:
        ray.kill(worker)


def left_behind() -> int:
    """Processes of this run's environments that still run, by the reaper's mark."""
    from verl_turnkey.envs import process_tree

    mark, run = f"{process_tree.MARK}=".encode(), f"{RUN}={os.environ[RUN]}".encode()
    environments = map(process_tree._variables, process_tree._pids())
    return sum(run in entries and any(entry.startswith(mark) for entry in entries) for entries in environments)


def main(
    episodes: str = "32,128,512,1024,2048",
    place: str = "thread",
    turns: int = 8,
    turn_seconds: float = 2.0,
    hosts: str = "auto",
    calls: int = 1024,
    waves: int = 2,
    workers: int = 1,
) -> None:
    """Print the table.

    Args:
        episodes: how many at once, ``waves`` rows each.
        place: thread or process, where environments run.
        turns: of each episode.
        turn_seconds: median of a turn of the model.
        hosts: ``turnkey.env.hosts``.
        calls: ``turnkey.env.calls_per_host``; many, since these environments only sleep.
        waves: of each size, in the same workers.
        workers: ``actor_rollout_ref.rollout.agent.num_workers``.
    """
    import ray

    os.environ[RUN] = uuid4().hex  # all processes of this run inherit it
    settings = Settings(place, turns, turn_seconds, hosts, calls, workers)
    print(
        f"{len(os.sched_getaffinity(0))} CPUs, load average {os.getloadavg()[0]:.1f}, environments in a {place}", end=""
    )
    print(f", agent-loop workers: {workers}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tk", ignore_cleanup_errors=True) as folder:  # short: sockets go there
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            for count in map(int, episodes.split(",")):
                tokenizer, config = tokenizer_and_config(Path(folder), settings, count)
                play_waves(config, tokenizer, settings, count, waves)
        finally:
            ray.shutdown()
    end = time.monotonic() + 60
    while (left := left_behind()) and time.monotonic() < end:  # the end of a host is noticed, and then takes its time
        time.sleep(0.5)
    print(f"\nload average {os.getloadavg()[0]:.1f}, processes left behind: {left}")


if __name__ == "__main__":
    import typer
    import verl  # noqa: F401  loads the plugin

    typer.run(main)
