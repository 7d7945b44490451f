"""What a training step leaves in the log, by the trainer and by real ranks, against plain loops over its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import ray
import torch
import transfer_queue as tq
from contract_tools import EPISODES, PARTITION, advance, batch_of, fill, hanging, output, put, read
from row_layouts import EVERYTHING, FIXED, KL_IN_REWARD, PACKED, Places, Rollout, Step, filled, merged, noise, write
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.plugins.actor import updates
from verl_turnkey.plugins.config.training import LogConfig
from verl_turnkey.plugins.log.bounds import chosen
from verl_turnkey.plugins.log.writer import Counts, look_for, new_segment, write_segment
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.trajectory_log import TrajectoryLog
from verl_turnkey.plugins.view import join

SEGMENT = new_segment()
KEY = ["train_step", "row_id", "turn_in_row"]
EPOCHS = "actor_rollout_ref.actor.ppo_epochs=2"
MANY = [EPOCHS, "turnkey.update.mini_batches=2"]


def log(folder: Path, segment: str = SEGMENT) -> list[str]:
    return [f"turnkey.log.trajectories={folder}", f"turnkey.log.segment={segment}"]


def table(made: Any, folder: Path, name: str) -> pd.DataFrame:
    for ref in made.log.flush(120.0):
        ray.get(ref)
    assert made.log.tables.drain(120.0)
    return join.read(folder, name)


class Trained:
    """A step of training, and what was in the queue when the actor was updated, by step of the rollout."""

    def __init__(self, made: Any, rollout: Rollout) -> None:
        self.metrics: dict[str, Any] = {}
        places = Places(rollout)
        with filled(rollout) as batch:
            batch = made._balance_batch(batch, metrics=self.metrics)
            batch = made._compute_old_log_prob(batch, self.metrics)
            batch = made._compute_values(batch, self.metrics)
            now = read(batch, "old_log_probs")  # the learning rate is 0: of the update, too
            number = noise("old_log_probs", 0.4)
            write(batch, "old_log_probs", lambda key, i: now[key][i] + number(places.token(key, i)))
            if made.use_reference_policy:
                write(batch, "ref_log_prob", lambda key, i: now[key][i] + noise("ref", 0.4)(places.token(key, i)))
            made.log.begin_step()
            batch = made._compute_advantage(batch, self.metrics)
            made._update_critic(batch, self.metrics)
            made._update_actor(batch, self.metrics)
            self.fields = set(tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION).keys())
            columns = {name: read(batch, name) for name in ("old_log_probs", "advantages", "entropy", "response_mask")}
        self.of = {name: places.by_step(column) for name, column in columns.items()} | {"now": places.by_step(now)}

    def trained(self) -> dict[Step, list[int]]:
        """Tokens of each step that a rejection has left; steps without any are not there."""
        kept = {
            step: [i for i, trained in enumerate(mask) if trained] for step, mask in self.of["response_mask"].items()
        }
        return {step: tokens for step, tokens in kept.items() if tokens}

    def ratios(self, step: Step, of_turn: bool) -> list[float]:
        gaps = [self.of["now"][step][i] - self.of["old_log_probs"][step][i] for i in self.trained()[step]]
        return [math.exp(sum(gaps) / len(gaps))] * len(gaps) if of_turn else [math.exp(gap) for gap in gaps]

    def by_hand(self, step: Step, of_turn: bool = False) -> dict[str, float]:
        ratios, tokens = self.ratios(step, of_turn), self.trained()[step]
        advantages = [self.of["advantages"][step][i] for i in tokens]
        outside = [(a > 0 and r > 1.2) or (a < 0 and r < 0.8) for r, a in zip(ratios, advantages, strict=True)]
        return {
            "ratio": sum(ratios) / len(ratios),
            "ratio_max": max(ratios),
            "clip_share": sum(outside) / len(outside),
            "entropy": sum(self.of["entropy"][step][i] for i in tokens) / len(tokens),
        }


def step_of(row: Mapping[str, Any]) -> Step:
    group, session = row["episode"].rsplit("_", 1)
    return group, int(session), row["turn"]


@pytest.mark.parametrize("layout", ["steps", "merged"])
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(1, [], id="one rank"),
        pytest.param(2, [*MANY, *EVERYTHING], id="two ranks, everything, epochs of mini-batches"),
        pytest.param(2, [*FIXED, *MANY], id="two ranks, fixed micro-batches, epochs of mini-batches"),
        pytest.param(1, [*PACKED, *EVERYTHING], id="packed, everything"),
        pytest.param(1, ["+turnkey/loss=turn_ratio", *MANY, *EVERYTHING], id="turn ratios, everything"),
        pytest.param(2, ["+turnkey/loss=st_ppo", "turnkey.update.weight_by=step"], id="two passes, by step"),
    ],
)
def test_updates_are_those_of_plain_loops_and_join_each_trained_turn_once(
    ready, rollout, tmp_path, world, overrides, layout
):
    made = ready(world, *log(tmp_path), *overrides)
    done = Trained(made, rollout if layout == "steps" else merged(rollout))
    credit, updates = (table(made, tmp_path, name) for name in ("credit", "updates"))
    epochs = 2 if EPOCHS in overrides else 1
    assert credit.groupby(["episode", "turn"]).size().eq(1).all()
    assert credit.groupby(KEY).size().eq(1).all()
    assert {step_of(row) for row in credit.to_dict("records")} >= set(done.of["now"])
    joined = credit.merge(updates, on=KEY, validate="one_to_many")
    assert len(joined) == len(updates) == epochs * len(done.trained())
    assert set(updates["epoch"]) == set(range(epochs))
    assert joined.groupby(["episode", "turn"])["epoch"].nunique().eq(epochs).all()
    of_turn = made.advantage_step.loss is not None
    for row in joined.to_dict("records"):
        expected = done.by_hand(step_of(row), of_turn)
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4), row
    assert 0 < updates["clip_share"].mean() < 1


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        pytest.param("seeupo", [EPOCHS, "turnkey.update.mini_batches=null"], id="turn by turn"),
        pytest.param("grpo_steps", ["+turnkey/loss=rebel", *MANY], id="group by group"),
    ],
)
def test_updates_in_phases_have_each_turn_once_an_epoch(ready, rollout, tmp_path, recipe, overrides):
    made = ready(2, *log(tmp_path), *overrides, recipe=recipe)
    assert made.batching.in_phases
    done = Trained(made, rollout)
    joined = table(made, tmp_path, "credit").merge(table(made, tmp_path, "updates"), on=KEY, validate="one_to_many")
    by_turn = {(step_of(row), row["epoch"]): row for row in joined.to_dict("records")}
    assert len(by_turn) == len(joined)
    assert set(by_turn) == {(step, epoch) for step in done.trained() for epoch in range(2)}
    for (step, _), row in by_turn.items():
        expected = done.by_hand(step)
        assert {name: row[name] for name in ("ratio", "ratio_max")} == pytest.approx(
            {name: expected[name] for name in ("ratio", "ratio_max")}, rel=1e-3
        )
    assert joined["clip_share"].isna().all(), "these losses do not say what they clip"


def test_a_rank_that_holds_rows_for_another_records_nothing(tmp_path):
    """Of ranks that share a sequence or a model all see the loss."""
    loss_fn = partial(print, config=None)
    engine = SimpleNamespace(is_mp_src_rank_with_outputs=lambda: False)
    actor = SimpleNamespace(engine=engine, loss_fn=loss_fn)
    updates.install(SimpleNamespace(actor=actor), str(tmp_path), SEGMENT)
    assert actor.loss_fn is loss_fn


def test_without_a_log_nothing_is_written_and_nothing_recorded(ready, rollout, tmp_path):
    made = ready(1)
    assert not {updates.ROW, updates.TURN} & Trained(made, rollout).fields
    assert made.log.flush() == []
    made.logger = Loggers()
    made.logger.log(data={"a": 1.0}, step=1)
    assert made.logger.logged == [(1, {"a": 1.0})]


# --- credit -----------------------------------------------------------------------------------------------------------


def credit_of(made: Any, folder: Path) -> pd.DataFrame:
    assert made.log.tables.drain(120.0)
    return join.read(folder, "credit")


def test_credit_is_that_of_the_batch_with_its_parts_and_groups(queue, trainer, tmp_path):
    made = trainer(*log(tmp_path), *KL_IN_REWARD)
    batch = upsample_batch_to_divisible_size(fill(EPISODES), 16, 2)
    batch.reorder(list(range(16))[::-1])
    write(batch, "ref_log_prob", lambda key, i: -1.5)  # the policy is likelier by 0.5 of each token
    batch = advance(made, batch)
    credit = credit_of(made, tmp_path)
    tokens = read(batch, "advantages")
    assert len(credit) == 10, "neither the failed episode nor padding"
    for row in credit.to_dict("records"):
        key = batch.keys[row["row_id"]]
        assert key == f"{row['episode']}_{row['turn']}"
        assert tokens[key] == pytest.approx([row["advantage"]] * len(tokens[key]), rel=1e-5, abs=1e-6)
        parts = [row[name] for name in credit if name.startswith("part.")]
        assert sum(parts) == pytest.approx(row["advantage"], abs=1e-5)
        assert row["kl"] == pytest.approx(0.1 * 0.5 * len(tokens[key]), rel=1e-4)
    assert {"part.episode_level", "part.step_level", "part.penalty"} <= set(credit)
    assert credit["train_step"].eq(1).all()
    assert credit["value"].isna().all()
    whole = credit.groupby("group.episode_level")
    assert {tuple(sorted({e.split("_")[0] for e in part["episode"]})) for _, part in whole} == {("a",), ("b",)}
    sizes = credit.groupby("group.step_level").size()
    shared = credit[credit["group.step_level"] >= 0]
    assert shared["size.step_level"].tolist() == [sizes[number] for number in shared["group.step_level"]]


def test_a_step_of_several_batches_numbers_their_rows_on(queue, trainer, tmp_path):
    made = trainer(*log(tmp_path))
    batch = fill(EPISODES)
    for step in (1, 2):
        made.global_steps = step
        made.log.begin_step()
        advance(made, batch)
        advance(made, batch)
    credit = credit_of(made, tmp_path)
    assert set(credit["train_step"]) == {1, 2}
    for _, part in credit.groupby("train_step"):
        assert part.groupby(KEY).size().eq(1).all()
        assert part["row_id"].max() < 2 * len(batch)
        halves = part["row_id"] >= len(batch)
        assert not set(part[halves]["group.episode_level"]) & set(part[~halves]["group.episode_level"])
    rows = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[updates.ROW])[updates.ROW]
    assert rows.tolist() == list(range(len(batch), 2 * len(batch)))


def test_rows_that_are_not_logged_are_not_recorded_either(queue, trainer, tmp_path):
    made = trainer(*log(tmp_path), "turnkey.log.share=0.5")
    batch = advance(made, fill({f"{i}": [[{"reward": float(e), "anchor": "s"}] for e in range(2)] for i in range(20)}))
    credit = credit_of(made, tmp_path)
    assert {episode.split("_")[0] for episode in credit["episode"]} == {
        f"{i}" for i in range(20) if chosen(f"{i}", 0.5)
    }
    marked = {key.rsplit("_", 1)[0] for key, turn in read(batch, updates.TURN).items() if max(turn) >= 0}
    assert marked == set(credit["episode"])


@pytest.mark.parametrize("recorded", [True, False])
def test_verls_own_estimators_tell_their_advantage(queue, trainer, tmp_path, recorded):
    """Of the rows of any agent loop, turn by turn."""
    made = trainer(*log(tmp_path), *KL_IN_REWARD, "algorithm.adv_estimator=grpo", recipe="base")
    for session in range(2):
        rows = []
        for index in range(2):
            steps = [make_step(step=2 * index + t, reward=0.5 * session, anchor="s") for t in range(2)]
            rows.append(output(make_record(steps), 6, 2.0 * session))
            rows[-1].response_mask = [1, 1, 0, 0, 1, 0]
            if not recorded:
                del rows[-1].extra_fields["turnkey"]
        put("g", session, rows)
    batch = batch_of(tq.kv_list(PARTITION)[PARTITION])
    write(batch, "ref_log_prob", lambda key, i: -1.5)
    batch = advance(made, batch)
    advantages, credit = read(batch, "advantages"), credit_of(made, tmp_path)
    turns = sorted(zip(credit["episode"], credit["turn"], strict=True))
    assert turns == [(f"g_{session}", turn) for session in range(2) for turn in range(4)]
    for row in credit.to_dict("records"):
        of_row = advantages[f"{row['episode']}_{row['turn'] // 2}"]
        positions = [[0, 1], [4]][row["turn"] % 2]
        assert row["turn_in_row"] == row["turn"] % 2
        assert row["advantage"] == pytest.approx(np.mean([of_row[i] for i in positions]), abs=1e-6)
        assert row["kl"] == pytest.approx(0.1 * 0.5 * len(positions), rel=1e-4)
    assert credit["advantage"].abs().max() > 0.1
    assert read(batch, updates.TURN)["g_1_1"] == [0, 0, -1, -1, 1, -1]


def test_rows_of_which_some_have_records_do_not_stop_verls_estimators(queue, trainer, tmp_path):
    made = trainer(*log(tmp_path), "algorithm.adv_estimator=grpo", recipe="base")
    rows = [output(make_record([make_step(step=0, reward=1.0, anchor="s")]), 3, 1.0) for _ in range(2)]
    del rows[1].extra_fields["turnkey"]
    for session, row in enumerate(rows):
        put("g", session, [row])
    advance(made, batch_of(tq.kv_list(PARTITION)[PARTITION]))
    assert credit_of(made, tmp_path).empty


def test_what_verl_survives_the_log_survives_too(queue, trainer, tmp_path, caplog):
    made = trainer(*log(tmp_path), "algorithm.adv_estimator=grpo", recipe="base")
    for session in range(2):
        row = output(make_record([make_step(step=0, reward=1.0, anchor="s")]), 3, float("nan"))
        del row.extra_fields["turnkey"]
        put("g", session, [row])
    advance(made, batch_of(tq.kv_list(PARTITION)[PARTITION]))
    assert "the credit of a batch is not in turnkey.log.trajectories: ValueError: reward" in caplog.text
    assert credit_of(made, tmp_path).empty
    made.logger = Loggers()
    made.logger.log(data={"a": 1.0, "b": np.array(["x"])}, step=1)
    assert made._logger._inner.logged[-1][0] == 1


def test_a_resumed_run_writes_its_steps_again_and_counts(queue, trainer, tmp_path):
    batch = fill(EPISODES)
    names = [f"20261122T0{i}0000_abcd" for i in range(2)]
    for name, steps in zip(names, ((1, 2, 3), (2, 3, 4)), strict=True):
        made = trainer(*log(tmp_path, name))
        write_segment(tmp_path, name, {"resumed_from": steps[0] - 1})
        for step in steps:
            made.global_steps = step
            made.log.begin_step()
            advance(made, batch)
        assert made.log.tables.drain(120.0)
    with pytest.warns(UserWarning, match="did steps 2 to 3 again"):
        credit = join.read(tmp_path, "credit")
    assert credit.groupby(KEY).size().eq(1).all()
    assert credit.groupby("train_step")["segment"].unique().map(list).to_dict() == {
        1: [names[0]],
        **{step: [names[1]] for step in (2, 3, 4)},
    }


# --- metrics ----------------------------------------------------------------------------------------------------------


class Loggers:
    """In the place of verl's Tracking."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        self.logged.append((step, dict(data)))

    def finish(self, exit_code: int = 0) -> str:
        return f"finished {exit_code}"


def test_every_number_that_verl_logs_is_in_the_table_of_steps(trainer, tmp_path):
    made = trainer(*log(tmp_path))
    made.logger = Loggers()
    numbers = {"a": 1, "b/c": np.float32(0.5), "d": torch.tensor(2.0), "e": np.array([3.0]), "f": math.nan}
    made.logger.log(data={**numbers, "text": "x", "list": [1.0], "none": None, "many": torch.ones(2)}, step=0)
    made.logger.log(data={"a": 7.0}, step=1)
    assert made.logger.finish(3) == "finished 3"
    assert made.log.tables.drain(120.0)
    table_of_steps = join.read(tmp_path, "steps")
    values = {(row["train_step"], row["name"]): row["value"] for row in table_of_steps.to_dict("records")}
    own = {f"turnkey/log/{name}" for name in ("written", "lost", "seconds")}
    assert set(values) == {(0, name) for name in {*numbers, *own}} | {(1, name) for name in {"a", *own}}
    assert [values[0, name] for name in ("a", "b/c", "d", "e")] == [1.0, 0.5, 2.0, 3.0]
    assert math.isnan(values[0, "f"])
    (_, first), (step, second) = made._logger._inner.logged
    assert first["text"] == "x", "verl's loggers are told everything"
    assert (step, second["a"], second["turnkey/log/lost"]) == (1, 7.0, 0.0)


def test_every_process_that_writes_looks_for_the_log(trainer, tmp_path):
    calls = []

    def worker(name: str) -> SimpleNamespace:
        return SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda *call: calls.append((name, *call))))

    made = trainer(*log(tmp_path))
    made.actor_rollout_wg = SimpleNamespace(workers=[worker("rank0"), worker("rank1")])
    made.log.look_for([worker("player")])
    assert calls == [(name, look_for, str(tmp_path), SEGMENT) for name in ("player", "rank0", "rank1")]


def test_metrics_of_the_log_count_the_rows_of_all_processes(ready, rollout, tmp_path):
    made = ready(2, *log(tmp_path))
    counts = [Counts(1000, 7, 0.5), Counts(10, 0, 0.5)]
    players = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda _, t=t: ray.put(t))) for t in counts]
    made.agent_loop_manager.agent_loop_workers = players
    made.logger = Loggers()
    Trained(made, rollout)
    written = {name: len(table(made, tmp_path, name)) for name in ("credit", "updates")}
    assert min(written.values()) > 10
    made.agent_loop_manager.agent_loop_workers = players[::-1]  # they take turns at the first place
    late = hanging()
    players[0].__ray_call__.remote = lambda _: late
    made.log.flush()
    made.logger.log(data={}, step=5)
    (_, metrics) = made._logger._inner.logged[-1]
    assert metrics["turnkey/log/written"] == sum(written.values()) + 1010
    assert metrics["turnkey/log/lost"] == 7
    ray.cancel(late, force=True)
    assert metrics["turnkey/log/seconds"] > 1


def test_what_an_agent_loop_worker_tells_of_its_log(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_worker, "_process", None)
    assert loop_worker.log_counts(None) == (0, 0, 0)
    for folder in (None, tmp_path):
        tables = TrajectoryLog(
            trainer(*(log(folder) if folder else [])).config,
            LogConfig(trajectories=folder and str(folder), segment=SEGMENT),
        )
        monkeypatch.setattr(loop_worker, "_process", SimpleNamespace(log=tables))
        assert loop_worker.log_counts(None).written == 0
    tables.tables.put("steps", 1, {"train_step": [1, 1], "name": ["a", "b"], "value": [0.0, 1.0]})
    assert tables.drain(120.0)
    assert loop_worker.log_counts(None).written == 2


def test_texts_of_long_ago_are_deleted_as_steps_are_logged(trainer, tmp_path):
    for step in range(30):
        (tmp_path / "texts" / f"step={step:06d}").mkdir(parents=True)
    made = trainer(*log(tmp_path), "turnkey.log.keep_texts=3")
    made.logger = Loggers()
    made.logger.log(data={"a": 1.0}, step=29)
    made.log.tidying.join(120.0)
    assert sorted(int(path.name[5:]) for path in (tmp_path / "texts").iterdir()) == [0, 10, 20, 27, 28, 29]
