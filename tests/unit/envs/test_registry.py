"""Ids and packages that are not there, and users' own modules."""

import json
import re
import subprocess
import sys
from importlib.metadata import metadata, version

import gymnasium
import pytest
from typer.testing import CliRunner

from verl_turnkey.envs import (
    EnvironmentKwargsError,
    MissingPackageError,
    ModuleImportError,
    UnknownEnvironmentError,
    make,
    registry,
)
from verl_turnkey.envs.catalog import ADAPTERS, Adapter
from verl_turnkey.envs.registry import listing
from verl_turnkey.envs.user_modules import environments_of, import_modules
from verl_turnkey.plugins.cli.main import app

OWN = """
import gymnasium
class Own(gymnasium.Env):
    def __init__(self, size=3): self.size = size
IMPORTS = globals().get("IMPORTS", 0) + 1
gymnasium.register("own/Env-v0", entry_point=Own)
"""


class Demanding(gymnasium.Env):
    def __init__(self, path: str, size: int = 3) -> None:
        self.path = path


gymnasium.register("own/Demanding-v0", entry_point=Demanding)
gymnasium.register("own/Given-v0", entry_point=Demanding, kwargs={"path": "registered"})


def test_what_a_constructor_refuses_is_said_in_its_own_words():
    with pytest.raises(EnvironmentKwargsError, match=r"^max_steps must be a positive integer or null, not 0$"):
        make("turnkey/FrozenLake-v0", {"max_steps": 0})


def test_a_missing_argument_is_named_with_its_key():
    with pytest.raises(EnvironmentKwargsError, match=r"'own/Demanding-v0' needs 'path'.*turnkey\.env\.kwargs\.path"):
        make("own/Demanding-v0", {"size": 1})
    assert make("own/Demanding-v0", {"path": "x"}).unwrapped.path == "x"
    assert make("own/Given-v0").unwrapped.path == "registered"


def test_gymnasiums_own_limit_is_taken_by_every_environment():
    assert make("own/Given-v0", {"max_episode_steps": 7}).spec.max_episode_steps == 7
    with pytest.raises(EnvironmentKwargsError, match=r"argument 'max_steps'.*It takes path, size, max_episode_steps"):
        make("own/Given-v0", {"max_steps": 7})


def test_unknown_id_names_the_closest(monkeypatch):
    # Without a namespace, as those of the package minigrid.
    monkeypatch.setitem(gymnasium.registry, "MiniGrid-v1x", gymnasium.registry["turnkey/MiniGrid-v0"])
    with pytest.raises(UnknownEnvironmentError, match="did you mean 'turnkey/MiniGrid-v0'"):
        make("turnkey/MinGrid-v0")
    with pytest.raises(UnknownEnvironmentError, match="did you mean 'turnkey/MiniGrid-v0'"):
        make("MiniGrid-v0")
    # A name without its namespace, or within it, is near; one of another namespace is not.
    with pytest.raises(UnknownEnvironmentError, match=r"'mine/WarmColdFixed-v0' is registered\. .*turnkey\.modules"):
        make("mine/WarmColdFixed-v0")


def test_missing_package_of_an_environment_of_ours(monkeypatch):
    entry_point = "absent_package_xyz.envs:Env"
    adapter = Adapter("test/Absent-v0", entry_point, "never there", package="absent-package-xyz", extra="absent")
    monkeypatch.setattr(registry, "ADAPTERS", (adapter,))
    gymnasium.register(adapter.id, entry_point=adapter.entry_point)
    expected = "needs the package 'absent-package-xyz', which is not installed: pip install \"verl-turnkey[absent]\""
    with pytest.raises(MissingPackageError, match=re.escape(expected)):
        make("test/Absent-v0")


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("minigrid", "needs the module 'minigrid' (imported by"),
        ("pygame", "needs the module 'pygame' (imported by minigrid."),
        ("minigrid.core.actions", "cannot be imported: import of minigrid.core.actions halted"),
    ],
)
def test_a_package_that_is_there_but_not_whole(absent, words):
    code = (
        f"import sys; sys.modules['{absent}'] = None\n"
        "import verl_turnkey.envs as envs\n"
        "try: envs.make('turnkey/MiniGrid-v0')\n"
        "except envs.MissingPackageError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert words in out
    assert 'pip install "verl-turnkey[minigrid]"' in out


def test_missing_package_of_a_users_environment_is_named(tmp_path, monkeypatch):
    gymnasium.register("own/Needs-v0", entry_point="no_such_package_xyz.envs:Env")
    with pytest.raises(MissingPackageError, match="pip install no_such_package_xyz") as caught:
        make("own/Needs-v0")
    assert caught.value.name == "no_such_package_xyz"
    (tmp_path / "needs_more_xyz.py").write_text("import no_such_module_xyz")
    monkeypatch.syspath_prepend(tmp_path)
    gymnasium.register("own/NeedsMore-v0", entry_point="needs_more_xyz:Env")
    with pytest.raises(MissingPackageError, match=r"'no_such_module_xyz' \(imported by needs_more_xyz\)"):
        make("own/NeedsMore-v0")


def test_a_misspelt_module_of_an_installed_package_is_not_to_be_installed():
    gymnasium.register("own/Misspelt-v0", entry_point="json.envz:Env")
    with pytest.raises(MissingPackageError, match=r"cannot be imported: No module named 'json\.envz'") as caught:
        make("own/Misspelt-v0")
    assert "pip" not in str(caught.value)


def test_extras_of_the_adapters_exist():
    extras = metadata("verl-turnkey").get_all("Provides-Extra")
    assert {adapter.extra for adapter in ADAPTERS if adapter.extra} <= set(extras)


def test_listing_says_what_is_there(monkeypatch, tmp_path):
    def needs() -> dict[str, list[bool | None]]:
        return {row["id"]: [need["found"] for need in row["needs"]] for row in listing(gymnasium.registry)}

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    before = needs()
    assert before["turnkey/ALFWorld-v0"] == before["turnkey/ScienceWorld-v0"] == [False]
    assert before["turnkey/WebShop-v0"] == [None]
    assert before["turnkey/FrozenLake-v0"] == []
    (tmp_path / "java").touch(0o755)
    (tmp_path / "json_2.1.1").mkdir()
    assert needs() == before | {"turnkey/ALFWorld-v0": [True], "turnkey/ScienceWorld-v0": [True]}
    rows = {row["id"]: row for row in listing(gymnasium.registry)}
    assert rows["turnkey/FrozenLake-v0"]["version"] == version("gymnasium")
    for row in rows.values():
        assert (row["version"] is None) == (row["install"] is not None)


def test_command_envs(tmp_path):
    path = tmp_path / "listed.py"
    path.write_text(OWN.replace("own/Env-v0", "own/Listed-v0"))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["list", "envs", *arguments])
        assert result.exit_code == 0
        return result.output

    rows = json.loads(run("--module", str(path), "--json"))
    assert [row["id"] for row in rows] == [adapter.id for adapter in ADAPTERS] + ["own/Listed-v0"]
    output = run()
    assert all(adapter.id in output for adapter in ADAPTERS)
    assert "needed: a running webshop_server.py" in output
    assert {row["id"]: row["switch"] for row in rows}["own/Listed-v0"] == "turnkey.env.id=own/Listed-v0"
    assert all(adapter.switch in output for adapter in ADAPTERS)


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
        with pytest.raises(
            ModuleImportError, match=r"turnkey\.modules: cannot import .*ZeroDivisionError: division by zero\)$"
        ):
            import_modules([str(path)])
    with pytest.raises(ModuleImportError, match=r"there is no file .*\. Give a dotted module"):
        import_modules([str(tmp_path / "absent.py")])
    with pytest.raises(ModuleImportError, match=r"cannot import 'no_such_module_xyz' .*\. Give a dotted module"):
        import_modules(["no_such_module_xyz"])
    with pytest.raises(ModuleImportError, match="is a list"):
        import_modules("json")


def test_what_a_package_registers_when_a_file_imports_it_is_not_of_the_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "many_levels.py").write_text(
        "import gymnasium\ngymnasium.register('test/Level-v0', 'many_levels:Level')\n"
    )
    own = "gymnasium.register('test/Mine-v0', entry_point=lambda: None)\n"
    (tmp_path / "mine.py").write_text(f"import gymnasium\nimport many_levels\n{own}")
    try:
        assert environments_of(str(tmp_path / "mine.py")) == ["test/Mine-v0"]
        assert "test/Level-v0" in gymnasium.registry
    finally:
        sys.modules.pop("many_levels", None)
        for name in ("test/Mine-v0", "test/Level-v0"):
            gymnasium.registry.pop(name, None)


def test_what_a_file_registers_is_known_whenever_it_was_imported(tmp_path):
    text = "import gymnasium\ngymnasium.register('test/Twice-v0', entry_point=lambda: None)\n"
    paths = [tmp_path / f"{name}.py" for name in ("one", "copy", "empty")]
    for path in paths:
        path.write_text("" if path.stem == "empty" else text)
    try:
        import_modules([str(paths[0])])  # as another command of the same process may have done
        assert environments_of(str(paths[0])) == ["test/Twice-v0"]
        with pytest.warns(UserWarning, match="Overriding environment"):
            assert environments_of(str(paths[1])) == ["test/Twice-v0"]
        assert environments_of(str(paths[2])) == []
    finally:
        gymnasium.registry.pop("test/Twice-v0", None)
