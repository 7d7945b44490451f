"""Event files as verl's tensorboard logger writes them."""

from __future__ import annotations

from torch.utils.tensorboard import SummaryWriter

from verl_turnkey.plugins.view.runs import read

NAME = "val-core/doorkey/acc/mean@1"


def test_event_files(tmp_path):
    for first, last in ((1, 4), (3, 5)):  # the second start goes on from step 3
        with SummaryWriter(str(tmp_path / "tb" / str(first))) as writer:
            for step in range(first, last):
                writer.add_scalar(NAME, step / 8, step)
    steps, values = read(tmp_path).curve(NAME)
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3, 4], [0.125, 0.25, 0.375, 0.5])
