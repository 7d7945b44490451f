"""Groups of the episodes of a task, for rewards that compare them with each other.

The rollouts of a task run in one event loop. Each joins its group before it begins, and leaves it when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Protocol

from verl_turnkey.envs.rewards.components import Steps, at_the_end

Ranking = tuple[Mapping[str, float], int]
"""the reward of each episode of a group by its name, and how many calls that took"""


class OfGroup(Protocol):
    """A component that is computed once for a whole group."""

    def of_group(self, members: Mapping[str, Steps]) -> Awaitable[Ranking]: ...


class Group:
    """The episodes of one task."""

    def __init__(self) -> None:
        self.open_members = 0
        self.whole = asyncio.Event()
        self._playing: set[str] = set()
        self._ended: dict[str, Steps] = {}
        self._rankings: dict[str, asyncio.Future[Ranking]] = {}

    def enter(self, name: str) -> None:
        self.open_members += 1
        self._playing.add(name)

    def leave(self, name: str) -> None:
        self._playing.discard(name)
        if not self._playing:
            self.whole.set()

    async def ranking(self, label: str, name: str, steps: Steps, component: OfGroup) -> Ranking:
        """That of all episodes that ended well, once the last one of the group has ended."""
        self._ended[name] = steps
        self.leave(name)
        await self.whole.wait()
        if label not in self._rankings:
            self._rankings[label] = asyncio.ensure_future(component.of_group(dict(self._ended)))
        return await asyncio.shield(self._rankings[label])  # a cancelled waiter does not cancel it for the others


class GroupMember:
    """An episode as a member of its group."""

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self.calls: dict[str, float] = {}
        """label of a component -> the episode's share of its calls"""
        group.enter(name)

    async def values(self, label: str, component: OfGroup, steps: Steps) -> list[float]:
        """The reward of the episode in its group, on its last step."""
        rewards, calls = await self._group.ranking(label, self._name, steps, component)
        self.calls[label] = calls / len(rewards)
        return at_the_end(steps, rewards[self._name])

    def leave(self) -> None:
        """The episode has ended, well or not."""
        self._group.leave(self._name)
        self._group.open_members -= 1


class Groups:
    """The groups whose episodes play now, by a key of their own."""

    def __init__(self) -> None:
        self._open: dict[str, Group] = {}

    def join(self, key: str, name: str) -> GroupMember:
        """Make episode ``name`` a member of group ``key``; all of its episodes must join before the first one ends."""
        self._open = {k: group for k, group in self._open.items() if group.open_members}
        group = self._open.get(key)
        if group is None or group.whole.is_set():  # an earlier group under the same key
            group = self._open[key] = Group()
        return GroupMember(group, name)

    seat = join
    """its former name"""


Seat = GroupMember
"""its former name"""
