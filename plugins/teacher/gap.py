"""Metrics of the gap D: the teacher's log-probability of a token minus that of the policy without the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def contrast(
    gap: torch.Tensor | None, advantage: torch.Tensor, mask: torch.Tensor, placebo: torch.Tensor | None = None
) -> float | None:
    """Mean gap of tokens with a positive advantage minus the mean gap of tokens with a negative one; None without both.

    ::

        mean of D over {A > 0}  -  mean of D over {A < 0},      D - D(placebo) in the place of D where there is one

    A single mean says little: under the policy's own samples E[D] = -KL(policy || teacher), so a text that says nothing
    true has a negative mean as well. In the difference that cancels, as far as it is the same for both kinds of tokens.

    Args:
        gap, advantage, mask, placebo: (N,) of N tokens; tokens whose mask is 0 do not count.
    """
    if gap is None:
        return None
    gap = (gap if placebo is None else gap - placebo).double()
    good, bad = (gap[mask.bool() & sign] for sign in (advantage > 0, advantage < 0))
    return (good.mean() - bad.mean()).item() if len(good) and len(bad) else None


def gap_metrics(rows: Pairs, control: Pairs) -> dict[str, float]:
    """Mean of the gap and of its size over the model's tokens; of ``control``, rows sent without a text, the size.

    ``rows``, ``control``: gap and mask (L,) of each row. The control's size is the noise of computing the same
    number twice in other company; without such rows there is no metric.
    """
    metrics: dict[str, float] = {}
    if rows:
        values = torch.cat([gap[mask.bool()] for gap, mask in rows]).double()
        metrics |= {"teacher/gap/mean": values.mean().item(), "teacher/gap_abs/mean": values.abs().mean().item()}
    if control:
        values = torch.cat([gap[mask.bool()] for gap, mask in control]).double()
        metrics["teacher/gap_abs/control"] = values.abs().mean().item()
    return metrics
