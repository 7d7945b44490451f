"""A clone without an installation is enough for editors and type checkers to find every module of the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    "advantage/modifying.py",
    "losses/registry.py",
    "losses/objectives.py",
    "envs/registry.py",
    "plugins/config/schema.py",
)


def test_a_type_checker_resolves_each_import_of_the_package_in_a_clone(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import verl_turnkey.absent\nfrom verl_turnkey.losses import absent\n", encoding="utf-8")
    # An interpreter that has no packages, neither this one nor those whose messages are left out below.
    bare = ["--pythonpath", sys._base_executable]
    command = [sys.executable, "-m", "pyright", "--outputjson", *bare, *FILES, str(broken)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False).stdout
    report = json.loads(output)
    assert report["summary"]["filesAnalyzed"] == len(FILES) + 1
    unresolved = [
        (Path(entry["file"]).name, entry["message"])
        for entry in report["generalDiagnostics"]
        if "verl_turnkey" in entry["message"] or "unknown import symbol" in entry["message"]
    ]
    assert unresolved == [
        ("broken.py", 'Import "verl_turnkey.absent" could not be resolved'),
        ("broken.py", '"absent" is unknown import symbol'),
    ]
