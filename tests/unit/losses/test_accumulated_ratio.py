"""SeeUPO's accumulated ratio; the reference's outputs are in the test of the estimator ``seeupo``, which it weighs."""

import pytest
import torch

from verl_turnkey.losses.seeupo import accumulated_ratio


def test_extreme_moves_are_clipped_and_rows_without_tokens_are_left_alone():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    zeros = torch.zeros(3, 2)
    after = torch.tensor([[50.0, 50.0], [-50.0, 9.0], [9.0, 9.0]])
    found = accumulated_ratio(torch.tensor([1.1, 1.0, 0.9]), zeros, after, mask)
    assert found.tolist() == pytest.approx([1.2, 0.8, 0.9])
