"""Do methods and branches pay off? Training runs, one per core, for as many days as it takes.

    python benchmarks/evidence/run.py run methods --core 0    # train missing runs; once per free core
    python benchmarks/evidence/run.py left methods            # print the missing runs
    python benchmarks/evidence/run.py one methods doorkey gigpo --lr 0.001 --seed 0    # repeat a run, as its line says
    python benchmarks/evidence/run.py pages                   # write the tables of results/README.md from the lines

Each run starts from the warm-started model of its task and seed and leaves a line in benchmarks/results, from which the
tables are made; its folder is under runs/evidence. Finished runs are not repeated; an interrupted run of the stack
resumes from its last checkpoint, one of the plain loop starts again.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Annotated

import lines
import tables
import typer
from studies import STUDIES, VALUED, Planned
from tasks import TASKS
from train import RunFailed, Taken, alone, train

WAIT = 10.0
"""seconds"""
app = typer.Typer(add_completion=False, no_args_is_help=True)
Study = Annotated[str, typer.Argument(help=" or ".join(STUDIES))]


@app.command()
def run(
    study: Study,
    core: Annotated[int | None, typer.Option(help="pin the runs to this core; default: all, several threads")] = None,
    minutes: Annotated[float, typer.Option(help="start no run later than this")] = float("inf"),
) -> None:
    """Train the missing runs, in the order of the plan."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the training process ends as well
    if core is not None:
        alone(core)
    until = time.monotonic() + 60 * minutes
    failed: set[tuple] = set()
    while time.monotonic() < until:
        todo = [planned for planned in missing(study) if planned.key not in failed]
        if not todo:
            break
        if not any(_tried(study, planned, failed) for planned in todo):
            time.sleep(WAIT)  # others train the rest, and more runs may follow


def _tried(study: str, planned: Planned, failed: set[tuple]) -> bool:
    """Whether this process trained the run; adds it to ``failed`` if it ended with an error."""
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


@app.command("one")
def repeat(
    study: Study,
    task: Annotated[str, typer.Argument(help=" or ".join(TASKS))],
    variant: Annotated[str, typer.Argument(help="a method or strategy of the study")],
    lr: Annotated[float, typer.Option(help="learning rate of the policy")],
    seed: Annotated[int, typer.Option()],
    critic_lr: Annotated[float | None, typer.Option(help="of the critic, for a method that has one")] = None,
    core: Annotated[int | None, typer.Option(help="pin the run to this core")] = None,
) -> None:
    """Repeat a run and print its success next to that of its line; saves a line only if there is none.

    Rounding differs between processes, so the runs may diverge where an action is sampled differently.
    """
    planned = planned_run(study, task, variant, lr, seed, critic_lr)
    if core is not None:
        alone(core)
    before = lines.kept(study, planned.key)
    repeated = train(study, planned, again=True)
    for what, line in (("this run", repeated), ("kept", before)):
        if line:
            at, success = lines.validations(line)
            curve = ", ".join(f"{value:.3f} at {step}" for step, value in zip(at, success, strict=True))
            print(f"{what}: {curve}; warm start {line['warm_start'][:16]}, {line['versions']}")


def planned_run(study: str, task: str, variant: str, lr: float, seed: int, critic_lr: float | None = None) -> Planned:
    """A run by the parts of its line's key.

    Raises:
        typer.BadParameter: an unknown study, task or variant, or a critic's rate for a variant without a critic.
    """
    for what, value, names in (("study", study, STUDIES), ("task", task, TASKS)):
        if value not in names:
            raise typer.BadParameter(f"expected the {what} to be {' or '.join(names)}, got {value!r}")
    if variant not in STUDIES[study].names:
        raise typer.BadParameter(f"expected {' or '.join(STUDIES[study].names)}, got {variant!r}")
    if critic_lr and variant not in VALUED:
        raise typer.BadParameter(f"{variant} has no critic")
    return STUDIES[study].run(task, variant, lr, seed, critic_lr)


@app.command()
def left(study: Study) -> None:
    """Print the missing runs known so far: a learning rate is chosen when all of a method's have been tried."""
    for planned in missing(study):
        print(lines.command(study, planned.key))


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
    return [planned for planned in STUDIES[study].plan(kept) if planned.key not in done]


if __name__ == "__main__":
    app()
