"""A critic with several heads in place of verl's, for a method that reads several values per turn."""

from __future__ import annotations

import ray
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins.credit.heads import target_field, value_field
from verl_turnkey.plugins.critic.worker import critic_with
from verl_turnkey.plugins.prm.worker import of_response
from verl_turnkey.plugins.trainer.advantage_step import AdvantageStep
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, partition_of


class ValueHeads:
    """The worker of the critic and its fields; with a method that reads one value it does nothing."""

    def __init__(self, trainer: PPOTrainer, step: AdvantageStep) -> None:
        self._trainer, self._heads = trainer, step.heads
        self.further = [value_field(step.heads, head) for head in step.heads[1:]]
        """fields of the values after the first, which has verl's field"""

    @property
    def fields(self) -> frozenset[str]:
        """The fields that only the critic's workers compute with."""
        return frozenset((*self.further, *map(target_field, self._heads)))

    def join(self) -> None:
        """Replace verl's critic class, before verl creates the workers."""
        if self._heads:
            self._trainer.role_worker_mapping[Role.Critic] = ray.remote(critic_with(self._heads))

    def computed(self, batch: KVBatchMeta) -> None:
        """After verl's pass: cut the further values to the responses, as verl does with its own."""
        if self._heads:
            data = partition_of(batch).read(batch.keys, [*self.further, "response_mask"])
            cut = {name: of_response(data[name], data["response_mask"], shift=1) for name in self.further}
            partition_of(batch).write(batch.keys, cut)
            batch.fields = None  # an earlier selection would hide the new fields
