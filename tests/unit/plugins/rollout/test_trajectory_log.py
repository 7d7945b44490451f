"""The log's file holds whole lines only, whatever the disk does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_turnkey.plugins.rollout.trajectory_log import JsonLines

FULL_DISK = """
import json, resource, sys
from pathlib import Path
from verl_turnkey.plugins.rollout.trajectory_log import JsonLines

def size(limit):  # a write beyond it is cut short, and the next one refused, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

lines, outcomes = JsonLines(Path(sys.argv[1])), []
for number, limit in enumerate([resource.RLIM_INFINITY, 150, 150, 20, resource.RLIM_INFINITY]):
    size(limit)
    try:
        lines({"number": number, "text": "x" * 100})
        outcomes.append("written")
    except OSError:
        outcomes.append("refused")
    [path] = Path(sys.argv[1]).iterdir()
    outcomes.append(path.read_text().count("\\n") == len([json.loads(line) for line in path.open()]))
print(json.dumps(outcomes))
"""


def test_a_full_disk_leaves_no_half_line_and_is_not_the_end(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["written", True, *["refused", True] * 3, "written", True]
    [path] = tmp_path.iterdir()
    assert [json.loads(line)["number"] for line in path.open()] == [0, 4]


def test_a_half_line_of_a_process_that_died_is_cut_off(tmp_path: Path):
    lines = JsonLines(tmp_path)
    lines._path.write_text('{"number": 0}\n{"numb')
    lines({"number": 1})
    assert lines._path.read_text() == '{"number": 0}\n{"number": 1}\n'
    lines._path.write_text('{"numb')
    JsonLines(tmp_path)({"number": 2})
    assert lines._path.read_text() == '{"number": 2}\n'


def test_what_is_no_json_raises_and_writes_nothing(tmp_path: Path):
    lines = JsonLines(tmp_path)
    with pytest.raises(TypeError, match="an episode to log holds a set"):
        lines({"number": {1}})
    lines({"number": 1})
    assert lines._path.read_text() == '{"number": 1}\n'


def test_a_folder_that_cannot_be_made_is_tried_again(tmp_path: Path):
    (tmp_path / "log").write_text("a file where a folder should be")
    lines = JsonLines(tmp_path / "log" / "deep")
    with pytest.raises(OSError, match="Not a directory"):
        lines({"number": 0})
    (tmp_path / "log").unlink()
    lines({"number": 1})
    assert lines._path.read_text() == '{"number": 1}\n'
