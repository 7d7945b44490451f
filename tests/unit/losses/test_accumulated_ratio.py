"""SeeUPO's accumulated ratio; the reference's outputs are in the test of the estimator ``seeupo``, which it weighs."""

import math

import pytest
import torch

from verl_turnkey.losses.clipping import accumulated_ratio


def test_extreme_moves_are_clipped_and_rows_without_tokens_are_left_alone():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    zeros = torch.zeros(3, 2)
    after = torch.tensor([[50.0, 50.0], [-50.0, 9.0], [9.0, 9.0]])
    ratio = accumulated_ratio(torch.tensor([1.1, 1.0, 0.9]), zeros, after, mask)
    assert ratio.tolist() == pytest.approx([1.2, 0.8, 0.9])


def test_the_turns_ratio_is_of_its_tokens_alone_and_clipped_before_it_is_multiplied():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0]])
    after = torch.tensor([[0.1, 0.05, 9.0, 9.0], [9.0, 0.5, 9.0, 9.0]])
    ratio = accumulated_ratio(torch.tensor([0.9, 0.9]), torch.zeros(2, 4), after, mask)
    assert ratio.tolist() == pytest.approx([0.9 * math.exp(0.075), 0.9 * 1.2])


def test_a_turn_of_one_token_counts_by_itself():
    ratio = accumulated_ratio(torch.ones(1), torch.zeros(1, 2), torch.tensor([[0.1, 9.0]]), torch.tensor([[1, 0]]))
    assert ratio.tolist() == pytest.approx([math.exp(0.1)])


def test_the_clips_are_a_fifth_unless_said_otherwise():
    far = torch.tensor([[0.5], [-0.5]])
    ones, zeros, mask = torch.ones(2), torch.zeros(2, 1), torch.ones(2, 1)
    assert accumulated_ratio(ones, zeros, far, mask).tolist() == pytest.approx([1.2, 0.8])
    wide = accumulated_ratio(ones, zeros, far, mask, clip_low=0.3, clip_high=0.4)
    assert wide.tolist() == pytest.approx([1.4, 0.7])
