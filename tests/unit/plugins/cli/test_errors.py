"""An error of the machine or of a file is one line that says what to change."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_turnkey.plugins.cli import main as command
from verl_turnkey.plugins.cli.errors import sentence


def refused() -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/runs/x")


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (refused, "/runs/x: permission denied: choose a place where you may read and write, or change its permissions"),
        (lambda: Path("/nowhere/x").read_text(), "/nowhere/x: no such file or directory: check the path"),
        (lambda: Path("/").read_text(), "/: is a directory: give a file"),
        (lambda: Path("/tmp", "x" * 300).touch(), "file name too long: choose a shorter name"),
        (lambda: b"Gr\xe4n".decode(), r"a file has the byte 0xe4 in b'Gr\xe4n': convert it, e.g. with `iconv"),
        (lambda: socket.socket(socket.AF_UNIX).bind("/tmp/" + "x" * 200), "too long a path (107 bytes with the socket"),
        (
            lambda: __import__("no_such"),
            "No module named 'no_such': install the package that provides it",
        ),
        (lambda: {}["key"], "key"),
    ],
)
def test_one_line(fails: Callable[[], object], words: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        fails()
    text = sentence(raised.value)
    assert words in text
    assert "\n" not in text
    assert "[Errno" not in text


def test_the_command_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "app", refused)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("turnkey: /runs/x: permission denied: ")
