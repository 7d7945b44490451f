"""``turnkey doctor --clean``: shows what ended runs left on this machine, and removes it when told to."""

from __future__ import annotations

from rich.table import Column, Table

from verl_turnkey.plugins.cli import packages
from verl_turnkey.plugins.shutdown import run_files


def clean(*, remove: bool) -> int:
    """Print the leftovers of this user, and remove them on demand; returns 0, or 1 if some could not be removed."""
    console = packages.console(highlight=False)
    try:
        remains = run_files.find()
    except run_files.HiddenError as error:
        owner = "Look as the user, and in the container, that ran them."
        console.print(f"Nothing is removed: {error}. {owner}", style="red")
        return 1
    if not remains:
        console.print("nothing is left of ended runs")
        return 0
    columns = (Column("what", no_wrap=True), "number", "MiB", "for hours", "such as")
    table = Table(*columns, title="used by no living process", title_justify="left")
    for what in dict.fromkeys(remain.what for remain in remains):
        of_kind = [remain for remain in remains if remain.what == what]
        size, seconds = sum(remain.bytes for remain in of_kind) / 2**20, max(remain.seconds for remain in of_kind)
        table.add_row(what, str(len(of_kind)), f"{size:.1f}", f"{seconds / 3600:.1f}", str(of_kind[0].path))
    console.print(table)
    if not remove:
        console.print("turnkey doctor --clean --yes removes them", markup=False)
        return 0
    left = run_files.remove({remain.path: remain.identity for remain in remains})
    console.print(f"{len(remains) - len(left)} removed")
    for path in left:
        console.print(f"could not be removed: {path}", markup=False, style="red")
    return 1 if left else 0
