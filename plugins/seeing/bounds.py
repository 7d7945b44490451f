"""How much of a run the trajectory log keeps: decided alike by every process, without talking."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

from verl_turnkey.plugins.seeing.reading import STEP


def chosen(group: str, share: float) -> bool:
    """Whether the group ``group`` (verl's uid) belongs to the ``share`` of all groups that is logged.

    All its episodes do or none: they are compared with each other.
    """
    place = sha256(group.encode("utf-8", "backslashreplace")).digest()[:8]
    return int.from_bytes(place, "big") < share * 2**64


def share_of(share: float, episodes_per_step: int | None, batch_size: int, n: int) -> float:
    """The share of groups such that a step of ``batch_size`` groups of ``n`` has about ``episodes_per_step`` of them.

    At least a group's share, so that a step is not without any on average; at most ``share``. None: no further bound.
    """
    if episodes_per_step is None:
        return share
    return min(share, max(n, episodes_per_step) / (batch_size * n))


def keep_texts(folder: str | Path, step: int, last: int = 20, every: int = 10) -> list[int]:
    """Delete the texts of steps before ``step`` except the ``last`` ones and every ``every``-th; their numbers stay.

    Returns the steps whose texts were deleted. Files that cannot be deleted stay, as do those of no step.
    """
    deleted = []
    texts = Path(folder) / "texts"
    for path in texts.iterdir() if texts.is_dir() else ():
        found = STEP.fullmatch(path.name)
        if found and int(found[1]) <= step - last and int(found[1]) % every:
            shutil.rmtree(path, ignore_errors=True)
            deleted.append(int(found[1]))
    return sorted(deleted)
