"""Metrics of the parts and groups of credit."""

from __future__ import annotations

import numpy as np

from verl_turnkey.advantage.group_ops import Floats, Ints


def describe(name: str, part: Floats) -> dict[str, float]:
    """Mean, population std and share of non-zero entries of a part of the credit (S,), as metrics; 0 for no steps."""
    if not len(part):
        return {f"credit/{name}/mean": 0.0, f"credit/{name}/std": 0.0, f"credit/{name}/share_nonzero": 0.0}
    return {
        f"credit/{name}/mean": float(part.mean()),
        f"credit/{name}/std": float(part.std()),
        f"credit/{name}/share_nonzero": float(np.mean(part != 0)),
    }


def describe_groups(name: str, codes: Ints, n: int) -> dict[str, float]:
    """Metrics of the ``n`` groups ``codes`` (S,): number, sizes, and share of steps in groups of two or more."""
    size = np.bincount(codes, minlength=n)
    return {
        f"credit/{name}_groups": float(n),
        f"credit/{name}_group_size/mean": len(codes) / n if n else 0.0,
        f"credit/{name}_group_size/max": float(size.max(initial=0)),
        f"credit/share_steps_in_{name}_groups": float(np.mean(size[codes] >= 2)) if n else 0.0,
    }
