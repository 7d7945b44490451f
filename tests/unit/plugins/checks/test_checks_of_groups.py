"""What the driver refuses of ``turnkey.groups``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks.groups import check_groups
from verl_turnkey.plugins.checks.run import Run
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.config.training import GroupsConfig


def checked(groups: dict[str, Any], mode: str = "turnkey_sync", **changes: Any) -> None:
    config = OmegaConf.create(
        {
            "turnkey": {"groups": groups, **changes.get("turnkey", {})},
            "algorithm": {"adv_estimator": changes.get("method", "gigpo")} | changes.get("algorithm", {}),
            "actor_rollout_ref": {
                "rollout": {
                    "n": changes.get("n", 8),
                }
            },
            "data": {"train_batch_size": changes.get("tasks", 8)},
            "trainer": {"v1": {"trainer_mode": mode, "separate_async": {"parameter_sync_step": 4}}},
        }
    )
    loops = [changes.get("loop", "turnkey_env")]
    check_groups(Run(config, turnkey_config(config), loops, files=changes.get("files", [])))


def test_what_works_is_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked({}, "sync")
        checked({"keep": 0.125})
        checked({"keep": 0.5}, "turnkey_separate_async")
        checked({"keep": 0.01, "keep_by": "spread"}, method="grpo")
        checked({"allocation": "prior", "decay": 0.5, "keep": 0.5})
        checked({"allocation": "variance"}, n=3)


def test_groups_of_one_are_said():
    with pytest.warns(UserWarning, match="may play a task once"):
        checked({"allocation": "variance", "n_low": 1, "n_high": 3}, n=2)


@pytest.mark.parametrize(
    ("groups", "changes", "message"),
    [
        ({"keep": 0.5}, {"mode": "sync"}, "trainer.v1.trainer_mode=turnkey_sync"),
        ({"keep": 0.5}, {"n": 1}, "rollout.n=1: raise it to 2 or more"),
        ({"keep": 0.12}, {}, "less than one of the 8 groups of an update (data.train_batch_size): raise it to 0.125"),
        ({"keep": 0.4}, {"mode": "turnkey_separate_async"}, "less than one of the 2 groups"),
        (
            {"keep": 0.5},
            {"method": "tree", "turnkey": {"rollout": {"strategy": "tree"}}},
            "turnkey.rollout.strategy=tree trains several: set turnkey.groups.keep to 1",
        ),
        ({"allocation": "variance"}, {"n": 2}, "gives each task from 2 to 3 episodes"),
        ({"allocation": "prior", "n_high": 8}, {}, "expected n_low < actor_rollout_ref.rollout.n < n_high"),
        ({"allocation": "prior"}, {"tasks": 1}, "raise data.train_batch_size"),
        (
            {"allocation": "variance"},
            {"algorithm": {"filter_groups": {"enable": True}}},
            "algorithm.filter_groups.enable=true drops those that end alike before they are seen: set it to false",
        ),
        ({"hint_high": 0.5}, {"loop": "tool_agent"}, "hint_high=0.5 has no effect with the agent loop tool_agent"),
        (
            {"hint_high": 0.5},
            {"algorithm": {"filter_groups": {"enable": True}}},
            "algorithm.filter_groups.enable=true drops before they are seen",
        ),
        (
            {"allocation": "variance"},
            {"turnkey": {"rollout": {"strategy": {"name": "entropy_branch", "trajectories": 16}}}},
            "strategy=entropy_branch counts its trajectories by actor_rollout_ref.rollout.n: set turnkey.groups",
        ),
        ({"allocation": "prior"}, {"mode": "sync"}, "trainer.v1.trainer_mode=turnkey_sync"),
    ],
)
def test_what_cannot_work_is_refused(groups, changes, message):
    with pytest.raises(ConfigError) as error:
        checked(groups, **changes)
    assert message in str(error.value)


def test_what_a_method_remembers_of_kept_groups_is_said():
    with pytest.warns(UserWarning, match="shrinkage then remembers only the kept groups of earlier batches"):
        checked({"keep": 0.5}, method="shrinkage")
    with pytest.warns(UserWarning, match="what shrinkage remembers of earlier batches includes outcomes with hints"):
        checked({"hint_high": 0.5}, method="shrinkage")


def test_data_that_say_how_often_themselves_are_refused(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [], "__rollout_n__": 3}\n')
    checked({"keep": 0.5}, files=[str(rows)])
    with pytest.raises(ConfigError, match=r"rows\.jsonl has a column __rollout_n__, which .* would overwrite"):
        checked({"allocation": "variance"}, files=[str(rows)])


def test_bounds_without_an_allocation_are_said():
    with pytest.warns(UserWarning, match="n_low and n_high have no effect with allocation=even"):
        checked({"n_low": 2})


@pytest.mark.parametrize(("n", "low", "high"), [(16, 8, 24), (5, 3, 7), (3, 2, 4)])
def test_the_bounds_are_half_and_one_and_a_half(n, low, high):
    assert GroupsConfig().bounds(n) == (low, high)
    assert GroupsConfig(n_low=1, n_high=9).bounds(n) == (1, 9)


def test_hints_need_a_column_and_a_template_that_shows_the_task(tmp_path: Path):
    with_hints, without, template = tmp_path / "with.jsonl", tmp_path / "without.jsonl", tmp_path / "bare.txt"
    with_hints.write_text('{"prompt": [], "turnkey_hint": "left"}\n')
    without.write_text('{"prompt": []}\n')
    template.write_text("{observation}\n")
    checked({"hint_high": 0.5}, files=[str(with_hints)])
    with pytest.raises(ConfigError, match=r"without\.jsonl has no column 'turnkey_hint'"):
        checked({"hint_high": 0.5}, files=[str(with_hints), str(without)])
    with pytest.raises(ConfigError, match=r"bare\.txt does not show the \{task\}"):
        checked({"hint_high": 0.5}, files=[], turnkey={"rollout": {"template": str(template)}})
