"""SeeUPO's bookkeeping against the released code's outputs, turn after turn in reverse order."""

import json
from pathlib import Path

import pytest
import torch

from verl_turnkey.losses.seeupo import accumulated_ratio, turn_advantages

CASES = json.loads((Path(__file__).parents[2] / "data" / "oracle" / "seeupo.json").read_text())["cases"]


def codes(names):
    return torch.tensor([sorted(set(names)).index(name) for name in names])


@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in CASES])
def test_every_turn_equals_the_reference(case):
    params = case["params"]
    group = codes(case["inputs"]["uid"])
    ratio = torch.ones(len(group))
    for turn in case["turns_in_update_order"]:
        mask = torch.tensor(turn["response_mask"])
        score = torch.tensor(turn["token_level_rewards"]).sum(1)
        found = turn_advantages(score, group, ratio, params["clamp_adv"])
        expected = torch.tensor(turn["expected"]["advantages"])
        torch.testing.assert_close(found[:, None] * mask, expected, atol=2e-5, rtol=0)
        before, after = (torch.tensor(turn[f"log_prob_{when}"]) for when in ("before", "after"))
        clip = {"clip_low": params["adv_clip_ratio_low"], "clip_high": params["adv_clip_ratio_high"]}
        ratio = accumulated_ratio(ratio, before, after, mask, **clip)
        torch.testing.assert_close(ratio, torch.tensor(turn["expected"]["ratios_after"]), atol=2e-6, rtol=0)


def test_some_reference_has_a_signal():
    largest = [
        abs(a) for c in CASES for t in c["turns_in_update_order"] for row in t["expected"]["advantages"] for a in row
    ]
    assert max(largest) > 0.5


def test_constant_groups_give_exactly_nothing():
    score = torch.tensor([0.1 + 0.2, 0.1 + 0.2, 0.1 + 0.2, 7.0, 7.0])
    assert turn_advantages(score, torch.tensor([0, 0, 0, 1, 1]), torch.ones(5)).tolist() == [0.0] * 5


def test_a_group_of_one_and_no_rows():
    assert turn_advantages(torch.tensor([2.0, 0.0, 0.0]), torch.tensor([0, 1, 1]), torch.ones(3))[0] > 0
    assert turn_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.zeros(0)).shape == (0,)


def test_extreme_moves_are_clipped_and_rows_without_tokens_are_left_alone():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    zeros = torch.zeros(3, 2)
    after = torch.tensor([[50.0, 50.0], [-50.0, 9.0], [9.0, 9.0]])
    found = accumulated_ratio(torch.tensor([1.1, 1.0, 0.9]), zeros, after, mask)
    assert found.tolist() == pytest.approx([1.2, 0.8, 0.9])
