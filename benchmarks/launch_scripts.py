"""How many of verl's example scripts that call ``main_ppo`` ``turnkey check`` reads; prints the others with the reason.

::

    git clone https://github.com/verl-project/verl
    python benchmarks/launch_scripts.py verl/examples
"""

from __future__ import annotations

import re
from pathlib import Path

import typer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli.script import read

CALL = re.compile(r"^[^#\n]*\bmain_ppo(\.py)?(\s|$)", re.MULTILINE)


def main(folder: Path) -> None:
    """``folder``: the scripts, in folders of any depth."""
    scripts = [path for path in sorted(folder.rglob("*.sh")) if CALL.search(path.read_text())]
    unread: dict[Path, str] = {}
    for path in scripts:
        try:
            read(path)
        except ConfigError as error:
            unread[path] = str(error).removeprefix(f"{path}: ").partition(". Instead")[0]
    for path, why in unread.items():
        print(f"{path}: {why}")
    turns = [path for path in scripts if "multiturn" in str(path) or "multi_turn" in path.read_text()]
    for words, chosen in (("all", scripts), ("multi-turn", turns)):
        print(f"{words}: {sum(path not in unread for path in chosen)} of {len(chosen)} read")


if __name__ == "__main__":
    typer.run(main)
