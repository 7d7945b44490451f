"""How the package reads and changes private parts of verl's objects.

The parts themselves are listed in ``seams.yaml``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from tensordict import TensorDict

SUPPORTED_VERL = ">=0.9,<0.10.0a0"
"""0.10.0.dev, verl's main branch, is within"""
TESTED_VERL = ("0.9.1",)
NO_TRAJECTORIES = "no materializable trajectories"
"""in the error message of the synchronous replay buffer if no episode of a batch left a row"""


def verl_version() -> str:
    """Version of the installed verl.

    Raises:
        importlib.metadata.PackageNotFoundError: verl is not installed.
    """
    from importlib.metadata import version

    return version("verl")


def unsupported_verl() -> str | None:
    """A warning when the installed verl is outside the supported range, else None."""
    from packaging.specifiers import SpecifierSet

    version = verl_version()
    if SpecifierSet(SUPPORTED_VERL, prereleases=True).contains(version):
        return None
    return (
        f"verl {version} is outside the supported range {SUPPORTED_VERL} (tested: {', '.join(TESTED_VERL)}); "
        "run `turnkey doctor --verl` to see which private parts moved"
    )


def server_managers(trainer: Any) -> list[Any]:
    """The managers of a trainer's inference servers; verl 0.9.0 has no method for them."""
    if hasattr(trainer, "_rollout_server_managers"):
        return trainer._rollout_server_managers()
    managers = (getattr(trainer, name, None) for name in ("llm_server_manager", "standalone_server_manager"))
    return [manager for manager in managers if manager is not None]


def reward_metric() -> str | None:
    """The value of ``algorithm.filter_groups.metric`` with which verl compares ``rm_scores``; None before 0.9.1."""
    from verl.trainer.ppo.v1 import replay_buffer

    return getattr(replay_buffer, "FILTER_GROUPS_REWARD_METRIC", None)


def actor_worker(process: Any) -> Any:
    """The worker with the actor's engine inside a Ray process of the trainer; verl puts several roles into one.

    Raises:
        RuntimeError: there is none.
    """
    return _worker(process, "an actor", lambda worker: getattr(getattr(worker, "actor", None), "engine", None))


def critic_worker(process: Any) -> Any:
    """The worker with the critic's engine, likewise: the one whose loss is verl's ``value_loss``.

    Raises:
        RuntimeError: there is none.
    """
    from verl.workers.utils.losses import value_loss

    def is_it(worker: Any) -> bool:
        return getattr(getattr(worker, "loss_fn", None), "func", None) is value_loss

    return _worker(process, "a critic", is_it)


def wrap_loss(worker: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Replace a worker's loss by ``function(loss, *arguments, ...)``, called with the keywords of verl's loss.

    These stay on the partial: other code reads the configuration from there.
    """
    worker.set_loss_fn(partial(function, worker.loss_fn, *arguments, **worker.loss_fn.keywords))


def _worker(process: Any, what: str, is_it: Callable[[Any], Any]) -> Any:
    inside = [*getattr(process, "worker_dict", {}).values(), *getattr(process, "fused_worker_dict", {}).values()]
    for worker in (process, *inside):
        if is_it(worker):
            return worker
    raise RuntimeError(
        f"found no worker with {what} in {type(process).__name__}; has verl changed? See `turnkey doctor --verl`"
    )


class _WithoutFlush(logging.LoggerAdapter):
    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        kwargs.pop("flush", None)
        return msg, kwargs


@contextmanager
def logger_of(module: ModuleType) -> Iterator[None]:
    """Context in which the module's logger accepts ``flush=``, which verl 0.9.1's separate_async passes by mistake."""
    original = module.logger
    module.logger = _WithoutFlush(original, {})  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        module.logger = original  # pyright: ignore[reportAttributeAccessIssue]


def own_manager(config: DictConfig) -> str | None:
    """Class name of the user's ``agent_loop_manager_class``; None without one, or if it extends verl's manager.

    Such a manager need not play the agent loops that verl's workers know. A class that cannot be imported here counts
    as one that extends verl's.
    """
    from omegaconf import OmegaConf

    path = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_manager_class")
    module, _, name = str(path or "").rpartition(".")
    if not module:
        return None
    from verl.experimental.agent_loop import AgentLoopManager

    try:
        manager = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit):  # of the user's code
        return None
    return None if isinstance(manager, type) and issubclass(manager, AgentLoopManager) else name


def loop_workers(manager: Any) -> list[Any]:
    """The Ray actors in which a manager plays; none where a user's ``agent_loop_manager_class`` has no such list.

    verl calls ``create`` and ``generate_sequences`` of a manager and nothing else.
    """
    workers = getattr(manager, "agent_loop_workers", None) or []
    return [worker for worker in workers if hasattr(worker, "__ray_call__")]


class Dealing:
    """A manager that marks prompts of a validation, and whose workers take turns if it extends verl's.

    verl always begins with the first worker, which would get all prompts that are requested one by one. Its loops do
    not see its own mark of a validation. Everything else is the manager's, which may allow no attributes of ours.

    Args:
        manager: verl's, or a user's with ``generate_sequences``.
        field: set to True on validation prompts.
    """

    def __init__(self, manager: Any, field: str) -> None:
        self._manager, self._field = manager, field

    def generate_sequences(self, prompts: TensorDict) -> Any:
        from verl.experimental.agent_loop import AgentLoopManager
        from verl.utils.tensordict_utils import assign_non_tensor_data

        if "validate" in prompts:
            assign_non_tensor_data(prompts, self._field, True)
        manager = self._manager
        if not isinstance(manager, AgentLoopManager):
            return manager.generate_sequences(prompts)
        workers = manager.agent_loop_workers
        used = len(prompts.chunk(len(workers)))
        result = manager.generate_sequences(prompts)
        manager.agent_loop_workers = workers[used:] + workers[:used]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def training_pool(trainer: Any) -> Any:
    """The resource pool of actor, critic and reference policy."""
    return trainer.resource_pool_manager.resource_pool_dict["global_pool"]


def data_parallel_size(group: Any) -> int:
    """Number of data-parallel ranks of an actor's group, requested and cached as in verl's ``_balance_batch``."""
    if "actor" not in group._dispatch_info:
        group._dispatch_info["actor"] = group._query_dispatch_info("actor")
    return max(group._dispatch_info["actor"]) + 1


class _Tower:
    """A vision tower that returns a tensor, as before transformers 5."""

    def __init__(self, visual: Any) -> None:
        self._visual = visual

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._visual(*args, **kwargs)
        return getattr(output, "pooler_output", output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._visual, name)


class _Seeing:
    """A vision-language model with such a tower."""

    def __init__(self, model: Any) -> None:
        self._model, self.visual = model, _Tower(model.visual)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def unpack_tower(module: ModuleType) -> None:
    """Let verl's forward of Qwen2-VL, Qwen2.5-VL and GLM-4V (its modules ``qwen2_vl`` and ``glm4v``) read the tower.

    verl 0.9.1 takes the output for a tensor, which fails since transformers 5: in the Qwen models for a micro-batch
    without any picture, for which it computes a blank one, in GLM-4V for every micro-batch. Rows of failed episodes and
    padding have no picture.
    """
    original = module._get_input_embeds

    @wraps(original)
    def _get_input_embeds(model: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_Seeing(model), *args, **kwargs)

    module._get_input_embeds = _get_input_embeds  # pyright: ignore[reportAttributeAccessIssue]
