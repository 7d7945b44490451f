"""Token ids of which each is stored once, however many prompts begin with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np


@dataclass(frozen=True, eq=False)
class SharedIds(Sequence[int]):
    """Ids that begin as an earlier sequence does; only the others are stored.

    An agent's prompts extend each other: as lists, those of an episode would take memory quadratic in its turns.

    Args:
        own: (L - shared,), int32, what follows the shared ids.
        before: the earlier sequence.
        shared: how many of its first ids these begin with.
    """

    own: np.ndarray
    before: SharedIds | None = None
    shared: int = 0

    @classmethod
    def of(cls, ids: Sequence[int], before: SharedIds | None = None) -> SharedIds:
        """``ids``, of which those that ``before`` begins with, too, are not stored again. Linear in both."""
        own = np.asarray(ids, np.int32)
        if before is None:
            return cls(own)
        length = min(len(own), len(before))
        differs = own[:length] != before._since(0)[:length]
        shared = int(differs.argmax()) if differs.any() else length
        return cls(own[shared:].copy(), before, shared) if shared else cls(own)

    def followed_by(self, ids: Sequence[int]) -> SharedIds:
        """These ids and then ``ids``."""
        return SharedIds(np.asarray(ids, np.int32), self, len(self))

    def __len__(self) -> int:
        return self.shared + len(self.own)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return int(self._since(0)[index])
        start, stop, step = index.indices(len(self))
        if step < 0:
            return self._since(0)[index].tolist()
        return self._since(start)[: max(0, stop - start) : step].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def _since(self, start: int) -> np.ndarray:
        """The ids from position ``start`` on."""
        parts: list[np.ndarray] = []
        ids, stop = self, len(self)
        while True:
            if stop > ids.shared:
                parts.append(ids.own[max(0, start - ids.shared) : stop - ids.shared])
                stop = ids.shared
            if stop <= start or ids.before is None:
                return np.concatenate(parts[::-1]) if parts else ids.own[:0]
            ids = ids.before
