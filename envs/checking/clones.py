"""Copies of an environment that is being played: does each go its own way from the same state?"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

from verl_turnkey.envs.checking.traces import Calls, Env, Trace, replay
from verl_turnkey.envs.copies import copied


def clones(make: Callable[[], Env], trace: Trace, calls: Calls) -> list[Trace]:
    """The episode ``trace`` on a copy made half-way, then on what it was copied from.

    Another copy has gone astray before, by the first action over and over: neither of them must have noticed.
    """
    middle = len(trace.actions) // 2
    original = make()
    half = replay(original, replace(trace, actions=trace.actions[:middle]), calls)
    astray, copy = (calls("reset", f"a copy after step {middle}", lambda: copied(original))[0] for _ in range(2))
    _go_on(astray, deepcopy(half), trace.actions[:1] * (len(trace.actions) - middle), calls)
    ends = [_go_on(env, deepcopy(half), trace.actions[middle:], calls) for env in (copy, original)]
    for env in (astray, copy, original):
        env.close()
    return ends


def _go_on(env: Env, trace: Trace, actions: list[str], calls: Calls) -> Trace:
    for action in actions:
        if not (trace.broken or trace.ended):
            calls.step(env, trace, action)
    return trace
