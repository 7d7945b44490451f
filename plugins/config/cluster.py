"""Whether a run starts Ray on this machine or joins a running cluster."""

from __future__ import annotations

import os

from omegaconf import DictConfig, OmegaConf


def joins_cluster(config: DictConfig) -> bool:
    """Whether the run joins a running Ray cluster, so that files may be on its machines only."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return bool(address) and address != "local"
