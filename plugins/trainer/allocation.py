"""How often each task is played (``turnkey.groups.allocation``), and with how much of its hint.

verl's agent-loop worker plays a prompt ``__rollout_n__`` times if the prompt has this field. The histories of tasks
are in the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_turnkey.envs.tasks import HINT
from verl_turnkey.plugins.checks.files import ROLLOUTS
from verl_turnkey.plugins.config.checkpoint_files import GROUPS
from verl_turnkey.plugins.config.training import GroupsConfig
from verl_turnkey.plugins.credit.supplied import TASK_FIELDS, task_keys
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.rollout.columns import HINT_SHARE, hint_words
from verl_turnkey.plugins.trainer import credit_state
from verl_turnkey.plugins.trainer.allocation_rules import RULES, TaskHistory, hint_share, learn
from verl_turnkey.plugins.trainer.outcomes import Outcome, of_groups
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta


class Allocation:
    """The history of every played task, and the allocation that follows for the tasks of a batch."""

    def __init__(self, config: DictConfig, options: GroupsConfig) -> None:
        self._config, self._options = config, options
        self.histories: dict[str, TaskHistory] = {}
        """key of the task -> history"""
        self.metrics: dict[str, float] = {}
        """of the newest batch of prompts"""

    def allot(self, batch: TensorDict) -> None:
        """Write into ``batch`` how often each prompt is played, ``rollout.n`` on average, and its share of a hint."""
        groups, n = self._options, self._config.actor_rollout_ref.rollout.n
        if not groups.remembers:
            return
        fields = {name: list(tu.get(batch, name)) for name in TASK_FIELDS if name in batch.keys()}  # noqa: SIM118
        tasks = [self.histories.get(key) for key in task_keys(fields)]
        metrics = {"groups/known": float(np.mean([history is not None for history in tasks]))}
        if groups.allocation != "even":
            counts = RULES[groups.allocation](tasks, n * len(tasks), *groups.bounds(n))
            tu.assign_non_tensor_stack(batch, ROLLOUTS, counts)
            metrics |= {"groups/episodes/min": float(min(counts)), "groups/episodes/max": float(max(counts))}
        if groups.hint_high:
            texts = tu.get(batch, HINT) if HINT in batch.keys() else [""] * len(tasks)  # noqa: SIM118
            shares = [
                hint_share(history, groups.hint_low, groups.hint_high) if hint_words(text) else 0.0
                for history, text in zip(tasks, texts, strict=True)
            ]
            tu.assign_non_tensor_stack(batch, HINT_SHARE, shares)
            metrics["groups/hinted"] = float(np.mean([share > 0 for share in shares]))
        if len(tasks) > 1:  # a single replacement says little
            self.metrics = metrics

    def learn(self, batch: KVBatchMeta, by_group: Mapping[str, list[Outcome]]) -> None:
        """Remember how the groups of ``batch`` ended, including those that are not trained."""
        fields = of_groups(batch, by_group, (*TASK_FIELDS, HINT_SHARE))
        shares = fields.pop(HINT_SHARE, [0.0] * len(by_group))
        for episodes, key, share in zip(by_group.values(), task_keys(fields), shares, strict=True):
            solved = [min(max(outcome.solved, 0.0), 1.0) for outcome in episodes]
            history = self.histories.get(key)
            if share and history is not None:
                # Successes with a hint say nothing about those without; and the hint may be why all episodes failed.
                self.histories[key] = history._replace(unsolved=0.0)
            elif solved:
                self.histories[key] = learn(history, solved, self._options.decay)

    def save(self, folder: Path) -> None:
        """Write the histories into the checkpoint ``folder``."""
        if self._options.remembers:
            flat = {
                f"{key} {name}": v for key, history in self.histories.items() for name, v in history._asdict().items()
            }
            credit_state.save(folder, "allocation", flat, GROUPS)

    def load(self, folder: Path) -> None:
        """Restore the histories from the checkpoint ``folder``."""
        if not self._options.remembers:
            return
        state = credit_state.load(folder, "allocation", GROUPS)
        if isinstance(state, str):
            logger.warning("%s: turnkey.groups has no history of the tasks played before", state)
            return
        keys = dict.fromkeys(name.split()[0] for name in state)
        self.histories = {key: TaskHistory(*(state[f"{key} {name}"] for name in TaskHistory._fields)) for key in keys}
