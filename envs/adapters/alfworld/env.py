"""ALFWorld's text games (Shridhar et al. 2021) through ALFWorld's own engine.

The games come from ``alfworld-download`` or from ``generate.py``; the wording of commands and answers is
the engine's and the data's, so old data ("put apple 1 in/on desk 1") and new ("move apple 1 to desk 1") both work.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from alfworld.agents.environment.alfred_tw_env import TASK_TYPES, AlfredDemangler
from textworld import EnvInfos
from textworld.envs import PddlEnv

from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.envs.adapters._shared import cache_folder
from verl_turnkey.envs.base import StepResult, TextEnv, check_name, digest, words

TREE = "json_2.1.1"  # where ALFWorld keeps its problems
SPLITS = ("train", "valid_seen", "valid_unseen")
TYPES = tuple(TASK_TYPES.values())
# It only prints the forms of commands; published prompts leave it out too.
NOT_OFFERED = {"help"}
# Facts about the past that no rule, goal or text of the engine depends on.
BOOKKEEPING = {"checked", "examined", "wasinreceptacle"}

_INTRO = re.compile(r"(?:-= .* =-\s+)?(?P<room>.*?)\s*Your task is to: (?P<task>.*)", re.DOTALL)
_SOLVABLE = re.compile(rb'"solvable": *true')
_HOW = (
    "Run `alfworld-download` (the official data) or `python -m verl_turnkey.envs.adapters.alfworld.generate DIR` "
    "(small problems, made offline), and name the folder in $ALFWORLD_DATA or in turnkey.env.kwargs.data."
)


class ALFWorldText(TextEnv):
    """A household task of ALFWorld. The seed chooses the game: the games of a split, sorted by path, ``seed % count``.

    Args:
        split: ``train``, ``valid_seen`` or ``valid_unseen``.
        task_types: only these of ALFWorld's six task types; None: all.
        data: folder with ``json_2.1.1``; None: ``$ALFWORLD_DATA``, else ``~/.cache/alfworld`` as ALFWorld itself does.
        max_steps: steps after which an episode is truncated; None: never.

    The reward is 1 for the step that solves the task. ``state_key`` is a hash of task and facts of the world: where
    everything is, what is open, held, hot, clean. An action that is not admissible changes nothing and is invalid.

    Raises:
        FileNotFoundError: no data folder, or no solvable game in it; says which commands make one.
    """

    # The parser is global in its process: instances in several threads would disturb each other.
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": False, "memory_mb": 150}

    def __init__(
        self,
        split: str = "train",
        task_types: Sequence[str] | None = None,
        data: str | None = None,
        max_steps: int | None = 50,
    ) -> None:
        super().__init__(max_steps)
        check_name(split, SPLITS, "ALFWorld has no split", "It is one of")
        chosen = (task_types,) if isinstance(task_types, str) else tuple(TYPES if task_types is None else task_types)
        for name in chosen:
            check_name(name, TYPES, "ALFWorld has no task type", "task_types holds some of")
        self._games = find_games(data_folder(data), split, chosen)
        self._engine = AlfredDemangler(PddlEnv(EnvInfos(facts=True, admissible_commands=True)), shuffle=False)
        self._game: Path | None = None
        self._task = ""

    @property
    def games(self) -> list[Path]:
        """The files of the games, in the order of their seeds."""
        return list(self._games)

    def task_ids(self) -> list[str]:
        """ALFRED's names of the tasks: task folder and trial."""
        return ["/".join(game.parts[-3:-1]) for game in self._games]

    def begin(self, seed: int) -> tuple[StepResult, str]:
        game = self._games[seed % len(self._games)]
        with own_argv():
            if game != self._game:
                self._engine.load(str(game))
                self._game = game
            state: Any = self._engine.reset()
        intro = _INTRO.fullmatch(state.feedback.strip())
        room, self._task = (intro["room"], intro["task"]) if intro else (state.feedback.strip(), "")
        self._score = 0
        return self._now(state, room), self._task

    def act(self, action: str) -> StepResult:
        command = self._commands.get(words(action))
        if command is None:
            return self.refused()
        state, score, done = self._engine.step(command)
        reward, self._score = score - self._score, score
        return self._now(state, state.feedback.strip(), reward, bool(done))

    def oracle(self) -> list[str] | None:
        return list(self._engine.walkthrough or ()) or None

    def _now(self, state: Any, text: str, reward: float = 0.0, terminated: bool = False) -> StepResult:
        offered = [command for command in state.admissible_commands if command not in NOT_OFFERED]
        self._commands = {words(command): command for command in offered}
        # Negated facts appear only once something has changed: the same state would get different keys.
        facts = sorted(
            str(fact) for fact in state.facts if not fact.name.startswith("not_") and fact.name not in BOOKKEEPING
        )
        return StepResult(text, digest(self._task, facts), offered, reward, terminated, success=bool(state.won))


@contextlib.contextmanager
def own_argv() -> Iterator[None]:
    """Restore ``sys.argv``, which the planner's translator overwrites."""
    kept = sys.argv
    try:
        yield
    finally:
        sys.argv = kept


def data_folder(data: str | None) -> Path:
    """The folder that holds ALFWorld's data."""
    folder = Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
    if not (folder / TREE).is_dir():
        origin = "turnkey.env.kwargs.data" if data else "$ALFWORLD_DATA, by default ~/.cache/alfworld"
        raise FileNotFoundError(f"no ALFWorld data: {folder} ({origin}) has no folder {TREE}. {_HOW}")
    return folder


def find_games(folder: Path, split: str, task_types: Sequence[str]) -> list[Path]:
    """The solvable games of these task types, sorted by path, so that a seed means the same game everywhere.

    ALFRED names a problem's folder after its task type. What ALFWorld cannot play (movable receptacles, sliced things)
    is left out by its own rule. The list of solvable games is cached in ``$TURNKEY_CACHE/alfworld``.
    """
    files = sorted((folder / TREE / split).glob("*/*/game.tw-pddl"))
    playable = [path for path in files if path.parts[-3].split("-")[0] in TYPES and "Sliced" not in path.parts[-3]]
    wanted = [path for path in playable if path.parts[-3].split("-")[0] in task_types]
    solvable = _solvable(folder / TREE / split, playable) if wanted else set()
    games = [path for path in wanted if path in solvable]
    if not games:
        raise FileNotFoundError(
            f"no playable ALFWorld game in {folder / TREE / split}: {len(files)} game.tw-pddl files, "
            f"{len(wanted)} of them of the types {', '.join(task_types)}, none of those marked solvable. {_HOW}"
        )
    return games


def _solvable(split: Path, games: Sequence[Path]) -> set[Path]:
    """Those of ``games`` that are marked solvable. Cached, since every process needs it of thousands of files."""
    split = split.absolute()
    names = {str(path.absolute().relative_to(split)): path for path in games}
    looks = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, games)]
    version = digest(list(zip(names, looks, strict=True)))  # changes when a game is added, removed or rewritten
    file = cache_folder("alfworld") / f"{digest(str(split))}.json"
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["version"] == version:
            return {names[name] for name in kept["solvable"]}
    except (OSError, ValueError, LookupError, TypeError):  # absent or incomplete
        pass
    solvable = [name for name, path in names.items() if _SOLVABLE.search(path.read_bytes())]
    with contextlib.suppress(OSError):  # without a cache the next process reads the games again
        write_text(file, json.dumps({"version": version, "solvable": solvable}))
    return {names[name] for name in solvable}
