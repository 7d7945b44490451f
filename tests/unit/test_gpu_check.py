"""The script for machines with a GPU, on a tiny model on the CPU: both sides of each comparison are then the same."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    """In this process: torch takes seconds to load, and is there."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def test_the_cpu_agrees_with_itself(script, tmp_path, capsys):
    out = tmp_path / "result.json"
    script.main(device="cpu", tiny=True, out=out)
    output = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert output.count("| tiny |") == len(result["numerics"]) + len(result["costs"]) == 8 + 4
    for row in result["numerics"]:
        exact = row["dtype"] == "float32"
        assert row["gradient_off"] < (1e-5 if exact else 0.05), row
        assert row["gradient_off"] > 0 or exact, row
        assert row["loss_device"] == pytest.approx(row["loss_cpu"], rel=1e-5 if exact else 0.05)
        if row["loss"] in ("st_ppo", "s_ppo"):  # the second gradient
            assert row["second_cpu"] > 1
            assert row["second_device"] == pytest.approx(row["second_cpu"], rel=1e-5 if exact else 0.05)
        else:
            assert row["second_cpu"] is None
    assert {(row["layout"], row["loss"]) for row in result["costs"]} == {
        (layout, loss) for layout in ("conversation", "row per step") for loss in ("vanilla", "st_ppo")
    }
    for row in result["costs"]:
        assert ("second pass" in row["parts"]) == (row["loss"] == "st_ppo")
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"])


def test_a_machine_without_a_gpu_is_told(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="--device cpu --tiny"):
        script.main()
