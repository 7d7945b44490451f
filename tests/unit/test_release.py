"""The checklist of a release names what does not hold. Its commands run for real in the release itself."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, over copies of the files that have the version."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_the_changelog_needs_the_version_with_its_day(release: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "CHANGELOG.md"
    page.write_text(f"## {release.version()} (unreleased)\n")
    with pytest.raises(release.Wrong, match=r"CHANGELOG\.md: expected a heading `## [\d.]+ \(YYYY-MM-DD\)`"):
        release.versions()
    page.write_text(f"# Changelog\n\n## {release.version()} (2026-11-26)\n")
    release.versions()


def test_another_version_in_the_citation_is_named(release: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 9.9.9\n")
    with pytest.raises(release.Wrong, match=r"CITATION\.cff: expected the line `version: "):
        release.versions()


def test_a_failed_command_shows_its_output_and_the_other_steps_run(
    release: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "CHANGELOG.md").write_text("")
    assert release.main(["clean", "versions"]) == 1  # the copy is no repository
    output = capsys.readouterr().out
    assert "NO\ngit status --porcelain:\nfatal: not a git repository" in output
    assert "NO\nCHANGELOG.md: expected" in output


def test_the_tests_that_it_names_exist(release: ModuleType) -> None:
    assert [name for name in release.PACKAGES if not (ROOT / name).is_file()] == []
