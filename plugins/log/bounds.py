"""How much of a run the trajectory log keeps: decided alike by every process, without talking."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.log.schema import STEP


def chosen(group: str, share: float) -> bool:
    """Whether the group ``group`` (verl's uid) belongs to the ``share`` of all groups that is logged.

    All its episodes do or none: they are compared with each other.
    """
    place = sha256(group.encode("utf-8", "backslashreplace")).digest()[:8]
    return int.from_bytes(place, "big") < share * 2**64


class Shares(NamedTuple):
    """Of all groups, those that are logged."""

    training: float = 1.0
    validation: float = 1.0


def logged_shares(config: Mapping[str, Any]) -> Shares:
    """The shares of groups that a run with this configuration logs.

    ``turnkey.log.share``, and less where a step of ``data.train_batch_size`` groups, or a validation, has more than
    ``turnkey.log.episodes_per_step`` episodes; a group's share at least. A validation whose size the driver could not
    count is taken for as large as a step.
    """
    log, rollout = turnkey_config(config).log, config["actor_rollout_ref"]["rollout"]
    groups = int(config["data"]["train_batch_size"])

    def share(n: int, groups: int) -> float:
        if log.episodes_per_step is None:
            return log.share
        return min(log.share, max(n, log.episodes_per_step) / (n * groups))

    return Shares(
        share(int(rollout["n"]), groups), share(int(rollout["val_kwargs"]["n"]), log.validation_tasks or groups)
    )


def keep_texts(folder: str | Path, step: int, last: int = 20, every: int = 10) -> list[int]:
    """Delete texts and pictures of steps before ``step`` except the ``last`` ones and every ``every``-th.

    Returns the steps of which something was deleted. Files that cannot be deleted stay, as do those of no step.
    """
    deleted = set[int]()
    for path in Path(folder).glob("*/step=*"):
        name = STEP.fullmatch(path.name)
        if path.parent.name in ("texts", "pictures") and name and int(name[1]) <= step - last and int(name[1]) % every:
            shutil.rmtree(path, ignore_errors=True)
            deleted.add(int(name[1]))
    return sorted(deleted)
