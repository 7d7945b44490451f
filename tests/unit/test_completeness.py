"""The completeness of this tree, and that each gap is noticed."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from completeness import gaps, registered

from verl_turnkey.envs.catalog import ADAPTERS

ROOT = Path(__file__).parents[2]


def test_whatever_is_there_is_registered_and_whole():
    missing = gaps(ROOT, registered())
    assert not missing, "\n" + "\n".join(missing)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    for name in ("advantage/methods", "advantage/modifiers", "losses", "envs/adapters", "recipe", "docs", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.png", "*.json"))
    shutil.copy(ROOT / "README.md", copy)
    return copy


Change = Callable[[Path], None]


def removed(path: str, text: str | None = None) -> Change:
    """Without the file, or without ``text`` in it."""

    def change(root: Path) -> None:
        if text is None:
            (root / path).unlink()
        else:
            content = (root / path).read_text(encoding="utf-8")
            assert text in content
            (root / path).unlink()  # the other trees have the same file
            (root / path).write_text(content.replace(text, ""), encoding="utf-8")

    return change


def added(path: str) -> Change:
    return lambda root: (root / path).write_text("", encoding="utf-8") and None


EST, TESTS, ADAPTERS_OF = "advantage/methods", "tests/unit/advantage/methods", "tests/unit/envs/adapters"
RECIPES = "recipe/config/turnkey"
ORPHAN = "belongs to nothing that is registered: delete it"
WRITE = "run `tools/write_tables.py`"
IN_ONE_FILE = ("a_grae", "copo", "dynamo_modulation", "empg", "length_gate", "rank_shaping", "shrinkage")
IN_ONE_FILE += ("tool_gate", "trace")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            added(f"{EST}/orphan.py"),
            [
                f"{EST}/orphan.py registers no estimator: decorate",
                "docs/methods/orphan.md is missing: write the page",
                f"{RECIPES}/orphan.yaml is missing: run `tools/write_tables.py`",
                f"docs/methods.md lacks '](methods/orphan.md)': {WRITE}",
                f"{TESTS}/test_orphan.py: no test compares 'orphan': compare",
            ],
        ),
        (removed("docs/methods/rebn.md"), ["docs/methods/rebn.md is missing: write the page"]),
        (removed(f"{RECIPES}/rebn.yaml"), [f"{RECIPES}/rebn.yaml is missing: run `tools/write_tables.py`"]),
        (
            removed(f"{TESTS}/test_compared_outcomes.py", "naive.max"),
            [f"{TESTS}/test_maxrl.py: no test compares 'maxrl'"],
        ),
        (removed("docs/methods.md", "](methods/rebn.md)"), [f"docs/methods.md lacks '](methods/rebn.md)': {WRITE}"]),
        (removed("README.md", "](docs/methods/hgpo.md)"), [f"README.md lacks '](docs/methods/hgpo.md)': {WRITE}"]),
        (added("docs/methods/orphan.md"), [f"docs/methods/orphan.md {ORPHAN}"]),
        (added(f"{RECIPES}/orphan.yaml"), [f"{RECIPES}/orphan.yaml {ORPHAN}"]),
        (added(f"{TESTS}/test_orphan.py"), [f"{TESTS}/test_orphan.py {ORPHAN}"]),
        (added("tests/unit/naive/orphan.py"), [f"tests/unit/naive/orphan.py {ORPHAN}"]),
        (
            added("advantage/modifiers/orphan.py"),
            [
                "advantage/modifiers/orphan.py registers no modifier: decorate",
                "docs/modifiers.md lacks '## orphan': write its section",
                f"docs/modifiers.md lacks '| [`orphan`](#orphan) |': {WRITE}",
                "tests/unit/advantage/modifiers: no test compares a number of the modifier 'orphan'",
            ],
        ),
        (removed("docs/modifiers.md", "\n## empg\n"), ["docs/modifiers.md lacks '## empg': write its section"]),
        (
            removed("tests/unit/advantage/modifiers/test_formulas.py"),
            [
                f"tests/unit/advantage/modifiers: no test compares a number of the modifier {name!r}"
                for name in IN_ONE_FILE
            ],
        ),
        (
            added("losses/orphan.py"),
            [
                "losses/orphan.py registers no loss: decorate",
                "docs/losses.md has no section on orphan: write it",
                f"docs/losses.md lacks '| `+turnkey/loss=orphan` |': {WRITE}",
                f"{RECIPES}/loss/orphan.yaml is missing: run `tools/write_tables.py`",
                "tests/unit/losses/test_orphan.py: no test compares a number of the loss 'orphan'",
            ],
        ),
        (removed("docs/losses.md", "## dgpo"), ["docs/losses.md has no section on dgpo"]),
        (removed("docs/losses.md", "`+turnkey/loss=dgpo`"), ["docs/losses.md lacks '| `+turnkey/loss=dgpo` |'"]),
        (removed(f"{RECIPES}/loss/dgpo.yaml"), [f"{RECIPES}/loss/dgpo.yaml is missing"]),
        (removed("tests/unit/losses/test_policy_losses.py", "dgpo"), ["tests/unit/losses/test_dgpo.py: no test"]),
        (added(f"{RECIPES}/loss/orphan.yaml"), [f"{RECIPES}/loss/orphan.yaml {ORPHAN}"]),
        (
            added("envs/adapters/orphan.py"),
            [
                "envs/adapters/orphan is not in the catalog: add",
                "docs/envs/orphan.md is missing: write the page",
                f"{ADAPTERS_OF}/test_orphan.py is missing: test the adapter",
                "the adapter orphan has no recipe: name one in envs/catalog.py",
            ],
        ),
        (
            removed("envs/adapters/gem.py"),
            [
                "envs/adapters/gem.py is not there: write it",
                f"docs/envs/gem.md {ORPHAN}",
                "tests/contract/envs/adapters/test_gem.py belongs to no adapter: delete it",
            ],
        ),
        (removed("docs/envs/gem.md"), ["docs/envs/gem.md is missing: write the page"]),
        (
            removed("tests/contract/envs/adapters/test_scienceworld.py"),
            [f"{ADAPTERS_OF}/test_scienceworld.py is missing: test"],
        ),
        (removed(f"{RECIPES}/env/sokoban.yaml"), [f"{RECIPES}/env/sokoban.yaml is missing: write the recipe"]),
        (removed(f"{RECIPES}/env/sokoban.yaml", "id: turnkey/GEM-v0"), [f"{RECIPES}/env/sokoban.yaml lacks 'id: turn"]),
        (removed("docs/environments.md", "[GEM](envs/gem.md)"), ["docs/environments.md lacks '[GEM](envs/gem.md)'"]),
        (removed("README.md", "[GEM](docs/envs/gem.md)"), [f"README.md lacks '[GEM](docs/envs/gem.md)': {WRITE}"]),
        (added("docs/envs/orphan.md"), [f"docs/envs/orphan.md {ORPHAN}"]),
        (added(f"{RECIPES}/env/orphan.yaml"), [f"{RECIPES}/env/orphan.yaml {ORPHAN}"]),
        (added(f"{ADAPTERS_OF}/test_orphan.py"), [f"{ADAPTERS_OF}/test_orphan.py belongs to no adapter: delete"]),
    ],
)
def test_a_gap_is_named(whole: Path, tmp_path: Path, change: Change, expected: list[str]):
    root = tmp_path / "tree"
    shutil.copytree(whole, root, copy_function=os.link)
    change(root)
    missing = gaps(root, registered())
    assert len(missing) == len(expected), missing
    for line, start in zip(missing, expected, strict=True):
        assert line.startswith(start)


def test_what_is_not_imported_is_not_registered(whole: Path):
    """An estimator and a loss whose file is there, with page and tests, and whose import is forgotten."""
    everything = registered()
    for kind, name in (("estimators", "rebn"), ("modifiers", "empg"), ("losses", "dgpo")):
        names = {other: module for other, module in getattr(everything, kind).items() if other != name}
        [line] = gaps(whole, replace(everything, **{kind: names}))
        assert f"{name}.py registers no" in line
    rest = tuple(adapter for adapter in ADAPTERS if adapter.module != "gem")
    assert "envs/adapters/gem is not in the catalog" in gaps(whole, replace(everything, adapters=rest))[0]


@pytest.mark.parametrize("part", ["unit", "contract", "openenv", "e2e"])
def test_the_files_of_a_part_have_names_of_their_own(part):
    """pytest imports each by its bare name, and refuses a second one of that name while it collects."""
    names = Counter(path.name for path in (ROOT / "tests" / part).rglob("*.py") if path.name != "conftest.py")
    assert names
    assert [name for name, count in names.items() if count > 1] == []
