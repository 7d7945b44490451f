"""The keys that are said to be read by nobody are read by nobody in the installed verl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import verl

from verl_turnkey.plugins.checks.keys import FORMER, READ_BY_KEY, UNLISTED, known
from verl_turnkey.plugins.config.foreign_keys import foreign

SOURCE = Path(verl.__file__).parent
# The trainers of V1 and what they call; recipes and the former trainer have keys of their own.
READERS = ("trainer/main_ppo.py", "trainer/ppo/*.py", "trainer/ppo/v1/**/*.py", "utils/**/*.py", "workers/**/*.py")
READERS += ("experimental/agent_loop/*.py", "experimental/reward_loop/**/*.py")
_READ = re.compile(
    r"\bconfig((?:\.[a-z_0-9]+(?![a-z_0-9(]))*)\.get\(\s*[\"']([a-z_0-9]+)[\"']|\bconfig((?:\.[a-z_0-9]+)+)"
)
METHODS = {"get", "items", "keys", "pop", "update", "copy", "values"}


def keys_read() -> set[str]:
    """What the source reads of a whole configuration: ``config.data.get("seed")``, ``config.trainer.nnodes``."""
    read = set()
    for pattern in READERS:
        for path in SOURCE.glob(pattern):
            for node, name, plain in _READ.findall(path.read_text(encoding="utf-8")):
                parts = [*(node or plain).split("."), name] if name else plain.split(".")
                read.add(".".join(part for part in parts if part and part not in METHODS))
    return read


def test_what_verl_reads_is_known():
    read = {key for key in keys_read() if key.rpartition(".")[0] in READ_BY_KEY}
    assert len(read) >= 60
    assert read - known() - UNLISTED == set()


def test_what_verls_dataset_reads_is_known():
    text = (SOURCE / "utils/dataset/rl_dataset.py").read_text(encoding="utf-8")
    read = {f"data.{name}" for name in re.findall(r"\bconfig\.get\(\s*\"([a-z_]+)\"", text)}
    assert len(read) >= 15
    assert read - known() <= UNLISTED


@pytest.mark.parametrize("key", sorted({*UNLISTED, *FORMER}))
def test_the_tables_hold_no_key_of_verls_files(key):
    assert key not in known()


def test_no_key_of_verls_is_taken_for_another_frameworks():
    assert [key for key in known() if foreign(key)] == []
