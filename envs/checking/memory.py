"""What a process and its children take of the machine's memory."""

from __future__ import annotations

import contextlib
import math
import os


def tree_memory_mb() -> float:
    """Resident memory of this process and all its children in MB; nan where /proc is not there.

    What the children share (the code of a browser, say) counts once.
    """
    parents: dict[int, int] = {}
    pages: dict[int, tuple[int, int]] = {}
    try:
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it may have ended
                with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/statm") as statm:
                    parents[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
                    _, resident, shared, *_ = map(int, statm.read().split())
                pages[int(name)] = (resident, shared)
    except OSError:
        return math.nan
    tree, todo = [], [os.getpid()]
    while todo:
        tree.append(todo.pop())
        todo += [child for child, parent in parents.items() if parent == tree[-1]]
    own = pages.get(tree[0], (math.nan, 0))[0]
    private = sum(resident - shared for process, (resident, shared) in pages.items() if process in tree[1:])
    common = max((pages[process][1] for process in tree[1:] if process in pages), default=0)
    return (own + private + common) * os.sysconf("SC_PAGE_SIZE") / 2**20
