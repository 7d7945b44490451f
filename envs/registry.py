"""gymnasium's registry with errors that say what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from verl_turnkey.envs.errors import (
    EnvironmentKwargsError,
    MissingPackageError,
    UnknownEnvironmentError,
    did_you_mean,
)


@dataclass(frozen=True)
class Adapter:
    """One of our environments: where its class is, and which extra brings the package it wraps."""

    id: str
    entry_point: str
    package: str
    extra: str


ADAPTERS = (Adapter("turnkey/MiniGrid-v0", "verl_turnkey.envs.minigrid:MiniGridText", "minigrid", "minigrid"),)


def register_adapters() -> None:
    """Put our ids into gymnasium's registry. Nothing third-party is imported before an environment is made."""
    for adapter in ADAPTERS:
        if adapter.id not in gymnasium.registry:
            gymnasium.register(adapter.id, entry_point=adapter.entry_point, disable_env_checker=True)


def make(env_id: str, kwargs: Mapping[str, Any] | None = None) -> gymnasium.Env[str, str]:
    """Make the environment ``env_id`` of gymnasium's registry.

    Raises:
        UnknownEnvironmentError: no such id; names the closest one.
        MissingPackageError: the package behind it is not installed; names the extra.
        EnvironmentKwargsError: ``kwargs`` that the environment does not take.
    """
    kwargs = dict(kwargs or {})
    try:
        spec = gymnasium.spec(env_id)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise UnknownEnvironmentError(
            f"no environment {env_id!r} is registered.{did_you_mean(env_id, gymnasium.registry)} An environment of "
            f"your own must be registered with gymnasium in a module listed in turnkey.modules. ({error})"
        ) from error
    creator = _load(spec)
    _check_kwargs(spec.id, creator, kwargs)
    try:
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except ModuleNotFoundError as error:
        raise _missing(spec.id, error) from error


def _load(spec: EnvSpec) -> Callable[..., Any]:
    try:
        return load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point  # type: ignore[return-value]
    except ModuleNotFoundError as error:
        raise _missing(spec.id, error) from error


def _missing(env_id: str, error: ModuleNotFoundError) -> MissingPackageError:
    package = (error.name or "").partition(".")[0]
    extra = next((adapter.extra for adapter in ADAPTERS if adapter.package == package), None)
    command = f'pip install "verl-turnkey[{extra}]"' if extra else f"pip install {package}"
    return MissingPackageError(
        f"environment {env_id!r} needs the package {package!r}, which is not installed: {command}", name=package
    )


def _check_kwargs(env_id: str, creator: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    parameters = inspect.signature(creator).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    accepted = [name for name in parameters if name != "self"] + ["max_episode_steps"]
    for name in kwargs:
        if name not in accepted:
            raise EnvironmentKwargsError(
                f"environment {env_id!r} takes no argument {name!r}.{did_you_mean(name, accepted)} "
                f"It takes {', '.join(accepted)}; they are set in turnkey.env.kwargs or in the task's kwargs."
            )
