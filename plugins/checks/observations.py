"""Driver checks of ``turnkey.update.observation_coefficient``: whether the rows hold observations, and one update."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.sizes import OURS
from verl_turnkey.plugins.config.schema import TurnkeyConfig, loss_of


def check_observations(config: DictConfig, turnkey: TurnkeyConfig, mode: str, loops: Collection[str]) -> None:
    """Refuse the term where no row has an observation between two turns, or an update is not a mean over the batch.

    ``mode`` is ``trainer.v1.trainer_mode``; ``loops``: those of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    if not turnkey.update.observation_coefficient:
        return
    key = f"turnkey.update.observation_coefficient={turnkey.update.observation_coefficient}"
    if not mode.startswith("turnkey_"):
        refuse(
            "observations-trainer",
            f"{key} needs a trainer that hands it to the actor, but trainer.v1.trainer_mode is {mode!r}: set "
            f"trainer.v1.trainer_mode=turnkey_{mode}",
        )
    if foreign := sorted(set(loops) - {OURS}):
        refuse(
            "observations-loop",
            f"{key} needs the agent loop {OURS}, which marks the tokens of observations, but the training rows are "
            f"played by {', '.join(foreign)}: set turnkey.update.observation_coefficient=0",
        )
    rollout = turnkey.rollout
    if not rollout.rows_hold_turns:
        refuse(
            "observations-rows",
            f"{key} learns the observations between the turns of a row, but turnkey.rollout.prompt={rollout.prompt} "
            f"turnkey.rollout.layout={rollout.layout} makes a row per turn: set turnkey.rollout.prompt=conversation "
            "turnkey.rollout.layout=merged",
        )
    if turnkey.update.order != "batch":
        parts = f"turnkey.update.order={turnkey.update.order}"
    elif (spec := loss_of(config)) is not None and spec.compares_groups:
        parts = f"the loss {spec.name}"
    else:
        return
    refuse(
        "observations-phases",
        f"{key} is a mean over the batch, but {parts} updates on parts of it: set "
        "turnkey.update.observation_coefficient=0",
    )
