"""Callbacks right after an import: now, later, once, and without a trace in the module."""

import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from verl_turnkey.plugins.verl_api import import_hooks
from verl_turnkey.plugins.verl_api.import_hooks import when_imported


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[str]:
    """A package ``hooked`` with a submodule ``part``, not imported yet."""
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / "__init__.py").write_text("value = 1\n")
    (tmp_path / "hooked" / "part.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield "hooked"
    sys.meta_path[:] = finders
    import_hooks._waiting.clear()
    for name in ("hooked", "hooked.part"):
        sys.modules.pop(name, None)


def test_a_module_that_is_there_calls_back_at_once(package):
    module = importlib.import_module(package)
    seen = []
    when_imported(package, seen.append)
    assert seen == [module]


def test_a_module_to_come_calls_back_after_it_has_executed(package):
    seen = []
    when_imported(package, lambda module: seen.append(module.value))
    when_imported(package, lambda module: seen.append(module.__name__))
    assert seen == []
    importlib.import_module(package)
    assert seen == [1, "hooked"]


def test_a_submodule_calls_back_and_its_parent_does_not(package):
    seen = []
    when_imported("hooked.part", lambda module: seen.append(module.value))
    importlib.import_module("hooked")
    assert seen == []
    importlib.import_module("hooked.part")
    assert seen == [2]


def test_called_once_even_when_reloaded(package):
    seen = []
    when_imported(package, seen.append)
    module = importlib.import_module(package)
    importlib.reload(module)
    assert len(seen) == 1


def test_the_module_keeps_its_own_loader(package):
    loader = importlib.util.find_spec(package).loader
    when_imported(package, lambda module: None)
    module = importlib.import_module(package)
    assert type(module.__loader__) is type(loader)
    assert type(module.__spec__.loader) is type(loader)


def test_a_module_that_fails_calls_back_when_it_succeeds_later(package, tmp_path):
    source = tmp_path / "hooked" / "part.py"
    source.write_text("raise ValueError('not yet')\n")
    seen = []
    when_imported("hooked.part", lambda module: seen.append(module.value))
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module("hooked.part")
    assert seen == []
    source.write_text("value = 'now it works'\n")
    importlib.invalidate_caches()
    importlib.import_module("hooked.part")
    assert seen == ["now it works"]


def test_a_module_that_does_not_exist_fails_as_ever(package):
    when_imported("hooked.absent", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match=r"hooked\.absent"):
        importlib.import_module("hooked.absent")


def test_an_exception_of_the_callback_reaches_the_importer(package):
    def fail(module: object) -> None:
        raise RuntimeError("the callback broke")

    when_imported(package, fail)
    with pytest.raises(RuntimeError, match="the callback broke"):
        importlib.import_module(package)


@pytest.mark.parametrize("device", ["", "cpu"])
def test_stage_one_imports_the_standard_library_only(device):
    code = """
import sys
before = set(sys.modules)
import verl_turnkey.plugins.entry as entry
assert entry.failure is None, entry.failure
added = {name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names}
print(*sorted(added))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"TURNKEY_DEVICE": device, "PATH": ""},
    )
    plugins = "verl_turnkey.plugins"
    cpu = [f"{plugins}.cpu", f"{plugins}.cpu.patches"]
    api = [f"{plugins}.verl_api", f"{plugins}.verl_api.import_hooks", f"{plugins}.verl_api.ledger"]
    assert done.stdout.split() == sorted(["verl_turnkey", plugins, *cpu, f"{plugins}.entry", *api])
