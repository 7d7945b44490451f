"""Do methods and branches pay? Training runs, one per core, over as many days as it takes.

    python benchmarks/evidence/run.py run methods --core 0    # train what is missing; once for each core that is free
    python benchmarks/evidence/run.py left methods            # what is missing
    python benchmarks/evidence/run.py pages                   # write the tables of docs/benchmarks.md from the lines

Each run starts from the warm-started model of its task and seed and leaves a line in benchmarks/results, from which the
tables are made; its folder is under runs/evidence. After an interruption finished runs are kept; one of the stack goes
on from its last checkpoint, one of the plain loop begins anew.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Annotated

import lines
import tables
import typer
from studies import STUDIES, Planned
from train import RunFailed, Taken, alone, train

WAIT = 10.0
"""seconds"""
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
    failed: set[tuple] = set()
    while time.monotonic() < until:
        todo = [planned for planned in missing(study) if planned.key not in failed]
        if not todo:
            break
        if not any(_tried(study, planned, failed) for planned in todo):
            time.sleep(WAIT)  # what is left is being trained by others, and may be followed by more


def _tried(study: str, planned: Planned, failed: set[tuple]) -> bool:
    """Whether the run was this process's to train; adds it to ``failed`` where it ends with an error."""
    try:
        line = train(study, planned)
    except Taken:
        return False
    except RunFailed as error:
        failed.add(planned.key)
        print(f"FAILED {planned}\n{error}", file=sys.stderr, flush=True)
        return True
    success = lines.validations(line)[1]
    print(f"{planned}: {success[0]:.3f} to {success[-1]:.3f} in {line['seconds']} s", flush=True)
    return True


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
