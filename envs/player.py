"""An environment spoken to in plain types: the one piece that runs beside environment code, in a thread or a process.

Whatever an environment raises comes out as an ``EnvironmentFailure``, and whatever it returns is checked and reduced to
the types that credit assignment reads, so that nothing of the environment's own has to survive the way to others.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.modules import import_modules
from verl_turnkey.envs.registry import make

Info = dict[str, Any]
_MESSAGE_CHARS = 2000
_TRACEBACK_CHARS = 1500
_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Declared:
    """What a class says about itself in ``metadata``; the defaults are for one that says nothing."""

    thread_safe: bool = False
    memory_mb: int = 200


class Player:
    """Holds one environment at a time. Not thread-safe: one call at a time.

    Args:
        modules: user modules to import first (see ``import_modules``).
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._env: gymnasium.Env[str, str] | None = None
        self._made_for: tuple[str, Mapping[str, Any]] | None = None

    def load(self, env_id: str) -> Declared | None:
        """Import the class of ``env_id``; None when that fails, because ``start`` says better what is wrong."""
        with _failures("reset"):
            import_modules(self._modules)
            try:
                entry = gymnasium.spec(env_id).entry_point
                creator = load_env_creator(entry) if isinstance(entry, str) else entry
            except Exception:
                return None
            metadata = getattr(creator, "metadata", None) or {}  # a function instead of a class has none
            memory = metadata.get("memory_mb", Declared.memory_mb)
            return Declared(metadata.get("thread_safe") is True, max(1, math.ceil(memory)))

    def start(self, env_id: str, kwargs: Mapping[str, Any], seed: int | None) -> tuple[str, Info]:
        """Reset, after making the environment if another one, or none, is here. First observation and info."""
        with _failures("reset"):
            import_modules(self._modules)
            if self._env is None or self._made_for != (env_id, kwargs):
                self.close()
                self._env = make(env_id, kwargs)
                self._made_for = (env_id, kwargs)
            answer = self._env.reset(seed=seed)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise TypeError(f"reset must return (observation, info), not {_shown(answer)}")
            return _observation(answer[0]), _info(answer[1])

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """One step: observation, reward, terminated, truncated, info."""
        assert self._env is not None
        with _failures("step"):
            answer = self._env.step(action)
            if not (isinstance(answer, tuple) and len(answer) == 5):
                raise TypeError(
                    f"step must return (observation, reward, terminated, truncated, info), not {_shown(answer)}"
                )
            observation, reward, terminated, truncated, info = answer
            return _observation(observation), _reward(reward), bool(terminated), bool(truncated), _info(info)

    def twin(self) -> Player | None:
        """An independent copy of the running environment in this process; None when its class offers no way.

        A class offers one with a method ``clone()``, or with ``metadata["deepcopy"] = True``.
        """
        assert self._env is not None
        with _failures("clone"):
            core = self._env.unwrapped
            if callable(clone := getattr(core, "clone", None)):
                env = copy.deepcopy(self._env, {id(core): clone()})  # the wrappers are copied, round the clone
            elif type(core).metadata.get("deepcopy") is True:
                env = copy.deepcopy(self._env)
            else:
                return None
            twin = Player(self._modules)
            twin._env, twin._made_for = env, self._made_for
            return twin

    def close(self) -> None:
        """Close the environment, if there is one; what it raises is nobody's concern any more."""
        env, self._env = self._env, None
        if env is not None:
            with contextlib.suppress(BaseException):
                env.close()


@contextlib.contextmanager
def _failures(kind: str) -> Iterator[None]:
    """Any exception of an environment, ``SystemExit`` included, as text: its class may not exist elsewhere."""
    try:
        yield
    except EnvironmentFailure:
        raise
    except BaseException as error:
        what = "".join(traceback.format_exception_only(type(error), error)).strip()[:_MESSAGE_CHARS]
        trace = "".join(traceback.format_tb(error.__traceback__))[-_TRACEBACK_CHARS:]
        raise EnvironmentFailure(kind, f"{what}\n{trace}") from None


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:100]}"


def _observation(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"an observation must be text, not {_shown(value)}")
    return _text(value)


def _text(value: Any) -> str:
    """As a plain str (of a subclass, such as numpy's, only the text), with no half surrogate pair: UTF-8 has none."""
    return str.__str__(str(value)).encode("utf-8", "replace").decode("utf-8")


def _reward(value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        reward = float(value)
    except (TypeError, ValueError):
        raise EnvironmentFailure("reward", f"a reward must be a number, not {_shown(value)}") from None
    if not math.isfinite(reward):
        raise EnvironmentFailure("reward", f"a reward must be finite, not {reward}")
    return reward


def _info(info: Any) -> Info:
    """The keys that prompts and credit assignment read, in plain types."""
    if not isinstance(info, Mapping):
        raise TypeError(f"info must be a dict, not {_shown(info)}")
    key, admissible, won = info.get("state_key"), info.get("admissible"), info.get("won")
    if isinstance(admissible, str):
        raise TypeError(f"info['admissible'] must be a list of actions, not the text {_shown(admissible)}")
    optional = {
        "images": [_image(image) for image in info.get("images") or []],
        "extra": _extra(info.get("extra")),
    }
    return {
        **{name: value for name, value in optional.items() if value},
        "state_key": key if key is None or type(key) is int else _text(key),
        "admissible": None if admissible is None else [_text(action) for action in admissible],
        "won": None if won is None else bool(won),
        "invalid": bool(info.get("invalid", False)),
        "task": _text(info.get("task") or ""),
    }


def _image(image: Any) -> np.ndarray:
    """A PIL image or an array as an array of (height, width, 3) bytes."""
    array = np.ascontiguousarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise TypeError(
            "info['images'] must hold PIL images or uint8 arrays of shape (height, width, 3), not "
            f"{type(image).__name__} {array.dtype} {array.shape}"
        )
    return array


def _extra(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"info['extra'] must be a dict, not {_shown(value)}")
    return _plain(value or {})


def _plain(value: Any) -> Any:
    """What the environment tells reward functions, as JSON would hold it: no class of the environment's gets out."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if type(value) in (int, float) and not -_LARGEST <= value <= _LARGEST:  # nan neither
        raise TypeError(f"info['extra'] must hold finite numbers, not {_shown(value)}")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"info['extra'] must hold numbers, texts, lists and dicts, not {_shown(value)}")
