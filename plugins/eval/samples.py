"""The folder of an evaluation: its identity, and a line per finished sample."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.plugins.eval.identity import differing, eval_id
from verl_turnkey.plugins.log.former_names import current_sample

IDENTITY, SAMPLES, RESULT, LOG = "eval.json", "samples.jsonl", "result.json", "turnkey_log"


class Samples:
    """The finished samples of an evaluation, read from ``folder`` when it resumes.

    Args:
        folder: locked.
        fields: the evaluation's identity.
        new: delete an earlier evaluation in the folder.

    Raises:
        ConfigError: the folder holds another evaluation.
    """

    def __init__(self, folder: Path, fields: Mapping[str, Any], new: bool = False) -> None:
        self.folder, self.id = folder, eval_id(fields)
        self.done: dict[str, dict[str, Any]] = {}
        """key -> sample"""
        self._file = (folder / SAMPLES).open("a+b")
        try:
            if new:
                self._forget()
            self._identify(json.loads(json.dumps(fields)))
            self._read()
        except BaseException:
            self._file.close()
            raise

    def key(self, task: str, number: int) -> str:
        """The key of sample ``number`` of ``task`` (JSON): 24 hexadecimal digits."""
        return hashlib.sha256(f"{self.id}\n{task}\n{number}".encode()).hexdigest()[:24]

    def add(self, key: str, sample: Mapping[str, Any]) -> None:
        """Store a finished sample; it is in the file before this returns."""
        self.done[key] = {"key": key, **sample}
        self._file.write((json.dumps(self.done[key]) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _forget(self) -> None:
        self._file.truncate(0)
        for name in (IDENTITY, RESULT):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / LOG, ignore_errors=True)

    def _identify(self, fields: Mapping[str, Any]) -> None:
        file = self.folder / IDENTITY
        if not file.exists():
            write_text(file, json.dumps({"eval_id": self.id, **fields}, indent=1) + "\n")
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        if before.pop("eval_id", None) != self.id:
            different = differing(before, fields).items()
            lines = [f"{name}: {there!r} there, {now!r} now" for name, (there, now) in different]
            raise ConfigError(
                f"{self.folder} holds another evaluation, which differs in\n  "
                + "\n  ".join(lines)
                + "\nGive another --out, or --new to delete that one"
            )

    def _read(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text.rfind(b"\n") + 1
        self._file.truncate(whole)  # an earlier call may have died in the middle of a line
        samples = (current_sample(json.loads(line)) for line in text[:whole].splitlines())
        self.done = {sample["key"]: sample for sample in samples}
