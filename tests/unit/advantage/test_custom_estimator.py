"""The example of an own estimator runs, in a process of its own as a user's would."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_estimator.py"

SCRIPT = """
import runpy, sys
from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit, estimators
assert "return_baseline" not in estimators()
runpy.run_path(sys.argv[1])
assert "return_baseline" in estimators()
steps = StepBatch(group=["t"] * 3, trajectory=["good", "good", "bad"], step=[0, 1, 0], reward=[0.0, 1.0, 0.0])
assert compute_credit("return_baseline", steps, gamma=0.5).advantage.tolist() == [0.0, 0.5, -0.5]
try:
    compute_credit("return_baseline", steps, gama=0.5)
except ConfigError as error:
    assert "did you mean 'gamma'" in str(error), error
else:
    raise AssertionError("a misspelt parameter passed")
"""


def test_importing_the_file_is_all_it_takes():
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_file_runs_by_itself():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "advantage=array([ 0. ,  0.5, -0.5])" in done.stdout
