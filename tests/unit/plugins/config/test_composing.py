"""A configuration is composed for the words alone, whatever the arguments of the program are."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from verl_turnkey.plugins.config.composing import composed
config = composed(["+turnkey=gigpo"])
print(config.algorithm.adv_estimator, sys.argv[1:])
"""


def test_arguments_of_the_program_are_no_launch_line():
    arguments = ["+turnkey=nosuch", "turnkey.rollout.max_turn=3"]
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"gigpo {arguments}"
