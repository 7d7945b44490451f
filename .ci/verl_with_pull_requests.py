"""The installed verl with verl's open pull requests, one upon the other: what is to come, before it is released.

    git clone --bare https://github.com/verl-project/verl verl.git
    git -C verl.git fetch origin '+refs/pull/*/merge:refs/pull/*/merge'
    .venv/bin/python .ci/verl_with_pull_requests.py verl.git /tmp/FOLDER
    PYTHONPATH=/tmp/FOLDER ./run_tests.sh verl

GitHub keeps a ``merge`` ref for open requests that merge. Newest first; one that does not apply, or after which a file
does not compile, is left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def pull_requests(clone: Path) -> Iterator[tuple[int, bytes]]:
    """Number and changes to the package, as a patch, of each request; ``clone``: a Git directory with their refs."""
    git = ["git", f"--git-dir={clone}"]
    refs = subprocess.check_output([*git, "for-each-ref", "--format=%(refname)", "refs/pull/*/merge"], text=True)
    for ref in sorted(refs.split(), key=lambda ref: -int(ref.split("/")[2])):
        patch = subprocess.check_output([*git, "diff", "--binary", f"{ref}^1", ref, "--", "verl"])
        if patch:
            yield int(ref.split("/")[2]), patch


def apply(patch: bytes, folder: Path) -> bool:
    """Change the package in ``folder``, or leave it as it is where the patch does not fit."""

    def git_apply(*options: str) -> bool:
        return subprocess.run(["git", "apply", *options], cwd=folder, input=patch, capture_output=True).returncode == 0

    if not git_apply():  # all of it or nothing
        return False
    changed = [folder / name.decode() for name in re.findall(rb"^\+\+\+ b/(.*\.py)\t?$", patch, re.MULTILINE)]
    try:
        for file in changed:
            compile(file.read_bytes(), file, "exec")
    except SyntaxError:
        git_apply("--reverse")
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        parser.error("verl is not installed")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(spec.origin).parent, args.folder / "verl", ignore=ignored)
    # In a folder of another repository `git apply` would skip every file.
    subprocess.run(["git", "init", "--quiet"], cwd=args.folder, check=True)
    fates: dict[bool, list[int]] = {True: [], False: []}
    for number, patch in pull_requests(args.clone):
        fates[apply(patch, args.folder)].append(number)
    print(f"{len(fates[True])} of {len(fates[True]) + len(fates[False])} pull requests:", *fates[True])
    return int(not fates[True])


if __name__ == "__main__":
    sys.exit(main())
