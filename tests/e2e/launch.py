"""Start stock verl as a user does, and read what it left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pandas as pd
import pytest
import torch

from verl_turnkey.envs.tasks import Task, split_seeds, write_parquet
from verl_turnkey.losses import turn_ids
from verl_turnkey.plugins.view.join import read

HERE = Path(__file__).parent
POLICY = HERE / "word_policy.py"
SEPARATE = (
    "trainer.v1.trainer_mode=turnkey_separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "ray_kwargs.ray_init.num_gpus=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.hybrid_engine=false",
)
"""overrides for a server apart from the trainer, with a logical GPU for each, and two updates in each step"""


@dataclass(frozen=True)
class Run:
    """A finished run: metrics by step, what the spy saw, and the episodes that the agent loop logged."""

    out: Path
    metrics: dict[int, dict[str, float]]

    def seen(self, step: int, update: int = 0) -> dict[str, Any]:
        """What the spy saw at an update of the actor; ``update``: which one, where a step has several."""
        return torch.load(self.out / "spy" / f"step{step}.{update}.pt", weights_only=False)

    def rows(self, step: int, *names: str, update: int = 0) -> Iterator[Any]:
        """These columns of what the spy saw, of each row that is no padding."""
        seen = self.seen(step, update)
        columns = zip(*(seen[name] for name in names), strict=True)
        return (row for row, padding in zip(columns, seen["padding"], strict=True) if not padding)

    def episodes(self, split: str) -> list[dict[str, Any]]:
        """The episodes of the trajectory log, each with its ``steps`` in the table of turns, and its ``texts``."""
        log = self.out / "episodes"
        parts: dict[str, dict[str, list[Any]]] = {"turns": {}, "texts": {}}
        for table, of in parts.items():
            for row in _plain(read(log, table).sort_values("turn")):
                of.setdefault(row["episode"], []).append(row)
        return [
            {**episode, "steps": parts["turns"].get(key, []), "texts": parts["texts"].get(key, [])}
            for episode in _plain(read(log, "episodes"))
            if (key := episode["episode"]) and episode["split"] == split
        ]

    def steps(self) -> list[dict[str, Any]]:
        """The steps of all training episodes that went well, as the estimators see them, with their row and turn."""
        return [
            {
                **step,
                "row": f"{step['episode']}_{int(step['row'])}",  # a float where turns of failed episodes have none
                "turn": int(step["turn_in_row"]),
                "step": step["turn"],
                "group": episode["group"],
                "trajectory": step["episode"],
                "global_step": episode["global_step"],
                "reward": step["composed_reward"],
                "success": episode["success"],
                "extra": {"next_anchor": step["next_anchor"], **json.loads(step["extra"] or "{}")},
            }
            for episode in self.episodes("train")
            if not episode["failed"]
            for step in episode["steps"]
        ]

    def played(self) -> dict[str, dict[str, Any]]:
        """The steps by the key of their row, where each row holds one."""
        steps = self.steps()
        assert not any(step["turn"] for step in steps)
        return {step["row"]: step for step in steps}

    def agrees_with(self, naive: Callable[[list[dict[str, Any]]], Sequence[float]], step: int, update: int = 0) -> None:
        """Assert that the advantages in the queue are those of a naive twin on what the agent loop logged."""
        queue = {key: row for key, *row in self.rows(step, "keys", "advantages", "mask", update=update)}
        for failed in (f"{e['episode']}_0" for e in self.episodes("train") if e["failed"]):
            assert failed not in queue or not queue.pop(failed)[1].any(), failed
        steps = [record for record in self.steps() if record["row"] in queue]
        turns = Counter(record["row"] for record in steps)
        assert turns.keys() == queue.keys()
        assert len(queue) > 0
        for record, value in zip(steps, naive(steps), strict=True):
            advantage, mask = queue[record["row"]]
            # The tokens of the only turn may have a gap, where some were rejected.
            tokens = mask.bool() if turns[record["row"]] == 1 else turn_ids(mask[None])[0] == record["turn"]
            assert tokens.any()
            credit = advantage[tokens].numpy()
            assert np.allclose(credit, value, rtol=1e-7, atol=1e-5), (
                f"step {step}, update {update}: credit {credit}, expected {value} of {record} in the group "
                f"{[other for other in steps if other['group'] == record['group']]}"
            )

    def holds_each_turn_once(self, step: int, tokenizer: Any) -> None:
        """Assert that the turns under the masks of ``step`` are, one by one, what the agent loop logged as written."""
        seen = self.seen(step)
        rows = dict(zip(seen["keys"], zip(seen["responses"], seen["mask"], strict=True), strict=True))
        for episode in (e for e in self.episodes("train") if e["global_step"] == step and not e["failed"]):
            turns_read: list[str] = []
            of_rows = Counter(int(record["row"]) for record in episode["steps"])
            assert sorted(of_rows) == list(range(len(of_rows)))
            for index in sorted(of_rows):
                response, mask = rows.pop(f"{episode['episode']}_{index}")
                turns = turn_ids(mask[None])[0]
                assert set(turns[mask.bool()].tolist()) == set(range(of_rows[index]))
                for turn in range(of_rows[index]):
                    turns_read.append(tokenizer.decode(response[turns == turn], skip_special_tokens=True))
            assert turns_read == [text["response"] for text in episode["texts"]]
        assert not any(mask.any() for _, mask in rows.values())


def _plain(table: Any) -> list[dict[str, Any]]:
    """The rows of a data frame, with None for what is null."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def data(folder: Path, batch: int) -> tuple[str, ...]:
    return (
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"data.train_batch_size={batch}",
    )


def critic(model: Path, lr: float) -> tuple[str, ...]:
    return (
        f"critic.model.path={model}",
        "critic.ppo_max_token_len_per_gpu=8192",
        f"critic.optim.lr={lr}",
        "critic.optim.weight_decay=0.0",
    )


def minigrid(
    out: Path, *levels: dict[str, Any], train: int = 8, val: int = 4, seed: int, batch: int = 4
) -> tuple[str, ...]:
    """Write tasks that go through ``levels`` in turn; the overrides that play them as the quickstart's model can."""
    out.mkdir(parents=True, exist_ok=True)
    for split, seeds in zip(("train", "val"), split_seeds(train, val, seed=seed), strict=True):
        tasks = [Task("turnkey/MiniGrid-v0", seed, levels[i % len(levels)]) for i, seed in enumerate(seeds)]
        write_parquet(out / f"{split}.parquet", tasks, "doorkey", split)
    return (
        "+turnkey/env=babyai",
        "turnkey.rollout.template=minigrid",
        "turnkey.rollout.action_format=plain",
        f"turnkey.rollout.max_turns={max(level['max_steps'] for level in levels)}",
        *data(out, batch=batch),
    )


def agent_tasks(out: Path, source: str, **splits: Sequence[dict[str, Any]]) -> None:
    """Write tasks for an agent of the user's, by split."""
    out.mkdir(parents=True, exist_ok=True)
    for split, tasks in splits.items():
        frame = pd.DataFrame({"turnkey_task": [json.dumps(task) for task in tasks]})
        frame["prompt"] = [[{"role": "user", "content": "-"}]] * len(frame)
        frame["data_source"] = source
        frame["extra_info"] = [{"split": split, "index": i} for i in range(len(frame))]
        frame.to_parquet(out / f"{split}.parquet")


def gigpo_by_role(steps: list[dict[str, Any]]) -> list[float]:
    """GiGPO's twin on what each role did, as if it were a trajectory in a group of its own."""

    def own(step: dict[str, Any], name: str) -> str:
        return f"{step[name]} {step['extra']['role']}"

    return naive.gigpo([{**s, "trajectory": own(s, "trajectory"), "group": own(s, "group")} for s in steps])


def questions(out: Path, source: str, question: str, rows: int) -> tuple[str, ...]:
    """Write data without tasks of this package, for loops of others; the overrides that name it."""
    for split in ("train", "val"):
        frame = pd.DataFrame(
            {
                "data_source": source,
                "prompt": [[{"role": "user", "content": question}]] * rows,
                "reward_model": [{"style": "rule", "ground_truth": ""}] * rows,
                "extra_info": [{"index": index, "split": split} for index in range(rows)],
            }
        )
        frame.to_parquet(out / f"{split}.parquet", index=False)
    return data(out, batch=rows)


def short(name: str, names: Iterable[str]) -> list[Any]:
    """``names`` as parameters of a fixture; the runs of all but ``name`` are long."""
    return [other if other == name else pytest.param(other, marks=pytest.mark.long) for other in names]


def train(
    out: Path,
    model: Path,
    *overrides: str,
    steps: int = 2,
    rollouts: int = 4,
    mini_batch: int | None = None,
    lr: float | None = None,
    modules: tuple[Path, ...] = (),
    env: dict[str, str] | None = None,
) -> Run:
    """A run on a CPU to its end; None: the default of the recipe."""
    actor = {"ppo_mini_batch_size": mini_batch, "optim.lr": lr}
    settings = [
        "+turnkey/device=cpu",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.n={rollouts}",
        *(f"actor_rollout_ref.actor.{key}={value}" for key, value in actor.items() if value is not None),
        f"trainer.total_training_steps={steps}",
    ]
    with started(out, *overrides, *settings, modules=modules, env=env) as process:
        code = process.wait(timeout=1500)
    assert code == 0, f"verl exited with {code}:\n{(out / 'log.txt').read_text()[-6000:]}"
    metrics: dict[int, dict[str, float]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        metrics.setdefault(entry["step"], {}).update(entry["data"])
    return Run(out, metrics)


@contextmanager
def started(
    out: Path,
    *overrides: str,
    modules: tuple[Path, ...] = (),
    env: dict[str, str] | None = None,
    cluster: str | None = None,
) -> Iterator[subprocess.Popen]:
    """``python -m verl.trainer.main_ppo +turnkey=... ...`` in a process of its own.

    With a Ray of its own, too, unless the address of a ``cluster`` is given.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "spy").mkdir(exist_ok=True)
    ray_dir = tempfile.mkdtemp(prefix="tk-")
    metrics = out / "metrics.jsonl"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"turnkey.modules=[{','.join(str(path) for path in (*modules, HERE / 'spy.py'))}]",
        f"turnkey.log.trajectories={out}/episodes",
        "data.max_prompt_length=256",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        f"hydra.run.dir={out}/hydra",
        *overrides,  # the last word
    ]
    variables = {"VERL_FILE_LOGGER_PATH": str(metrics), "TURNKEY_SPY": str(out / "spy"), **(env or {})}
    if cluster:  # its nodes know nothing of this environment, and say themselves what they have
        command += [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}={value}" for name, value in variables.items()]
        command += [f"+ray_kwargs.ray_init.address={cluster}"]
        command += [f"ray_kwargs.ray_init.{name}=null" for name in ("num_cpus", "num_gpus")]
    else:
        command += [f"+ray_kwargs.ray_init._temp_dir={ray_dir}"]
    environment = {**os.environ, **variables}
    try:
        with (out / "log.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
    finally:
        shutil.rmtree(ray_dir, ignore_errors=True)
