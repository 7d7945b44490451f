"""The rules for what an environment may return: observation, reward, flags and ``info``.

In training, a host ends an episode at its first fault; ``turnkey env-check`` and the driver's probe report all of them.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_turnkey.advantage.columns import LARGEST_REWARD
from verl_turnkey.envs.base import digest
from verl_turnkey.envs.tools import read_results, read_tools

Info = dict[str, Any]
"""``state_key`` (str, int or None), ``admissible`` (list of str or None), ``success`` (bool or None), ``invalid``,
``task``, and where there are any ``images`` (arrays of (height, width, 3) bytes), their ``images_key`` (see
:attr:`Answer.images_key`), ``extra`` (plain values), ``tools`` (of a reset, and of a step that changes them) and
``results`` (of a step), see ``envs.tools``, ``outcome`` and ``rewards`` (role -> number, of a step of an environment
that declares roles), and ``turn_limit`` and ``roles`` (of a reset in a host), see ``base.turn_limit`` and
``base.declared_roles``; the agent loop adds a ``note``, see :attr:`Answer.text`"""

KEYS = ("state_key", "admissible", "task", "success", "won", "invalid", "images", "extra", "tools")
"""the keys of ``info`` that are read from any environment"""
_LARGEST = sys.float_info.max
MOST_PIXELS = 2**26
"""in all images of an answer, or of a request: a kilobyte of PNG can become a hundred megabytes"""
DECLARED = "the roles in the class's metadata, such as metadata = {'roles': ['first', 'second']}"


@dataclass(frozen=True)
class Fault:
    """What is wrong with an answer; ``property`` as ``turnkey env-check`` calls it."""

    property: str
    message: str


@dataclass
class Answer:
    """An answer in plain types; an invalid part has a neutral value."""

    observation: str = ""
    info: Info = field(default_factory=dict)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    faults: list[Fault] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What the agent is shown: the observation, and the agent loop's ``note`` on calls that never ran."""
        note = self.info.get("note")
        return f"{self.observation}\n{note}" if note else self.observation

    @property
    def state_key(self) -> str | int | None:
        return self.info["state_key"]

    @property
    def images_key(self) -> str:
        """A hash of the images' content: equal for equal images in equal order; empty without images."""
        return self.info.get("images_key", "")

    @property
    def observation_key(self) -> str:
        """Identifies what the agent sees: the text, and the content of the images."""
        return f"{self.observation}\n[images {self.images_key}]" if self.images_key else self.observation

    @property
    def anchor(self) -> str | int:
        """The key by which methods compare states: the environment's, else what the agent sees."""
        return self.observation_key if self.state_key is None else self.state_key

    def add_state(self, further: str) -> None:
        """Add ``further``, a state outside the environment, to the key; it replaces what was added before.

        A copy of ``info`` still has the environment's own key.
        """
        self.info["state_key"] = digest(self.info.setdefault("env_state_key", self.anchor), further)

    @property
    def admissible(self) -> list[str] | None:
        return self.info["admissible"]

    @property
    def success(self) -> bool | None:
        return self.info["success"]

    @property
    def invalid(self) -> bool:
        return self.info["invalid"]

    @property
    def role(self) -> Any:
        """Whose move it is; None: the environment has no roles."""
        return self.info.get("extra", {}).get("role")

    @property
    def paid(self) -> dict[str, float]:
        """What the step and the end of the episode pay each role on its last turn, beside the mover's reward."""
        outcome, rewards = self.info.get("outcome", {}), self.info.get("rewards", {})
        return {role: rewards.get(role, 0.0) + outcome.get(role, 0.0) for role in {**rewards, **outcome}}


def read_reset(answer: Any, roles: Sequence[str] = ()) -> Answer | Fault:
    """What ``reset`` returned, (observation, info); a fault when it has another form.

    ``roles``: those that the environment declares.
    """
    if not (isinstance(answer, tuple) and len(answer) == 2):
        return Fault("runs", f"reset must return (observation, info), not {short_repr(answer)}")
    output = _read(answer[0], answer[1])
    _check_roles(output, {}, roles)
    return output


def read_step(answer: Any, roles: Sequence[str] = ()) -> Answer | Fault:
    """What ``step`` returned, (observation, reward, terminated, truncated, info); a fault when it has another form.

    ``roles``: those that the environment declares.
    """
    if not (isinstance(answer, tuple) and len(answer) == 5):
        return Fault(
            "runs", f"step must return (observation, reward, terminated, truncated, info), not {short_repr(answer)}"
        )
    observation, reward, terminated, truncated, info = answer
    output = _read(observation, info, results=read_results)
    try:
        output.reward = finite_reward(reward, "a reward")
    except ValueError as error:
        output.reward = math.nan
        output.faults.append(Fault("reward", str(error)))
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not _is_bool(flag):
            output.faults.append(Fault("flags", f"{name} must be a bool, not {short_repr(flag)}"))
    output.terminated, output.truncated = terminated is not None and bool(terminated), bool(truncated)
    _check_roles(output, info if isinstance(info, Mapping) else {}, roles)
    return output


def _check_roles(answer: Answer, info: Mapping[str, Any], roles: Sequence[str]) -> None:
    """Add to ``answer`` what ``info`` pays by role, and the faults in it and in the role that it names."""

    def fault(what: str) -> None:
        declared = f"metadata['roles'] declares {', '.join(map(repr, roles))}" if roles else f"declare {DECLARED}"
        answer.faults.append(Fault("roles", f"{what}: {declared}"))

    role = answer.role
    if not (role is None or isinstance(role, str | int | float)):
        fault(f"info['extra']['role'] must be a text or a number, not {short_repr(role)}")
    elif roles and role not in roles and not (role is None and (answer.terminated or answer.truncated)):
        fault(f"info['extra']['role'] must say whose move it is, not {role!r}")
    for key in ("outcome", "rewards"):
        numbers = info.get(key)
        if not isinstance(numbers, Mapping) or (not roles and role not in numbers):
            if roles and numbers is not None:
                fault(f"info['{key}'] must be a dict of role and number, not {short_repr(numbers)}")
            continue  # a key of an environment's own, without roles
        if unknown := [name for name in numbers if name not in roles]:
            fault(f"info['{key}'] pays {unknown[0]!r}")
            continue
        try:
            read = {name: finite_reward(value, f"info['{key}'][{name!r}]") for name, value in numbers.items()}
            answer.info[key] = read
        except ValueError as error:
            answer.faults.append(Fault("reward", str(error)))


def plain_text(value: Any) -> str:
    """As a plain str (of a subclass, such as numpy's, only the text), with no half surrogate pair: UTF-8 has none."""
    return str.__str__(str(value)).encode("utf-8", "replace").decode("utf-8")


def read_json(text: str, **options: Any) -> Any:
    """The value of a JSON text, with no half surrogate pair; ``options``: of ``json.loads``, which raises."""
    text = plain_text(text)
    value = json.loads(text, **options)
    if "\\ud" not in text.lower():
        return value
    return json.loads(plain_text(json.dumps(value, ensure_ascii=False)), **options)


def short_repr(value: Any) -> str:
    """Type and beginning of an unexpected value."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else f'{text[:80]}... ({len(text)} characters)'}"


def first_difference(left: str, right: str) -> int:
    """Where two texts differ first; where one begins the other, the length of the shorter one."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _read(observation: Any, info: Any, **further: Callable[[Any], Any]) -> Answer:
    """``further``: readers of keys of ``info`` that not every answer has."""
    faults: list[Fault] = []
    if not isinstance(observation, str):
        faults.append(Fault("observation", f"an observation must be text, not {short_repr(observation)}"))
        observation = repr(observation)[:1000]
    readers = {"images": _images, "extra": lambda value: plain_values(value, "info['extra']"), "tools": read_tools}
    readers |= further
    return Answer(plain_text(observation), _info(info, faults, readers), faults=faults)


def finite_reward(value: Any, what: str) -> float:
    """A reward as a float. Raises ValueError, which calls it ``what``."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, not {short_repr(value)}")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"{what} must be at most 1e18 in size, not {short_repr(value)}")
    return number


def _info(info: Any, faults: list[Fault], readers: Mapping[str, Callable[[Any], Any]]) -> Info:
    """The keys that prompts and credit assignment read, in plain types; ``readers``: how to read the optional ones."""

    def fault(what: str, property: str = "info") -> None:
        faults.append(Fault(property, what))

    if not isinstance(info, Mapping):
        fault(f"info must be a dict, not {short_repr(info)}")
        info = {}
    key, admissible, task = info.get("state_key"), info.get("admissible"), info.get("task")
    if isinstance(key, np.integer):
        key = int(key)
    if key is not None and (isinstance(key, bool) or not isinstance(key, str | int)):
        fault(f"info['state_key'] must be a str or an int, not {short_repr(key)}", "state_key")
        key = None
    if isinstance(admissible, np.ndarray):
        admissible = admissible.tolist()
    if admissible is not None and not (
        isinstance(admissible, list | tuple) and all(isinstance(action, str) for action in admissible)
    ):
        fault(f"info['admissible'] must be a list of str, not {short_repr(admissible)}")
        admissible = None
    if task is not None and not isinstance(task, str):
        fault(f"info['task'] must be text, not {short_repr(task)}")
        task = None
    flags: dict[str, bool | None] = {}
    for name in ("success", "won", "invalid"):
        flags[name] = info.get(name)
        if flags[name] is not None and not _is_bool(flags[name]):
            fault(f"info['{name}'] must be a bool, not {short_repr(flags[name])}")
            flags[name] = None
    success, won = flags["success"], flags["won"]  # won: verl-agent's name for it
    if success is not None and won is not None and bool(success) != bool(won):
        fault(
            f"info['success'] is {bool(success)} and info['won'] is {bool(won)}, two names for whether the task is "
            "solved: give one of them, or change both"
        )
        success = won = None
    success = won if success is None else success
    optional: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            if info.get(name) is not None:
                optional[name] = read(info[name])
        except (TypeError, ValueError) as error:
            fault(str(error))
    if optional.get("images"):
        optional["images_key"] = images_key(optional["images"])
    return {
        **{name: value for name, value in optional.items() if value},
        "state_key": plain_text(key) if isinstance(key, str) else key,
        "admissible": None if admissible is None else [plain_text(action) for action in admissible],
        "success": None if success is None else bool(success),
        "invalid": bool(flags["invalid"]),
        "task": plain_text(task or ""),
    }


def _images(images: Iterable[Any]) -> list[np.ndarray]:
    """Images as arrays of (height, width, 3) bytes.

    Raises:
        TypeError, ValueError: one is none of :data:`_IMAGES`, is not readable, or they have too many pixels together.
    """
    if isinstance(images, str | bytes | Path) or not isinstance(images, Iterable) or hasattr(images, "convert"):
        raise TypeError(f"info['images'] must be a list, not {short_repr(images)}")
    arrays: list[np.ndarray] = []
    left = MOST_PIXELS
    for image in images:
        arrays.append(_image(image, left))
        left -= arrays[-1].size // 3
    return arrays


_IMAGES = "uint8 arrays of shape (height, width, 3), PIL images, or bytes or paths of PNG and JPEG files"


def _image(image: Any, most_pixels: int) -> np.ndarray:
    if isinstance(image, str | Path | bytes):
        from PIL import Image, UnidentifiedImageError

        try:
            image = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=("PNG", "JPEG"))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ValueError(f"info['images'] must hold {_IMAGES}: {error}") from None
    height, width = (image.height, image.width) if hasattr(image, "convert") else (*np.shape(image), 1, 1)[:2]
    if width * height > most_pixels:
        raise ValueError(f"info['images'] must have at most {MOST_PIXELS} pixels together; one has {width} x {height}")
    try:
        # A copy: an environment may draw the next picture into the same memory.
        array = np.array(image.convert("RGB") if hasattr(image, "convert") else image, order="C")
    except (OSError, SyntaxError) as error:  # a file that ends early, or is damaged
        raise ValueError(f"info['images'] must hold {_IMAGES}: {error}") from None
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise TypeError(f"info['images'] must hold {_IMAGES}, not {type(image).__name__} {array.dtype} {array.shape}")
    return array


def images_key(images: Iterable[Any]) -> str:
    """See :attr:`Answer.images_key`."""
    content, arrays = hashlib.sha1(), _images(images)
    for image in arrays:
        content.update(repr(image.shape).encode())
        content.update(image.data)  # contiguous, see _image
    return content.hexdigest()[:16] if arrays else ""


def plain_values(value: Any, what: str) -> dict[str, Any]:
    """What reward functions receive, as JSON would hold it: no class of the environment's gets out.

    Raises:
        TypeError: it is not a mapping of plain values; calls it ``what``.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a dict, not {short_repr(value)}")
    return _plain(value, what)


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if type(value) in (int, float) and not -_LARGEST <= value <= _LARGEST:  # nan neither
        raise TypeError(f"{what} must hold finite numbers, not {short_repr(value)}")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, Mapping):
        return {plain_text(key): _plain(item, what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, what) for item in value]
    raise TypeError(f"{what} must hold numbers, texts, lists and dicts, not {short_repr(value)}")
