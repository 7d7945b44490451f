"""A healthy environment, and one for every property of ``turnkey env-check`` that violates just this one.

``DEFECTS`` names the property and its status; the ids are ``defect/<class>-v0``. ``IN_PROCESSES`` are the defects that
only show (or can only be survived) when the environment runs in processes of its own.
"""

import copy
import itertools
import math
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

from verl_turnkey.envs.base import StepResult, TextEnv, digest

MOVES = {"left": -1, "right": 1}
COINS = {1: 0.25, 2: 0.5}


class Corridor(TextEnv):
    """Walk right to the goal, past two coins. The seed says how far it is."""

    def __init__(self) -> None:
        super().__init__(max_steps=30)
        self.taken: set[int] = set()

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self.goal, self.position = 4 + seed % 3, 0
        self.taken = set()
        return self.result(), f"Walk to {self.goal}."

    def act(self, action: str) -> StepResult:
        if action not in MOVES:
            return self.result(invalid=True)
        self.position = max(0, self.position + MOVES[action])
        reward = 0.0 if self.position in self.taken else COINS.get(self.position, 0.0)
        if reward:
            self.taken.add(self.position)
        arrived = self.position == self.goal
        return self.result(reward=1.0 if arrived else reward, terminated=arrived, success=arrived)

    def oracle(self) -> list[str] | None:
        return ["right"] * self.goal

    def result(self, **outcome: Any) -> StepResult:
        return StepResult(
            f"You stand at {self.position} of {self.goal}, with {len(self.taken)} coins.",
            digest(self.goal, self.position, sorted(self.taken)),
            list(MOVES),
            **outcome,
        )


def with_results(name: str, base: type[Corridor] = Corridor, **fields: Callable[[Any, StepResult], Any]) -> Any:
    """A corridor whose results have other ``fields``, made of the environment and its healthy result."""

    def result(self: Corridor, **outcome: Any) -> StepResult:
        healthy = base.result(self, **outcome)
        return replace(healthy, **{field: value(self, healthy) for field, value in fields.items()})

    return type(name, (base,), {"result": result, "__module__": __name__})


def with_answers(name: str, change: Callable[..., Any]) -> type[Corridor]:
    """A corridor whose steps return something else, made of the five parts of the healthy answer."""

    def step(self: Corridor, action: str) -> Any:
        return change(*Corridor.step(self, action))

    return type(name, (Corridor,), {"step": step, "__module__": __name__})


def before_acting(name: str, do: Callable[[Corridor, str], Any]) -> type[Corridor]:
    """A corridor that does something else before it acts."""

    def act(self: Corridor, action: str) -> StepResult:
        do(self, action)
        return Corridor.act(self, action)

    return type(name, (Corridor,), {"act": act, "__module__": __name__})


def fail(error: BaseException) -> None:
    raise error


class _Numbered(Corridor):
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.numbers)


FRUIT = {"fig", "pear", "plum", "apple", "nut"}
TwoPlayers = with_results("TwoPlayers", extra=lambda env, _: {"role": env.position % 2})
UnknownPlayer = with_results(
    "UnknownPlayer", extra=lambda env, _: {"role": ("first", "third" if env.taken else "second")[env.position % 2]}
)
UnknownPlayer.metadata = {**Corridor.metadata, "roles": ["first", "second"]}
PaysAStranger = with_results(
    "PaysAStranger",
    extra=lambda *_: {"role": "first"},
    outcome=lambda env, seen: {"third": 1.0} if seen.success else {},
)
PaysAStranger.metadata = {**Corridor.metadata, "roles": ["first", "second"]}
NoText = with_results("NoText", observation=lambda env, seen: [env.position] if env.taken else seen.observation)
OrderOfASet = with_results("OrderOfASet", observation=lambda _, seen: f"{seen.observation} {' '.join({*FRUIT})}")
KeyIsATuple = with_results("KeyIsATuple", state_key=lambda env, _: (env.position, len(env.taken)))
NoKey = with_results("NoKey", state_key=lambda *_: None)
KeyIsAHash = with_results("KeyIsAHash", state_key=lambda _, seen: hash(seen.state_key))
CoarseKey = with_results("CoarseKey", state_key=lambda env, _: env.position // 2)
KeyIsTheTask = with_results("KeyIsTheTask", state_key=lambda env, _: env.goal)
KeyWithoutTheCoins = with_results(
    "KeyWithoutTheCoins",
    state_key=lambda env, _: f"{env.position} of {env.goal}",
    observation=lambda env, _: f"You stand at {env.position}.",
    reward=lambda env, seen: 0.0 if seen.invalid else 0.1 * len(env.taken),
)
# Healthy: the coins that are shown earn nothing and change nothing.
ShowsWhatDoesNotMatter = with_results(
    "ShowsWhatDoesNotMatter",
    state_key=lambda env, _: f"{env.position} of {env.goal}",
    reward=lambda _, seen: float(seen.success),
)
ListsUntilTheEnd = with_results("ListsUntilTheEnd", admissible=lambda _, seen: None if seen.success else [*MOVES])
NotANumber = with_results("NotANumber", reward=lambda env, seen: math.nan if env.position == 3 else seen.reward)
OffersTheImpossible = with_results("OffersTheImpossible", admissible=lambda *_: [*MOVES, "jump"])
OffersNothing = with_results("OffersNothing", admissible=lambda env, _: list(MOVES) if env.position < 3 else [])
# What can be done depends on something that the key leaves out.
KeyWithoutTheDoor = with_results(
    "KeyWithoutTheDoor",
    state_key=lambda env, _: env.position,
    admissible=lambda env, _: list(MOVES) if env.taken else ["right"],
)

KeyOfTheInstance = with_results(
    "KeyOfTheInstance", _Numbered, state_key=lambda env, seen: f"{env.number} {seen.state_key}"
)
ShortAnswer = with_answers("ShortAnswer", lambda *answer: answer[:4])
RewardInWords = with_answers("RewardInWords", lambda seen, reward, *rest: (seen, str(reward), *rest))
BothFlags = with_answers("BothFlags", lambda seen, reward, end, cut, info: (seen, reward, end, end or cut, info))
NumpysFlags = with_answers(
    "NumpysFlags", lambda seen, reward, end, cut, info: (seen, np.float64(reward), np.bool_(end), np.bool_(cut), info)
)
SuccessInWords = with_answers(
    "SuccessInWords", lambda *answer: (*answer[:4], {**answer[4], "success": "yes" if answer[4]["success"] else ""})
)
KnowsMore = with_answers("KnowsMore", lambda *answer: (*answer[:4], {**answer[4], "valid": True, "reward": 1.0}))
ShowsImage = with_answers("ShowsImage", lambda *answer: (*answer[:4], {**answer[4], "image": "corridor.png"}))
KeyOnlyAtTheStart = with_answers(
    "KeyOnlyAtTheStart", lambda *answer: (*answer[:4], {k: v for k, v in answer[4].items() if k != "state_key"})
)
Raises = before_acting("Raises", lambda env, _: env.position == 2 and fail(KeyError("no such room")))
Exits = before_acting("Exits", lambda *_: fail(SystemExit(3)))
RaisesOnOtherText = before_acting("RaisesOnOtherText", lambda _, text: text not in MOVES and fail(ValueError("what?")))
RaisesOnLongText = before_acting("RaisesOnLongText", lambda _, text: len(text) > 1000 and fail(ValueError("too long")))
Slow = before_acting("Slow", lambda env, _: time.sleep(0.05 * (env.position == 3)))
Hangs = before_acting("Hangs", lambda env, _: time.sleep(3600 * (env.position == 2)))
GlobalRandom = before_acting("GlobalRandom", lambda *_: random.random())
Prints = before_acting("Prints", lambda _, action: print("step", action[:10]))
PrintsFromC = before_acting("PrintsFromC", lambda *_: os.write(1, b"libgame says hello\n"))
CRY = b"assertion failed in game.c"
Dies = before_acting(
    "Dies", lambda env, _: env.position == 2 and os.write(2, CRY) and os.kill(os.getpid(), signal.SIGABRT)
)


class Unmakeable(Corridor):
    def __init__(self) -> None:
        raise RuntimeError("found 0 games")


class CannotClose(Corridor):
    def close(self) -> None:
        raise OSError("still in use")


class NoGenerator(Corridor):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        answer = super().reset(seed=seed)
        self._np_random = None
        return answer


class NarrowSpace(Corridor):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Text(5)


class GoesOn(Corridor):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._running = True
        return super().step(action)


class AnotherTask(Corridor):
    """The wording of the task is drawn from something that the seed does not rule."""

    wordings = itertools.count()

    def begin(self, seed: int) -> tuple[StepResult, str]:
        result, task = super().begin(seed)
        return result, f"{task} ({next(self.wordings)})"


class InstancesDiffer(_Numbered):
    def act(self, action: str) -> StepResult:
        result = super().act(action)
        return replace(result, observation=f"{result.observation} The wind is {self.number}.")


class DoorsOfAll(Corridor):
    """A door that any instance opened is open in all episodes of the process."""

    doors: ClassVar[list[str]] = [f"open {door}" for door in "abcd"]
    opened: ClassVar[set[str]] = set()

    def act(self, action: str) -> StepResult:
        if action not in self.doors:
            return super().act(action)
        seen = replace(self.result(), observation="It was open." if action in self.opened else "It opens.")
        self.opened.add(action)
        return seen

    def result(self, **outcome: Any) -> StepResult:
        return replace(super().result(**outcome), admissible=[*MOVES, *self.doors])


class KeepsCoins(Corridor):
    """Coins that an earlier episode took stay taken."""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        taken = self.taken
        answer = super().begin(seed)
        self.taken = taken
        return (self.result(), answer[1])


class OneStart(Corridor):
    def begin(self, seed: int) -> tuple[StepResult, str]:
        return super().begin(0)


class Drawn(NoKey):
    """Says the same everywhere: only a picture tells where it is."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return self._drawn(*super().reset(seed=seed))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, *rest, info = super().step(action)
        return self._drawn(observation, *rest, info)

    def _drawn(self, observation: str, *rest: Any) -> Any:
        *flags, info = rest
        picture = np.zeros((1, 16, 3), np.uint8)
        picture[0, :3, 0] = self.goal, self.position, len(self.taken)
        return "You see:", *flags, {**info, "images": [picture]}


class DrawnByTime(Corridor):
    """The picture has a clock in it."""

    def result(self, **outcome: Any) -> StepResult:
        return replace(super().result(**outcome), images=[np.full((1, 16, 3), self._running * self._steps, np.uint8)])


class KeyCountsSteps(Corridor):
    def result(self, **outcome: Any) -> StepResult:
        result = super().result(**outcome)
        return replace(result, state_key=f"{self._steps} {result.state_key}")

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self._steps = -1
        return super().begin(seed)


class KeyCountsMoves(Corridor):
    """An invalid action leaves the key as it was."""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self._moves = 0
        return super().begin(seed)

    def act(self, action: str) -> StepResult:
        self._moves += action in MOVES
        return super().act(action)

    def result(self, **outcome: Any) -> StepResult:
        result = super().result(**outcome)
        return replace(result, state_key=f"{self._moves} {result.state_key}")


class RunningSum(Corridor):
    def begin(self, seed: int) -> tuple[StepResult, str]:
        self.score = 0.0
        return super().begin(seed)

    def act(self, action: str) -> StepResult:
        result = super().act(action)
        self.score += result.reward
        return replace(result, reward=self.score)


class RunningSumAndHardToProbe(RunningSum):
    """An action that means nothing ends the episode, so that none can be tried after a reward."""

    def act(self, action: str) -> StepResult:
        if action not in MOVES:
            return self.result(invalid=True, terminated=True)
        return super().act(action)


class SpeaksItsOwnLanguage(Corridor):
    """Nothing tells which texts are actions."""

    def act(self, action: str) -> StepResult:
        return self.result(invalid=True)

    def oracle(self) -> list[str] | None:
        return None

    def result(self, **outcome: Any) -> StepResult:
        return replace(super().result(**outcome), admissible=None)


class KnownToItsOracle(_Numbered):
    """No drawn text is an action, and an action shows what differs between instances."""

    def act(self, action: str) -> StepResult:
        return super().act("right") if action in ("fjord", "fjell") else self.result(invalid=True)

    def oracle(self) -> list[str] | None:
        return ["fjord"] * (self.goal - 1) + ["fjell"]

    def result(self, **outcome: Any) -> StepResult:
        wind = f" The wind is {self.number}." if self.position else ""
        healthy = super().result(**outcome)
        return replace(healthy, observation=healthy.observation + wind, admissible=None)


class UnlistedMoves(Corridor):
    """No list and no text names an action, and the oracle takes one alone: what ``left`` does is not seen."""

    def result(self, **outcome: Any) -> StepResult:
        return replace(super().result(**outcome), admissible=None)


class EitherWay(UnlistedMoves):
    """Healthy once both moves are named: the oracle takes one of them alone, which depends on the task."""

    def act(self, action: str) -> StepResult:
        return super().act({"left": "right", "right": "left"}.get(action, action) if self.goal % 2 else action)

    def oracle(self) -> list[str] | None:
        return ["left" if self.goal % 2 else "right"] * self.goal


class NamesOneMove(UnlistedMoves):
    def oracle(self) -> list[str] | None:
        return None

    def result(self, **outcome: Any) -> StepResult:
        seen = super().result(**outcome)
        return replace(seen, observation=f"{seen.observation} You may go right")


class OracleTakesBothMoves(UnlistedMoves):
    """Healthy."""

    def oracle(self) -> list[str] | None:
        return ["right", "left"] + ["right"] * self.goal


class Quiz(UnlistedMoves):
    """Healthy: one question, of one step, and any text is an answer to it."""

    def act(self, action: str) -> StepResult:
        right = action == str(self.goal)
        seen = self.result(reward=float(right), success=right, terminated=True)
        return replace(seen, observation="Right." if right else "Wrong.")

    def oracle(self) -> list[str] | None:
        return [str(self.goal)]


class Boxed(UnlistedMoves):
    """Healthy: one question, of one step, and only an answer in the right form is valid."""

    def act(self, action: str) -> StepResult:
        answer = re.fullmatch(r"\\boxed{(\d+)}", action)
        right = answer is not None and int(answer[1]) == self.goal
        return self.result(reward=float(right), success=right, terminated=True, invalid=answer is None)

    def oracle(self) -> list[str] | None:
        return [f"\\boxed{{{self.goal}}}"]


class LimitedSessions(OracleTakesBothMoves):
    """Its server has no session for a third instance."""

    sessions = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.session = next(self.sessions)

    def begin(self, seed: int) -> tuple[StepResult, str]:
        if self.session > 1:
            raise OSError("no session left")
        return super().begin(seed)


class LogsMoves(Corridor):
    """Healthy: the observation ends with a log of all moves, but only the place and the coins matter."""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self.moves: list[str] = []
        return super().begin(seed)

    def act(self, action: str) -> StepResult:
        self.moves += [action] * (action in (*MOVES, "wait"))
        return self.result() if action == "wait" else super().act(action)

    def result(self, **outcome: Any) -> StepResult:
        seen, moves = super().result(**outcome), " ".join(self.moves)
        return replace(seen, observation=f"{seen.observation} Moves so far: {moves}", admissible=[*MOVES, "wait"])


class Leaps(UnlistedMoves):
    """Its oracle takes one step."""

    def act(self, action: str) -> StepResult:
        match action.split():
            case ["leap", place] if place.isdecimal():
                self.position = int(place[:2])
                arrived = self.position == self.goal
                return self.result(reward=float(arrived), terminated=arrived, success=arrived)
        return super().act(action)

    def oracle(self) -> list[str] | None:
        return [f"leap {self.goal}"]


class StaysTired(Leaps):
    """An agent that moved in one episode is tired after the first step of the next."""

    metadata: ClassVar[dict[str, Any]] = {**Corridor.metadata, "thread_safe": True}
    tired = False

    def act(self, action: str) -> StepResult:
        result, tired = super().act(action), self.tired
        if result.invalid or result.terminated:
            return result
        self.tired = True
        return replace(result, observation="You are tired.") if tired else result


class TiresAll(OracleTakesBothMoves):
    """After a move in any episode of the process agents are tired in all of them; no first episode has a move."""

    moves: ClassVar[list[str]] = []

    def act(self, action: str) -> StepResult:
        result, tired = super().act(action), bool(self.moves)
        if result.invalid or result.terminated:
            return result
        self.moves.append(action)
        return replace(result, observation="You are tired.") if tired else result


class TellsTheStep(Corridor):
    """Healthy: the key has no step number, but observations and rewards depend on it."""

    def act(self, action: str) -> StepResult:
        result = super().act(action)
        late = result.reward * 0.99**self._steps
        return replace(result, observation=f"Step {self._steps}: {result.observation}", reward=late)


class HiddenGoal(Corridor):
    """Healthy: what the seed says shows at the end."""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        return super().begin(seed)[0], "Walk."

    def result(self, **outcome: Any) -> StepResult:
        return StepResult(
            f"You stand at {self.position}.", digest(self.position, sorted(self.taken)), list(MOVES), **outcome
        )


class MovesByAnyText(Corridor):
    def act(self, action: str) -> StepResult:
        return super().act(action if action in MOVES else "right")


class WithoutSpaces(Corridor):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = self.action_space = None


class OracleOfNumbers(Corridor):
    def oracle(self) -> Any:
        return [1] * self.goal


class OracleOfOneText(Corridor):
    def oracle(self) -> Any:
        return "right"


class BadOracle(Corridor):
    def oracle(self) -> list[str] | None:
        return ["right"] * (self.goal - 1)


class GlobalRandomAndThreads(GlobalRandom):
    metadata: ClassVar[dict[str, Any]] = {**Corridor.metadata, "thread_safe": True}


class SharedPosition(Corridor):
    """Says that it may run in threads; all instances stand at one place."""

    metadata: ClassVar[dict[str, Any]] = {**Corridor.metadata, "thread_safe": True}
    place: ClassVar[list[int]] = [0]

    @property
    def position(self) -> int:
        return self.place[0]

    @position.setter
    def position(self, value: int) -> None:
        self.place[0] = value
        time.sleep(0.0005)  # the others' turn


class Greedy(Corridor):
    metadata: ClassVar[dict[str, Any]] = {**Corridor.metadata, "memory_mb": 5}


class DiesElsewhere(Corridor):
    """The second process that plays finds no port, no licence, no lock."""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        if os.environ["PYTHONHASHSEED"] != "0":
            os._exit(9)
        return super().begin(seed)


class AloneInTheWorld(Corridor):
    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("PYTHONHASHSEED") == "1":
            raise OSError("the port is taken")


class Copied(Corridor):
    """Healthy, and copied by a deep copy."""

    metadata: ClassVar[dict[str, Any]] = {**Corridor.metadata, "thread_safe": True, "deepcopy": True}


class CopyForgets(Copied):
    """Its copy stands at the start."""

    def clone(self) -> Corridor:
        copy = type(self)()
        copy.reset(seed=0)
        return copy


class CopyShares(SharedPosition):
    """A step of a copy moves what it was copied from."""

    def __init__(self) -> None:
        super().__init__()
        self.place = [0]  # an instance's own, but for its copies

    def clone(self) -> Corridor:
        return copy.copy(self)


class CannotBeCopied(Copied):
    def clone(self) -> Corridor:
        raise TypeError("cannot pickle a socket")


class PositionOfTheThread(Corridor):
    """Healthy in threads of their own; two instances in one thread, as a clone and its original, stand at one place."""

    metadata: ClassVar[dict[str, Any]] = {**Corridor.metadata, "thread_safe": True}
    place: ClassVar[threading.local] = threading.local()

    @property
    def position(self) -> int:
        return getattr(self.place, "position", 0)

    @position.setter
    def position(self, value: int) -> None:
        self.place.position = value


class PositionInAFile(Corridor):
    """All processes of a check stand at one place, so that a clone's reset moves the original."""

    @property
    def position(self) -> int:
        return int(self._file.read_text() or 0)

    @position.setter
    def position(self, value: int) -> None:
        self._file.write_text(str(value))

    @property
    def _file(self) -> Path:
        return Path(tempfile.gettempdir()) / f"corridor-{os.getppid()}"


class OneThreadOnly(Corridor):
    """Says that it may run in threads, and remembers which one it was made in."""

    metadata: ClassVar[dict[str, Any]] = {**Corridor.metadata, "thread_safe": True}

    def __init__(self) -> None:
        super().__init__()
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("make me in the main thread")


# class, property, status, words in the evidence
DEFECTS: tuple[tuple[type[Corridor], str, str, str], ...] = (
    (Unmakeable, "makes", "fail", "RuntimeError: 'found 0 games'"),
    (Raises, "runs", "fail", "step('right') (seed 0, step 2) raised KeyError: \"'no such room'\" (defective_envs"),
    (Exits, "runs", "fail", "SystemExit"),
    (ShortAnswer, "runs", "fail", "step must return (observation, reward"),
    (CannotClose, "runs", "fail", "close() raised OSError: 'still in use'"),
    (RaisesOnLongText, "any_text", "fail", "); correct step(), or, if this text is not a valid action, return"),
    (Slow, "deadline", "fail", "s of 0.04 s: raise turnkey.env.reset_timeout or step_timeout"),
    (
        NoGenerator,
        "gymnasium",
        "fail",
        "; reset(self, *, seed=None, options=None) must begin with super().reset(seed=seed)",
    ),
    (NarrowSpace, "gymnasium", "warn", "AnyText"),
    (NoText, "observation", "fail", "list [1]"),
    (ShowsImage, "info", "warn", "nothing reads info['image']; did you mean info['images']?"),
    (SuccessInWords, "info", "fail", "info['success'] must be a bool, not str"),
    (BothFlags, "flags", "fail", "are both set; set truncated only where"),
    (GoesOn, "after_end", "warn", "raise an exception"),
    (AnotherTask, "group", "fail", "the seed alone must decide: draw from self.np_random, and use no clock"),
    (InstancesDiffer, "seed", "fail", "wind is"),
    (KnownToItsOracle, "seed", "fail", "after action 1 'fjord'"),
    (KeepsCoins, "reuse", "fail", "with 0 coins"),
    (OneStart, "seeds_differ", "warn", "one start, and no difference was seen with these actions: either"),
    (KeyIsATuple, "state_key", "fail", "tuple (0, 0)"),
    (NoKey, "state_key", "warn", "the text of observations is compared"),
    (Drawn, "state_key", "warn", "the text and images of observations are compared"),
    (DrawnByTime, "images", "warn", "is drawn in two ways"),
    (KeyOnlyAtTheStart, "state_key", "fail", "answers: return it after every reset and step"),
    (KeyOfTheInstance, "key_stable", "fail", "another instance"),
    (CoarseKey, "key_coarse", "warn", "does not always lead"),
    (KeyIsTheTask, "key_coarse", "warn", "the key never changes in an episode, though rollouts differ (seed "),
    (KeyWithoutTheCoins, "key_coarse", "warn", "gives reward "),
    (KeyWithoutTheDoor, "key_coarse", "warn", "two sets of admissible actions: add to the key what"),
    (KeyCountsSteps, "key_repeats", "warn", "a counter in it?"),
    (KeyCountsMoves, "key_repeats", "warn", "a step number in it?"),
    (TwoPlayers, "roles", "warn", "an episode of the roles 0, 1: declare them in metadata['roles']"),
    (
        UnknownPlayer,
        "roles",
        "fail",
        "must say whose move it is, not 'third': metadata['roles'] declares 'first', 'second'",
    ),
    (PaysAStranger, "roles", "fail", "info['outcome'] pays 'third'"),
    (NotANumber, "reward", "fail", "must be a finite number, not float nan"),
    (RewardInWords, "reward", "fail", "str"),
    (RunningSum, "reward_per_step", "fail", "[0.25, 0.75] earned the same again: if this is a running sum, return"),
    (RunningSumAndHardToProbe, "reward_per_step", "warn", "never fall: if this is a running sum, return what the step"),
    (OffersTheImpossible, "admissible", "fail", "'jump' is in admissible and came back as invalid: accept it, or"),
    (SpeaksItsOwnLanguage, "admissible", "warn", "words and numbers drawn was a valid action"),
    (NamesOneMove, "admissible", "warn", "no episode had two distinct valid actions ('right'), so little of"),
    (Leaps, "admissible", "warn", "the only valid actions played were those of oracle(), one per task ('leap "),
    (OffersNothing, "admissible", "fail", "empty, the episode goes on: end the episode, or list what can be done"),
    (
        MovesByAnyText,
        "invalid_text",
        "fail",
        "was not flagged and earned 0.25: change nothing, and set info['invalid']",
    ),
    (OracleOfNumbers, "oracle", "fail", "oracle() (seed 0) must return a list of str, or None, not list [1, 1, 1, 1]"),
    (OracleOfOneText, "oracle", "fail", "oracle() (seed 0) must return a list of str, or None, not str 'right'"),
    (BadOracle, "oracle", "fail", "success=False, terminated=False, reward 0; correct oracle(), or let the step"),
    (GlobalRandom, "global_rng", "warn", "random in step("),
    (GlobalRandomAndThreads, "global_rng", "fail", "thread_safe must be False"),
    (Prints, "stdout", "warn", "step "),
    (CopyForgets, "clone", "fail", "a clone made half-way, seed"),
    (CopyShares, "clone", "fail", "made by a copy, which must take everything along and share nothing"),
    (CannotBeCopied, "clone", "fail", "a clone made half-way raised TypeError"),
    (PositionOfTheThread, "clone", "fail", "made by a reset and a replay, which must"),
    (OneThreadOnly, "threads", "fail", "make me in the main thread"),
    (SharedPosition, "threads", "fail", "thread_safe'] must be False"),
)
IN_PROCESSES: tuple[tuple[type[Corridor], str, str, str], ...] = (
    (OrderOfASet, "processes", "fail", "PYTHONHASHSEED=1"),
    (TiresAll, "reuse", "fail", "then 'You are tired.'; reset must restore everything, even what instances share"),
    (KeyIsAHash, "key_stable", "fail", "PYTHONHASHSEED=1"),
    (DiesElsewhere, "processes", "fail", "exit status 9"),
    (PositionInAFile, "clone", "fail", "what was cloned half-way, seed"),
    (AloneInTheWorld, "processes", "fail", "the port is taken"),
    (PrintsFromC, "stdout", "warn", "libgame says hello"),
    (Greedy, "memory", "warn", "of 5 MB declared"),
    (Hangs, "deadline", "fail", "turnkey.env.step_timeout"),
    (Dies, "runs", "fail", "signal SIGABRT"),
)

HEALTHY = (
    Boxed,
    Copied,
    HiddenGoal,
    KnowsMore,
    ListsUntilTheEnd,
    LogsMoves,
    NumpysFlags,
    OracleTakesBothMoves,
    Quiz,
    ShowsWhatDoesNotMatter,
    TellsTheStep,
)
OTHERS = (Corridor, DoorsOfAll, EitherWay, LimitedSessions, RaisesOnOtherText, StaysTired)
for _env in (*OTHERS, *HEALTHY, *(env for env, *_ in (*DEFECTS, *IN_PROCESSES))):
    if f"defect/{_env.__name__}-v0" not in gymnasium.registry:
        gymnasium.register(f"defect/{_env.__name__}-v0", entry_point=_env)
