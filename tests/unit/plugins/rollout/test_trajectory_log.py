"""When the rows of episodes come to the disk."""

from __future__ import annotations

import threading
from pathlib import Path

from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.log import writer
from verl_turnkey.plugins.rollout.trajectory_log import TrajectoryLog, token_lengths


def test_a_file_is_written_after_five_minutes_unless_a_step_ends_before(tmp_path: Path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(writer, "monotonic", lambda: clock[0])
    config = {
        "data": {"train_batch_size": 4},
        "actor_rollout_ref": {"rollout": {"n": 2, "val_kwargs": {"n": 1}}},
        "turnkey": {"log": {"trajectories": str(tmp_path / "log")}},
    }
    tables = TrajectoryLog(config, turnkey_config(config).log).tables

    def files(now: float) -> int:
        clock[0] = now
        for _ in range(2):  # the second is taken when everything due at the first is written
            taken = threading.Event()
            tables.put_later(lambda taken=taken: [taken.set()][:0], 0, 0)
            assert taken.wait(10)
        return len(list((tmp_path / "log").rglob("*.parquet")))

    tables.put("turns", 1, {"episode": ["a_0"], "turn": [0]})
    assert files(0) == 0
    assert files(299) == 0
    assert files(300) == 1
    tables.put("turns", 1, {"episode": ["a_1"], "turn": [0]})
    tables.put("turns", 2, {"episode": ["b_0"], "turn": [0]})
    assert files(301) == 2
    assert tables.drain(10)
    assert files(301) == 3


def of_bytes(ids: list[int], skip_special_tokens: bool = False) -> str:
    """A tokenizer of bytes, with 256 as its one special token."""
    return bytes(i for i in ids if i < 256).decode(errors="replace") + "</s>" * (256 in ids and not skip_special_tokens)


def test_a_character_of_several_tokens_counts_at_the_last():
    ids = [*"aé🙂".encode(), 256]
    assert token_lengths(ids, "aé🙂", of_bytes) == [1, 0, 1, 0, 0, 0, 1, 0]
    assert token_lengths([], "", of_bytes) == []
    assert token_lengths([*b"a\xf0"], "a\ufffd", of_bytes) is None, "the text ends inside a character"
    assert token_lengths([*b" a"], "a", of_bytes) is None, "the tokenizer drops a space"
