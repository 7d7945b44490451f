"""The script for machines with a GPU, on a tiny model on the CPU: both sides of each comparison are then the same."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    """In this process: torch takes seconds to load, and is there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_check")


def test_the_cpu_agrees_with_itself(script, tmp_path, capsys):
    out = tmp_path / "result.json"
    script.main(device="cpu", tiny=True, part=[*script.ON_DEVICE], out=out)
    result = json.loads(out.read_text())
    assert result["outcomes"] == {"costs": "passed", "gradients": "passed"}
    report = (tmp_path / "report.md").read_text()
    assert report.count("| tiny |") == len(result["gradients"]) + len(result["costs"]) == 8 + 4
    assert "- device: cpu\n- gpus: 0\n" in report
    assert str(tmp_path / "report.md") in capsys.readouterr().out
    for row in result["gradients"]:
        exact = row["dtype"] == "float32"
        assert row["ok"]
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
    with pytest.raises(typer.BadParameter, match=r"expected one of costs, gradients, sleep, .*, got sleeping"):
        script.main(device="cpu", part=["costs", "sleeping"])


def test_what_a_machine_lacks_is_in_the_report(script, tmp_path, capsys):
    out = tmp_path / "result.json"
    script.main(device="cpu", part=["sleep", "smollm2", "preset-7b"], out=out)
    outcomes = json.loads(out.read_text())["outcomes"]
    assert outcomes == {
        "sleep": "skipped: it needs 1 GPU, and there are 0",
        "smollm2": "skipped: on a CPU only with --tiny",
        "preset-7b": "skipped: it needs 4 GPUs, and there are 0",
    }
    report = (tmp_path / "report.md").read_text()
    assert all(f"| {part} | {outcome} |" in report for part, outcome in outcomes.items())


def test_a_part_that_fails_does_not_end_the_others(script, tmp_path, capsys):
    report = script.Report(tmp_path / "result.json", {"device": "cpu"})

    def breaks() -> list:
        raise RuntimeError("output\nthe last line")

    report.run("first", None, breaks)
    report.run("second", None, lambda: [{"loss": "a", "ok": True}, {"loss": "b", "ok": False}])
    report.run("third", None, lambda: [{"loss": "a"}])
    assert json.loads((tmp_path / "result.json").read_text())["outcomes"] == {
        "first": "failed: RuntimeError: the last line",
        "second": "failed: 1 of 2 rows are not ok",
        "third": "passed",
    }
