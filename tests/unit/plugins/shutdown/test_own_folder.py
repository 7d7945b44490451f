"""Of two runs that write checkpoints to one folder, the second is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.shutdown.driver import guarded
from verl_turnkey.plugins.shutdown.run_files import OF_CHECKPOINTS, own_folder

OTHER = """
import sys
from verl_turnkey.plugins.shutdown.run_files import own_folder
with own_folder({"default_local_dir": sys.argv[1], "save_freq": 1}):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_one_runs_until_its_process_ends(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    mine = {"default_local_dir": str(folder), "save_freq": 10}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "holds\n"
        message = rf"default_local_dir={folder}: .*\(process {other.pid} on .*experiment_name"
        with pytest.raises(ConfigError, match=message), own_folder(mine):
            pytest.fail("began")
        with pytest.raises(ConfigError, match=message):
            guarded(lambda *_, **__: pytest.fail("began"))({"trainer": mine}, None)
        with own_folder({**mine, "save_freq": -1}):  # writes nothing
            pass
        with own_folder({**mine, "default_local_dir": str(tmp_path / "another")}):
            pass
        other.kill()
    with own_folder(mine):
        assert (folder / OF_CHECKPOINTS).read_text().startswith(f"process {os.getpid()} on ")
    with own_folder(mine):  # the next run of the same process
        pass


def test_a_folder_that_cannot_be_made_is_left_to_another_check(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with own_folder({"default_local_dir": str(tmp_path / "file" / "checkpoints"), "save_freq": 1}):
        pass


def test_a_program_without_the_keys_of_verl_goes_on():
    with own_folder({}):
        pass
