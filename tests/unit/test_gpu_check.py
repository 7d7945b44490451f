"""The script for machines with a GPU, on a tiny model on the CPU: both sides of each comparison are then the same."""

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from live_processes import dead_soon

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    """In this process: torch takes seconds to load, and is there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_check")


@pytest.fixture
def stack(script) -> ModuleType:
    return importlib.import_module("gpu_stack")


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


CHECKED = ("sleep", "smollm2", "preset-7b", "sequence-parallel")
NO_GPU = ("it needs 1 GPU, and there are 0", "on a CPU only with --tiny", "it needs 4 GPUs, and there are 0")


@pytest.mark.parametrize(
    ("absent", "reasons"),
    [
        ((), (*NO_GPU, NO_GPU[1])),
        (("vllm", "peft", "flash_attn"), (*["vllm not installed"] * 3, "peft not installed")),
        (("pytest",), (*NO_GPU, "pytest not installed")),
    ],
)
def test_what_a_machine_lacks_is_in_the_report(script, stack, monkeypatch, tmp_path, capsys, absent, reasons):
    monkeypatch.setattr(stack, "find_spec", lambda name: None if name in absent else name)
    out = tmp_path / "result.json"
    script.main(device="cpu", part=[*CHECKED], out=out)
    outcomes = json.loads(out.read_text())["outcomes"]
    assert outcomes == {part: f"skipped: {reason}" for part, reason in zip(CHECKED, reasons, strict=True)}
    report = (tmp_path / "report.md").read_text()
    assert all(f"| {part} | {outcome} |" in report for part, outcome in outcomes.items())


def test_a_program_that_takes_too_long_ends_with_all_that_it_has_started(stack, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(stack, "MOST_SECONDS", 5.0)
    with pytest.raises(subprocess.TimeoutExpired):
        stack.run(tmp_path, ["bash", "-c", "sleep 600 & echo $!; wait"])
    assert dead_soon(int((tmp_path / "output.log").read_text()))


def test_gradients_in_bfloat16_are_compared_with_those_of_one_rank(stack):
    errors = {"a": 0.02, "b": 0.05, "clipped": 0.6}

    def ok(exact: bool = False, **changes: float) -> list[bool]:
        return [row["ok"] for row in stack.judged({"1 rank": errors, "2 ranks": errors | changes}, exact)]

    assert ok() == [True, True]
    assert ok(clipped=0.9) == [True, True]
    assert ok(a=0.06) == [True, False]
    assert ok(a=float("nan")) == [True, False]
    assert ok(exact=True) == [False, False]
    wrong = dict.fromkeys(errors, 0.5)
    assert [row["ok"] for row in stack.judged({"1 rank": wrong, "2 ranks": wrong}, exact=False)] == [False, False]


def test_what_an_earlier_run_left_is_not_measured(stack, script, monkeypatch, tmp_path):
    (tmp_path / "preset-7b").mkdir()
    (tmp_path / "preset-7b" / "metrics.jsonl").write_text(json.dumps({"step": 4, "data": {"timing_s/step": 1.0}}))
    monkeypatch.setattr(stack, "run", lambda folder, line: folder.mkdir())
    with pytest.raises(FileNotFoundError, match="holds no metrics"):
        stack.Node("cuda", 4, tmp_path, script.FULL, []).measure("preset-7b")


def test_a_part_that_fails_does_not_end_the_others(script, monkeypatch, tmp_path, capsys):
    """Nor does a GPU whose every later call raises the same error."""

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
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
