"""TextWorld's text adventures (Côté et al. 2018): generated and compiled here, or your own ``.z8`` files."""

from __future__ import annotations

import contextlib
import fcntl
import re
import tempfile
import threading
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import textworld
from textworld import EnvInfos, GameOptions
from textworld.challenges import CHALLENGES
from textworld.generator import compile_game

from verl_turnkey.envs.adapters._shared import cache_folder
from verl_turnkey.envs.base import StepResult, TextEnv, check, check_name, digest, is_count, words
from verl_turnkey.envs.errors import EnvironmentKwargsError

FLAG = (False, True)
# Options of each challenge: the default and the allowed values.
OPTIONS: dict[str, dict[str, tuple[Any, Collection[Any]]]] = {
    "coin_collector": {"level": (5, range(1, 301)), "only_last_action": (False, FLAG)},
    "treasure_hunter": {"level": (5, range(1, 31)), "only_last_action": (False, FLAG)},
    "simple": {"rewards": ("dense", ("dense", "balanced", "sparse")), "goal": ("brief", ("detailed", "brief", "none"))},
    "cooking": {
        "recipe": (1, range(1, 6)),
        "take": (1, range(6)),
        "go": (1, (1, 6, 9, 12)),
        "open": (False, FLAG),
        "cook": (False, FLAG),
        "cut": (False, FLAG),
        "drop": (False, FLAG),
        "recipe_seed": (0, range(2**31)),
        "split": (None, (None, "train", "valid", "test")),
    },
}
REWARDS = ("score", "success")

# What a game prints after its answer: the prompt with the status line, or the question at the end of the game.
_TAIL = re.compile(r"\n(?:> +-= |Would you like to RESTART).*", re.DOTALL)
# Not the description: the game would write it after every command, which takes more time than all else together.
_WANTED = EnvInfos(
    admissible_commands=True, facts=True, max_score=True, objective=True, score=True, win_facts=True, won=True
)
# TextWorld has one parser per process: one thread at a time makes or loads a game. Compiling and playing need no lock,
# and no thread waits for a compiler or another process while it holds this one.
_LOADING = threading.Lock()


class TextWorldText(TextEnv):
    """A text adventure. The seed chooses the game, which is generated and compiled at its first use and kept on disk.

    Args:
        challenge: ``coin_collector``, ``treasure_hunter``, ``simple`` or ``cooking``.
        games: number of different games: the seed is taken modulo it; None: a different game for every seed.
        path: a ``.z8`` game that TextWorld made, or a folder of such games, instead of a challenge: the games sorted by
            path, ``seed % count``.
        reward: ``score`` gives the points of the step (they sum to the game's maximum); ``success`` gives 1.0 for
            winning and 0.0 otherwise.
        max_steps: steps after which an episode is truncated; None: never.
        options: of the challenge, named as in the command ``tw-make``: see ``OPTIONS``.

    ``state_key`` is a hash of the objective, the facts of the world and the completed quests. An action that is not
    admissible changes nothing and is invalid. A lost game (burned food, the wrong treasure) terminates without success.

    Generated games are kept in ``$TURNKEY_CACHE/textworld``, by default ``~/.cache/verl-turnkey/textworld``.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": True, "memory_mb": 8}

    def __init__(
        self,
        challenge: str = "coin_collector",
        games: int | None = None,
        path: str | None = None,
        reward: str = "score",
        max_steps: int | None = 50,
        **options: Any,
    ) -> None:
        super().__init__(max_steps)
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        check(games is None or is_count(games), "games", "a positive integer or null", games)
        self._challenge, self._options = challenge, settings(challenge, options)
        self._own = own_games(Path(path)) if path is not None else []
        if self._own and (options or games is not None):
            raise EnvironmentKwargsError(
                f"games of your own (path={path!r}) take no {', '.join(options) or 'games'}: drop one of the two"
            )
        self._folder = Path(path or ".") if Path(path or ".").is_dir() else Path(path or ".").parent
        self._games = games
        self._reward = reward
        self._game: Path | None = None

    @property
    def game(self) -> Path | None:
        """The file of the game that is being played, for oracles; None before the first reset."""
        return self._game

    def begin(self, seed: int) -> tuple[StepResult, str]:
        game = self._own[seed % len(self._own)] if self._own else self._made(seed)
        if game != self._game:
            with _LOADING:
                self._engine = textworld.start(str(game), _WANTED)
            self._game = game
        state: Any = self._engine.reset()
        self._objective = _clean(state.objective)
        self._quests = [[{str(fact) for fact in event} for event in quest] for quest in state.win_facts]
        self._done: set[int] = set()
        self._score = 0
        _, title, room = state.feedback.partition("-= ")  # behind a banner and the objective
        return self._now(state, title + room or state.feedback), self._objective

    def act(self, action: str) -> StepResult:
        command = self._commands.get(words(action))
        if command is None:
            return self.refused()
        state: Any
        state, score, terminated = self._engine.step(command)
        points, self._score = score - self._score, score
        reward = points if self._reward == "score" else float(state.won)
        # A completed quest stays completed when its facts change again: its points are given once.
        facts = {str(fact) for fact in state.facts}
        self._done.update(i for i, quest in enumerate(self._quests) if any(event <= facts for event in quest))
        return self._now(state, state.feedback, reward, bool(terminated))

    def oracle(self) -> list[str] | None:
        assert self._game is not None, "reset comes first"
        with _LOADING:
            engine = textworld.start(str(self._game), EnvInfos(policy_commands=True))
        state: Any = engine.reset()
        return state.policy_commands or None

    def task_ids(self) -> list[str] | None:
        """The files of games of your own below ``path``; None where games are generated."""
        return [str(game.relative_to(self._folder)) for game in self._own] or None

    def _made(self, seed: int) -> Path:
        return compiled(self._challenge, self._options, seed % self._games if self._games else seed)

    def _now(self, state: Any, text: str, reward: float = 0.0, terminated: bool = False) -> StepResult:
        self._commands = {words(command): command for command in state.admissible_commands}
        key = digest(self._objective, sorted(map(str, state.facts)), sorted(self._done))
        return StepResult(
            _clean(text), key, state.admissible_commands, reward, terminated=terminated, success=bool(state.won)
        )


def settings(challenge: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a challenge, the given ones checked and the others at their defaults."""
    check_name(challenge, OPTIONS, "TextWorld has no challenge", "It is one of")
    known = OPTIONS[challenge]
    for name, value in options.items():
        check_name(name, known, f"TextWorld's challenge {challenge} takes no option", "It takes")
        default, allowed = known[name]
        choices = f"from {allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else f"one of {allowed}"
        check(value in allowed and isinstance(value, bool) == isinstance(default, bool), name, choices, value)
    return {name: options.get(name, default) for name, (default, _) in known.items()}


def own_games(path: Path) -> list[Path]:
    """The games at ``path``, a file or a folder, in the order of their seeds."""
    games = sorted(path.rglob("*.z8")) if path.is_dir() else [path]
    for game in games:
        if not game.is_file() or not game.with_suffix(".json").is_file():
            raise FileNotFoundError(f"{game} is not a TextWorld game: it takes a .z8 file with the .json beside it")
    if not games:
        raise FileNotFoundError(f"no .z8 game in {path}: make some with `tw-make`, or drop turnkey.env.kwargs.path")
    return games


def compiled(challenge: str, options: Mapping[str, Any], seed: int) -> Path:
    """The game file of these options and seed, from the cache or made now."""
    name = "-".join([challenge, *(f"{k}={v}" for k, v in options.items())])
    folder = cache_folder("textworld") / version("textworld") / name
    game = folder / str(seed) / "game.z8"
    if game.is_file():
        return game
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{seed}.lock", "w") as lock:
        # The episodes of a group need the same game at the same moment, in several threads and processes.
        with contextlib.suppress(OSError):  # a file system without locks: several may make the game, and one is kept
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not game.is_file():
            with tempfile.TemporaryDirectory(prefix="new-", dir=folder) as scratch:
                new = Path(scratch) / "game"
                new.mkdir()
                _compile(challenge, options, seed, new / game.name)
                try:
                    new.rename(game.parent)  # atomic: no process finds half a game
                except OSError:
                    if not game.is_file():  # else another process has made it
                        raise
    return game


def _compile(challenge: str, options: Mapping[str, Any], seed: int, path: Path) -> None:
    with _LOADING:
        wanted = GameOptions()
        wanted.seeds = seed % 2**32
        wanted.path = str(path)
        wanted.grammar.only_last_action = options.get("only_last_action", False)
        _, make, _ = CHALLENGES[f"tw-{challenge}"]
        try:
            game = make({"test": False, **options}, wanted)
        except (ValueError, AssertionError) as error:
            raise EnvironmentKwargsError(f"TextWorld makes no {challenge} with {dict(options)}: {error}") from error
    compile_game(game, wanted)  # runs compilers, and does not use the parser
    path.with_suffix(".ni").unlink()  # the source, which playing does not need


def _clean(text: str | None) -> str:
    """A game's answer without status line, closing question and empty lines."""
    return "\n".join(line.strip() for line in _TAIL.sub("", text or "").split("\n") if line.strip())
