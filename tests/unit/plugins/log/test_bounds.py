"""Which groups are logged, and whose texts stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_turnkey.plugins.log.bounds import Shares, chosen, keep_texts, logged_shares

GROUPS = [f"group {i}" for i in range(4000)]


def test_a_group_is_chosen_by_its_name_alone():
    assert all(chosen(group, 1.0) for group in GROUPS)
    assert not any(chosen(group, 0.0) for group in GROUPS)
    quarter = {group for group in GROUPS if chosen(group, 0.25)}
    assert 900 < len(quarter) < 1100
    assert quarter < {group for group in GROUPS if chosen(group, 0.5)}
    # sha256(b"a") begins with ca978112, which is 0.79137 of the way
    assert chosen("a", 0.7915)
    assert not chosen("a", 0.7913)
    assert chosen("\ud800", 1.0)


@pytest.mark.parametrize(
    ("share", "most", "groups", "n", "expected"),
    [
        (1.0, 256, 16, 8, 1.0),  # 128 episodes
        (1.0, 256, 128, 8, 0.25),
        (0.1, 256, 128, 8, 0.1),
        (0.5, None, 128, 8, 0.5),
        (1.0, 4, 10, 8, 0.1),  # a group is larger than the bound
    ],
)
def test_the_bound_of_a_step_and_of_a_validation_is_a_share(share, most, groups, n, expected):
    def shares(batch: int, tasks: int | None, n: int, of_validation: int) -> Shares:
        return logged_shares(
            {
                "data": {"train_batch_size": batch},
                "actor_rollout_ref": {"rollout": {"n": n, "val_kwargs": {"n": of_validation}}},
                "turnkey": {"log": {"share": share, "episodes_per_step": most, "validation_tasks": tasks}},
            }
        )

    assert shares(groups, 1, n, 1) == pytest.approx((expected, share))
    assert shares(1, groups, 1, n) == pytest.approx((share, expected))
    assert shares(groups, None, 1, n).validation == pytest.approx(expected), "not counted: as large as a step"


def test_texts_of_the_last_steps_and_of_some_stay(tmp_path: Path):
    for table in ("texts", "turns"):
        for step in range(46):
            (tmp_path / table / f"step={step:06d}").mkdir(parents=True)
            (tmp_path / table / f"step={step:06d}" / "a.parquet").write_text("x")
    (tmp_path / "texts" / "notes.txt").write_text("x")
    assert keep_texts(tmp_path, 45) == [step for step in range(26) if step not in (0, 10, 20)]
    assert keep_texts(tmp_path, 45) == []
    assert keep_texts(tmp_path, 46) == [26]
    left = sorted(path.name for path in (tmp_path / "texts").iterdir())
    assert left == ["notes.txt", *(f"step={step:06d}" for step in (0, 10, 20, *range(27, 46)))]
    assert len(list((tmp_path / "turns").iterdir())) == 46
    assert keep_texts(tmp_path, 45, last=3, every=7) == [10, 20, 27, *(s for s in range(29, 43) if s not in (35, 42))]
    assert keep_texts(tmp_path / "nothing", 9) == []
