"""A laptop has the log of a run and no verl: the page is made without it, and without Ray and torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import synthetic_run

COMMAND = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("verl", "ray", "torch", "vllm", "transformers", "tensordict"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from verl_turnkey.plugins.cli.main import main
main()
"""


def test_the_page_is_made_without_verl_ray_and_torch(tmp_path: Path) -> None:
    synthetic_run.write(tmp_path / "run", episodes=40, steps=2)
    command = [sys.executable, "-c", COMMAND, "view", str(tmp_path / "run"), "--out", str(tmp_path / "view.html")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "<html" in (tmp_path / "view.html").read_text()


def test_a_command_that_needs_an_absent_package_says_which_and_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, "list", "losses"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "turnkey: No module named 'torch': install the package that provides it\n"
