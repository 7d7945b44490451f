"""Names without values: they pass through definitions, and whoever computes with one hears of it."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from verl_turnkey.plugins.cli.check import may_sweep
from verl_turnkey.plugins.cli.without_torch import Absent, Mark, NeedsVerl, possible

TORCH = Absent("torch")


def test_definitions_pass():
    tensor = TORCH.Tensor
    assert tensor in (tensor, Any)

    @Mark("torch.no_grad")()
    def double(values: tensor | None, others: tensor | None = None) -> tuple[tensor, dict[str, tensor]]:
        return values, {}

    @dataclass
    class Row:
        values: tensor  # pyright: ignore[reportInvalidTypeForm]
        kind: Any = field(default=TORCH.float32)

    assert Row(3).kind is not None
    assert double(3) == (3, {})


@pytest.mark.parametrize(
    "compute",
    [
        lambda: TORCH.cuda.is_available(),
        lambda: bool(TORCH.version),
        lambda: TORCH.float32 == "float32",
        lambda: isinstance(3, TORCH.Tensor),
        lambda: issubclass(int, TORCH.Tensor),
        lambda: types.new_class("Net", (TORCH.nn.Module,)),
        lambda: [*TORCH.devices],
        lambda: len(TORCH.devices),
        lambda: 3 in TORCH.devices,
        lambda: TORCH.count > 1,
        lambda: setattr(TORCH, "threads", 1),
    ],
)
def test_to_compute_with_one_needs_verl(compute: Callable[[], Any]):
    with pytest.raises(NeedsVerl), suppress(Exception):  # which checks turn into findings
        compute()


def test_a_class_of_verl_on_the_line_needs_verl():
    assert not possible(["+trainer.checkpoint_callback_class=verl.trainer.Callback"])


@pytest.mark.parametrize("word", ["--multirun", "hydra.mode=MULTIRUN", "+hydra.sweep.dir=a", "hydra/launcher=basic"])
def test_words_of_hydra_may_start_several_runs(word: str):
    assert may_sweep(["+turnkey=gigpo", "hydra.run.dir=/runs/1", word])
    assert not may_sweep(["+turnkey=gigpo", "hydra.run.dir=/runs/1", "trainer.experiment_name=hydra"])
