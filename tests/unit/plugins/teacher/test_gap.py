"""The contrast of the gap between good and bad tokens, by hand."""

from __future__ import annotations

import pytest
import torch

from verl_turnkey.plugins.teacher.column import contrast, gap_metrics

GAP = torch.tensor([1.0, 3.0, -2.0, 5.0, 100.0, 7.0])
ADVANTAGE = torch.tensor([0.5, 2.0, -1.0, -1.0, 1.0, 0.0])
MASK = torch.tensor([1, 1, 1, 1, 0, 1])


def test_the_contrast_is_a_difference_of_means():
    assert contrast(GAP, ADVANTAGE, MASK) == pytest.approx((1 + 3) / 2 - (-2 + 5) / 2)
    assert contrast(GAP - 4, ADVANTAGE, MASK) == pytest.approx(0.5), "what all tokens have in common cancels"


def test_a_placebo_is_subtracted_token_by_token():
    placebo = torch.tensor([0.0, 1.0, -2.0, 1.0, 9.0, 9.0])
    assert contrast(GAP, ADVANTAGE, MASK, placebo) == pytest.approx((1 + 2) / 2 - (0 + 4) / 2)


def test_without_tokens_of_both_signs_there_is_none():
    assert contrast(GAP, ADVANTAGE.abs(), MASK) is None
    assert contrast(GAP, ADVANTAGE, MASK * 0) is None
    assert contrast(None, ADVANTAGE, MASK) is None


def test_metrics_are_over_the_models_tokens():
    rows = [(GAP[:3], MASK[:3]), (GAP[3:], MASK[3:])]
    control = [(torch.tensor([0.0, -0.5]), torch.tensor([0, 1]))]
    assert gap_metrics(rows, control) == {
        "teacher/gap/mean": pytest.approx((1 + 3 - 2 + 5 + 7) / 5),
        "teacher/gap_abs/mean": pytest.approx((1 + 3 + 2 + 5 + 7) / 5),
        "teacher/gap_abs/control": 0.5,
    }
    assert gap_metrics([], []) == {}
