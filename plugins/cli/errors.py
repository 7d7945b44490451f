"""What the command says of an error in the user's input or on the user's machine: one line with what to change."""

from __future__ import annotations

import errno
import re

ADVICE = {
    errno.EACCES: "choose a place where you may read and write, or change its permissions",
    errno.EPERM: "choose a place where you may read and write, or change its permissions",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENOSPC: "make room, or choose a folder on another disk",
    errno.EDQUOT: "make room, or choose a folder outside of the quota",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "check the path",
    errno.EEXIST: "choose another path, or move what is there",
    errno.ENOTDIR: "choose a path below a folder",
    errno.EISDIR: "give a file",
}


def sentence(error: Exception) -> str:
    """The message of ``error`` without its type and number."""
    if isinstance(error, UnicodeDecodeError):
        around = error.object[max(0, error.start - 20) : error.end + 20]
        return (
            f"expected text in UTF-8, but a file has the byte 0x{error.object[error.start]:02x} in {around!r}: convert "
            "it, e.g. with `iconv -f latin1 -t utf-8 FILE > NEW`"
        )
    if isinstance(error, OSError) and "AF_UNIX path" in str(error):
        return (
            "the folder for sockets has too long a path (107 bytes with the socket's name): set TMPDIR=/tmp, or "
            "ray_kwargs.ray_init._temp_dir to a short folder"
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        advice = ADVICE.get(error.errno or 0)
        return f"{error.filename}: {error.strerror.lower()}{f': {advice}' if advice else ''}"
    plain = error.args and isinstance(error.args[0], str) and not isinstance(error, UnicodeError)
    words = str(error.args[0] if plain else error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{words}: install the package that provides it"
    return re.sub(r"^\[Errno \d+\] ", "", words)
