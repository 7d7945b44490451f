"""The launch lines that ``turnkey new`` prints are lines that verl accepts."""

from __future__ import annotations

import shlex
import sys

import pytest
from typer.testing import CliRunner

from verl_turnkey.advantage import registry as estimator_registry
from verl_turnkey.losses import registry as loss_registry
from verl_turnkey.plugins.cli.check import dry_run
from verl_turnkey.plugins.cli.main import app


@pytest.mark.parametrize(
    ("kind", "chosen"), [("estimator", "estimator    fresh_one: "), ("loss", "loss         fresh_one: ")]
)
def test_the_line_starts(stock_overrides: list[str], tmp_path, monkeypatch, capsys, kind, chosen):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)  # put back after the test
    output = CliRunner().invoke(app, ["new", kind, "fresh_one"], catch_exceptions=False).output
    [line] = [line for line in output.splitlines() if "verl.trainer.main_ppo" in line]
    _, _, _, *arguments, dots = shlex.split(line)
    assert dots == "..."
    try:
        code = dry_run([*arguments, "+turnkey/env=babyai", *stock_overrides])
    finally:
        estimator_registry._ESTIMATORS.pop("fresh_one", None)
        loss_registry._LOSSES.pop("fresh_one", None)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert chosen in captured.out
