"""What a wheel contains, and what an import loads."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
ROOMS = ("advantage", "losses", "envs", "plugins", "recipe")


def test_a_wheel_ships_code_configuration_and_types(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build writes into its source folder
    source.mkdir()
    for name in (*ROOMS, "src", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"  # what pip calls
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    for room in ROOMS:
        files = [path for path in (ROOT / room).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert files
        for path in files:
            assert f"verl_turnkey/{path.relative_to(ROOT)}" in shipped
    assert shipped >= {f"verl_turnkey/{name}.py" for name in ("__init__", "__main__", "loops")}
    assert not [name for name in shipped if name.split("/")[0] in ROOMS]
    licenses = {name.partition(".dist-info/licenses/")[2] for name in shipped} - {""}
    vendored = {str(path.relative_to(ROOT)) for path in (ROOT / "plugins/view/assets/vendor").glob("*.txt")}
    assert licenses == {"LICENSE", *vendored}


def test_importing_environments_is_light() -> None:
    """Every host does, also through the packages of others."""
    heavy = ("torch", "ray", "verl", "minigrid")
    code = f"import sys, verl_turnkey.envs; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_what_every_process_of_verl_imports_brings_no_environments() -> None:
    """The callbacks of the entry point register estimators and losses in all of Ray's workers."""
    heavy = ("gymnasium", "hydra", "pydantic", "aiohttp", "verl_turnkey.envs", "verl_turnkey.plugins.config.schema")
    code = f"""
import sys, verl_turnkey.plugins.entry, verl_turnkey.plugins.register, verl_turnkey.plugins.credit.estimator
print([name for name in {heavy} if name in sys.modules])"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_container_installs_what_the_tests_install() -> None:
    """The same pinned lists, and every Debian package that ``run_tests.sh`` would fetch."""
    container, tests = ((ROOT / name).read_text(encoding="utf-8") for name in ("Dockerfile", "run_tests.sh"))
    command = r"bash examples/install_cpu\.sh \S+ (.+)"
    lists = re.findall(command, tests)
    assert len(lists) == 1
    assert re.findall(command, container) == lists
    debian = {name for names in re.findall(r"programs=\((.+)\)", tests) for name in re.findall(r":([\w+-]+)", names)}
    assert len(debian) == 6
    assert debian <= set(container.split())


def test_versions_that_stand_twice_are_the_same() -> None:
    def matches(file: str, pattern: str) -> set[str]:
        return set(re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))

    version = matches("pyproject.toml", r'^version = "(.+)"$')
    assert matches("CITATION.cff", r"^version: (.+)$") == version
    ruff = matches("examples/cpu/requirements.txt", r"^ruff==(.+)$")
    assert matches(".pre-commit-config.yaml", r"ruff==([\d.]+)") == ruff
    assert len(version) == len(ruff) == 1


def test_no_package_has_two_pins() -> None:
    """The further lock files are installed over the first: another version would replace what the CPU stack runs on."""
    pins: dict[str, set[str]] = {}
    for lock in sorted((ROOT / "examples/cpu").glob("*.txt")):
        for line in re.findall(r"^[^#\s].*$", lock.read_text(encoding="utf-8"), re.MULTILINE):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate({"python_version": "3.11", "python_full_version": "3.11.7"}):
                pins.setdefault(canonicalize_name(pin.name), set()).add(str(pin.specifier))
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}
