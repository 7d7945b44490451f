"""Text files of users in any encoding, at every door; and files that no reader sees half written."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text, whole_file, write_text
from verl_turnkey.envs.adapters.appworld import _task_ids
from verl_turnkey.envs.adapters.search import load_passages
from verl_turnkey.envs.agents.harbor import HarborTask
from verl_turnkey.envs.mcp_servers.servers import read_servers
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.rewards.outcome import Contrastive
from verl_turnkey.envs.tasks import Task, open_parquet, write_parquet
from verl_turnkey.plugins.checks.files import json_rows
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.panel import find
from verl_turnkey.plugins.cli.report import _read
from verl_turnkey.plugins.cli.script import read
from verl_turnkey.plugins.cli.task_rows import read_rows
from verl_turnkey.plugins.config.command_line import CommandLine
from verl_turnkey.plugins.config.machine import model_config
from verl_turnkey.plugins.config.schema import load_examples
from verl_turnkey.plugins.config.scorers import TeacherConfig
from verl_turnkey.plugins.gateway.models import read_replies

TEXT = "Tür\nöffnen\n"
BROKEN = [
    (TEXT.encode("latin-1"), "line 1 has the byte 0xfc, as in Latin-1"),
    ("erste\nTür".encode("cp1252"), "line 2 has the byte 0xfc"),
    (TEXT.encode("utf-16-le"), "zero bytes, as UTF-16 without a byte order mark"),
    ("\ufeffTür".encode("utf-16-le") + b"\x00", "begins like UTF-16 and is broken"),
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, encoding):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode(encoding))
    assert read_text(path) == TEXT
    assert read_text(path, line_ends=True) == TEXT.replace("\n", "\r\n")
    if encoding.startswith("utf-8"):
        assert read_text(path, only_utf8=True) == TEXT
    else:
        with pytest.raises(ConfigError, match=rf"text.txt: expected text in UTF-8, but it is {encoding.upper()}"):
            read_text(path, only_utf8=True)


@pytest.mark.parametrize(("content", "problem"), BROKEN)
def test_another_encoding_is_named_with_its_line(tmp_path, content, problem):
    path = tmp_path / "a text.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_text(path)
    assert str(refused.value).startswith(f"{path}: expected text in UTF-8, but ")
    assert problem in str(refused.value)
    assert f"'{path}' > NEW" in str(refused.value)


SERVERS = '{"mcpServers": {"Tür": {"command": "true"}}}'
Read = Callable[[Path], Any]
# File, text that is fine, reader; at the end whether UTF-16 with a byte order mark is: not where bash, verl or
# transformers read the file, too.
DOORS: list[tuple[str, str, Read, bool]] = [
    ("launch.sh", "python -m verl.trainer.main_ppo a=Tür", read, False),
    ("replies.yaml", "[Tür]", read_replies, True),
    ("mcp.json", SERVERS, lambda path: read_servers(str(path)), True),
    ("template.txt", "Tür {observation}", lambda path: load_template(str(path)), True),
    ("teacher.txt", "Tür {text}", lambda path: TeacherConfig(template=str(path)).text_template(), True),
    ("turns.yaml", "[{observation: Tür, action: a}]", lambda path: load_examples(str(path)), True),
    ("turns.jsonl", '{"observation": "Tür", "action": "a"}', lambda path: load_examples(str(path)), True),
    ("stored.json", '{"Tür": 1}', lambda path: Contrastive(file=str(path)), True),
    ("ids.txt", "Tür", lambda path: _task_ids(str(path)), True),
    ("corpus.jsonl", '{"contents": "Tür"}', lambda path: load_passages(str(path)), False),
    ("rows.csv", "a\nTür", lambda path: read_rows(str(path)), True),
    ("rows.jsonl", '{"a": "Tür"}', lambda path: read_rows(str(path)), True),
    ("train.jsonl", '{"a": "Tür"}', json_rows, False),
    ("config.json", '{"a": "Tür"}', lambda path: model_config(str(path.parent)), False),
    (
        "main.yaml",
        "a: Tür",
        lambda path: CommandLine(["--config-dir", str(path.parent)]).has_own("turnkey", "x"),
        False,
    ),
]


@pytest.mark.parametrize(("name", "text", "read", "marked"), DOORS)
def test_every_door_reads_utf8_and_names_a_file_of_another_encoding(tmp_path, name, text, read, marked):
    path = tmp_path / name
    for encoding, fine in (("utf-8", True), ("utf-8-sig", True), ("utf-16", marked), ("latin-1", False)):
        path.write_bytes(text.encode(encoding))
        if fine:
            read(path)
            continue
        with pytest.raises((ValueError, TypeError)) as refused:
            read(path)
        assert str(path) in str(refused.value)
        assert "UTF-8" in str(refused.value)


@pytest.mark.parametrize("name", ["panel.json", "report.json"])
def test_files_that_we_wrote_may_be_broken_too(tmp_path, name):
    path = tmp_path / name
    path.write_bytes('{"panel": "Tür"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=str(path)):
        (find if name == "panel.json" else _read)(str(path) if name == "panel.json" else path)


@pytest.mark.parametrize("name", ["instruction.md", "task.toml"])
def test_harbor_tasks(tmp_path, name):
    for folder in ("environment", "tests"):
        (tmp_path / folder).mkdir()
    texts = {"instruction.md": "Öffne.", "task.toml": "version = '1.0'  # ö", "tests/test.sh": "true"}
    for file, text in texts.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    assert HarborTask.load(str(tmp_path)).instruction == "Öffne."
    (tmp_path / name).write_bytes(texts[name].encode("latin-1"))
    done = CliRunner().invoke(app, ["env-check", "--harbor", str(tmp_path), "--ignore-dockerfile"])
    assert done.exit_code == 1
    assert f"{tmp_path / name}: expected text in UTF-8" in done.output


@pytest.mark.parametrize("option", ["--task", "--replies"])
def test_the_command_says_the_file_in_one_line(tmp_path, option):
    path = tmp_path / "given.json"
    path.write_bytes('["Tür"]'.encode("latin-1"))
    done = turnkey("agent", "my.py:play", option, str(path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"turnkey: {path}: expected text in UTF-8")


def test_a_terminal_of_few_characters_takes_any_text(tmp_path):
    words = ["tasks", "Tür→", "--env", "turnkey/FrozenLake-v0", "--train", "1", "--val", "1"]
    done = turnkey(*words, cwd=tmp_path, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "r\\u2192/train.parquet" in done.stdout


def turnkey(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl_turnkey", *words]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, errors="replace"
    )


def test_a_file_is_there_as_a_whole_or_as_before(tmp_path):
    path = tmp_path / "new" / "facts.json"
    write_text(path, json.dumps({"a": "Tür"}))
    with pytest.raises(UnicodeEncodeError), whole_file(path) as part:
        part.write_text("\ud800", encoding="utf-8")
    assert json.loads(read_text(path)) == {"a": "Tür"}
    assert [file.name for file in path.parent.iterdir()] == ["facts.json"]


def test_a_link_stays_a_link_and_a_pipe_is_written_itself(tmp_path):
    for name in ("there.json", "new/later.json"):
        link = tmp_path / Path(name).name.replace(".json", "")
        link.symlink_to(tmp_path / name)
        for text in ("first", "second"):
            write_text(link, text)
            assert link.is_symlink()
            assert read_text(tmp_path / name) == text
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "Tür")
    assert os.read(reader, 100).decode() == "Tür"
    os.close(reader)
    assert pipe.is_fifo()


def test_tasks_are_whole_and_a_part_of_them_is_named(tmp_path, monkeypatch):
    file = tmp_path / "train.parquet"
    write_parquet(file, [Task("a/B-v0", seed) for seed in range(9)], "b", "train")
    before = file.read_bytes()
    monkeypatch.setattr("pyarrow.parquet.write_table", lambda table, path: Path(path).write_bytes(b"PAR1") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_parquet(file, [Task("a/B-v0", 1)], "b", "train")
    assert file.read_bytes() == before
    assert len(pd.read_parquet(file)) == 9
    for content in (before[: len(before) // 2], b"", b"PAR1"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{file} is not a whole parquet file .*Delete it"):
            open_parquet(file)


def test_a_run_with_a_cut_file_of_tasks_says_to_delete_it(tmp_path):
    for name in ("train", "val"):
        (tmp_path / "tasks").mkdir(exist_ok=True)
        (tmp_path / "tasks" / f"{name}.parquet").write_bytes(b"PAR1 cut")
    words = ["train", "frozenlake", "--model", "m", "--device", "cpu", "--out", str(tmp_path), "--print"]
    assert f"{tmp_path}/tasks/train.parquet is not a whole parquet file" in str(
        CliRunner().invoke(app, words).exception
    )
