"""Do methods and branches pay? Training runs on the real stack, resumable, one per core, over as many days as it takes.

    python benchmarks/evidence/run.py run methods --core 0    # train what is missing; once for each core that is free
    python benchmarks/evidence/run.py left methods            # what is missing
    python benchmarks/evidence/run.py pages                   # write the tables of docs/benchmarks.md from the lines

Each run starts from the warm-started model of its task and seed and leaves a line in benchmarks/results, from which the
tables are made; its folder is under runs/evidence. A run that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import signal
import sys
import time
from itertools import count
from typing import Annotated

import lines
import tables
import typer
from studies import STUDIES, Planned
from train import RUNS, RunFailed, Taken, alone, locked, train

app = typer.Typer(add_completion=False, no_args_is_help=True)
Study = Annotated[str, typer.Argument(help=" or ".join(STUDIES))]


@app.command()
def run(
    study: Study,
    core: Annotated[int | None, typer.Option(help="hold the runs to this core; default: all, several threads")] = None,
    minutes: Annotated[float, typer.Option(help="no run begins later than this")] = float("inf"),
) -> None:
    """Train what is missing, in the order of the plan."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the training process is ended as well
    if core is not None:
        alone(core)
    until = time.monotonic() + 60 * minutes
    tried: set[tuple] = set()
    for _ in count():
        planned = next((each for each in missing(study) if each.key not in tried), None)
        if planned is None or time.monotonic() > until:
            break
        tried.add(planned.key)
        try:
            line = train(study, planned)
        except Taken:
            continue
        except RunFailed as error:
            print(f"FAILED {planned}\n{error}", file=sys.stderr, flush=True)
            continue
        with locked(RUNS):
            lines.add(study, line)
        success = lines.validations(line)[1]
        print(f"{planned}: {success[0]:.3f} to {success[-1]:.3f} in {line['seconds']} s", flush=True)


@app.command()
def left(study: Study) -> None:
    """Print what is missing, as far as it is known: learning rates are chosen when all of a method are tried."""
    for planned in missing(study):
        print(planned)


@app.command()
def pages() -> None:
    """Write the tables from the lines."""
    tables.write()


def missing(study: str) -> list[Planned]:
    """Runs without a line."""
    if study not in STUDIES:
        raise typer.BadParameter(f"expected {' or '.join(STUDIES)}, got {study!r}")
    kept = lines.load(study)
    done = {lines.key(line) for line in kept}
    return [planned for planned in STUDIES[study](kept) if planned.key not in done]


if __name__ == "__main__":
    app()
