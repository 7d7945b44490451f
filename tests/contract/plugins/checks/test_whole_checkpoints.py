"""Which checkpoint a run resumes from, on files that torch and safetensors wrote and a crash cut short."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_tools import Compose
from safetensors.torch import save_file
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.checks import checkpoints
from verl_turnkey.plugins.checks.checkpoints import check_steps
from verl_turnkey.plugins.checks.files import data_mark
from verl_turnkey.plugins.checks.findings import Refusal, RuleWarning, id_of
from verl_turnkey.plugins.config import checkpoint_files, resolve

RANKS = 2
CONTENTS = ("model", "optim", "extra_state")


def save(root: Path, step: int, *, roles: tuple[str, ...] = ("actor",), tracker: bool = True) -> Path:
    """A checkpoint as verl writes it with FSDP."""
    folder = root / f"global_step_{step}"
    for role in roles:
        (folder / role).mkdir(parents=True)
        for content in CONTENTS:
            for rank in range(RANKS):
                held = {"weight": torch.arange(5000) + step}
                torch.save(held, folder / role / f"{content}_world_size_{RANKS}_rank_{rank}.pt")
    torch.save({"position": step}, folder / "data.pt")
    (folder / "transfer_queue").mkdir()
    (folder / "transfer_queue" / "metadata.json").write_text("{}")
    (folder / "transfer_queue" / "controller_state.pkl").write_bytes(pickle.dumps({"partitions": list(range(50))}))
    (folder / "turnkey_credit.json").write_text(json.dumps({"method": "rae", "state": {"a": 0.5}}))
    if tracker:
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


@pytest.fixture
def config(compose: Compose, tmp_path: Path) -> Any:
    return composed(compose, tmp_path)


def composed(compose: Compose, root: Path, *overrides: str, recipe: str = "rae") -> Any:
    where = (f"trainer.default_local_dir={root}", f"trainer.n_gpus_per_node={RANKS}", "trainer.save_freq=1")
    return compose(f"+turnkey={recipe}", *where, *overrides)


def check(config: Any, *, use_critic: bool = False) -> list[str]:
    """The changes and the warnings."""
    made = [write(config, use_critic) for write in (resolve.resumed_checkpoint, resolve.kept_checkpoints)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoints.check_checkpoints(config, use_critic=use_critic)
    return [change.message for change in made if change] + [str(warning.message) for warning in caught]


def halve(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def empty(file: Path) -> None:
    file.write_bytes(b"")


ACTOR = "actor/model_world_size_2_rank_1.pt"
HUGGING_FACE = "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"
FAULTS = [
    (ACTOR, halve, "is truncated or damaged: File is not a zip file"),
    (ACTOR, empty, "is empty"),
    (ACTOR, Path.unlink, "is missing"),
    ("actor/optim_world_size_2_rank_0.pt", halve, "is truncated"),
    ("actor/extra_state_world_size_2_rank_1.pt", Path.unlink, "is missing"),
    ("data.pt", Path.unlink, "is missing"),
    ("data.pt", halve, "is truncated"),
    ("turnkey_credit.json", halve, "is truncated"),
    ("transfer_queue/metadata.json", Path.unlink, "is missing"),
    ("transfer_queue/controller_state.pkl", halve, "is truncated"),
    ("actor", shutil.rmtree, "is missing"),
    ("", shutil.rmtree, "there is no such folder"),
]


@pytest.mark.parametrize(("name", "harm", "why"), FAULTS)
def test_the_one_before_is_taken_and_the_file_is_named(config: Any, tmp_path: Path, name: str, harm, why: str):
    before, newest = save(tmp_path, 3), save(tmp_path, 4)
    assert check(config) == []
    assert config.trainer.resume_mode == "auto"
    harm(newest / name)
    (message,) = check(config)
    assert str(newest / name).rstrip("/") in message
    assert why in message
    assert message.endswith(f"The run resumes from {before}")
    assert (config.trainer.resume_mode, config.trainer.resume_from_path) == ("resume_path", str(before))
    assert torch.load(f"{config.trainer.resume_from_path}/data.pt") == {"position": 3}


def test_damaged_ones_are_passed_over_and_none_is_an_error(config: Any, tmp_path: Path):
    oldest, *others = (save(tmp_path, step) for step in (8, 9, 10))
    for folder in others:
        halve(folder / ACTOR)
    save(tmp_path, 11, tracker=False)  # verl had not yet called it complete
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert f"resumes from {oldest}" in check(config)[0]
    config.trainer.update(resume_mode="auto", resume_from_path=None)
    halve(oldest / ACTOR)
    with pytest.raises(ConfigError, match=r"global_step_10/actor/model_\w+.pt is truncated.*no other checkpoint in"):
        check(config)


@pytest.mark.parametrize("text", ["", "\0\0", "1x"])
def test_a_damaged_tracker_leaves_the_newest_whole_one(config: Any, tmp_path: Path, text: str):
    save(tmp_path, 9)
    save(tmp_path, 10)
    halve(save(tmp_path, 11) / ACTOR)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    (message,) = check(config)
    assert f"global_step_11/{ACTOR} is truncated" in message
    assert message.endswith("global_step_10")
    config.trainer.update(resume_mode="auto", resume_from_path=None)
    shutil.rmtree(tmp_path / "global_step_11")
    (message,) = check(config)
    assert message == (
        f"{tmp_path}/latest_checkpointed_iteration.txt is damaged. The run resumes from {tmp_path}/global_step_10"
    )


def test_a_path_that_the_user_names_has_no_other(compose: Compose, tmp_path: Path):
    save(tmp_path, 3)
    newest = save(tmp_path, 4)
    how = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}")
    (newest / "data.pt").unlink()  # verl starts the data anew, and says so
    assert check(composed(compose, tmp_path, *how)) == []
    halve(newest / ACTOR)
    with pytest.raises(
        ConfigError, match=rf"trainer.resume_from_path cannot be resumed from: {newest}/{ACTOR} is trunc"
    ):
        check(composed(compose, tmp_path, *how))
    shutil.rmtree(newest)
    with pytest.raises(ConfigError, match="there is no such folder"):
        check(composed(compose, tmp_path, *how))


def test_a_critic_must_be_whole_too(config: Any, tmp_path: Path):
    save(tmp_path, 3, roles=("actor", "critic"))
    halve(save(tmp_path, 4, roles=("actor", "critic")) / "critic" / "optim_world_size_2_rank_0.pt")
    assert check(config, use_critic=False) == []
    assert "global_step_4/critic/optim" in check(config, use_critic=True)[0]


@pytest.mark.parametrize("resume", ["auto", "resume_path"])
def test_a_critic_must_have_the_heads_that_the_method_reads(compose: Compose, tmp_path: Path, resume: str):
    folder = save(tmp_path, 3, roles=("actor", "critic"))
    (folder / "critic" / "huggingface").mkdir()
    (folder / "critic" / "huggingface" / "config.json").write_text('{"id2label": {"0": "LABEL_0"}}')
    lines = [f"trainer.resume_mode={resume}"]
    lines += [f"trainer.resume_from_path={folder}"] if resume == "resume_path" else []
    with pytest.raises(ConfigError, match=rf"{folder}/critic was trained with another number of heads \(1\)"):
        check(composed(compose, tmp_path, *lines, recipe="hae"), use_critic=True)
    assert check(composed(compose, tmp_path, *lines, "turnkey.credit.heads=1", recipe="hae"), use_critic=True) == []
    assert check(composed(compose, tmp_path, *lines, recipe="turn_gae"), use_critic=True) == []


def test_a_file_of_a_method_that_does_not_run_may_be_damaged(compose: Compose, tmp_path: Path):
    halve(save(tmp_path, 4) / "turnkey_credit.json")
    config = composed(compose, tmp_path, recipe="gigpo")
    assert check(config) == []


def test_ranks_of_other_nodes_may_have_their_files_there(compose: Compose, tmp_path: Path):
    newest = save(tmp_path, 4)
    config = composed(compose, tmp_path, "trainer.n_gpus_per_node=1", "trainer.nnodes=2")
    (newest / ACTOR).unlink()
    assert check(config) == []
    halve(newest / "actor/model_world_size_2_rank_0.pt")
    with pytest.raises(ConfigError, match=r"rank_0\.pt is truncated"):
        check(config)


def test_other_engines_have_files_of_other_names(config: Any, tmp_path: Path):
    config.actor_rollout_ref.actor.strategy = "megatron"
    before, newest = save(tmp_path, 3), save(tmp_path, 4)
    for folder in (before, newest):
        shutil.rmtree(folder / "actor")
        (folder / "actor" / "huggingface").mkdir(parents=True)
        save_file({"a": torch.zeros(100)}, folder / "actor" / "huggingface" / "model.safetensors")
    assert check(config) == []
    halve(newest / "actor" / "huggingface" / "model.safetensors")
    assert "model.safetensors is truncated" in check(config)[0]
    config.trainer.update(resume_mode="auto", resume_from_path=None)
    shutil.rmtree(newest / "actor")
    assert "global_step_4/actor is missing" in check(config)[0]


def test_nothing_is_looked_at_by_a_run_that_begins_anew(compose: Compose, tmp_path: Path):
    assert check(composed(compose, tmp_path)) == []
    halve(save(tmp_path, 4) / ACTOR)
    assert check(composed(compose, tmp_path, "trainer.resume_mode=disable")) == []


def test_safetensors_are_judged_by_their_header(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.ones(3, 3)}, file)
    whole = file.read_bytes()
    assert checkpoint_files.damage(file) is None
    for size in (4, 20, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "is truncated" in checkpoint_files.damage(file)


ACTORS, CRITICS = "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"


@pytest.mark.parametrize(
    ("overrides", "kept", "message"),
    [
        ([f"trainer.{ACTORS}=1", f"trainer.{CRITICS}=3"], (3, 3), f"trainer.{ACTORS}=1: raised to 3, so that turnkey"),
        ([f"trainer.{ACTORS}=2", f"trainer.{CRITICS}=2"], (3, 3), f"{ACTORS}=2 and trainer.{CRITICS}=2: raised to 3"),
        (["+trainer.remove_previous_ckpt_in_save=true"], (3, 3), "remove_previous_ckpt_in_save=true: raised to 3"),
        ([f"trainer.{ACTORS}=1", "turnkey.stop.whole_checkpoints=1"], (2, None), "=1: raised to 2, so that turnkey"),
        ([f"trainer.{ACTORS}=2", "turnkey.stop.whole_checkpoints=1"], (2, None), None),
        ([f"trainer.{ACTORS}=3", f"trainer.{CRITICS}=5"], (3, 5), None),
        ([f"trainer.{ACTORS}=1", "trainer.save_freq=-1"], (1, None), None),
        ([], (None, None), None),
    ],
)
def test_verl_keeps_one_more_than_are_to_be_whole(
    compose: Compose, tmp_path: Path, overrides: list[str], kept: tuple[int | None, int | None], message: str | None
):
    """Before it writes the next one, verl deletes the oldest."""
    config = composed(compose, tmp_path, *overrides)
    messages = check(config)
    assert len(messages) == (message is not None)
    assert message is None or message in messages[0]
    assert (config.trainer[ACTORS], config.trainer[CRITICS]) == kept
    assert not config.trainer.get("remove_previous_ckpt_in_save")


@pytest.mark.parametrize("keep", [2, 3])
def test_verl_has_all_but_one_of_them_while_it_saves(tmp_path: Path, keep: int):
    """verl's own bookkeeping: two take the space of one and its successor. It forgets those before a resume."""
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    def there() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    manager = BaseCheckpointManager.__new__(BaseCheckpointManager)
    manager.previous_saved_paths = []
    for step in range(1, 10):
        manager.ensure_checkpoint_capacity(keep)
        if step > keep:
            assert there() == [str(number) for number in range(1, step)][1 - keep :]
        (tmp_path / str(step)).mkdir()
        manager.register_checkpoint(str(tmp_path / str(step)), keep)
    left, manager.previous_saved_paths = there(), []
    for step in range(10, 20):
        manager.ensure_checkpoint_capacity(keep)
        (tmp_path / str(step)).mkdir()
        manager.register_checkpoint(str(tmp_path / str(step)), keep)
    assert len(left) == keep
    assert set(left) < set(there())


@pytest.mark.parametrize("resume", ["auto", "resume_path"])
def test_checkpoints_without_the_weights_that_training_goes_on_with_are_not_resumed_from(
    compose: Compose, tmp_path: Path, resume: str
):
    """verl would load nothing, and count on from the step of the checkpoint."""
    assert any("lacks model" in message for message in check(composed(compose, tmp_path, HUGGING_FACE)))
    folder = save(tmp_path, 3)
    lines = [HUGGING_FACE, f"trainer.resume_mode={resume}"]
    lines += [f"trainer.resume_from_path={folder}"] if resume == "resume_path" else []
    with pytest.raises(ConfigError, match=r"cannot be resumed from: .*actor: load_contents has no 'model'"):
        check(composed(compose, tmp_path, *lines))
    assert not check(composed(compose, tmp_path, HUGGING_FACE, "trainer.resume_mode=disable"))


def test_a_checkpoint_without_the_process_reward_model_is_incomplete(compose: Compose, tmp_path: Path):
    """A fresh one beside a trained policy would learn from scratch, without a word."""
    save(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"global_step_2/turnkey_prm/model_world_size_2_rank_0\.pt is missing"):
        check(composed(compose, tmp_path, recipe="istar"))
    check(composed(compose, tmp_path, "turnkey.prm.every=0", recipe="istar"))  # it has nothing to remember
    save(tmp_path, 4, roles=("actor", "turnkey_prm"))
    config = composed(compose, tmp_path, recipe="istar")
    assert check(config) == []
    assert config.trainer.resume_mode == "auto"


def loader(tasks: int, workers: int) -> StatefulDataLoader:
    numbers, generator = list(range(tasks)), torch.Generator().manual_seed(1)
    sampler = RandomSampler(numbers, generator=generator)  # as verl's create_rl_sampler
    return StatefulDataLoader(numbers, batch_size=4, num_workers=workers, drop_last=True, sampler=sampler)


def fetched(loader: StatefulDataLoader, steps: int) -> None:
    """As verl's trainer: a second StopIteration in a row ends the run."""
    batches = iter(loader)
    for _ in range(steps):
        try:
            next(batches)
        except StopIteration:
            batches = iter(loader)
            next(batches)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("before", "steps", "after", "id"),
    [
        (64, 10, 32, "data-fewer-than-played"),
        (64, 10, 39, "data-fewer-than-played"),
        (64, 10, 40, "data-changed"),
        (64, 6, 32, "data-changed"),
        (64, 16, 128, "data-changed"),
        (64, 20, 17, "data-changed"),
        (64, 20, 15, "data-fewer-than-played"),
        (64, 10, 64, None),
    ],
)
def test_other_tasks_than_those_of_the_checkpoint(
    compose: Compose, tmp_path: Path, workers: int, before: int, steps: int, after: int, id: str | None
):
    """What verl's own loader does with its state; ours says it before the start."""
    folder, file = save(tmp_path, steps), tmp_path / "train.parquet"
    first = loader(before, workers)
    fetched(first, steps)
    torch.save(state := first.state_dict(), folder / "data.pt")
    config = composed(compose, tmp_path, f"data.train_files={file}", f"data.val_files={file}")
    write_parquet(file, [Task("turnkey/Errands-v0", seed) for seed in range(before)], "errands", "train")
    (folder / "turnkey_data.json").write_text(json.dumps(data_mark(config)))
    write_parquet(file, [Task("turnkey/Errands-v0", seed) for seed in range(after)], "errands", "train")
    second = loader(after, workers)
    second.load_state_dict(state)
    stops = pytest.raises(StopIteration) if id == "data-fewer-than-played" else nullcontext()
    with stops:
        fetched(second, after // 4 + 1)
    assert rule_of(config) == id
    if id is None:
        seeds = [*range(1, before), 7]
        write_parquet(file, [Task("turnkey/Errands-v0", seed) for seed in seeds], "errands", "train")
        assert rule_of(config) == "data-changed"  # as many others


def test_checkpoints_of_former_versions_are_compared_by_time(compose: Compose, tmp_path: Path):
    folder, file = save(tmp_path, 3), tmp_path / "train.parquet"
    config = composed(compose, tmp_path, f"data.train_files={file}", f"data.val_files={file}")
    write_parquet(file, [Task("turnkey/Errands-v0", seed) for seed in range(8)], "errands", "train")
    for at, id in ((1, None), (2**31, "data-changed")):
        os.utime(file, (at, at))
        assert rule_of(config) == id
    (folder / "data.pt").unlink()  # verl begins the data anew
    assert rule_of(config) is None


def rule_of(config: Any) -> str | None:
    """The rule by which the data are refused, or warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpoints.check_resumed_data(config)
        except Refusal as refusal:
            return refusal.id
    return next((id_of(warning.message) for warning in caught if isinstance(warning.message, RuleWarning)), None)


@pytest.mark.parametrize(("steps", "warned"), [(4, False), (3, True), (2, True)])
@pytest.mark.parametrize("mode", ["auto", "resume_path", "disable"])
def test_a_run_whose_last_step_is_done(compose: Compose, tmp_path: Path, mode: str, steps: int, warned: bool):
    folder = save(tmp_path, 3)
    where = [f"trainer.resume_from_path={folder}"] if mode == "resume_path" else []
    config = composed(compose, tmp_path, f"trainer.total_training_steps={steps}", f"trainer.resume_mode={mode}", *where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_steps(config)
    messages = [str(warning.message) for warning in caught]
    assert any("no step is left to train" in message for message in messages) == (warned and mode != "disable")
