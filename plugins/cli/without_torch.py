"""verl's configuration classes and registries in a process that never imports torch, which takes seconds.

verl's own files are executed where they define what the checks of a launch line read. Whatever else they import is a
module of names without values: a name may be imported, passed on and used in an annotation. To compute with one raises
:class:`NeedsVerl`, and the check starts again with all of verl.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from omegaconf import OmegaConf

from verl_turnkey.plugins.config.composing import verls_config_dir
from verl_turnkey.plugins.config.machine import visible_accelerator
from verl_turnkey.plugins.config.schema import loss_of
from verl_turnkey.plugins.verl_api.import_hooks import when_imported

HEAVY = frozenset(("torch", "tensordict", "transfer_queue", "ray", "vllm", "datasets", "peft", "torchdata"))
EXECUTED = (
    "verl.base_config",
    "verl.experimental.reward_loop.reward_manager.registry",
    "verl.trainer.config",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.core_algos",
    "verl.trainer.ppo.rollout_corr_helper",
    "verl.trainer.ppo.utils",
    "verl.utils.config",
    "verl.utils.import_utils",
    "verl.utils.logging_utils",
    "verl.utils.profiler.config",
    "verl.utils.qat.core",
    "verl.utils.tokenizer",
    "verl.utils.tracking",
    "verl.workers.config",
    "verl.workers.rollout.replica",
)
"""verl's files, and its packages with all their files, that are executed as they are"""
NAMES_FROM = {
    "verl.utils": "verl.utils.config",
    "verl.utils.profiler": "verl.utils.profiler.config",
    "verl.utils.qat": "verl.utils.qat.core",
}
"""packages whose ``__init__`` is left out, and the module whose names they offer"""
SETTINGS = ("VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_MODELSCOPE", "VERL_PLATFORM")
"""variables by which ``import verl`` does more than define things"""
QUICK = {
    "critic.enable": None,
    "actor_rollout_ref.model.lora_rank": None,
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": None,
    "actor_rollout_ref.actor.optim.optimizer_impl": "torch.optim",
    "actor_rollout_ref.actor.optim.optimizer": "AdamW",
    "data.custom_cls.path": None,
    "reward.custom_reward_function.path": None,
}
"""keys with which verl, or our checks, look into packages or run the user's code, unless they are empty or have this
value"""
AGENT_LOOPS, REWARD_MANAGERS = "verl.experimental.agent_loop", "verl.experimental.reward_loop.reward_manager"
find_spec, distributions = importlib.util.find_spec, importlib.metadata.packages_distributions


class NeedsVerl(BaseException):
    """A check computed with a part of verl or of torch that this process lacks.

    It is not an ``Exception``, because checks turn those into findings.
    """


class Absent:
    """A name without a value."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __or__(self, other: Any) -> Absent:
        return self

    def __eq__(self, other: Any) -> bool:  # `typing` compares the parts of annotations
        if isinstance(other, str | int | float):
            self._computed()
        return self is other

    def _computed(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NeedsVerl(self._name)

    __ror__ = __getitem__ = __or__
    __hash__ = object.__hash__
    __call__ = __bool__ = __iter__ = __len__ = __contains__ = __lt__ = __gt__ = __int__ = __float__ = _computed
    __enter__ = __setattr__ = __instancecheck__ = __subclasscheck__ = __mro_entries__ = _computed


class Mark(Absent):
    """A decorator that leaves what it decorates as it is."""

    def __call__(self, *marked: Any, **_: Any) -> Any:
        return marked[0] if marked else self


class Names(ModuleType):
    """A module of names without values."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            raise NeedsVerl(f"{self.__name__}.{name}")
        if name.startswith("__"):
            raise AttributeError(name)
        for folder in map(Path, self.__dict__.get("__path__", ())):
            if (folder / f"{name}.py").is_file() or (folder / name).is_dir():
                return importlib.import_module(f"{self.__name__}.{name}")
        if source := NAMES_FROM.get(self.__name__):
            values = vars(importlib.import_module(source))
            if name in values:
                return values[name]
        if name.isupper() and name in (constants := _constants(self.__spec__)):
            return constants[name]
        return Absent(f"{self.__name__}.{name}")


def _constants(spec: ModuleSpec | None) -> dict[str, Any]:
    """The constants that a file of verl gives a name, without executing it."""
    if spec is None or not spec.name.startswith("verl.") or not str(spec.origin).endswith(".py"):
        return {}
    values = {}
    for node in ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return values


class _OwnNames(dict[str, list[str]]):
    """Packages of distributions that are called like them."""

    def __missing__(self, name: str) -> list[str]:
        return [name]


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if values := VALUES.get(module.__name__):
            vars(module).update(values())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        root = name.partition(".")[0]
        installed = PathFinder.find_spec(name, path) if root == "verl" or root in HEAVY else None
        if installed is None or any(f"{name}.".startswith(f"{executed}.") for executed in EXECUTED):
            return installed
        spec = ModuleSpec(name, _Loader(), origin=installed.origin)
        spec.submodule_search_locations = installed.submodule_search_locations
        return spec


def _registered(package: str) -> Iterator[tuple[str, str]]:
    """Name and class of what the files of ``package`` register, in the order in which it imports them."""
    folder = verls_config_dir().parents[1].joinpath(*package.split(".")[1:])
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if not (isinstance(node, ast.ImportFrom) and node.level == 1):
            continue
        tree = ast.parse((folder / f"{node.module}.py").read_text(encoding="utf-8"))
        for cls in (part for part in tree.body if isinstance(part, ast.ClassDef)):
            for call in (mark for mark in cls.decorator_list if isinstance(mark, ast.Call)):
                if ast.unparse(call.func).startswith("register"):
                    yield ast.literal_eval(call.args[0]), f"{package}.{node.module}.{cls.name}"


def _agent_loops() -> dict[str, Any]:
    return {"_agent_loop_registry": {name: {"_target_": target} for name, target in _registered(AGENT_LOOPS)}}


def _fill_reward_managers(module: ModuleType) -> None:
    vars(module)["REWARD_MANAGER"] |= {name: Absent(target) for name, target in _registered(REWARD_MANAGERS)}


def _auto_set_device(config: Any) -> None:
    """verl sets ``trainer.device`` to the accelerator of this machine, if there is one.

    It is the first to get the configuration: one that will need all of verl is not checked up to there.
    """
    if visible_accelerator() and config.trainer.device != "cuda":
        raise NeedsVerl("verl.utils.device.auto_set_device")
    for key, quick in QUICK.items():
        if OmegaConf.select(config, key, throw_on_resolution_failure=False) not in (None, False, 0, "", quick):
            raise NeedsVerl(key)
    if (loss := loss_of(config)) and loss.weight:  # the checks call it
        raise NeedsVerl(loss.name)


VALUES: dict[str, Callable[[], dict[str, Any]]] = {
    "ray": lambda: {"remote": Mark("ray.remote"), "is_initialized": lambda: False, "shutdown": lambda: None},
    "torch": lambda: {"no_grad": Mark("torch.no_grad")},
    f"{AGENT_LOOPS}.agent_loop": _agent_loops,
    "verl.utils.device": lambda: {"auto_set_device": _auto_set_device, "is_cuda_available": False},
}


def possible(words: Sequence[str] = ()) -> bool:
    """Whether nothing in this process, its environment, other plugins of verl or ``words`` needs all of verl."""
    if any("verl." in word.partition("=")[2] for word in words):  # a class or a function of it
        return False
    if any(name.partition(".")[0] in {*HEAVY, "verl", "transformers"} for name in sys.modules):
        return False
    if any(name in os.environ for name in SETTINGS) or find_spec("torch_npu"):
        return False
    return [plugin.name for plugin in importlib.metadata.entry_points(group="verl.plugins")] == ["turnkey"]


def install() -> None:
    """From here on this process has no torch, and of verl what :data:`EXECUTED` lists."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
    importlib.metadata.packages_distributions = _OwnNames  # else transformers lists the files of all packages
    try:  # transformers looks once, and then reads tokenizers without torch
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()
    finally:
        importlib.util.find_spec, importlib.metadata.packages_distributions = find_spec, distributions
    sys.meta_path.insert(0, _Finder())
    when_imported(f"{REWARD_MANAGERS}.registry", _fill_reward_managers)
    importlib.import_module("verl_turnkey.plugins.entry")  # as `import verl` does
