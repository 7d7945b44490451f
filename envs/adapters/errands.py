"""Errands in a house: fetch what somebody in the hall wants, in words and with rules that fit on a screen.

A hall with rooms around it. One hand: one thing at a time. An errand is done when the thing is given in the hall;
giving a thing that nobody there wants ends the episode. With ``hint=False`` and ``cupboards=True`` the agent has to
look for the thing and to remember what it has seen elsewhere.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count, words

ROOMS = ("attic", "bathroom", "bedroom", "cellar", "garage", "garden", "kitchen", "library", "office", "studio")
THINGS = (
    *("apple", "ball", "basket", "blanket", "book", "bottle", "brush", "camera", "candle", "clock", "coat", "cup"),
    *("hammer", "hat", "key", "knife", "lamp", "letter", "map", "mirror", "pen", "phone", "pillow", "plate"),
    *("ring", "rope", "shoe", "spoon", "towel", "umbrella"),
)
PEOPLE = ("Alice", "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Jack", "Maria", "Paul", "Sarah")
HALL, CUPBOARD = "hall", "cupboard"


class ErrandsText(TextEnv):
    """Fetch things from the rooms of a house for the people in its hall.

    Actions: ``go ROOM``, ``go hall``, ``take THING``, ``drop THING`` (in a room), ``give THING`` (in the hall) and,
    with cupboards, ``open cupboard``. The seed determines the house.

    Args:
        rooms: around the hall, 2 to 10.
        things: in the rooms, at least as many as ``errands``, at most 30.
        errands: how many people want something, 1 to 12.
        hint: whether the task says in which room a thing is.
        cupboards: whether the things of a room are in a cupboard that is closed at first.
        max_steps: steps after which the episode is truncated.

    The reward is ``1 / errands`` for each thing that is given to the person who wants it, and ``success`` means that
    all errands are done. ``state_key`` is a hash of the task, all things, cupboards, the place and the hand.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "thread_safe": True, "memory_mb": 1}

    def __init__(
        self,
        rooms: int = 3,
        things: int = 4,
        errands: int = 1,
        hint: bool = True,
        cupboards: bool = False,
        max_steps: int | None = 8,
    ) -> None:
        super().__init__(max_steps)
        for name, value, least, most in (
            ("rooms", rooms, 2, len(ROOMS)),
            ("errands", errands, 1, len(PEOPLE)),
            ("things", things, 1, len(THINGS)),
        ):
            check(is_count(value) and least <= value <= most, name, f"an integer from {least} to {most}", value)
        check(things >= errands, "things", f"at least as many as errands ({errands})", things)
        for name, flag in (("hint", hint), ("cupboards", cupboards)):
            check(isinstance(flag, bool), name, "true or false", flag)
        self._counts = (rooms, things, errands)
        self._hint, self._cupboards = hint, cupboards

    def begin(self, seed: int) -> tuple[StepResult, str]:
        rng = random.Random(seed)
        rooms, things, errands = self._counts
        self.rooms = rng.sample(ROOMS, rooms)
        self.location = {thing: self.rooms[i % rooms] for i, thing in enumerate(rng.sample(THINGS, things))}
        """room of each thing that is neither carried nor given away"""
        people = rng.sample(PEOPLE, errands)
        self.wanted = dict(zip(rng.sample(list(self.location), errands), people, strict=True))
        """person who waits for a thing, by thing"""
        self.closed = set(self.rooms) if self._cupboards else set()
        self.place, self.hand = HALL, None
        wishes = [
            f"{person} wants the {thing}{f' from the {self.location[thing]}' if self._hint else ''}."
            for thing, person in self.wanted.items()
        ]
        self._task = " ".join(wishes)
        return self._result(), self._task

    def act(self, action: str) -> StepResult:
        action = words(action).rstrip(".")
        if action not in self.actions():
            return self.refused()
        verb, _, noun = action.partition(" ")
        if verb == "go":
            self.place = noun
        elif verb == "open":
            self.closed.discard(self.place)
        elif verb == "take":
            self.hand = noun
            del self.location[noun]
        elif verb == "drop":
            self.hand, self.location[noun] = None, self.place
        else:
            return self._give(noun)
        return self._result()

    def actions(self) -> list[str]:
        """All possible actions."""
        if self.place == HALL:
            return [*(f"go {room}" for room in self.rooms), *([f"give {self.hand}"] if self.hand else [])]
        actions = [f"go {HALL}"]
        if self.place in self.closed:
            actions.append(f"open {CUPBOARD}")
        actions += [f"drop {self.hand}"] if self.hand else [f"take {thing}" for thing in self.visible()]
        return actions

    def visible(self) -> list[str]:
        """Things that can be seen from where the agent is."""
        if self.place in self.closed:
            return []
        return sorted(thing for thing, room in self.location.items() if room == self.place)

    def oracle(self) -> list[str] | None:
        plan: list[str] = []
        closed = set(self.closed)
        for thing in self.wanted:
            room = self.location[thing]
            plan += [f"go {room}", *([f"open {CUPBOARD}"] if room in closed else []), f"take {thing}"]
            plan += [f"go {HALL}", f"give {thing}"]
            closed.discard(room)
        return plan if self.max_steps is None or len(plan) <= self.max_steps else None

    def _give(self, thing: str) -> StepResult:
        self.hand = None
        person = self.wanted.pop(thing, None)
        if person is None:
            return self._result(f"Nobody here wants the {thing}. ", terminated=True)
        done = not self.wanted
        return self._result(f"{person} takes the {thing}. ", reward=1 / self._counts[2], terminated=done, success=done)

    def _result(self, event: str = "", **outcome: Any) -> StepResult:
        if self.place == HALL:
            *others, last = sorted(self.wanted.values()) or ["nobody"]
            people = f"{', '.join(others)} and {last}" if others else last
            place = f"You are in the hall with {people}. Doors: {', '.join(self.rooms)}."
        elif self.place in self.closed:
            place = f"You are in the {self.place}. Its cupboard is closed."
        else:
            place = f"You are in the {self.place}. You see: {', '.join(self.visible()) or 'nothing'}."
        observation = f"{event}{place} You carry {f'the {self.hand}' if self.hand else 'nothing'}."
        location, closed = sorted(self.location.items()), sorted(self.closed)
        key = digest(self._task, self.rooms, location, closed, sorted(self.wanted), self.place, self.hand)
        return StepResult(observation, key, None if outcome.get("terminated") else self.actions(), **outcome)
