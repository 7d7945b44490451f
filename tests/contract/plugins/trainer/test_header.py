"""The header of a run against what the run then does: every number and every fact of it, on verl's own trainers.

Environments, agent-loop workers, queue and trainers are real. A script writes the actions, and worker groups keep what
they were told to train.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import ray
import torch
import transfer_queue as tq
from contract_tools import AWKWARD, PARTITION, SEPARATE, Compose, kill
from ray import cloudpickle
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput
from whole_runs import Idle

from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.checks.header import header
from verl_turnkey.plugins.trainer.worker_setup import WorkerCalls

TASKS = [Task("contract/Awkward-v0", seed) for seed in range(4)]
VALIDATION = [*TASKS[:2], Task("contract/Awkward-v0", 100)]
TURNS = 3
WIN, LOOK = "win", "look"  # ends the episode, and never does


class Script:
    """The server's client: answers in turn, and notes how it was asked to sample."""

    def __init__(self, tokenizer: Any, answers: Sequence[str], notes: Path) -> None:
        self.answers = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
        self.notes, self.calls = notes, count()

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        with self.notes.open("a") as file:
            print(sampling_params["temperature"], sampling_params["top_p"], file=file)
        ids = self.answers[next(self.calls) % len(self.answers)]
        versions = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1, "num_cached_tokens": None}
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), extra_fields=versions)


class Scorer:
    """verl's reward loop worker, for loops that bring no reward."""

    def compute_score(self, data: Any) -> dict[str, Any]:
        return {"reward_score": 1.0, "reward_extra_info": {}}


@dataclass
class Batch:
    """What one call trained."""

    keys: list[str]
    tags: list[dict[str, Any]]
    infos: dict[str, dict[str, float]]
    optimizer_steps: int

    @property
    def groups(self) -> set[str]:
        return {key.rsplit("_", 2)[0] for key in self.keys}

    @property
    def episodes(self) -> set[str]:
        return {key.rsplit("_", 1)[0] for key in self.keys}


class Workers:
    """Stands in the place of the worker groups of one role: keeps what each call got, and answers in the queue."""

    def __init__(self) -> None:
        self._dispatch_info = {"actor": [0], "critic": [0]}
        self.workers: list[Any] = []
        self.called: list[str] = []
        self.trained: list[Batch] = []
        self.futures: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(batch: Any = None) -> Any:
            self.called.append(name)
            if not isinstance(batch, KVBatchMeta):  # other than training, such as to send the weights
                return []
            if name in ("update_actor", "train_mini_batch"):
                self._note(batch)
                answer = {"metrics": {"mfu": 0.0}}
                return answer if name == "update_actor" else SimpleNamespace(get=lambda: answer)
            rows = [torch.zeros(tag["seq_len"]) for tag in batch.tags]
            nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            names = ("values",) if name == "infer_batch" else ("log_probs", "entropy")
            fields = TensorDict(dict.fromkeys(names, nested), batch_size=len(batch))
            tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)
            return self if name == "infer_batch" else batch

        return call

    def _note(self, batch: KVBatchMeta) -> None:
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        keys = [batch.keys[i] for i in real]
        data = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["extra_fields"])
        infos = {
            key.rsplit("_", 1)[0]: extra.get("reward_extra_info") or {}
            for key, extra in zip(keys, data.pop("extra_fields").tolist(), strict=True)
        }
        steps = batch.extra_info["num_mini_batch"] * batch.extra_info["epochs"]
        self.trained.append(Batch(keys, [batch.tags[i] for i in real], infos, steps))


@dataclass
class Done:
    """A run, and what its header said before."""

    header: dict[str, str]
    trainer: Any
    actor: list[Batch]
    critic: list[Batch]
    called: list[str]
    sampled: set[tuple[float, float]]
    validated: list[str] = field(default_factory=list)
    """the verl uid of each validation episode, which is its task's"""
    played: int = 0
    """tasks that were played for training"""

    def numbers(self, label: str, pattern: str) -> list[int]:
        """The numbers of a line, by a pattern whose groups they are."""
        match = re.search(pattern, self.header[label])
        assert match, (label, self.header[label])
        return [int(group) for group in match.groups()]


def by_label(lines: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    label = ""
    for line in lines[1:]:
        label = line[2:14].strip() or label
        texts[label] = f"{texts.get(label, '')} {line[15:]}".strip()
    return texts


Run = Callable[..., Done]


@pytest.fixture
def run(queue, compose: Compose, tokenizer, tmp_path: Path) -> Run:
    """``run("+turnkey=gigpo", ..., answers=...)``: a run of ``steps`` steps."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    write_parquet(tmp_path / "train.parquet", TASKS, "source", "train")
    write_parquet(tmp_path / "val.parquet", VALIDATION, "source", "val")

    def start(*overrides: str, answers: Sequence[str] = (LOOK,), steps: int = 1, mode: str = "sync") -> Done:
        config = compose(
            *(("+turnkey=gigpo",) if not any(text.startswith("+turnkey=") for text in overrides) else ()),
            f"trainer.v1.trainer_mode=turnkey_{mode}",
            *(SEPARATE if mode == "separate_async" else ()),
            f"data.train_files={tmp_path}/train.parquet",
            f"data.val_files={tmp_path}/val.parquet",
            "data.dataloader_num_workers=0",
            "data.max_response_length=400",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            f"trainer.default_local_dir={tmp_path}/checkpoints",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=100",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.logger=[]",
            f"turnkey.modules=[{AWKWARD}]",
            "turnkey.env.probe=false",
            f"turnkey.rollout.max_turns={TURNS}",
            "turnkey.rollout.max_tokens_per_turn=8",
            *overrides,
        )
        labels = by_label(header(config))
        trainer: Any = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer._init_tokenizer()
        trainer._init_dataloader()
        trainer._init_dump_executor()
        trainer.checkpoint_manager = trainer.standalone_checkpoint_manager = Idle()
        scorers = [ray.remote(num_cpus=0)(Scorer).remote()]
        trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=scorers)
        trainer.current_mode = HybridEngineMode.TRAINER
        trainer.ref_in_actor, trainer.distillation_config = config.actor_rollout_ref.model.lora_rank > 0, None
        actor, critic = Workers(), Workers()
        trainer.actor_rollout_wg = trainer.ref_policy_wg = WorkerCalls(actor, trainer.actor_update.before_call)
        trainer.critic_wg = WorkerCalls(critic, trainer.actor_update.before_call)
        trainer._compute_metrics = lambda *_, **__: None
        trainer._load_checkpoint()
        done = Done(labels, trainer, actor.trained, critic.trained, actor.called, set())
        update_metrics = trainer._val_metrics_update

        def validated(data_sources: Any, sample_uids: list[str], *more: Any, **named: Any) -> Any:
            done.validated += sample_uids
            return update_metrics(data_sources, sample_uids, *more, **named)

        trainer._val_metrics_update = validated
        manager = AgentLoopManagerTQ.create(
            config=config,
            llm_client=Script(tokenizer, answers, tmp_path / "notes"),
            reward_loop_worker_handles=scorers,
        )
        generate = manager.generate_sequences

        def generated(prompts: Any) -> Any:
            done.played += 0 if "validate" in prompts else len(prompts)
            return generate(prompts)

        manager.generate_sequences = generated
        try:
            trainer.fit(manager)
        finally:
            for worker in [*manager.agent_loop_workers, *scorers]:
                kill(worker)
        lines = (tmp_path / "notes").read_text().splitlines()
        done.sampled = {(float(line.split()[0]), float(line.split()[1])) for line in lines}
        return done

    return start


def span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(" to ")
    return int(low), int(high or low)


def check_step(done: Done) -> tuple[int, int]:
    """Compares the numbers of the lines ``per step`` and ``update`` with one step; the bounds of its rows."""
    per_step = re.match(
        r"(\d+) tasks x ([\d to]+)(?:, by .*,)? = ([\d to]+) episodes, ([\d to]+) rows", done.header["per step"]
    )
    assert per_step, done.header["per step"]
    tasks, rollouts, episodes, rows = int(per_step[1]), *map(span, per_step.groups()[1:])
    (batch,) = done.actor
    groups = {group: [e for e in batch.episodes if e.rsplit("_", 1)[0] == group] for group in batch.groups}
    assert len(groups) == tasks
    assert all(rollouts[0] <= len(of_group) <= rollouts[1] for of_group in groups.values())
    assert episodes[0] <= len(batch.episodes) <= episodes[1]
    assert rows[0] <= len(batch.keys) <= rows[1]
    mini_batches, epochs, steps = done.numbers(
        "update", r"(\d+) mini-batch(?:es)? x (\d+) epochs? = (\d+) optimizer step"
    )
    assert steps == mini_batches * epochs == batch.optimizer_steps
    return rows


CONVERSATION = "turnkey.rollout.prompt=conversation"


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        pytest.param([], 8 * TURNS, id="a row per step"),
        pytest.param(
            [CONVERSATION, "turnkey.rollout.layout=steps"],
            8 * TURNS,
            id="a conversation in steps",
            marks=pytest.mark.long,
        ),
        pytest.param(["turnkey.rollout.strategy=tree", "turnkey.rollout.max_turns=4"], 8 * (4 + 3 + 2 * 1), id="tree"),
        pytest.param(
            ["turnkey.rollout.strategy={name: tree, first: 0, every: 1, depth: 2}"],
            8 * 10,
            id="bushy tree",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["turnkey.rollout.strategy={name: siblings, candidates: 3}"],
            8 * 3 * TURNS,
            id="siblings",
            marks=pytest.mark.long,
        ),
        pytest.param(["turnkey.rollout.strategy={name: vine, rollouts: 2}"], 8 * TURNS, id="vine"),
    ],
)
def test_rows_of_episodes_that_play_all_their_turns_are_the_most_that_the_header_allows(run: Run, overrides, rows):
    done = run(*overrides)
    assert check_step(done)[1] == rows == len(done.actor[0].keys)
    measured = sum(info.get("branching/measured", 0) for info in done.actor[0].infos.values())
    trained = sum(info.get("branching/trained", 0) for info in done.actor[0].infos.values())
    for number, name in ((measured, "further rollouts"), (trained, "trained branches")):
        if number:
            assert done.numbers("strategy", rf"at most (\d+) {name}") == [number]
        else:
            assert name not in done.header.get("strategy", "")


@pytest.mark.long
@pytest.mark.parametrize("overrides", [[], ["turnkey.rollout.strategy={name: tree, first: 1}"]])
def test_rows_of_episodes_of_one_turn_are_the_fewest(run: Run, overrides):
    done = run(*overrides, answers=[WIN])
    assert check_step(done)[0] == len(done.actor[0].keys) == 8


@pytest.mark.long
def test_the_rows_of_a_conversation_merge(run: Run):
    done = run(CONVERSATION)
    low, high = check_step(done)
    assert (low, high) == (len(done.actor[0].keys), 8 * TURNS) == (8, 24)
    assert done.header["agent loop"] == "turnkey_env: a row per conversation"


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ["turnkey.rollout.strategy={name: vine, rollouts: 3, every: 2}"],
        ["turnkey.rollout.strategy={name: vine, rollouts: 3}", "turnkey.rollout.branch_steps=4"],
        ["turnkey.rollout.strategy={name: vine, rollouts: 3}", "turnkey.rollout.branch_tokens=40"],
        ["turnkey.rollout.strategy={name: tree, first: 0, every: 1}", "turnkey.rollout.branch_steps=4"],
        ["turnkey.rollout.strategy={name: entropy_branch, trajectories: 3, alpha: 1.0}"],
        ["turnkey.rollout.strategy={name: spo_chain, every: 2, rollouts: 2}"],
    ],
)
@pytest.mark.parametrize("answers", [[LOOK], [LOOK, WIN, LOOK]])
def test_branches_stay_within_the_bounds(run: Run, overrides, answers):
    done = run(*overrides, answers=answers)
    check_step(done)
    infos = done.actor[0].infos.values()
    for key, name in (("trained", "trained branches"), ("measured", "further rollouts")):
        number = sum(info[f"branching/{key}"] for info in infos)
        if number:
            assert number <= done.numbers("strategy", rf"at most (\d+) {name}")[0]


@pytest.mark.long
def test_queries_of_the_model(run: Run):
    reward = "reward: {name: length, weight: -1}"
    done = run(CONVERSATION, f"turnkey.rollout.strategy={{name: probe, answers: 2, {reward}}}")
    check_step(done)
    queries = sum(info["branching/measured"] for info in done.actor[0].infos.values())
    assert done.numbers("strategy", r"at most (\d+) queries") == [queries] == [2 * 8 * TURNS]


# --- which groups are trained -----------------------------------------------------------------------------------------

DIFFER = (WIN, LOOK, LOOK)  # so that the episodes of a group end differently, in whatever order they play
FILTER = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward"]


@pytest.mark.parametrize("by", ["groups", pytest.param("spread", marks=pytest.mark.long)])
def test_kept_groups(run: Run, by):
    done = run("turnkey.groups.keep=0.5", f"turnkey.groups.keep_by={by}", answers=DIFFER)
    low, high = span(re.match(r"([\d to]+) of 4 groups", done.header["trained"])[1])
    (batch,) = done.actor
    assert low <= len(batch.groups) <= high
    assert (low, high) == ((2, 2) if by == "groups" else (1, 4))
    rows = span(re.search(r"episodes, ([\d to]+) rows", done.header["per step"])[1])
    assert rows == (low * 2, high * 2 * TURNS)
    assert rows[0] <= len(batch.keys) <= rows[1]
    steps = done.numbers("update", r"(\d+) optimizer step")[0]
    assert batch.optimizer_steps == steps if by == "groups" else batch.optimizer_steps <= steps


@pytest.mark.long
def test_stored_episodes_join_and_are_trained(run: Run):
    """Of the first step all episodes fail, of the second none."""
    done = run(
        "turnkey.groups.replay=1", *("trainer.total_training_steps=2", "algorithm.rollout_correction.rollout_is=token"),
        "turnkey.env.hosts=1", answers=[LOOK] * (8 * TURNS) + [WIN] * 8,
    )  # fmt: skip
    first, second = done.actor
    assert len(first.episodes) == 8
    joined = len(second.episodes) - 8
    assert 0 < joined <= done.numbers("replay", r"at most (\d+) stored episodes per step, 1 for each group")[0] == 4
    rows = span(re.search(r"episodes, ([\d to]+) rows", done.header["per step"])[1])
    assert rows == (8, (8 + 4) * TURNS)
    assert all(rows[0] <= len(batch.keys) <= rows[1] for batch in done.actor)


@pytest.mark.long
def test_stored_groups_join_and_are_trained(run: Run):
    done = run(
        "turnkey.groups.buffer=2", "trainer.total_training_steps=2", "algorithm.rollout_correction.rollout_is=token",
        answers=[WIN, LOOK] * 12 + [WIN] * 100,
    )  # fmt: skip
    most, groups = done.numbers("replay", r"at most (\d+) stored episodes per step, in at most (\d+) stored groups")
    assert (most, groups) == (4, 2)
    for batch in done.actor:
        assert 4 <= len(batch.groups) <= 4 + groups
        assert 8 <= len(batch.episodes) <= 8 + most


@pytest.mark.long
def test_filtered_groups_are_replaced(run: Run):
    done = run(*FILTER, answers=[WIN, WIN, *DIFFER])
    check_step(done)
    assert done.header["filter"] == "replaces groups with the same reward in all episodes (algorithm.filter_groups)"
    assert done.trainer.replay_buffer.filter_groups_metric == "reward"


@pytest.mark.long
def test_allocation_within_its_bounds(run: Run):
    rollouts = ["actor_rollout_ref.rollout.n=4", "turnkey.groups.n_low=2", "turnkey.groups.n_high=7"]
    done = run("turnkey.groups.allocation=variance", *rollouts, answers=DIFFER)
    check_step(done)
    assert "4 tasks x 2 to 7, by variance, = 16 episodes, 16 to 48 rows" in done.header["per step"]


@pytest.mark.long
def test_a_column_that_sets_the_rollouts_of_a_task(run: Run, tmp_path):
    def with_column() -> None:
        table = pd.read_parquet(tmp_path / "train.parquet")
        table["__rollout_n__"] = [1, 2, 3, 3]
        table.to_parquet(tmp_path / "counted.parquet")

    with_column()
    done = run(f"data.train_files={tmp_path}/counted.parquet")
    check_step(done)
    assert done.header["per step"].startswith("4 tasks x 1 to 3, by the column __rollout_n__, = 4 to 12 episodes")
    assert len(done.actor[0].episodes) == 9


# --- the update -------------------------------------------------------------------------------------------------------


def test_the_critic_and_its_steps(run: Run):
    done = run("+turnkey=turn_gae", "critic.ppo_mini_batch_size=1", "critic.ppo_epochs=2")
    check_step(done)
    assert done.trainer.use_critic
    (batch,) = done.critic
    assert done.numbers("critic", r"(\d+) mini-batches x (\d+) epochs = (\d+) optimizer steps") == [4, 2, 8]
    assert batch.optimizer_steps == 8


@pytest.mark.long
def test_without_a_critic_or_kl_the_header_has_neither(run: Run):
    done = run()
    assert not done.trainer.use_critic
    assert not done.trainer.use_reference_policy
    assert not {"critic", "kl", "lora", "filter", "trained", "replay", "strategy", "correction"} & {*done.header}


KL = {
    "algorithm.use_kl_in_reward=true": "0.001 x kl in the reward (fixed)",
    "actor_rollout_ref.actor.use_kl_loss=true": "0.001 x low_var_kl in the loss",
}


@pytest.mark.parametrize("keys", [[*KL]])
def test_kl(run: Run, keys):
    done = run(*keys)
    assert done.trainer.use_reference_policy
    assert "compute_ref_log_prob" in done.called
    assert done.header["kl"] == ", ".join(KL[key] for key in keys)
    in_reward = "algorithm.use_kl_in_reward=true" in keys
    assert (getattr(done.trainer, "kl_ctrl_in_reward", None) is not None) == in_reward


@pytest.mark.long
def test_lora(run: Run):
    done = run("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.use_kl_loss=true")
    config = omega_conf_to_dataclass(done.trainer.config.actor_rollout_ref.model)
    assert done.header["lora"] == f"rank {config.lora_rank}, alpha {config.lora_alpha}, on {config.target_modules}"
    assert "compute_ref_log_prob" not in done.called  # the actor without its adapter is the reference


@pytest.mark.long
def test_turns_in_reverse(run: Run):
    done = run("+turnkey=seeupo", "actor_rollout_ref.actor.ppo_epochs=2", answers=[LOOK])
    most = done.numbers(
        "update", r"at most (\d+) turns x (\d+) epochs = (\d+) optimizer steps per batch, from the last"
    )
    assert sum(batch.optimizer_steps for batch in done.actor) == most[2] == TURNS * 2
    done = run("+turnkey=seeupo", answers=[WIN])
    assert sum(batch.optimizer_steps for batch in done.actor) == 1 < done.numbers("update", r"= (\d+) optimizer")[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 2),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], 1),
        (["turnkey.update.mini_batches=100"], 8),  # an episode each
        (["+turnkey=grpo_steps", "+turnkey/loss=rebel", "actor_rollout_ref.actor.ppo_mini_batch_size=2"], 2),
        (["+turnkey=grpo_steps", "+turnkey/loss=rebel", "turnkey.update.mini_batches=100"], 4),  # a group each
    ],
)
def test_optimizer_steps(run: Run, overrides, steps):
    done = run(*overrides)
    assert done.numbers("update", r"= (\d+) optimizer step") == [steps]
    assert sum(batch.optimizer_steps for batch in done.actor) == steps


@pytest.mark.long
def test_a_step_of_several_updates(run: Run):
    done = run("actor_rollout_ref.actor.ppo_epochs=2", mode="separate_async")
    steps = done.numbers("update", r"= (\d+) optimizer steps per update of a step")[0]
    assert [batch.optimizer_steps for batch in done.actor] == [steps, steps] == [2, 2]
    assert sum(len(batch.keys) for batch in done.actor) == 8 * TURNS


# --- verl's own estimators and loops ----------------------------------------------------------------------------------

GRPO = ["+turnkey=base", "algorithm.adv_estimator=grpo"]


def test_verls_estimator_sees_no_penalty(run: Run):
    done = run(*GRPO, "turnkey.rollout.invalid_action_penalty=0.5")
    check_step(done)
    assert done.trainer.advantage_step.estimator is None
    assert done.header["estimator"] == "grpo (verl's)"
    assert done.header["reward"] == "1.0 x step"


@pytest.mark.long
def test_the_penalty_of_our_estimators(run: Run):
    done = run("turnkey.rollout.invalid_action_penalty=0.5", "turnkey.rewards=[{name: step, weight: 2}]")
    assert done.header["reward"] == "2.0 x step, -0.5 per invalid action"


@pytest.mark.long
def test_a_loop_of_verls_has_a_row_per_episode(run: Run):
    done = run(*GRPO, "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent")
    assert check_step(done) == (8, 8)
    assert not {"environment", "strategy"} & {*done.header}


# --- sampling and validation ------------------------------------------------------------------------------------------


def test_how_training_and_validation_sample(run: Run):
    validation = "actor_rollout_ref.rollout.val_kwargs"
    done = run(
        "actor_rollout_ref.rollout.temperature=0.7", f"{validation}.temperature=0.2", f"{validation}.top_p=0.9",
        f"{validation}.n=2", "trainer.val_before_train=true", "trainer.test_freq=1",
    )  # fmt: skip
    assert done.header["sampling"] == "temperature 0.7"
    assert done.header["validation"] == (
        "before the first step and at the end: 3 tasks (2 of them also training tasks: same environment, arguments and "
        "seed) x 2 episodes, temperature 0.2, top_p 0.9"
    )
    assert done.sampled == {(0.7, 1.0), (0.2, 0.9)}
    assert len(done.validated) == 2 * 3 * 2
    assert len({*done.validated}) == 2 * 3
    assert sum(task in TASKS for task in VALIDATION) == 2


@pytest.mark.long
def test_without_validation(run: Run):
    done = run()
    assert done.header["validation"] == "none"
    assert not done.validated


@pytest.mark.long
def test_the_environment(run: Run):
    done = run("+turnkey.env.kwargs.observation=hall")
    assert done.header["environment"] == (
        'contract/Awkward-v0 (4 tasks); default kwargs {"observation": "hall"}; '
        "at most 3 turns (turnkey.rollout.max_turns)"
    )
    assert done.header["steps"] == "1"
    assert done.trainer.total_training_steps == 1
