"""Where a run is: on this machine, or in a Ray cluster that runs already."""

from __future__ import annotations

import os

from omegaconf import DictConfig, OmegaConf


def joins_cluster(config: DictConfig) -> bool:
    """Whether the run joins a running Ray cluster, so that files may be on its machines only."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return bool(address) and address != "local"
