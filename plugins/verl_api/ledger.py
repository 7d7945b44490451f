"""The ledger: every registration that we attempted in verl, and its result.

A registration never raises into verl: a clash or a failure is recorded, shown by ``turnkey doctor``, and checked by the
trainer at start (:func:`verify`), in the driver and inside the workers.

A name that verl or another plugin already uses stays theirs and is recorded as a clash; an estimator or a loss is
always available as ``turnkey/<name>``.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

TRAINERS = {
    "turnkey_sync": "TurnkeyTrainerSync",
    "turnkey_colocate_async": "TurnkeyTrainerColocateAsync",
    "turnkey_separate_async": "TurnkeyTrainerSeparateAsync",
}
AGENT_LOOPS = ("turnkey_env", "turnkey_agent")
# verl's own agent loops, each with its extra fields that hold one number per turn.
VERLS_LOOPS = {"single_turn_agent": (), "tool_agent": ("tool_rewards",)}

# Modules of verl that hold each kind of point; importing them runs the callbacks of the entry point.
HOMES = {
    "config": ("hydra.core.plugins", "verl.utils.config"),
    "estimator": ("verl.trainer.ppo.core_algos",),
    "loss": ("verl.trainer.ppo.core_algos",),
    "trainer": ("verl.trainer.ppo.v1",),
    "agent_loop": ("verl.experimental.agent_loop.agent_loop",),
}

Status = Literal["registered", "clash", "missing", "failed"]


@dataclass(frozen=True)
class Point:
    """One extension point: its kind and name, and the result of the registration."""

    kind: str
    name: str
    status: Status
    detail: str = ""


_points: dict[tuple[str, str], Point] = {}
_still_ours: dict[tuple[str, str], Callable[[], bool]] = {}


def _note(kind: str, name: str, status: Status, detail: str = "") -> None:
    _points[kind, name] = Point(kind, name, status, detail)


def guarded(kind: str, name: str, register: Callable[[], None]) -> None:
    """Run ``register``; an exception is recorded and not raised into verl."""
    try:
        register()
    except Exception:
        _note(kind, name, "failed", traceback.format_exc())
    else:
        if (kind, name) not in _points or _points[kind, name].status == "failed":
            _note(kind, name, "registered")


def claim(kind: str, name: str, registry: MutableMapping[str, Any], value: Any) -> None:
    """Register ``value`` under ``name`` unless the name is taken."""
    holder = registry.get(name)
    if holder is not None and holder != value:
        _note(kind, name, "clash", f"held by {_describe(holder)}{_way_out(kind, name)}")
        return
    registry[name] = value
    _note(kind, name, "registered")
    _still_ours[kind, name] = lambda: registry.get(name) == value


def _way_out(kind: str, name: str) -> str:
    return f"; use turnkey/{name}" if kind in ("estimator", "loss") and not name.startswith("turnkey/") else ""


def _describe(thing: Any) -> str:
    if isinstance(thing, MutableMapping):
        return str(thing.get("_target_", dict(thing)))
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', thing)}"


def loss_names() -> list[str]:
    """Our losses; none where torch is missing."""
    if find_spec("torch") is None:
        return []
    from verl_turnkey.losses import losses

    return list(losses())


def expected() -> list[tuple[str, str]]:
    """(kind, name) of everything that must be in place once verl is fully imported."""
    from verl_turnkey.advantage import estimators

    names = [("config", "hydra search path"), ("config", "driver validation")]
    names += [("estimator", alias) for name in estimators() for alias in (name, f"turnkey/{name}")]
    names += [("loss", alias) for name in loss_names() for alias in (name, f"turnkey/{name}")]
    names += [("trainer", name) for name in TRAINERS]
    return names + [("agent_loop", name) for name in AGENT_LOOPS]


def points() -> list[Point]:
    """The current record; it reads the registries again, because another plugin may have overwritten an entry."""
    current = []
    for key in expected():
        point = _points.get(key) or Point(*key, "missing", _why_missing(key[0]))
        ours = _still_ours.get(key)
        if point.status == "registered" and ours is not None and not ours():
            point = Point(*key, "clash", f"overwritten by another plugin after us{_way_out(*key)}")
        current.append(point)
    return current


def _why_missing(kind: str) -> str:
    star = _points.get((kind, "*"))
    if star is not None and star.status == "failed":
        return star.detail
    absent = [home for home in HOMES[kind] if home not in sys.modules]
    if absent:
        return f"{', '.join(absent)} was never imported in this process"
    return "the entry point did not run (is the package installed in this environment?)"


def owns(kind: str, name: str) -> bool:
    """Whether ``name`` is ours in this process, and not another plugin's."""
    return any(point.kind == kind and point.name == name and point.status == "registered" for point in points())


def import_homes() -> dict[str, str]:
    """Import every module that holds an extension point; returns {module: traceback} of those that fail."""
    broken = {}
    for homes in HOMES.values():
        for home in homes:
            try:
                importlib.import_module(home)
            except Exception:
                broken[home] = traceback.format_exc()
    return broken


def verify(kinds: tuple[str, ...], needed: tuple[str, ...] = ()) -> None:
    """Assert that every point of ``kinds`` is ours in this process.

    A clash is only fatal for a name in ``needed`` (the run asks for it): the others stay reachable as
    ``turnkey/<name>``.

    Raises:
        RuntimeError: names each bad point and why it is bad.
    """
    bad = [
        point
        for point in points()
        if point.kind in kinds
        and point.status != "registered"
        and not (point.status == "clash" and point.name not in needed)
    ]
    if bad:
        lines = "\n".join(f"  {point.kind} {point.name}: {point.status}. {point.detail.strip()}" for point in bad)
        raise RuntimeError(f"verl-turnkey is not fully registered in this process; run `turnkey doctor`.\n{lines}")
