"""verl's engines with the output of a process reward model under a name of its own.

``log_probs`` and ``values`` are columns of the actor and the critic in verl's queue, to which a worker's outputs go.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from torch.nn import Linear
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry

from verl_turnkey.plugins.config.scorers import HEAD_BIAS, OUT

#: Of each kind: verl's type of the model, and its output.
VERLS = {"implicit": ("language_model", "log_probs"), "head": ("value_model", "values")}


def model_type(kind: str) -> str:
    """The name of a kind's engine in verl's registry."""
    return f"turnkey_{kind}"


@cache
def register(kind: str, strategy: str) -> None:
    """Put the engine of a kind for ``strategy`` (fsdp, fsdp2) into verl's registry, for the device of this process."""
    verls_type, output_name = VERLS[kind]

    class Engine(EngineRegistry.get_engine_cls(verls_type, strategy)):
        def _build_module(self) -> Any:
            self.model_config.model_type = verls_type  # which decides on the class of the module
            module = super()._build_module()
            if not getattr(self.model_config.hf_config, HEAD_BIAS, True):
                heads = [layer for layer in module.modules() if isinstance(layer, Linear) and layer.out_features == 1]
                heads[-1].register_parameter("bias", None)
            return module

        def prepare_model_outputs(
            self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
        ) -> dict[str, Any]:
            verls = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
            return {OUT: verls[output_name]}

    EngineRegistry.register(model_type=model_type(kind), backend=strategy, device=device_of_engines())(Engine)


def device_of_engines() -> str:
    """The device for which verl looks up an engine in this process."""
    return os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
