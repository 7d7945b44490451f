"""A page that ``turnkey view`` writes, beside what it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.view.join import LoggedRun, load


@dataclass
class Written:
    """A page, and the runs in it."""

    address: str
    runs: list[LoggedRun]

    @property
    def run(self) -> LoggedRun:
        return self.runs[0]


def write(folder: Path, *runs: Path, **options: str) -> Written:
    further = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    out = folder / "page.html"
    CliRunner().invoke(app, ["view", *map(str, runs), "--out", str(out), *further], catch_exceptions=False)
    return Written(out.as_uri(), [load(run) for run in runs])
