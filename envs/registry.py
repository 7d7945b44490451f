"""gymnasium's registry with errors that say what to do; our own environments in it are those of the catalog."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.catalog import ADAPTERS, by_short_name, short_names
from verl_turnkey.envs.errors import EnvironmentKwargsError, MissingPackageError, UnknownEnvironmentError


def register_adapters() -> None:
    """Put our ids into gymnasium's registry. Nothing third-party is imported before an environment is made."""
    for adapter in ADAPTERS:
        if adapter.id not in gymnasium.registry:
            gymnasium.register(adapter.id, entry_point=adapter.entry_point, disable_env_checker=True)


def listing(known: Collection[str] = ()) -> list[dict[str, Any]]:
    """Our environments, and those in gymnasium's registry beside ``known``, as plain JSON values.

    ``switch`` chooses the environment on a launch line. ``version`` is None when the package is not installed;
    ``install`` is then the command. ``needs``: what else the environment needs, and whether it was ``found`` (None:
    that cannot be checked).
    """
    ours = [
        {
            "id": adapter.id,
            "switch": adapter.switch,
            "summary": adapter.summary,
            "package": adapter.package or "verl-turnkey",
            "version": adapter.version,
            "install": None if adapter.version else adapter.command,
            "needs": [{"what": need.what, "found": need.is_present()} for need in adapter.needs],
        }
        for adapter in ADAPTERS
    ]
    ids = {adapter.id for adapter in ADAPTERS}
    others = [
        {"id": env_id, "switch": f"turnkey.env.id={env_id}", "summary": _summary(spec), "install": None, "needs": []}
        | {name: value for name, value in spec_of(env_id).items() if name in ("package", "version")}
        for env_id, spec in gymnasium.registry.items()
        if env_id not in ids and env_id not in known
    ]
    return ours + others


def _summary(spec: EnvSpec) -> str:
    entry: Any = spec.entry_point
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"


def spec_of(env_id: str, kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What an episode was played in: id, kwargs, and the package behind it with its version (None: not known)."""
    package = next((adapter.package for adapter in ADAPTERS if adapter.id == env_id), "")
    if not package and env_id in gymnasium.registry:
        entry = gymnasium.registry[env_id].entry_point
        package = re.split("[.:]", entry)[0] if isinstance(entry, str) else ""
    try:
        package_version = version(package) if package else None
    except PackageNotFoundError:
        package_version = None
    return {"id": env_id, "kwargs": dict(kwargs or {}), "package": package or None, "version": package_version}


def make(env_id: str, kwargs: Mapping[str, Any] | None = None) -> gymnasium.Env[str, str]:
    """Make the environment ``env_id`` of gymnasium's registry.

    Raises:
        UnknownEnvironmentError: no such id; names the closest one.
        MissingPackageError: a package behind it is not installed; names it, the extra and the command.
        EnvironmentKwargsError: ``kwargs`` that the environment does not take.
    """
    kwargs = dict(kwargs or {})
    spec = check_call(env_id, kwargs)
    with _naming_packages(spec):
        try:
            return gymnasium.make(spec, disable_env_checker=True, **kwargs)
        except EnvironmentKwargsError as error:  # gymnasium appends to its message
            raise error.__cause__ or error from None


@contextmanager
def _naming_packages(spec: EnvSpec) -> Iterator[None]:
    """Turn an import error into one that says what to install."""
    try:
        yield
    except MissingPackageError:
        raise
    except ImportError as error:
        raise MissingPackageError(_missing(spec, error), name=error.name) from error


def check_call(env_id: str, kwargs: Mapping[str, Any]) -> EnvSpec:
    """The spec behind ``env_id``, once the signature of its constructor has room for ``kwargs``; makes nothing.

    Raises:
        UnknownEnvironmentError, MissingPackageError, EnvironmentKwargsError: as :func:`make`.
    """
    try:
        spec = gymnasium.spec(env_id)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        ours = by_short_name(env_id)
        short = f"; it is a short name of {ours.id}: {ours.switch} on a launch line." if ours else ""
        space, _, name = env_id.rpartition("/")
        spaces = {id: id.rpartition("/")[0] for id in gymnasium.registry}
        near = [id for id in spaces if name == id.rpartition("/")[2]] or [id for id in spaces if space == spaces[id]]
        hint = short or did_you_mean(env_id, near) or "."
        raise UnknownEnvironmentError(
            f"no environment {env_id!r} is registered{hint} An environment of your own is registered with gymnasium "
            f"in a module or file that turnkey.modules names. ({error})"
        ) from error
    with _naming_packages(spec):
        creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    _check_kwargs(spec, creator, kwargs)
    return spec


def unknown(name: str) -> UnknownEnvironmentError:
    """The error of a command that gets ``name`` in place of an environment."""
    ids = [env_id for env_id, spec in gymnasium.registry.items() if not str(spec.entry_point).startswith("gymnasium.")]
    return UnknownEnvironmentError(
        f"there is no environment {name!r}{did_you_mean(name, [*short_names(), *ids]) or '.'} Give a short name "
        f"({', '.join(sorted(short_names()))}), a gymnasium id, or a file that registers one (my_env.py, "
        "my_env.py:ID); `turnkey list envs` lists them"
    )


def _missing(spec: EnvSpec, error: ImportError) -> str:
    """What to install when a module is missing: that of the environment, or one that a package of its own needs."""
    adapter = next((adapter for adapter in ADAPTERS if adapter.id == spec.id), None)
    module, importer = error.name or "", _importer(error)
    root = module.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not module or (root != module and _is_there(root)):
        # Something is installed, but in another version, broken, or misspelt.
        return (
            f"environment {spec.id!r} cannot be imported: {error} (in {importer}). The package is installed, but this "
            f"part of it is not there or does not load"
            + (f"; the version that fits comes with {adapter.command}" if adapter and adapter.extra else "")
        )
    if adapter is not None and adapter.version is None:
        return (
            f"environment {spec.id!r} needs the package {adapter.package!r}, which is not installed: {adapter.command}"
        )
    wanted = f"environment {spec.id!r} needs the module {root!r} (imported by {importer}), which is not installed"
    if adapter is not None and adapter.extra:
        return f"{wanted}: {adapter.command} brings all it needs"
    return f"{wanted}: pip install {root}, or the package that provides it if its name differs"


def _importer(error: ImportError) -> str:
    """The module whose import statement failed."""
    name, trace = "?", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "?")
        if not module.startswith("importlib") and module != "_frozen_importlib":
            name = module
        trace = trace.tb_next
    return name


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _check_kwargs(spec: EnvSpec, creator: Any, kwargs: Mapping[str, Any]) -> None:
    parameters = inspect.signature(creator).parameters
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    if missing := [name for name in required if name not in kwargs and name not in spec.kwargs]:
        keys = " and ".join(f"turnkey.env.kwargs.{name}" for name in missing)
        raise EnvironmentKwargsError(
            f"environment {spec.id!r} needs {', '.join(map(repr, missing))}: set {keys} on a launch "
            "line, or --kwargs of the commands `turnkey tasks` and `turnkey env-check`"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    accepted = [name for name in parameters if name != "self"] + ["max_episode_steps"]
    for name in kwargs:
        if name not in accepted:
            raise EnvironmentKwargsError(
                f"environment {spec.id!r} takes no argument {name!r}{did_you_mean(name, accepted) or '.'} "
                f"It takes {', '.join(accepted)}; they are set in turnkey.env.kwargs or in the task's kwargs."
            )
