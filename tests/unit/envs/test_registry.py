"""Ids and packages that are not there, and users' own modules."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import pytest

from verl_turnkey.envs import MissingPackageError, ModuleImportError, UnknownEnvironmentError, make
from verl_turnkey.envs.modules import import_modules

OWN = """
import gymnasium
class Own(gymnasium.Env):
    def __init__(self, size=3): self.size = size
IMPORTS = globals().get("IMPORTS", 0) + 1
gymnasium.register("own/Env-v0", entry_point=Own)
"""


def test_unknown_id_names_the_closest():
    with pytest.raises(UnknownEnvironmentError, match="Did you mean 'turnkey/MiniGrid-v0'"):
        make("turnkey/MinGrid-v0")
    with pytest.raises(UnknownEnvironmentError, match=r"turnkey\.modules"):
        make("no such id")


def test_missing_package_names_the_extra():
    code = (
        "import sys; sys.modules['minigrid'] = None\n"
        "import verl_turnkey.envs as envs\n"
        "try: envs.make('turnkey/MiniGrid-v0')\n"
        "except envs.MissingPackageError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 'pip install "verl-turnkey[minigrid]"' in out


def test_missing_package_of_a_users_environment_is_named():
    gymnasium.register("own/Needs-v0", entry_point="no_such_package_xyz.envs:Env")
    with pytest.raises(MissingPackageError, match="pip install no_such_package_xyz"):
        make("own/Needs-v0")


def test_importing_the_room_imports_no_environment_package_and_no_ray():
    code = "import sys, verl_turnkey.envs; print([m for m in ('minigrid', 'ray', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_users_file_is_imported_once(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    import_modules([str(path), "json"])
    first = gymnasium.registry["own/Env-v0"]
    import_modules([str(path)])
    assert gymnasium.registry["own/Env-v0"] is first
    assert make("own/Env-v0", {"size": 5}).unwrapped.size == 5


def test_a_module_that_fails_names_the_key(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    for _ in range(2):  # a module that failed is not taken for imported
        with pytest.raises(ModuleImportError, match=r"turnkey\.modules: cannot import .*ZeroDivisionError"):
            import_modules([str(path)])
    with pytest.raises(ModuleImportError, match="there is no file"):
        import_modules([str(tmp_path / "absent.py")])
    with pytest.raises(ModuleImportError, match="cannot import 'no_such_module_xyz'"):
        import_modules(["no_such_module_xyz"])
    with pytest.raises(ModuleImportError, match="is a list"):
        import_modules("json")
