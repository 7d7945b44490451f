"""Text files of users, in UTF-8 or what their byte order mark says; and files that no reader sees half written."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from uuid import uuid4

from verl_turnkey.advantage.params import ConfigError

_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # begins like the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def read_text(path: str | PathLike[str], *, only_utf8: bool = False, line_ends: bool = False) -> str:
    """The text of a file, without its byte order mark.

    Args:
        only_utf8: another program reads the file as UTF-8, too.
        line_ends: keep them as they are; by default each is ``\\n``.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it has another encoding; names the file, and what was expected.
    """
    data = Path(path).read_bytes()
    mark = next((mark for mark in _MARKS if data.startswith(mark)), b"")
    encoding, data = _MARKS.get(mark, "utf-8"), data[len(mark) :]
    if only_utf8 and encoding != "utf-8":
        raise _wrong(path, f"it is {encoding[:6].upper()}", encoding[:6])
    if not mark and b"\0" in data:
        raise _wrong(path, "it has zero bytes, as UTF-16 without a byte order mark has", "utf-16le")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if mark:
            raise _wrong(path, f"it begins like {encoding[:6].upper()} and is broken ({error})", encoding) from None
        line = data.count(b"\n", 0, error.start) + 1
        raise _wrong(path, f"line {line} has the byte 0x{data[error.start]:02x}, as in Latin-1", "latin1") from None
    return text if line_ends else text.replace("\r\n", "\n").replace("\r", "\n")


def _wrong(path: str | PathLike[str], problem: str, encoding: str) -> ConfigError:
    convert = f"iconv -f {encoding} -t utf-8 {shlex.quote(str(path))} > NEW"
    return ConfigError(f"{path}: expected text in UTF-8, but {problem}: convert it, e.g. with `{convert}`")


@contextmanager
def whole_file(path: str | PathLike[str]) -> Iterator[Path]:
    """Where to write the file ``path``, which takes its name when the block ends: no reader sees a part of it.

    Its folder is made if it is not there; after an error the former file is still there. A link stays a link; a pipe or
    a device is written itself.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8, as :func:`whole_file`."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
