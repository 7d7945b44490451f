"""The clone of this repository that a command is called in."""

from __future__ import annotations

from pathlib import Path


def find(start: Path | None = None) -> Path | None:
    """The root of the clone that holds ``start`` (default: the working directory); None outside of one."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        project = folder / "pyproject.toml"
        if project.is_file() and 'name = "verl-turnkey"\n' in project.read_text(encoding="utf-8"):
            return folder
    return None


def require(start: Path | None = None) -> Path:
    """The root of the clone that holds ``start``, whose code must be the one that runs."""
    root = find(start)
    if root is None:
        raise ValueError(f"expected to be called in a clone of verl-turnkey, not in {start or Path.cwd()}")
    import verl_turnkey.advantage

    code = Path(verl_turnkey.advantage.__file__ or "").resolve().parents[1]
    if code != root:
        raise ValueError(
            f"the package that `turnkey` runs is in {code}, and this clone is {root}: its tables and files can only be "
            f"made by its own code. Install it first: pip install --no-deps -e {root}"
        )
    return root
