"""Validation metrics where verl does not leave out failed episodes itself."""

from __future__ import annotations

import pytest

from verl_turnkey.plugins.trainer.validation import validation_metrics, without_missing

SOURCES = ["Lake", "Lake", "Lake", "Grid"]
TASKS = ["a", "a", "b", "c"]
INFOS = {
    "acc": [1.0, None, 0.0, 1.0],
    "episode_length": [4.0, None, 10.0, 7.0],
    "failed": [0.0, 1.0, 0.0, 0.0],
    "env_return": [0.5, 0.25, 0.0, 1.0],
}


def test_a_failed_episode_has_no_length_and_is_not_solved():
    infos = without_missing(SOURCES, TASKS, INFOS)
    lake = infos["Lake"]
    assert (lake["acc"]["mean@2"], lake["acc"]["mean@1"]) == (0.5, 0.0)
    assert lake["acc_success_only"]["mean@1"] == pytest.approx((1.0 + 0.0) / 2)
    assert lake["episode_length"]["mean@1"] == pytest.approx((4 + 10) / 2)
    assert lake["failed"]["mean@2"] == 0.5
    assert lake["env_return"]["mean@2"] == pytest.approx((0.5 + 0.25) / 2)
    assert infos["Grid"]["episode_length"]["mean@1"] == 7


def test_verls_own_counts_are_passed_on_where_it_takes_them():
    expected = {("Lake", "a"): 2}

    def newest(sources, uids, infos, turns, expected_acc_counts=None):
        return {"given": expected_acc_counts}

    def older(sources, uids, infos, turns):
        from verl.trainer.ppo.v1 import trainer_base

        return trainer_base.process_validation_metrics(sources, uids, infos)["Grid"]["episode_length"]

    assert validation_metrics(newest, SOURCES, TASKS, INFOS, [1], expected) == {"given": expected}
    assert validation_metrics(older, SOURCES, TASKS, INFOS, [1], None)["mean@1"] == 7
