"""One scripted rollout in both row layouts, and one training step on either: what test_layouts.py compares."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
import transformers
from awkward_env import Gallery
from contract_tools import EOS, PARTITION, Pictures, batch_of, loop_of_verl, put, read, write
from contract_tools import output as queue_row
from naive.common import turns_of
from omegaconf import DictConfig
from training_ranks import Ranks
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import transferqueue_utils
from verl.utils.tokenizer import hf_processor
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

OFF_POLICY = 0.4
"""size of what the old policy's log-probabilities differ by from the actor's"""

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
        engines = f"{actor.model.path} {actor.model.use_remove_padding} {actor.actor.use_dynamic_bsz} {sizes}"
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
def filled(rollout: Rollout, **model: Any) -> Iterator[KVBatchMeta]:
    """The rows in the queue, until the end; ``model``: what a worker has of one that sees."""
    for (group, session), outputs in rollout.items():
        put(group, session, [output.model_copy(deep=True) for output in outputs], **model)
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


def train(made: Any, rollout: Rollout, poison: float = 0.0, **model: Any) -> Trained:
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

    noises = {"old_log_probs": OFF_POLICY, "rollout_log_probs": 0.0} | ({"values": 0.3} if made.use_critic else {})
    with filled(rollout, **model) as batch:
        batch = made._balance_batch(batch, metrics=done.metrics)
        batch = made._compute_old_log_prob(batch, done.metrics)
        if made.use_critic:
            batch = made._compute_values(batch, done.metrics)
        for name in noises:
            done.columns[name] = places.by_step(read(batch, name))
        if made.use_reference_policy:
            shift("ref_log_prob", "old_log_probs", 0.5)
        for name, size in noises.items():
            shift(name, name, size)
        batch = made._compute_advantage(batch, done.metrics)
        for name in ("advantages", "returns"):
            done.columns[name] = places.by_step(read(batch, name))
            shift(name, name, 0.0)
        if made.use_critic:
            made._update_critic(batch, done.metrics)
            done.critic = flat(made.critic_wg.gradients)
        made._update_actor(batch, done.metrics)
    done.actor = flat(made.actor_rollout_wg.gradients)
    done.micro_batches = made.actor_rollout_wg.micro_batches
    return done


def flat(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])


def apart(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((reference - other).norm() / reference.norm()).item()


# --- episodes with pictures -------------------------------------------------------------------------------------------

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
SHOWN: dict[str, tuple[list[int], list[str]]] = {
    "a": ([1, 1, 1], ["left right left", "right right left", "left left right", "left raise"]),
    "b": ([0, 0], ["left right", "right left"]),
    "c": ([0, 2, 1], ["left right right", "right left left"]),
    "d": ([1, 0], ["left left", "right left"]),
}
"""by group: pictures before each move, and the moves of its episodes"""
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class NoVideos(transformers.BaseVideoProcessor):
    """In the place of a processor that needs torchvision."""

    def __init__(self) -> None:
        pass


@dataclass
class Seeing:
    """A vision-language model of random weights: its folder, and what agent loops and their workers have of it."""

    folder: Path
    tokenizer: Any
    processor: Any
    hf_model_type: str
    dataset_cls: type = Pictures

    def parts(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


def seeing(folder: Path, family: str, text_tokenizer: Any) -> Seeing:
    """A model of 0.12 to 0.15 M parameters; a token of a picture is a square of 8 x 8 pixels."""
    tokenizer = copy.deepcopy(text_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *VISION]})
    tokenizer.chat_template = CHAT
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(VISION)), strict=True))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    patches = {"patch_size": 4, "temporal_patch_size": 2}
    sight = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, **patches}
    if family == "qwen3_vl":
        text |= {"head_dim": 32, "rope_parameters": {**rope, "mrope_interleaved": True}}
        sight |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        kind, processor_class = transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLProcessor
    else:
        sight |= {"window_size": 16, "fullatt_block_indexes": [1]}
        kind, processor_class = transformers.Qwen2_5_VLForConditionalGeneration, transformers.Qwen2_5_VLProcessor
    config = kind.config_class(text_config=text, vision_config=sight, tie_word_embeddings=True, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind(config)
    with torch.no_grad():  # fresh weights are so small that nothing depends on anything
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 256, "longest_edge": 4096}
    images = transformers.Qwen2VLImageProcessor(merge_size=2, size=size, **patches)
    processor = processor_class(images, tokenizer, NoVideos(), chat_template=CHAT)
    with pytest.MonkeyPatch.context() as patch:  # verl reads it from files, which those of videos need torchvision for
        patch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_, **__: processor)
        return Seeing(folder, tokenizer, hf_processor(folder), family)


class Moves:
    """In the place of the servers' client: answers with these moves, and keeps the turns."""

    def __init__(self, tokenizer: Any, moves: str) -> None:
        self.tokenizer, self.moves = tokenizer, moves.split()
        self.turns: list[tuple[list[int], list[int]]] = []
        """ids of each prompt, and of its answer"""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        ids = [*self.tokenizer.encode(self.moves[len(self.turns)]), self.tokenizer.eos_token_id]
        self.turns.append((list(prompt_ids), ids))
        versions = {"global_steps": 4, "min_global_steps": 4, "max_global_steps": 4}
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), extra_fields=versions)


def looked(config: DictConfig, model: Seeing) -> tuple[Rollout, dict[tuple[str, int], Moves]]:
    """The rows of turnkey_env for :data:`SHOWN`, and the server of each episode."""
    parts = model.parts("processor", "hf_model_type", "dataset_cls")
    servers = {(g, n): Moves(model.tokenizer, m) for g, (_, moves) in SHOWN.items() for n, m in enumerate(moves)}

    async def episode(group: str, session: int) -> list[AgentLoopOutput]:
        loop = loop_of_verl("turnkey_env", config, servers[group, session], model.tokenizer, **parts)
        task = Task("contract/Gallery-v0", 3, {"shows": SHOWN[group][0]}).to_json()
        row = {"uid": group, "session_id": session, "global_steps": 5, "turnkey_task": task}
        return await loop.run({"temperature": 1.0, "logprobs": True}, **row)

    async def episodes() -> list[list[AgentLoopOutput]]:
        return await asyncio.gather(*(episode(*key) for key in servers))

    try:
        return dict(zip(servers, asyncio.run(episodes()), strict=True)), servers
    finally:
        loop_worker.finish(None)


@dataclass
class Turn:
    """A turn as an onlooker of environment and server writes it down: a row of the twin."""

    step: Step
    prompt: list[int]
    answer: list[int]
    pictures: list[np.ndarray]
    """all that the conversation has shown"""
    reward: float
    state: tuple[Any, ...]


def onlooker(servers: Mapping[tuple[str, int], Moves]) -> list[Turn]:
    """The turns of the episodes that did not fail, from the environment itself."""
    turns = []
    for (group, session), moves in servers.items():
        if "raise" in moves.moves:
            continue
        env = Gallery(SHOWN[group][0])
        (text, info), pictures = env.reset(seed=3), []
        for t, (move, (prompt, answer)) in enumerate(zip(moves.moves, moves.turns, strict=True)):
            now = info.get("images", [])
            pictures = [*pictures, *now]
            state = text, *(picture.tobytes() for picture in now)
            text, reward, _, _, info = env.step(move)
            turns.append(Turn((group, session, t), prompt, answer, pictures, reward, state))
    return turns
