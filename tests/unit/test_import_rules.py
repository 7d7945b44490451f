"""Who may import whom, and how long a file may be: the rules of CONTRIBUTING.md, read from the imports.

An import inside a function counts like any other, and so does a text with the name of a module of ours; one under
``if TYPE_CHECKING`` does not, since it never runs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("advantage", "losses", "envs", "plugins", "recipe")

ROOMS_BELOW = {
    "advantage": (),
    "losses": ("advantage",),
    "envs": ("advantage",),
    "plugins": ("advantage", "losses", "envs", "recipe"),
    "recipe": (),
}
# Folder -> the packages of others that its files import; those after the bar inside functions only. The longest folder
# that fits a file counts. Not listed: plugins, and adapters, which import the package of their environment.
PACKAGES = {
    "advantage": "numpy | sklearn scipy",
    "losses": "torch |",
    "recipe": "|",
    "envs": "numpy gymnasium | PIL pandas pyarrow pydantic scipy",
    "envs.hosting": "gymnasium | ray",
    "envs.agents": "numpy | openai tomli",
    "envs.mcp_servers": "| mcp",
}
ONLY_PLUGINS = {"hydra", "omegaconf", "torch", "transfer_queue", "verl", "vllm"}

# plugins/ from the ground up: a file imports its own folder and what lies on lower floors.
FLOORS = (
    ("verl_api", "config", "notices", "ports"),
    ("log", "shutdown"),
    ("view",),
    ("credit",),
    ("teacher", "prm"),
    ("cpu", "rollout", "actor", "critic"),
    ("gateway",),
    ("register",),
    ("checks",),
    ("trainer", "eval"),  # above the checks, whose probe they play
    ("entry",),
    ("cli",),
)

# env-check plays in processes that are a host's.
TO_OTHER_WING = {("envs.checking.report", "envs.hosting.processes")}

# The list of environments holds the names of adapters as text.
TEXT_TO_WING = {("envs.catalog", "envs.adapters")}
# May change where modules are searched for: to the current folder as `python -m` does; and loads the user's own files.
SEARCHES = {"envs.adapters.webshop.server", "plugins.cli.main", "plugins.cli.script", "envs.user_modules"}

LONGEST = 600


@dataclass(frozen=True)
class Import:
    """``file``, a module of ours without ``verl_turnkey``, imports ``target``, another one or a package of others."""

    file: str
    line: int
    target: str
    lazy: bool = False
    text: bool = False
    """by a text that names it"""

    @property
    def ours(self) -> bool:
        return self.target.split(".")[0] in ROOMS


# --- reading ----------------------------------------------------------------------------------------------------------
@cache
def modules() -> dict[str, Path]:
    """Module -> file."""
    paths = {}
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        *parts, last = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts if last == "__init__" else [*parts, last])] = path
    return paths


def names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports name whole modules"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def named(node: ast.AST) -> list[str]:
    """The modules that a text names: ours in any text, others where the text is what ``import_module`` imports."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        parts = [part for argument in node.args[:1] for part in ast.walk(argument) if isinstance(part, ast.Constant)]
        return [part.value for part in parts if isinstance(part.value, str) and re.fullmatch(r"[\w.]+\w", part.value)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"verl_turnkey(?:\.\w+)+", node.value)
    return []


def read(node: ast.AST, lazy: bool = False) -> Iterator[tuple[int, str, bool, bool]]:
    """Line, name, whether a function holds it, and whether a text names it, of the imports below ``node``."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return
    line = getattr(node, "lineno", 0)
    yield from ((line, name, lazy, False) for name in names(node))
    yield from ((line, name, True, True) for name in named(node))
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from read(child, lazy)


@cache
def imports() -> tuple[Import, ...]:
    """Of all files, without those of the standard library."""
    edges = []
    for module, path in modules().items():
        for line, name, lazy, text in read(ast.parse(path.read_text(encoding="utf-8"))):
            first, _, rest = name.partition(".")
            if first == "verl_turnkey":
                while rest not in modules():
                    assert rest, f"{path}:{line}: {name} is no module of ours"
                    rest = rest.rpartition(".")[0]
                edges.append(Import(module, line, rest, lazy, text))
            elif first not in sys.stdlib_module_names:
                edges.append(Import(module, line, first, lazy, text))
    return tuple(edges)


# --- the rules: what is wrong with an import, or None -----------------------------------------------------------------
def rooms(edge: Import) -> str | None:
    room, other = edge.file.split(".")[0], edge.target.split(".")[0]
    if edge.ours and other not in (room, *ROOMS_BELOW[room]):
        return f"{room}/ imports {', '.join(ROOMS_BELOW[room]) or 'no other room'}"
    return None


def packages(edge: Import) -> str | None:
    if edge.ours or edge.file.startswith("plugins"):
        return None
    if edge.file.startswith("envs.adapters"):
        return "only plugins/ imports it" if edge.target in {*ONLY_PLUGINS, "ray"} else None
    folder = max((key for key in PACKAGES if f"{edge.file}.".startswith(f"{key}.")), key=len)
    anywhere, lazily = (part.split() for part in PACKAGES[folder].split("|"))
    if edge.target in anywhere or (edge.lazy and edge.target in lazily):
        return None
    inside = f", and inside functions {' '.join(lazily)}" if lazily else ""
    return f"{folder.replace('.', '/')}/ imports {' '.join(anywhere) or 'no package'}{inside}"


def queue(edge: Import) -> str | None:
    if edge.target == "transfer_queue" and edge.file != "plugins.verl_api.queue":
        return "plugins/verl_api/queue.py reads and writes rows, and nobody else"
    return None


def methods(edge: Import) -> str | None:
    folder = "advantage.methods"
    to_method = edge.target.startswith(f"{folder}.") and not edge.target.startswith(f"{folder}._")
    if to_method and edge.file != folder:
        return "no other file imports a method: what two of them share is a file that begins with an underscore"
    return None


def wing(module: str) -> str | None:
    """The folder in its room; of adapters the environment's, a file or a folder; None of files at the room's root."""
    room, *parts = module.split(".")
    if room == "envs":
        if not (ROOT / "envs" / parts[0]).is_dir() if parts else True:
            return None
        return ".".join(parts[:2]) if parts[0] == "adapters" else parts[0]
    return parts[0] if parts else None


def wings(edge: Import) -> str | None:
    if not edge.target.startswith("envs."):
        return None
    own, other = wing(edge.file) if edge.file.startswith("envs") else None, wing(edge.target)
    if (edge.file, edge.target) in TO_OTHER_WING | TEXT_TO_WING:
        return None
    if other is None or other == own or (own and own.startswith("adapters.") and other.startswith("adapters._")):
        return None
    if other.startswith("adapters"):
        return "nobody imports an adapter: the registry holds its name as text"
    if edge.file.startswith("envs"):
        return "a wing of envs/ imports the files at its root and no other wing; these import no wing"
    return None


def floors(edge: Import) -> str | None:
    if not (edge.file.startswith("plugins.") and edge.target.startswith("plugins.")):
        return None
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    own, other = wing(edge.file), wing(edge.target)
    assert own in floor, f"plugins/{own} stands on no floor: give it one in {Path(__file__).name}"
    assert other in floor, f"plugins/{other} stands on no floor: give it one in {Path(__file__).name}"
    if own != other and floor[other] >= floor[own]:
        below = [name for names in FLOORS[: floor[own]] for name in names]
        return f"plugins/{own} imports itself and {', '.join(below) or 'nothing else of plugins/'}"
    return None


RULES: tuple[Callable[[Import], str | None], ...] = (rooms, packages, queue, methods, wings, floors)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_imports(rule: Callable[[Import], str | None]) -> None:
    broken = [(edge, reason) for edge in imports() if (reason := rule(edge))]
    lines = [f"{modules()[edge.file]}:{edge.line} imports {edge.target}: {reason}" for edge, reason in broken]
    assert not lines, "\n".join(lines)


def test_nothing_hides_an_import() -> None:
    """Names of modules are whole, and nobody changes where modules are searched for, or runs a file as a module."""
    lines = []
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        lines += [f"{path}:{line}: {what}" for line, what in hidden(module, ast.parse(text))]
    assert not lines, "\n".join(lines)


def hidden(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        whole = not isinstance(node, ast.Constant) or not re.search(r"verl_turnkey\.[\w.]+\.$", str(node.value))
        if isinstance(node, ast.Constant) and not whole:
            yield node.lineno, "the name of a module of ours is put together"
        if module in SEARCHES:
            continue
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target).startswith("sys.path") for target in targets):
                yield node.lineno, "sys.path is changed"
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if re.match(r"sys\.path\.\w+$", function):
                yield node.lineno, "sys.path is changed"
            if function.rpartition(".")[2] in ("spec_from_file_location", "run_path", "addsitedir"):
                yield node.lineno, f"{function} imports a file"


def test_hidden_imports_are_found() -> None:
    source = """
        LOOP = "verl_turnkey.plugins.trainer.trainer"
        sys.path.insert(0, str(Path(__file__).parent))
        sys.path += ["agents"]
        guard = importlib.import_module("guard")
        import_module(f"verl_turnkey.plugins.{name}")
        runpy.run_path("guard.py")
    """
    tree = ast.parse(textwrap.dedent(source))
    imported = [name for _, name, *_ in read(tree)]
    assert imported == ["verl_turnkey.plugins.trainer.trainer", "guard", "verl_turnkey.plugins"]
    assert [line for line, _ in sorted(hidden("plugins.log.writer", tree))] == [3, 4, 6, 7]


@pytest.mark.parametrize(
    ("file", "target", "rule"),
    [
        ("advantage.batch", "losses", rooms),
        ("losses.turns", "plugins.notices", rooms),
        ("losses.objectives", "envs.base", rooms),
        ("envs.base", "plugins", rooms),
        ("advantage.batch", "torch", packages),
        ("advantage.methods.proxmo", "sklearn", packages),
        ("losses.turns", "numpy", packages),
        ("losses.objectives", "numpy", packages),
        ("envs.registry", "ray", packages),
        ("envs.hosting.pool", "ray", packages),
        ("envs.adapters.gem", "verl", packages),
        ("recipe", "numpy", packages),
        ("plugins.trainer.replay", "transfer_queue", queue),
        ("plugins.verl_api.internals", "transfer_queue", queue),
        ("advantage.methods.vc_gae", "advantage.methods.turn_gae", methods),
        ("plugins.credit.rows", "advantage.methods.gigpo", methods),
        ("envs.hosting.pool", "envs.prompting.memory", wings),
        ("envs.registry", "envs.hosting.pool", wings),
        ("envs.adapters.gem", "envs.adapters.textarena", wings),
        ("plugins.cli.main", "envs.adapters.gem", wings),
        ("envs.checking.play", "envs.adapters.gem", wings),
        ("plugins.credit.rows", "plugins.rollout.episode", floors),
        ("plugins.rollout.episode", "plugins.actor.update_order", floors),
        ("plugins.checks.validate", "plugins.trainer.trainer", floors),
        ("plugins.register", "plugins.entry", floors),
    ],
)
def test_what_the_rules_refuse(file: str, target: str, rule: Callable[[Import], str | None]) -> None:
    assert rule(Import(file, 1, target))


def on_circles(edges: Sequence[Import]) -> list[Import]:
    """The imports through which a file comes to import itself."""
    rest: dict[str, set[str]] = {}
    for edge in edges:
        if edge.ours and edge.target != edge.file and not edge.text:
            rest.setdefault(edge.file, set()).add(edge.target)
    # A file that imports nothing of what is left lies on no circle, nor does one that nothing of it imports.
    while free := [file for file in rest if not rest[file] & rest.keys() or not any(file in rest[by] for by in rest)]:
        for file in free:
            del rest[file]
    return [edge for edge in edges if edge.file in rest and edge.target in rest]


def test_no_circles() -> None:
    lines = [f"{modules()[edge.file]}:{edge.line} imports {edge.target}: a circle" for edge in on_circles(imports())]
    assert not lines, "\n".join(lines)


def test_a_circle_is_found() -> None:
    first, two, three = (Import(f"envs.{a}", 1, f"envs.{b}", lazy=True) for a, b in ("ab", "bc", "ca"))
    aside = [Import("envs.x", 1, "envs.a"), Import("envs.b", 1, "envs.y"), Import("envs.y", 1, "numpy")]
    assert on_circles([first, two, three, *aside]) == [first, two, three]
    assert not on_circles([first, two, *aside])


def test_modules_outside_of_packages_have_names_of_their_own() -> None:
    """One process of tests may import all of them; of two with one name it gets the first for both."""
    folders: dict[str, set[str]] = {}
    for part in ("tests", "benchmarks", "examples"):
        for path in (ROOT / part).rglob("*.py"):
            if not (path.parent / "__init__.py").exists() and not path.stem.startswith(("test_", "conftest")):
                folders.setdefault(path.stem, set()).add(str(path.parent.relative_to(ROOT)))
    twins = {name for name, paths in folders.items() if len(paths) > 1}
    # Commands, which nobody imports; and the two that benchmarks/evidence/tasks.py keeps apart.
    assert twins <= {"run", "warm_start"}, {name: folders[name] for name in twins}


def test_no_file_is_longer_than_a_reader_bears() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values()}
    long = [f"{path}:{length} lines; at most {LONGEST}" for path, length in lengths.items() if length > LONGEST]
    assert not long, "\n".join(long)


CLOCK = re.compile(r"\btime\.time\(|\bdatetime\.(now|utcnow|today)\(|^from time import .*\btime\b|\bstrftime\(", re.M)
READS_THE_CLOCK = {
    "plugins/log/writer.py": "names of starts, each behind those that are there",
    "plugins/cli/run_folder.py": "the same, for metrics",
    "plugins/trainer/logging.py": "when a start was, for readers",
    "plugins/rollout/episode.py": "when a turn ended: one process writes all times of an episode",
    "plugins/shutdown/run_files.py": "the age of files in /tmp and /dev/shm, which are the machine's own",
    "plugins/view/notes.py": "when a note was written, for readers",
}


def test_no_time_of_one_machines_clock_is_compared_with_anothers() -> None:
    """Durations and limits are of clocks that are never set. A new entry here says why two clocks apart do no harm."""
    reads = {str(path.relative_to(ROOT)) for path in modules().values() if CLOCK.search(path.read_text("utf-8"))}
    assert reads == READS_THE_CLOCK.keys()


def test_a_check_begins_without_torch() -> None:
    """The import takes longer than most checks; a rule that needs torch, verl or Ray imports it."""
    code = "import verl_turnkey.plugins.cli.check; from verl_turnkey.plugins.cli.without_torch import possible"
    assert subprocess.run([sys.executable, "-c", f"import sys; {code}; sys.exit(not possible())"]).returncode == 0
