"""The one list of our environments. Tables in the docs, the README and the command line are made from it.

Nothing third-party is imported here: an entry point is a string until gymnasium makes the environment.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_HERE = "verl_turnkey.envs.adapters"


@dataclass(frozen=True)
class Need:
    """What an environment needs besides packages. ``is_present`` returns None where that cannot be checked."""

    what: str
    is_present: Callable[[], bool | None]


def _folder(variable: str, default: str, holds: str) -> Callable[[], bool]:
    return lambda: (Path(os.environ.get(variable) or default).expanduser() / holds).is_dir()


def _program(*names: str) -> Callable[[], bool]:
    return lambda: any(shutil.which(name) for name in names)


def _server() -> None:
    """Not checked: a server's address is an argument of the environment."""


@dataclass(frozen=True)
class Adapter:
    """One of our environments: its class, the extra that installs the package it wraps, what the user provides."""

    id: str
    entry_point: str
    summary: str
    recipe: str | None = None
    """of the group ``turnkey/env``; None: another environment of the same adapter has one"""
    package: str = ""
    """the distribution it wraps; empty when none"""
    extra: str = ""
    """extra of this package that installs it; empty when none"""
    without_dependencies: bool = False
    """the package runs without those that it asks for, whose versions do not fit verl's"""
    needs: tuple[Need, ...] = ()
    """besides the package: data, programs, servers"""
    samples: tuple[Mapping[str, Any], ...] = field(default=({},), hash=False)
    """kwargs that ``turnkey env-check --all-installed`` plays"""

    @property
    def name(self) -> str:
        """Of the id: MiniGrid for ``turnkey/MiniGrid-v0``."""
        return self.id.rpartition("/")[2].rpartition("-v")[0]

    @property
    def switch(self) -> str:
        """The override that selects it on a launch line."""
        return f"+turnkey/env={self.recipe}" if self.recipe else f"turnkey.env.id={self.id}"

    @property
    def module(self) -> str:
        """Of ``envs/adapters``, a file or a folder."""
        return self.entry_point.removeprefix(f"{_HERE}.").partition(":")[0].partition(".")[0]

    @property
    def page(self) -> str:
        """In ``docs``."""
        return f"envs/{self.module}.md"

    @property
    def version(self) -> str | None:
        """Of the package it wraps; None when that is not installed."""
        try:
            return version(self.package) if self.package else version("verl-turnkey")
        except PackageNotFoundError:
            return None

    @property
    def command(self) -> str:
        """The command that installs it."""
        if self.extra:
            return f'pip install "verl-turnkey[{self.extra}]"'
        return f"pip install {'--no-deps ' if self.without_dependencies else ''}{self.package}"

    def missing(self) -> list[str]:
        """What is missing here: the pip command, and the needs that are not present."""
        lacking = [] if self.version else [self.command]
        return lacking + [need.what for need in self.needs if need.is_present() is False]


_ALFWORLD_DATA = "$ALFWORLD_DATA: the folder that `alfworld-download` or our generator of small problems filled"
ADAPTERS = (
    Adapter(
        "turnkey/Errands-v0",
        f"{_HERE}.errands:ErrandsText",
        summary="fetch things in a house",
        recipe="errands",
        samples=({}, {"errands": 2, "hint": False, "cupboards": True, "max_steps": 24}),
    ),
    Adapter(
        "turnkey/Service-v0",
        f"{_HERE}.service:ServiceText",
        summary="customer service for a shop, with tools",
        recipe="service",
        samples=({}, {"requests": 2, "subgoal_reward": 0.05}),
    ),
    Adapter(
        "turnkey/MiniGrid-v0",
        f"{_HERE}.minigrid:MiniGridText",
        summary="levels of MiniGrid and BabyAI",
        recipe="babyai",
        package="minigrid",
        extra="minigrid",
        samples=({}, {"level": "BabyAI-GoToLocal-v0"}),
    ),
    Adapter(
        "turnkey/FrozenLake-v0",
        f"{_HERE}.toytext:FrozenLakeText",
        summary="walk over a frozen lake",
        recipe="frozenlake",
        package="gymnasium",
    ),
    Adapter(
        "turnkey/Taxi-v0", f"{_HERE}.toytext:TaxiText", summary="fetch and deliver a passenger", package="gymnasium"
    ),
    Adapter(
        "turnkey/CliffWalking-v0",
        f"{_HERE}.toytext:CliffWalkingText",
        summary="walk along a cliff",
        package="gymnasium",
    ),
    *(
        Adapter(f"turnkey/{name}-v0", f"{_HERE}.cards:{name}Text", summary, recipe, samples=({}, {"images": True}))
        for name, summary, recipe in (
            ("Points24", "make 24 of four cards, in words or drawn", "cards"),
            ("EZPoints", "make 12 of two cards, in words or drawn", None),
            ("NumberLine", "walk along a number line, in words or drawn", None),
            ("BlackJack", "cards against a dealer, in words or drawn", None),
        )
    ),
    Adapter(
        "turnkey/Gymnasium-v0",
        f"{_HERE}.spaces:SpacesText",
        summary="any environment of gymnasium's",
        recipe="gymnasium",
        package="gymnasium",
        samples=({"env": "CartPole-v1"}, {"env": "Blackjack-v1"}),
    ),
    Adapter(
        "turnkey/TextWorld-v0",
        f"{_HERE}.textworld:TextWorldText",
        summary="generated text adventures",
        recipe="textworld",
        package="textworld",
        extra="textworld",
        samples=tuple({"challenge": name} for name in ("coin_collector", "treasure_hunter", "simple", "cooking")),
    ),
    Adapter(
        "turnkey/ALFWorld-v0",
        f"{_HERE}.alfworld.env:ALFWorldText",
        summary="household tasks",
        recipe="alfworld",
        package="alfworld",
        extra="alfworld",
        needs=(Need(_ALFWORLD_DATA, _folder("ALFWORLD_DATA", "~/.cache/alfworld", "json_2.1.1")),),
    ),
    Adapter(
        "turnkey/GEM-v0",
        f"{_HERE}.gem:GEMText",
        summary="GEM's games: Sokoban, Mastermind, Hanoi, ...",
        recipe="sokoban",
        package="gem-llm",
        extra="gem",
        samples=tuple({"game": f"{name}-v0-easy"} for name in ("Sokoban", "Mastermind", "Sudoku", "TowerofHanoi")),
    ),
    Adapter(
        "turnkey/Search-v0",
        f"{_HERE}.search:SearchText",
        summary="questions over a text corpus",
        recipe="search",
        package="bm25s",
        extra="search",
    ),
    Adapter(
        "turnkey/WebShop-v0",
        f"{_HERE}.webshop.env:WebShopText",
        summary="buying in a web shop",
        recipe="webshop",
        needs=(Need("a running webshop_server.py (docs/envs/webshop.md)", _server),),
        samples=(),
    ),
    Adapter(
        "turnkey/AppWorld-v0",
        f"{_HERE}.appworld:AppWorldText",
        summary="operate apps by writing code",
        recipe="appworld",
        needs=(Need("running AppWorld servers (docs/envs/appworld.md)", _server),),
        samples=(),
    ),
    Adapter(
        "turnkey/BFCL-v0",
        f"{_HERE}.bfcl:BfclText",
        summary="requests to simulated APIs, with tools",
        recipe="bfcl",
        package="bfcl-eval",
        without_dependencies=True,
        samples=({}, {"categories": ["miss_func"], "turn_reward": 0.1}),
    ),
    Adapter(
        "turnkey/OpenSpiel-v0",
        f"{_HERE}.openspiel:OpenSpielText",
        summary="OpenSpiel's games for two roles",
        recipe="openspiel",
        package="open-spiel",
        without_dependencies=True,
        samples=({"game": "tic_tac_toe"}, {}, {"game": "leduc_poker"}),
    ),
    Adapter(
        "turnkey/ScienceWorld-v0",
        f"{_HERE}.scienceworld:ScienceWorldText",
        summary="science experiments",
        recipe="scienceworld",
        package="scienceworld",
        extra="scienceworld",
        needs=(Need("a Java runtime: the program java", _program("java")),),
    ),
    Adapter(
        "turnkey/MiniWoB-v0",
        f"{_HERE}.miniwob:MiniWoBText",
        summary="small web pages",
        recipe="miniwob",
        package="miniwob",
        extra="miniwob",
        needs=(
            Need("Chromium: the program chromium or google-chrome", _program("chromium", "google-chrome", "chrome")),
            Need("its driver: the program chromedriver", _program("chromedriver")),
        ),
    ),
    Adapter(
        "turnkey/OpenEnv-v0",
        f"{_HERE}.openenv:OpenEnvText",
        summary="any OpenEnv server",
        recipe="openenv",
        package="openenv",
        extra="openenv",
        needs=(Need("a running OpenEnv server", _server),),
        samples=(),
    ),
    Adapter(
        "turnkey/TextArena-v0",
        f"{_HERE}.textarena:TextArenaText",
        summary="TextArena's games for one or two players",
        recipe="textarena",
        package="textarena",
        extra="textarena",
    ),
)


def short_names() -> dict[str, Adapter]:
    """Our environments by their short names: that of the recipe, and that of the id in lower case."""
    return {name: adapter for adapter in ADAPTERS for name in (adapter.name.lower(), adapter.recipe) if name}


def by_short_name(text: str) -> Adapter | None:
    """Our environment with this short name; case, ``_`` and ``-`` do not count."""
    return short_names().get(re.sub("[-_]", "", text).lower())
