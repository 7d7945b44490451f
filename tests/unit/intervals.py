"""Intervals of numbers as texts, ``[0, 1)``: what is just inside of one, and what is just outside."""

import math

STEP = 1e-3


def around(interval: str, whole: bool = False) -> tuple[list[float], list[float]]:
    """``whole``: of integers. NaN is outside of every interval of other numbers."""
    low, high = map(float, interval[1:-1].split(","))
    inside: list[float] = []
    outside: list[float] = [] if whole else [math.nan]
    for edge, is_in, step in ((low, interval[0] == "[", STEP), (high, interval[-1] == "]", -STEP)):
        if math.isfinite(edge):
            inner, outer = (int(edge + sign * step / STEP) if whole else edge + sign * step for sign in (1, -1))
            edge = int(edge) if whole else edge
            inside.append(edge if is_in else inner)
            outside.append(outer if is_in else edge)
        elif not whole:
            (inside if is_in else outside).append(edge)
    return inside, outside
