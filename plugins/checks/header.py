"""What a run will do, in a dozen lines before it starts; ``turnkey check`` prints the same and starts nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.files import training_loops
from verl_turnkey.plugins.checks.header_rollout import ROLLOUT
from verl_turnkey.plugins.checks.header_run import RUN
from verl_turnkey.plugins.checks.header_update import UPDATE, ignored
from verl_turnkey.plugins.checks.run import Run
from verl_turnkey.plugins.checks.selection import uses_us
from verl_turnkey.plugins.config.schema import turnkey_config

_WIDTH = 116
_WHOLE: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
"""so that keys and values can be copied"""


def header(config: DictConfig, warnings: Sequence[str] = ()) -> list[str]:
    """The lines; none for a run of stock verl.

    Args:
        config: a whole configuration that has passed the checks.
        warnings: what these had to say, shown at the end.
    """
    if not uses_us(config):
        return []
    loops, enabled = sorted(training_loops(config)), config.critic.enable
    # As verl.trainer.ppo.utils.need_critic decides, without its warning.
    use_critic = str(config.algorithm.adv_estimator) == "gae" if enabled is None else bool(enabled)
    run = Run(config, turnkey_config(config), loops, use_critic)
    entries = [(label, text) for label, line in (*RUN, *ROLLOUT, *UPDATE) if (text := line(run))]
    entries += [("ignored", text) for text in ignored(run)]
    entries += [("warning", text) for text in warnings]
    lines = [f"verl-turnkey {version('verl-turnkey')}: this run"]
    for label, text in entries:
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:<12} ", subsequent_indent=" " * 15, **_WHOLE)
    return lines
