"""What a field of the configuration is, said at the field; lists of fields of a kind are loops over these roles.

    servers: Played[ServersFile[str | dict[str, Any] | None]] = None

A field has one use (played, sampled, hosted, trained or apart), and says where its texts name files or are secrets.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

T = TypeVar("T")
Names = tuple[str | int, ...]
"""the way from a field's value to a text in it: names of mappings and numbers in lists; empty: the value itself"""


class Use(Enum):
    """What a field decides."""

    PLAYED = "how an episode is played and what it earns: part of panels, of an evaluation's identity, and of eval RUN"
    SAMPLED = "how a model is asked: part of an evaluation's identity and of eval RUN, and each panel leaves it open"
    HOSTED = "where an episode runs and how long it may take: part of eval RUN"
    TRAINED = "what is trained and how: of a run alone"
    APART = "neither: what is written and checked, and when a run ends"


@dataclass(frozen=True)
class Files:
    """The texts of a field that name files or folders: absolute for workers, which may run in another folder."""

    names_file: Callable[[str, Names, Mapping[str, Any], Path], bool]
    """called with a text, its way, the mapping it stands in, and the folder that it is relative to"""
    watched: bool = True
    """whether it holds code or texts of the user, whose content is on record, and whose changes a resume names"""
    module: str = ""
    """pattern of the texts that name a module as Python imports it, which is its first group"""
    inside: Callable[[Path], Any] | None = None
    """reads the value that a file of the field holds in place of the configuration"""

    def relative(self, value: Any, folder: Path) -> Iterator[tuple[Names, str]]:
        """The texts in ``value`` that are relative to ``folder``: their ways, and the absolute path of each."""
        for names, text, entry in texts(value):
            here = text and "://" not in text and "${" not in text and self.names_file(text, names, entry, folder)
            if here and (path := str(folder / Path(text).expanduser())) != text:
                yield names, path

    def read(self, value: Any, folder: Path) -> Iterator[tuple[Names, Path]]:
        """The files in ``value`` that are there, also those that a command names by absolute paths, and their ways."""
        for names, text, entry in texts(value):
            if self._named(text, names, entry, folder) and (path := file_in(text, folder)) is not None:
                yield names, path

    def sources(self, value: Any, folder: Path) -> Iterator[tuple[str, Path | str]]:
        """The files in ``value``, and the Python files of its folders and packages: names, paths.

        A name begins with the folder or package that the configuration names. Of an absolute path in a command only a
        Python file counts. An installed package has its version in place of a path.
        """
        for names, text, entry in texts(value):
            if text and self.names_file(text, names, entry, folder):
                if (path := file_in(text, folder)) is None:
                    yield from _python_files(folder / os.path.expanduser(text))
                    continue
                yield path.name, path
                if self.inside and not names:
                    yield from self.sources(self.inside(path), folder)
            elif self._named(text, names, entry, folder):
                if (path := file_in(text, folder)) is not None and path.suffix == ".py":
                    yield path.name, path
            elif self.module and (match := re.fullmatch(self.module, text)):
                yield from _of_package(match[1], folder)

    def _named(self, text: str, names: Names, entry: Mapping[str, Any], folder: Path) -> bool:
        absolute = bool(names) and text.startswith(("/", "~"))
        return bool(text) and (absolute or self.names_file(text, names, entry, folder))


@dataclass(frozen=True)
class Secret:
    """The texts of a field that are masked wherever a configuration is written."""

    hides: Callable[[Names], bool] = lambda names: True


def _code(text: str, *_: Any) -> bool:
    return text.endswith(".py") or ".py:" in text


def _exists(text: str, _names: Names, _entry: Mapping[str, Any], folder: Path) -> bool:
    return os.path.exists(folder / Path(text).expanduser())  # False for what is too long for a path


def _of_component(text: str, names: Names, entry: Mapping[str, Any], _folder: Path) -> bool:
    """Of a reward component; one of the user's own defines its options itself."""
    own = ":" in str(entry.get("name", ":"))
    code, options = ("name", "path", "embed", "compare"), ("cache", "file")
    return (_code(text) and {*names[-1:]} <= {*code}) or (not own and {*names[-1:]} <= {*options})


def _of_template(text: str, names: Names, entry: Mapping[str, Any], folder: Path) -> bool:
    from verl_turnkey.envs.prompting.prompts import TEMPLATES  # every process of verl reads roles, and few play

    return not (TEMPLATES / f"{text}.txt").is_file() and _exists(text, names, entry, folder)  # a shipped name wins


def _of_environment(text: str, names: Names, entry: Mapping[str, Any], folder: Path) -> bool:
    from verl_turnkey.envs.tasks import PLACES

    return {*names[-1:]} <= {*PLACES} and (_code(text) or _exists(text, names, entry, folder))


def _of_servers(text: str, names: Names, entry: Mapping[str, Any], folder: Path) -> bool:
    script = names[1:2] == ("args",) and text.endswith(".py") and not entry.get("cwd")
    return not names or names[-1] == "cwd" or (script and _exists(text, names, entry, folder))


def _servers(path: Path) -> Any:
    """The servers in a file of MCP clients; none in one that cannot be read, which the checks refuse."""
    try:
        return json.loads(path.read_bytes())["mcpServers"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}


FUNCTION = r"(\w[\w.]*):\w+"
"""``package.module:function``"""
Played = Annotated[T, Use.PLAYED]
Sampled = Annotated[T, Use.SAMPLED]
Hosted = Annotated[T, Use.HOSTED]
Trained = Annotated[T, Use.TRAINED]
Apart = Annotated[T, Use.APART]
File = Annotated[T, Files(lambda _text, names, *_: not names)]
FileList = Annotated[T, Files(lambda *_: True)]
FileOfVerl = Annotated[T, Files(_exists)]
Folder = Annotated[T, Files(lambda *_: True, watched=False)]
Code = Annotated[T, Files(_code, module=FUNCTION)]
Modules = Annotated[T, Files(_code, module=r"(\w[\w.]*)")]
CodeOrCommand = Annotated[T, Files(lambda text, names, *_: not names and _code(text), module=FUNCTION)]
ModelFolder = Annotated[T, Files(_exists, watched=False)]
TemplateFile = Annotated[T, Files(_of_template)]
TextOrFile = Annotated[T, Files(lambda text, *_: "{text}" not in text)]
ServersFile = Annotated[T, Files(_of_servers, inside=_servers)]
EnvironmentFiles = Annotated[T, Files(_of_environment, module=FUNCTION)]
ComponentFiles = Annotated[T, Files(_of_component, module=FUNCTION)]
Hidden = Annotated[T, Secret()]
HiddenInServers = Annotated[T, Secret(lambda names: {"env", "headers"} & {*names[1:2]} != set())]


@dataclass(frozen=True, eq=False)
class Leaf:
    """A field without fields of its own."""

    key: str
    """on a launch line"""
    default: Any = None
    use: Use | None = None
    files: Files | None = None
    secret: Secret | None = None

    @classmethod
    def of(cls, key: str, hint: Any, default: Any = None) -> Leaf:
        roles = {type(role): role for role in getattr(hint, "__metadata__", ())}
        return cls(key, default, roles.get(Use), roles.get(Files), roles.get(Secret))

    def content(self, value: Any) -> Any:
        """``value`` with each file by its name and a hash of its content, wherever it lies; secrets by their hashes."""
        instead = {}
        for names, path in self.files.read(value, Path()) if self.files else ():
            instead[names] = f"{str(read(value, names)).rpartition('/')[2]} ({_hash(path.read_bytes())})"
        for names, text, _ in texts(value) if self.secret else ():
            if self.secret and self.secret.hides(names):
                instead[names] = f"*** ({_hash(text.encode())})"
        return replaced(value, instead)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def leaves(cls: Any, where: str) -> Iterator[Leaf]:
    """The leaves of a dataclass whose fields are annotated with roles; ``where``: its key."""
    hints, node = get_type_hints(cls, include_extras=True), cls()
    for field in fields(cls):
        key, hint, value = f"{where}.{field.name}", hints[field.name], getattr(node, field.name)
        if is_dataclass(value):
            yield from leaves(type(value), key)
        else:
            yield Leaf.of(key, hint, value)


def texts(value: Any, names: Names = (), entry: Mapping[str, Any] | None = None) -> Iterator[tuple[Names, str, Any]]:
    """The texts in plain data: the way to each, the text, and the mapping that it stands in."""
    if isinstance(value, str):
        yield names, value, entry or {}
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from texts(part, (*names, name), value)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from texts(part, (*names, number), entry)


def read(value: Any, names: Names) -> Any:
    """What lies at the end of a way."""
    for name in names:
        value = value[name]
    return value


def replaced(value: Any, instead: Mapping[Names, str], names: Names = ()) -> Any:
    """Plain data with the texts at the ends of some ways replaced."""
    if names in instead:
        return instead[names]
    if isinstance(value, Mapping):
        return {name: replaced(part, instead, (*names, name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(part, instead, (*names, number)) for number, part in enumerate(value)]
    return value


def file_in(text: str, folder: Path) -> Path | None:
    """The file that a text names, also as ``file.py:function``; None: it names none that is there."""
    head = text.partition(".py:")[0] + ".py" if ".py:" in text else text
    try:
        path = folder / Path(head).expanduser()
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, a null byte, no such user
        return None


MOST_FILES = 2000
"""of a folder that are on record, and folders in it that are searched"""
NOT_SEARCHED = ("__pycache__", "site-packages", "dist-packages", "node_modules")


def _python_files(place: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of a Python file, or of the first below a folder but hidden ones and packages installed in it."""
    if os.path.isfile(place):
        yield place.name, place
    if not os.path.isdir(place):  # both are False for what is too long for a path
        return
    left = MOST_FILES
    for searched, (folder, inside, files) in enumerate(os.walk(place)):
        inside[:] = sorted(name for name in inside if not name.startswith(".") and name not in NOT_SEARCHED)
        for name in sorted(files):
            path = Path(folder, name)
            if left and name.endswith(".py") and not name.startswith(".") and os.path.isfile(path):
                yield str(path.relative_to(place.parent)), path
                left -= 1
        if not left or searched >= MOST_FILES:
            return


def _of_package(module: str, folder: Path) -> Iterator[tuple[str, Path | str]]:
    """The files of the outermost package of a dotted name; name and version of one that pip installed."""
    place = _package(module, folder)
    if place is None:
        return
    if not {"site-packages", "dist-packages"} & {*place.parts}:
        yield from _python_files(place)
        return
    top = module.partition(".")[0]
    names = dict.fromkeys(packages_distributions().get(top, ()))
    yield from ((name, version(name)) for name in names) if names else [(top, "unknown")]


def _package(module: str, folder: Path) -> Path | None:
    """The outermost package of a dotted name, or its file, without an import; None for Python's and this package."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("verl_turnkey", "verl"):  # reports have their versions
        return None
    if (folder / top / "__init__.py").is_file():  # Python looks there first
        return folder / top
    if (file := folder / f"{top}.py").is_file():
        return file
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    place = folders[0] if folders else spec and spec.origin
    return Path(place) if place else folder / top  # a package without __init__.py
