"""One scripted rollout in both row layouts, and one training step on either: what test_layouts.py compares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from contract_tools import EOS, PARTITION, batch_of, loop_of_verl, put, read, write
from contract_tools import output as queue_row
from omegaconf import DictConfig
from training_ranks import Ranks
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import transferqueue_utils
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.merging import merge_rows

Rollout = dict[tuple[str, int], list[AgentLoopOutput]]
"""Rows of each episode, by group and session."""
Step = tuple[str, int, int]
"""Group, session and number of a step."""

SETTINGS = [
    "+turnkey/device=cpu",
    "turnkey.update.mini_batches=1",
    "data.max_prompt_length=300",
    "data.max_response_length=300",
    "actor_rollout_ref.actor.optim.lr=0",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=300",
    "critic.enable=true",
    "critic.optim.lr=0",
    "critic.ppo_max_token_len_per_gpu=300",
]
FIXED = [
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "critic.use_dynamic_bsz=true",
]
PACKED = ["actor_rollout_ref.model.use_remove_padding=true", "critic.model.use_remove_padding=true"]

KL_IN_REWARD = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1"]
EVERYTHING = [
    *KL_IN_REWARD,
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.3",
    "actor_rollout_ref.actor.entropy_coeff=0.3",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.7_1.4'",
]
"""KL in the reward, KL in the loss, an entropy bonus, importance weights and rejected tokens at once"""

#: Turns of each episode, by group; "dead" stands for one that failed.
LENGTHS: dict[str, list[int | str]] = {"a": [3, 1, 5, 2], "b": [4, 10, "dead", 3], "c": [2, 6, 4, 1]}
#: Turns without a token: each is a row of its own.
EMPTY = {("c", 1, 2)}
#: Turns whose prompt was rendered anew: another row begins.
FRESH = {("a", 2, 3)}


class Sampler:
    """Episodes whose turns a model writes, and a script the rest."""

    def __init__(self, model: Any, seed: int = 0) -> None:
        self.model = model
        self.torch_draw = torch.Generator().manual_seed(seed)
        self.draw = np.random.default_rng(seed)

    def context(self, length: int) -> list[int]:
        return self.draw.integers(3, 259, length).tolist()

    @torch.no_grad()
    def turn(self, prompt: list[int], length: int) -> tuple[list[int], list[float]]:
        """Tokens one by one at temperature 1, and their log-probabilities as the sampler saw them."""
        ids, log_probs = list(prompt), []
        while len(log_probs) < length and ids[len(prompt) :][-1:] != [EOS]:
            now = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(torch.multinomial(now.exp(), 1, generator=self.torch_draw)))
            log_probs.append(now[ids[-1]].item())
        return ids[len(prompt) :], log_probs

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """As the client of the inference servers."""
        ids, log_probs = self.turn(prompt_ids, sampling_params["max_tokens"])
        versions = {"global_steps": 4, "min_global_steps": 4, "max_global_steps": 4}
        return TokenOutput(token_ids=ids, log_probs=log_probs, extra_fields=versions)

    def episode(self, group: str, session: int, turns: int) -> list[AgentLoopOutput]:
        """Rows of one step each. A prompt is the one before, the turn after it, and an observation."""
        rows: list[AgentLoopOutput] = []
        prompt = self.context(self.draw.integers(5, 20))
        solved = bool(self.draw.integers(2))
        for t in range(turns):
            if (group, session, t) in FRESH:
                prompt = self.context(12)
            length = 0 if (group, session, t) in EMPTY else int(self.draw.integers(1, 9))
            ids, log_probs = self.turn(prompt, length)
            step = make_step(
                step=t,
                reward=float(self.draw.integers(3)) / 4 + float(solved and t == turns - 1),
                anchor=f"state {self.draw.integers(3)}",
                action=f"go {self.draw.integers(3)}" if ids else None,
                valid=bool(ids),
                penalty=0.0 if ids else 0.1,
                terminated=t == turns - 1 and solved,
                truncated=t == turns - 1 and not solved,
                success=solved,
                extra={"tool_calls": float(self.draw.integers(3))},
                version=(version := int(self.draw.integers(4))),
            )
            mask = [int(bool(ids))] * max(1, len(ids))
            rows.append(row(prompt, ids or [EOS], mask, log_probs or [0.0], [step], version))
            prompt = prompt + ids + self.context(self.draw.integers(1, 8))
        return rows


def row(
    prompt: list[int], response: list[int], mask: list[int], log_probs: list[float], steps: list[Any], version: int = 0
) -> AgentLoopOutput:
    """A row of an episode, or without steps the one of a failed one, generated at this version of the weights."""
    made = queue_row(make_record(steps, failed=None if steps else "EnvironmentFailure: it died"), len(mask), 0.0)
    made.prompt_ids, made.response_ids, made.response_mask, made.response_logprobs = prompt, response, mask, log_probs
    made.extra_fields |= {"min_global_steps": version, "max_global_steps": version}
    return made


def sample(model: Any) -> Rollout:
    """The rollout with a row per step."""
    sampler = Sampler(model)
    return {
        (group, session): [row([5, 6, EOS], [EOS], [0], [0.0], [])]
        if isinstance(turns, str)
        else sampler.episode(group, session, turns)
        for group, sessions in LENGTHS.items()
        for session, turns in enumerate(sessions)
    }


def conversation(config: DictConfig, tokenizer: Any, sampler: Sampler) -> list[AgentLoopOutput]:
    """The rows of an episode of turnkey_env, whose turns the model writes."""
    loop = loop_of_verl("turnkey_env", config, sampler, tokenizer)
    row = {"uid": "u", "session_id": 0, "global_steps": 5, "turnkey_task": Task("contract/Awkward-v0", 3).to_json()}
    try:
        return asyncio.run(loop.run({"temperature": 1.0, "logprobs": True}, **row))
    finally:
        loop_worker.finish(None)


def merged(rollout: Rollout) -> Rollout:
    """The same with the rows that extend each other as one."""
    return {key: merge_rows(outputs) for key, outputs in rollout.items()}


def turns_of(mask: Sequence[int]) -> list[list[int]]:
    """Positions of the tokens of each run of ones."""
    turns: list[list[int]] = []
    for t, token in enumerate(mask):
        if token:
            turns += [[]] if not t or not mask[t - 1] else []
            turns[-1].append(t)
    return turns


class Places:
    """Where each step of a rollout stands in its rows: written here once more, from masks and records alone."""

    def __init__(self, rollout: Rollout) -> None:
        self.at: dict[str, list[Step | None]] = {}
        """by row key, the step of each response token"""
        for (group, session), outputs in rollout.items():
            for index, output in enumerate(outputs):
                steps = output.extra_fields["turnkey"]["steps"]
                of: list[Step | None] = [None] * len(output.response_mask)
                for step, positions in zip(steps, turns_of(output.response_mask), strict=False):
                    for position in positions:
                        of[position] = (group, session, step["step"])
                self.at[f"{group}_{session}_{index}"] = of

    def token(self, key: str, position: int) -> tuple[Step, int] | None:
        """The step of a response token and its number in the turn; None for one that is not the model's."""
        step = self.at[key][position] if key in self.at else None
        return None if step is None else (step, self.at[key][:position].count(step))

    def by_step(self, column: Mapping[str, list[float]]) -> dict[Step, list[float]]:
        """A column of the queue as the values of each step's tokens."""
        columns: dict[Step, list[float]] = {}
        for key, of in self.at.items():
            for step, value in zip(of, column[key], strict=True):
                if step is not None:
                    columns.setdefault(step, []).append(value)
        return columns


def noise(what: str, size: float) -> Callable[[tuple[Step, int] | None], float]:
    """A number for every token of the model: one of its turn plus one of its own. 0 for all other tokens."""

    def number(token: tuple[Step, int] | None) -> float:
        if token is None:
            return 0.0
        (group, session, step), place = token
        seed = [*f"{what}{group}".encode(), session, step]
        whole = np.random.default_rng(seed).normal()
        return size * float(whole + np.random.default_rng([*seed, place]).normal()) / 2

    return number


class WorkerGroup:
    """Stands in the place of verl's RayWorkerGroup over one role of real workers; the data comes from the queue."""

    def __init__(self, ranks: Ranks, role: str) -> None:
        self.ranks, self.role = ranks, role
        self._dispatch_info = {"actor": list(range(len(ranks.lines)))}
        self.gradients: dict[str, torch.Tensor] = {}
        """of the last call"""
        self.micro_batches: list[list[int]] = []
        """rows of each in the last call, by rank"""

    @property
    def workers(self) -> list[Any]:
        """Each with what the trainer calls on Ray's handles."""

        def handle(rank: Ranks) -> Any:
            def remote(function: Callable[..., Any], *arguments: Any) -> Any:
                return ray.put(rank.ask_all("run", self.role, function, arguments)[0])

            return SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote))

        return [handle(Ranks([line])) for line in self.ranks.lines]

    def __getattr__(self, method: str) -> Callable[[KVBatchMeta], Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(batch: KVBatchMeta) -> Any:
            parts = [transferqueue_utils.kv_batch_meta2batch_meta(part) for part in batch.chunk(len(self.ranks.lines))]
            data = [transferqueue_utils._meta_to_realdata(part) for part in parts]
            answers = self.ranks.ask("call", [(self.role, method, part) for part in data])
            seen = self.ranks.ask_all("seen")
            self.gradients, self.micro_batches = seen[0][0], [rows for _, rows in seen]
            if method in ("update_actor", "train_mini_batch"):
                return SimpleNamespace(get=lambda: answers[0]) if method == "train_mini_batch" else answers[0]
            for part, answer in zip(parts, answers, strict=True):
                transferqueue_utils._update_meta_with_output(answer, part)
            return SimpleNamespace(futures=[]) if method == "infer_batch" else batch

        return call


def start(made: Any, ranks: Ranks, monkeypatch: Any) -> None:
    """The trainer's own ``_setup`` with worker groups in the place of those that verl starts in Ray."""
    config = made.config

    def setup(self: Any) -> None:
        actor = config.actor_rollout_ref
        sizes = actor.actor.ppo_micro_batch_size_per_gpu, actor.actor.ppo_max_token_len_per_gpu
        engines = f"{actor.model.use_remove_padding} {actor.actor.use_dynamic_bsz} {sizes}"
        ranks.ask_all("build", engines, actor, config.critic)
        self.actor_rollout_wg = WorkerGroup(ranks, "actor")
        self.agent_loop_manager = SimpleNamespace(agent_loop_workers=[])
        self.ref_in_actor = False
        self.distillation_config = None
        if self.use_critic:
            self.critic_wg = WorkerGroup(ranks, "critic")
        self.tokenizer = SimpleNamespace(eos_token_id=EOS)

    monkeypatch.setattr(PPOTrainerSync, "_setup", setup)
    made._setup()


@dataclass
class Trained:
    """What a training step came to."""

    columns: dict[str, dict[Step, list[float]]] = field(default_factory=dict)
    """of the queue: the values on each step's tokens"""
    table: dict[str, np.ndarray] = field(default_factory=dict)
    """columns of the table of steps"""
    actor: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """all gradients in one vector"""
    critic: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    micro_batches: list[list[int]] = field(default_factory=list)
    """rows of each micro-batch of the actor's update, by rank"""
    metrics: dict[str, Any] = field(default_factory=dict)


@contextmanager
def filled(rollout: Rollout) -> Iterator[KVBatchMeta]:
    """The rows in the queue, until the end."""
    for (group, session), outputs in rollout.items():
        put(group, session, [output.model_copy(deep=True) for output in outputs])
    batch = batch_of(tq.kv_list(PARTITION)[PARTITION])
    batch.extra_info["temperature"] = 1.0
    try:
        yield batch
    finally:
        tq.kv_clear(keys=list(tq.kv_list(PARTITION).get(PARTITION, {})), partition_id=PARTITION)


def credit(made: Any, rollout: Rollout) -> Trained:
    """The advantage step alone, with made-up log-probabilities and values."""
    done, places = Trained(), Places(rollout)
    with filled(rollout) as batch:
        for name, size in (("old_log_probs", 0.4), ("ref_log_prob", 0.4), ("values", 1.0)):
            number = noise(name, size)
            write(batch, name, lambda key, i, number=number: number(places.token(key, i)))
        batch = made._compute_advantage(batch, done.metrics)
        done.columns = {name: places.by_step(read(batch, name)) for name in ("advantages", "returns")}
        table = made.advantage_step.table.steps
        done.table = {name: getattr(table, name) for name in ("reward", "tokens", "value", "step")}
    return done


def train(made: Any, rollout: Rollout, poison: float = 0.0) -> Trained:
    """verl's training step from the balancing on, in its order.

    The old policy and the reference are some way off the actor: their log-probabilities are its own plus numbers drawn
    for each turn and token. ``poison`` is the size of what is added to every column on tokens that are not the model's.
    """
    done, places = Trained(), Places(rollout)
    draw = np.random.default_rng(3)

    def shift(name: str, source: str, size: float) -> None:
        column, number = read(batch, source), noise(name, size)

        def value(key: str, i: int) -> float:
            token = places.token(key, i)
            if token is None and i == 0 and name == "values":
                return column[key][i]  # before a turn without tokens
            return column[key][i] + (poison * draw.normal() if token is None else number(token))

        write(batch, name, value)

    with filled(rollout) as batch:
        batch = made._balance_batch(batch, metrics=done.metrics)
        batch = made._compute_old_log_prob(batch, done.metrics)
        batch = made._compute_values(batch, done.metrics)
        for name in ("old_log_probs", "rollout_log_probs", "values"):
            done.columns[name] = places.by_step(read(batch, name))
        if made.use_reference_policy:
            shift("ref_log_prob", "old_log_probs", 0.5)
        for name, size in (("old_log_probs", 0.4), ("values", 0.3), ("rollout_log_probs", 0.0)):
            shift(name, name, size)
        batch = made._compute_advantage(batch, done.metrics)
        for name in ("advantages", "returns"):
            done.columns[name] = places.by_step(read(batch, name))
            shift(name, name, 0.0)
        made._update_critic(batch, done.metrics)
        made._update_actor(batch, done.metrics)
    done.critic, done.actor = flat(made.critic_wg.gradients), flat(made.actor_rollout_wg.gradients)
    done.micro_batches = made.actor_rollout_wg.micro_batches
    return done


def flat(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])


def apart(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((reference - other).norm() / reference.norm()).item()
