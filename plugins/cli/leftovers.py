"""``turnkey doctor --clean``: shows what ended runs left on this machine, and removes it when told to."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Column, Table

from verl_turnkey.plugins.shutdown import leftovers


def clean(*, remove: bool) -> int:
    """Print the leftovers of this user, and remove them on demand; returns 0, or 1 if some could not be removed."""
    console = Console(width=None if os.isatty(1) else 120, highlight=False)
    try:
        found = leftovers.find()
    except leftovers.HiddenError as error:
        console.print(
            f"Nothing is removed: {error}. Look as the user, and in the container, that ran them.", style="red"
        )
        return 1
    if not found:
        console.print("nothing is left of ended runs")
        return 0
    columns = (Column("what", no_wrap=True), "number", "MiB", "for hours", "such as")
    table = Table(*columns, title="used by no living process", title_justify="left")
    for what in dict.fromkeys(each.what for each in found):
        of_kind = [each for each in found if each.what == what]
        size, seconds = sum(each.bytes for each in of_kind) / 2**20, max(each.seconds for each in of_kind)
        table.add_row(what, str(len(of_kind)), f"{size:.1f}", f"{seconds / 3600:.1f}", str(of_kind[0].path))
    console.print(table)
    if not remove:
        console.print("turnkey doctor --clean --yes removes them", markup=False)
        return 0
    left = leftovers.remove({each.path: each.identity for each in found})
    console.print(f"{len(found) - len(left)} removed")
    for path in left:
        console.print(f"could not be removed: {path}", markup=False, style="red")
    return 1 if left else 0
