"""A critic with several heads on one model: verl's worker and engine with a wider last layer, and its loss.

Each head has a field of its own, jagged: a 3-D jagged column would come out of verl's micro-batches with a wrong width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import model as verls_models
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import TrainingWorker

from verl_turnkey.advantage import ConfigError, ValueHead
from verl_turnkey.plugins.credit.heads import VALUES, target_field, value_field
from verl_turnkey.plugins.prm.worker import device_of_engines, of_response

MODEL_TYPE, VERLS_TYPE = "turnkey_heads", "value_model"


def learnt_positions(head: ValueHead) -> str:
    """Entry of a mini-batch: at how many positions, over all ranks, a head is fitted."""
    return f"turnkey_learnt_{head.name}"


class HeadedCritic(TrainingWorker):
    """verl's worker of the critic; :func:`critic_with` sets the heads of a subclass."""

    heads: ClassVar[Sequence[ValueHead]] = ()

    def __init__(self, config: TrainingWorkerConfig) -> None:
        register_engine(tuple(self.heads), config.engine_config.strategy)
        super().__init__(replace(config, model_type=MODEL_TYPE))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def set_loss_fn(self, loss_fn: Any) -> None:
        """verl's trainer brings its own loss of one value; only its settings are taken."""
        self.loss_fn = partial(heads_loss, heads=self.heads, **loss_fn.keywords)


def critic_with(heads: Sequence[ValueHead]) -> type[HeadedCritic]:
    """The worker of a critic with these heads; Ray sends the class to its processes as it is."""

    class OfHeads(HeadedCritic):
        pass

    OfHeads.heads = tuple(heads)
    return OfHeads


def heads_loss(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None, *, config: Any, heads: Sequence[Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The sum over heads of mean max((v - target)^2, (clip(v, old -+ cliprange_value) - target)^2).

    A head's mean is over its positions in the mini-batch, of all ranks; without verl's factor 1/2. ``config``: of
    verl's critic.

    Source: the released code of HiPER (arXiv:2602.16165), with means over mini-batches in the place of micro-batches.
    """
    mask, clip, total = data["response_mask"], config.cliprange_value, torch.zeros(())
    metrics: dict[str, Any] = {}
    for head in heads:
        field = value_field(heads, head)
        target = data[target_field(head)].values()
        at = ~torch.isnan(target)
        predicted = of_response(model_output[field], mask, shift=1).values()[at]
        old, target = data[field].values()[at], target[at]
        clipped = torch.clamp(predicted, old - clip, old + clip)
        error, error_of_clipped = (predicted - target) ** 2, (clipped - target) ** 2
        share = data["dp_size"] / max(1, int(data[learnt_positions(head)]))  # the optimizer sees the mean over ranks
        loss = torch.maximum(error, error_of_clipped).sum() * share
        total = total.to(loss) + loss
        for name, value in (
            ("vf_loss", loss),
            ("vf_clipfrac", (error_of_clipped > error).sum() * share),
            ("vpred_mean", predicted.sum() * share),
        ):
            metrics[f"critic/{head.name}/{name}"] = Metric(value=value.detach(), aggregation=AggregationType.SUM)
    metrics["critic/vf_loss"] = Metric(value=total.detach(), aggregation=AggregationType.SUM)
    return total, metrics


@cache
def register_engine(heads: tuple[ValueHead, ...], strategy: str) -> None:
    """Put the engine for ``strategy`` (fsdp, fsdp2) into verl's registry, for the device of this process."""
    fields = [value_field(heads, head) for head in heads]

    class Engine(EngineRegistry.get_engine_cls(VERLS_TYPE, strategy)):
        def _build_module(self) -> Any:
            self.model_config.model_type = VERLS_TYPE  # which decides on the class of the module
            with labels(len(heads)):
                module = super()._build_module()
            if hasattr(module, "v_head"):
                raise ConfigError(
                    f"the critic needs {len(heads)} heads, and {self.model_config.path} is not a model that "
                    "transformers makes a token classifier of: set critic.model.path to another, or "
                    "turnkey.credit.heads=1"
                )
            return module

        def prepare_model_outputs(
            self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
        ) -> dict[str, Any]:
            both = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)[VALUES]
            columns = both.values().unbind(-1)  # of (tokens, heads)
            return {
                field: torch.nested.nested_tensor_from_jagged(column.contiguous(), both.offsets())
                for field, column in zip(fields, columns, strict=True)
            }

        def forward_backward_batch(self, data: TensorDict, *args: Any, **more: Any) -> Any:
            if all(target_field(head) in data for head in heads):
                learnt = [(~torch.isnan(data[target_field(head)].values())).sum() for head in heads]
                counts = torch.stack(learnt).to(get_device_id())
                torch.distributed.all_reduce(counts, group=self.get_data_parallel_group())
                for head, count in zip(heads, counts.tolist(), strict=True):
                    tu.assign_non_tensor(data, **{learnt_positions(head): count})
            return super().forward_backward_batch(data, *args, **more)

    EngineRegistry.register(model_type=MODEL_TYPE, backend=strategy, device=device_of_engines())(Engine)


@contextmanager
def labels(number: int) -> Iterator[None]:
    """Meanwhile verl's critics have ``number`` outputs per token; its engine asks for one."""
    verls = verls_models.load_valuehead_model

    def load(*args: Any, model_config: Any, **more: Any) -> Any:
        model_config.num_labels = number
        return verls(*args, model_config=model_config, **more)

    with patch.object(verls_models, "load_valuehead_model", load):
        yield
