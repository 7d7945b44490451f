"""Whole episodes are dealt to optimizer steps by a draw, and their rows to ranks, equally many and of equal weight."""

import hashlib
import json
import math
import os
import socket
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.actor.update_order import even
from verl_turnkey.plugins.log.writer import read_segments
from verl_turnkey.plugins.trainer import checkpointing
from verl_turnkey.plugins.trainer.batching import deal, filled, lay_out, mini_batches, parts, rows_of_a_part
from verl_turnkey.plugins.trainer.logging import about, write_start
from verl_turnkey.plugins.trainer.mutual_information import prompt_information, thoughts

episodes = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=30)
"""rows of each, and whether it has a token to train"""


def rows_of(episodes, seed=0):
    rng = np.random.default_rng(seed)
    keys = [f"task_{e // 3}_{e}_{i}" for e, (rows, _) in enumerate(episodes) for i in range(rows)]
    alive = np.array([alive for rows, alive in episodes for _ in range(rows)])
    lengths = rng.integers(10, 2000, size=len(keys))
    return keys, lengths, np.where(alive, rng.integers(1, 10, size=len(keys)), 0)


def episode_of(key):
    return key.rsplit("_", 1)[0]


@settings(max_examples=200, deadline=None)
@given(
    episodes,
    st.lists(st.integers(1, 5), max_size=2),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 99),
)
def test_a_batch_as_verl_cuts_it(episodes, roles, ranks, micro, seed):
    """Each rank's rows front to back into equally many for each mini-batch of each role."""
    keys, lengths, trained = rows_of(episodes, seed)
    dealt = deal(keys, lengths, trained, roles, (seed, 0))
    share = rows_of_a_part(dealt, ranks, micro)
    size = len(dealt) * ranks * share
    full = filled(dealt, ranks * share, range(len(keys), size))
    weights = np.append(lengths, np.full(size - len(keys), 128)).astype(float)
    order = lay_out(full, weights, ranks, micro)
    assert sorted(order.tolist()) == list(range(size)), "every row once"

    longest = max(rows for rows, _ in episodes)
    assert size - len(keys) < len(dealt) * (longest + ranks * micro), "few of padding"

    alive = sum(alive for _, alive in episodes)
    numbers = [mini_batches(wanted, len(dealt)) for wanted in roles]
    if alive >= math.lcm(*roles):
        assert numbers == roles
    by_rank = order.reshape(ranks, -1)
    for number in numbers:
        assert by_rank.shape[1] % (number * micro) == 0, "whole micro-batches"
        cut = by_rank.reshape(ranks, number, -1).transpose(1, 0, 2).reshape(number, -1)
        of_episode: dict[str, set[int]] = {}
        for step, rows in enumerate(cut.tolist()):
            for row in rows:
                if row < len(keys):
                    of_episode.setdefault(episode_of(keys[row]), set()).add(step)
            assert not alive or any(row < len(keys) and trained[row] for row in rows), "something to train"
        assert all(len(steps) == 1 for steps in of_episode.values()), "an episode is never in two mini-batches"


@settings(max_examples=60, deadline=None)
@given(episodes, st.integers(1, 4), st.integers(0, 99))
def test_parts_are_drawn_by_the_seed_whatever_the_order_in_which_rows_stand(episodes, number, seed):
    keys, lengths, trained = rows_of(episodes)
    turned = np.random.default_rng(seed).permutation(len(keys))
    first = deal(keys, lengths, trained, [number], (seed, 1))
    again = deal([keys[i] for i in turned], lengths[turned], trained[turned], [number], (seed, 1))
    assert [part.tolist() for part in first] == [turned[part].tolist() for part in again]


def test_other_seeds_deal_other_episodes():
    keys, lengths, trained = rows_of([(2, True)] * 40)
    dealt = {
        tuple(sorted(keys[i] for i in deal(keys, lengths, trained, [2], seed)[0])) for seed in ((3, 0), (3, 1), (4, 0))
    }
    assert len(dealt) == 3


def test_each_episode_is_as_likely_in_any_optimizer_step():
    """Short ones, which finish first and may be the won ones, too."""
    keys, lengths, trained = rows_of([(1, True)] * 6 + [(9, True)] + [(4, True)] * 5)
    first: Counter[str] = Counter()
    for seed in range(400):
        first.update({episode_of(keys[i]) for i in deal(keys, lengths, trained, [2], (seed, 0))[0]})
    assert len(first) == 12
    assert all(140 < count < 260 for count in first.values())  # six standard deviations of 10


@pytest.mark.parametrize(
    ("roles", "played", "partition"),
    [
        ([4], 100, 4),
        ([4, 2], 100, 4),  # a mini-batch of the second has two parts
        ([4, 6], 12, 12),
        ([4, 6], 11, 6),  # too few for both: 3 of 4 and all 6
        ([8, 4], 7, 4),
        ([8, 4], 5, 4),
        ([16, 4], 15, 12),
        ([4], 3, 3),
        ([4], 0, 1),
        ([], 100, 1),
    ],
)
def test_parts_serve_every_role_where_the_episodes_suffice(roles, played, partition):
    assert parts(roles, played) == partition


@pytest.mark.parametrize(("wanted", "of", "number"), [(4, 12, 4), (4, 6, 3), (4, 3, 3), (4, 1, 1), (5, 7, 1)])
def test_a_mini_batch_has_whole_parts(wanted, of, number):
    assert mini_batches(wanted, of) == number


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 6))
def test_bins_hold_equally_many_and_no_bin_much_more_than_another(weights, bins):
    weights = np.array(weights + [1] * (-len(weights) % bins), dtype=float)
    assigned = even(weights, bins)
    assert set(np.bincount(assigned, minlength=bins).tolist()) == {len(weights) // bins}
    total = np.bincount(assigned, weights=weights)
    # Dealt round by round in the order of weight, whatever the round's order, they would differ by no more.
    assert total.max() - total.min() <= weights.max()


def test_the_ranks_of_a_large_mini_batch_are_within_a_percent():
    rng = np.random.default_rng(0)
    for weights in (rng.uniform(200, 1500, 512), 200 + rng.exponential(2000, 512)):
        total = np.bincount(even(weights, 8), weights=weights)
        assert total.max() < 1.01 * total.mean()


def test_micro_batches_of_a_rank_have_equal_weight():
    weights = np.array([100.0, 100, 1, 1, 50, 50, 51, 51])
    order = lay_out([np.arange(8)], weights, ranks=2, micro=2)
    assert sorted(weights[order].reshape(4, 2).sum(1).tolist()) == [101] * 4


# --- The file of a method's state: what comes back, and what is refused -----------------------------------------------
STATE = {"white": 0.1 + 0.2, "black": -1e-17, "": 3.0}


def test_a_state_comes_back_to_the_last_bit(tmp_path: Path):
    folder = tmp_path / "global_step_3"
    checkpointing.save_state(folder, "rae", {"white": 1.0})
    checkpointing.save_state(folder, "rae", STATE)
    assert checkpointing.restore_state(folder, "rae", "starts over") == STATE
    assert [file.name for file in folder.iterdir()] == ["turnkey_credit.json"]


def test_a_write_that_breaks_off_leaves_the_file_before(tmp_path: Path):
    checkpointing.save_state(tmp_path, "rae", STATE)
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpointing.save_state(tmp_path, "rae", {"white": float("nan")})
    assert checkpointing.restore_state(tmp_path, "rae", "starts over") == STATE


def test_a_state_of_another_method_or_none_says_why(tmp_path: Path, caplog):
    assert checkpointing.restore_state(tmp_path, "rae", "starts over") is None
    checkpointing.save_state(tmp_path, "rae", STATE)
    assert checkpointing.restore_state(tmp_path, "other", "starts over") is None
    file = tmp_path / "turnkey_credit.json"
    assert caplog.messages == [f"there is no {file}: starts over", f"{file} is of the method 'rae': starts over"]


@pytest.mark.parametrize("state", ["", ', "state": [1.0]', ', "state": {"white": "much"}', ', "state": {"white": NaN}'])
def test_a_file_that_holds_something_else_is_refused_by_name(tmp_path: Path, state: str):
    for text in ("{", "[]", f'{{"method": "rae"{state}}}'):
        (tmp_path / checkpointing.FILE).write_text(text)
        with pytest.raises(ConfigError, match=r"turnkey_credit.json: expected .*the method starts over"):
            checkpointing.restore_state(tmp_path, "rae", "starts over")


def test_the_folder_is_the_one_that_verl_resumed_from():
    trainer = SimpleNamespace(default_local_dir="runs/a", resume_mode="auto", resume_from_path="runs/b/global_step_7")
    config = SimpleNamespace(trainer=trainer)
    assert checkpointing.resumed_folder(config, 7) == Path("runs/a/global_step_7")
    trainer.resume_mode = "resume_path"
    assert checkpointing.resumed_folder(config, 7) == Path("runs/b/global_step_7")
    assert checkpointing.folder_of(config, 7) == Path("runs/a/global_step_7")


def test_every_process_that_writes_a_checkpoint_is_asked_once(tmp_path: Path, monkeypatch):
    """The trainer's own, the actor's and the critic's, which may share some with the actor."""
    monkeypatch.setattr(checkpointing.ray, "get", list)
    calls = []

    class Worker:
        def __init__(self, name, refusal=None):
            self.name, self.refusal = name, refusal
            self.__ray_call__ = SimpleNamespace(remote=self.answer)

        def answer(self, function, folder):
            calls.append((self.name, function, folder))
            return self.refusal

    shared, other = Worker("shared"), Worker("critic's", "node-2 (Read-only file system: /mnt)")

    def check(folder, use_critic, save_freq=1):
        calls.clear()
        saved = OmegaConf.create({"trainer": {"default_local_dir": str(folder), "save_freq": save_freq}})
        groups = {"actor_rollout_wg": SimpleNamespace(workers=[shared])}
        groups |= {"critic_wg": SimpleNamespace(workers=[shared, other])} if use_critic else {}
        checkpointing.check_writable(SimpleNamespace(config=saved, use_critic=use_critic, **groups))

    check(tmp_path, use_critic=False)
    assert calls == [("shared", checkpointing.unwritable, str(tmp_path))]
    with pytest.raises(ConfigError, match=r"cannot be written on node-2 \(Read-only file system: /mnt\)\. The"):
        check(tmp_path, use_critic=True)
    assert [name for name, *_ in calls] == ["shared", "critic's"]
    with pytest.raises(ConfigError, match=rf"cannot be written on {socket.gethostname()} \([^:]+: /sys\)\. The"):
        check("/sys/checkpoints", use_critic=False)
    check("/sys/checkpoints", use_critic=False, save_freq=-1)
    assert calls == []


# --- A run's log says what was run and from where it resumed, without its secrets; a disk that refuses stops n --------
SEGMENT = "20260102T030405_00ff"


def configured(folder: Path | None, **turnkey):
    return OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "gigpo"},
            "actor_rollout_ref": {
                "actor": {"policy_loss": {"loss_mode": "vanilla"}},
                "rollout": {"n": 8, "val_kwargs": {"n": 1}},
            },
            "data": {"train_batch_size": 16},
            "trainer": {"project_name": "babyai", "experiment_name": "gigpo", "epochs": "${algorithm.adv_estimator}"},
            "turnkey": {
                "credit": {"gamma": 0.9, "modify": [{"name": "empg"}]},
                "log": {
                    "trajectories": None if folder is None else str(folder),
                    "segment": SEGMENT,
                    "episodes_per_step": 64,
                    "validation_tasks": 640,
                },
                "env": {"kwargs": {"api_key": "sk-1", "url": "https://me:pw@host/x"}},
                **turnkey,
            },
        }
    )


def test_what_a_start_says_of_itself(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text("[1]")
    name = "-c user.name=a -c user.email=a@b"
    for command in ("init -q .", "add train.json", f"{name} commit -q -m first"):
        subprocess.run(["git", *command.split()], check=True)
    config = configured(tmp_path / "log")
    config.data.train_files = "train.json"
    write_start(config, 12)
    [(name, start)] = read_segments(tmp_path / "log").items()
    assert (name, start["resumed_from"]) == (SEGMENT, 12)
    assert start["started"].endswith("+00:00")
    assert start["versions"].keys() == {"python", "verl", "verl-turnkey", "vllm", "torch", "ray", "transformers"}
    assert len(start["commit"]) == 40
    assert start["changed"] is False
    assert start["files"] == {"train.json": hashlib.sha256(b"[1]").hexdigest()}
    assert start["hardware"]["cores"] == len(os.sched_getaffinity(0))
    assert start["hardware"].keys() == {"cores", "memory_gb", "accelerators", "nodes", "per_node"}
    run = json.loads((tmp_path / "log" / "run.json").read_text())
    assert run["schema"] == 2
    assert (run["project"], run["experiment"], run["method"], run["loss"]) == ("babyai", "gigpo", "gigpo", "vanilla")
    assert run["params"]["gamma"] == 0.9
    assert [modifier["name"] for modifier in run["modify"]] == ["empg"]
    assert run["config"] == start["config"]
    for info in (run, start):
        assert (info["share"], info["validation_share"]) == (0.5, 0.1)
    assert run["config"]["trainer"]["epochs"] == "gigpo"
    assert run["config"]["turnkey"]["env"]["kwargs"] == {"api_key": "***", "url": "https://***@host/x"}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "log", tmp_path / "log" / "segments")} == {0o700}


def test_a_start_has_the_files_of_the_user(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("mylab", "log"):
        (tmp_path / folder).mkdir()
    for name in ("own.py", "mylab/__init__.py"):
        (tmp_path / name).write_text("SEED = 1\n")
    write_start(configured(tmp_path / "log", modules=["own.py", "mylab.envs"]), 0)
    start = read_segments(tmp_path / "log")[SEGMENT]
    digest = hashlib.sha256(b"SEED = 1\n").hexdigest()
    assert start["sources"]["turnkey.modules"] == {
        "own.py": {"path": "own.py", "sha256": digest},
        "mylab/__init__.py": {"path": "mylab/__init__.py", "sha256": digest},
    }
    assert start["files"] == {}


def test_a_start_is_on_record_before_the_files_of_the_user_are(tmp_path: Path, monkeypatch):
    def refuse(_: object) -> None:
        assert SEGMENT in read_segments(tmp_path / "log")
        raise RuntimeError("a hook of the import system")

    monkeypatch.setattr("verl_turnkey.plugins.trainer.logging.sources", refuse)
    write_start(configured(tmp_path / "log"), 3)
    start = read_segments(tmp_path / "log")[SEGMENT]
    assert start["resumed_from"] == 3
    assert "sources" not in start


def test_uncommitted_changes_are_on_record(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    for command in ("init -q .", "add own.py"):
        subprocess.run(["git", *command.split()], check=True)
    write_start(configured(tmp_path / "log"), 0)
    assert read_segments(tmp_path / "log")[SEGMENT]["changed"] is True


def test_outside_of_a_repository_and_without_a_log(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    write_start(configured(None), 0)
    assert list(tmp_path.iterdir()) == []
    write_start(configured(tmp_path / "log"), 0)
    assert read_segments(tmp_path / "log")[SEGMENT]["commit"] is None


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path, caplog):
    (tmp_path / "log").write_text("a file where a folder should be")
    write_start(configured(tmp_path / "log"), 0)
    [record] = caplog.records
    lacking = f"turnkey.log.trajectories lacks part of the description of the run, which {socket.gethostname()} cannot"
    assert lacking in record.getMessage()


def test_about_an_estimator_and_a_loss_of_others():
    config = configured(None, credit={})
    config.algorithm.adv_estimator = "grpo"
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "gpg"
    info = about(config)
    assert (info["method"], info["params"], info["modify"], info["loss"]) == ("grpo", {}, [], "gpg")


# --- RAGEN-2's mutual-information proxy: its formula as a loop, check values, and the thoughts that it scores ---------
ORACLE = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "teacher_check_values.json").read_text())["mi"]


def test_check_values():
    sums, lengths = np.array([[-2.0, -6.0], [-5.0, -3.0]]), np.array([2, 2])
    values = prompt_information(sums, lengths)
    of_sequences = ORACLE["sequence"]
    assert values["sequence"] == pytest.approx(of_sequences["mi"], abs=1e-6)
    assert values["entropy"] == pytest.approx(of_sequences["H_cond"], abs=1e-6)
    assert values["bound"] == pytest.approx(of_sequences["bound"], abs=1e-6)
    assert (values["retrieval"], values["chance"]) == (of_sequences["acc"], of_sequences["chance"])
    assert values["per_token"] == pytest.approx(ORACLE["per_token"]["mi"], abs=1e-6)


def test_a_template_says_nothing_about_its_prompt():
    values = prompt_information(np.array([[-2.0, -2.0], [-3.0, -3.0]]), np.array([1, 4]))
    assert values["sequence"] == values["per_token"] == 0
    assert values["retrieval"] == ORACLE["collapsed"]["acc"] == values["chance"]


def naive(sums: list[list[float]], lengths: list[int]) -> tuple[float, float, float]:
    total = per_token = right = 0.0
    number = len(sums)
    for i in range(number):
        total += math.log(math.exp(sums[i][i]) / (sum(math.exp(x) for x in sums[i]) / number))
        means = [x / lengths[i] for x in sums[i]]
        per_token += math.log(math.exp(means[i]) / (sum(math.exp(x) for x in means) / number))
        right += max(range(number), key=lambda j: sums[i][j]) == i
    return total / number, per_token / number, right / number


@pytest.mark.parametrize("number", [2, 3, 9])
def test_equal_to_the_loop_and_never_above_the_bound(number: int):
    rng = np.random.default_rng(number)
    sums, lengths = -rng.exponential(5, (number, number)), rng.integers(1, 20, number)
    values = prompt_information(sums, lengths)
    total, per_token, right = naive(sums.tolist(), lengths.tolist())
    assert (values["sequence"], values["per_token"], values["retrieval"]) == pytest.approx((total, per_token, right))
    assert max(values["sequence"], values["per_token"]) <= values["bound"] == pytest.approx(math.log(number))


def test_long_responses_do_not_underflow():
    values = prompt_information(np.array([[-2000.0, -6000.0], [-5000.0, -3000.0]]), np.array([900, 900]))
    assert values["sequence"] == pytest.approx(math.log(2))


class Letters:
    """A tokenizer with a token for each of these."""

    WORDS = ("<think>", "</think>", "ab", " ", "go", "é")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("ids", "inside"),
    [
        ([0, 2, 3, 2, 1, 4], slice(1, 4)),
        ([2, 5, 1, 4], slice(0, 2)),  # the generation prompt opened them
        ([2, 1, 0, 4, 1], slice(0, 1)),  # the generation prompt opened the first ones
        ([0, 1, 4], None),
        ([4, 3, 4], None),
        ([0, 2, 3], None),  # cut before their end
    ],
)
def test_thoughts_are_the_tokens_between_their_marks(ids: list[int], inside: slice | None):
    assert thoughts(ids, Letters()) == inside
