"""seeupo: the released code turn after turn (with the ratio of the losses), its twin, groups of one."""

import naive
import numpy as np
import pytest
import torch
from estimator_cases import as_batch, assert_same_credit, cases, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.losses.clipping import accumulated_ratio


def credit(score, group, **params):
    n = len(score)
    batch = StepBatch(group=group, trajectory=range(n), step=[0] * n, reward=score)
    return compute_credit("seeupo", batch, **params).advantage


@pytest.mark.parametrize("case", cases("seeupo"))
def test_every_turn_equals_the_reference(case):
    """A turn at a time, the last first: the reference normalizes over the rows of the turn, one per trajectory."""
    params = case["params"]
    ratio = torch.ones(len(case["inputs"]["uid"]))
    for turn in case["turns_in_update_order"]:
        mask = np.array(turn["response_mask"])
        score = np.array(turn["token_level_rewards"]).sum(1)
        advantage = credit(score, case["inputs"]["uid"], clamp=params["clamp_adv"]) * ratio.numpy()
        expected = np.array(turn["expected"]["advantages"])
        np.testing.assert_allclose(advantage[:, None] * mask, expected, atol=2e-5, rtol=0)
        before, after = (torch.tensor(turn[f"log_prob_{when}"]) for when in ("before", "after"))
        clip = {"clip_low": params["adv_clip_ratio_low"], "clip_high": params["adv_clip_ratio_high"]}
        ratio = accumulated_ratio(ratio, before, after, torch.tensor(mask), **clip)
        torch.testing.assert_close(ratio, torch.tensor(turn["expected"]["ratios_after"]), atol=2e-6, rtol=0)


def test_some_reference_has_a_signal():
    turns = [turn for case in cases("seeupo") for turn in case.values[0]["turns_in_update_order"]]
    assert max(np.abs(turn["expected"]["advantages"]).max() for turn in turns) > 0.5


@settings(max_examples=100, deadline=None)
@given(
    step_rows(),
    st.fixed_dictionaries({"clamp": st.sampled_from([0.5, 3.0]), "singleton": st.sampled_from(["zero", "score"])}),
)
def test_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("seeupo", as_batch(rows), **params).advantage, naive.seeupo(rows, **params))


def test_hand_example():
    # centred: -1, 1, -2, 2; their sample std is sqrt(10 / 3)
    expected = np.array([-1.0, 1.0, -2.0, 2.0]) / (10 / 3) ** 0.5
    np.testing.assert_allclose(credit([0.0, 2.0, 1.0, 5.0], list("aabb")), expected)
    np.testing.assert_allclose(credit([0.0, 2.0, 1.0, 5.0], list("aabb"), clamp=0.6), expected.clip(-0.6, 0.6))


def test_constant_groups_give_exactly_nothing():
    assert credit([0.1 + 0.2] * 3 + [7.0] * 2, list("aaabb")).tolist() == [0.0] * 5


def test_a_group_of_one_keeps_its_score_or_gets_nothing():
    assert credit([2.0, 0.0, 0.0], list("abb"))[0] > 0
    assert credit([2.0, 0.0, 0.0], list("abb"), singleton="zero").tolist() == [0.0] * 3
