"""ScienceWorld: thirty kinds of elementary science experiments in a text world, one Java process per instance.

Wang et al. 2022, "ScienceWorld: Is your agent smarter than a 5th grader?". The simulator is the package's own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from scienceworld import ScienceWorldEnv
from scienceworld.constants import ID2TASK
from scienceworld.utils import infer_task

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count
from verl_turnkey.envs.errors import EnvironmentKwargsError, MissingPackageError, UnknownEnvironmentError

TASKS = sorted({infer_task(name) for name in ID2TASK})
SPLITS = ("train", "dev", "test")
SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "openDoors",
    "openContainers",
    "selfWateringFlowerPots",
    "noElectricalAction",
)
UNKNOWN = "No known action matches that input"
AMBIGUOUS = "Ambiguous request"
_starting = threading.Lock()


class ScienceWorldText(TextEnv):
    """An experiment of ScienceWorld. The seed picks the task, when there are several, and its variation.

    Args:
        task: name or id of a task (``find-plant``, ``4-2``), or several of them; None: all thirty.
        split: which variations are played: ``train``, ``dev`` or ``test``, as the package divides them.
        simplification: the package's own, separated by commas: ``easy`` (all of the others), ``teleportAction``,
            ``openDoors``, ``openContainers``, ``selfWateringFlowerPots``, ``noElectricalAction``; empty: none.
        admissible: list the possible commands: 100 to 3,000, some without effect; it takes most of a step's time.
        max_steps: steps before truncation; the package's own limit is 100.
        heap_mb: limit of the Java heap. An option ``-Xmx`` in ``$JAVA_TOOL_OPTIONS`` overrides it.

    A step's reward is the change of the score (0 to 100) divided by 100, so that an episode's rewards add up to at most
    1. Focusing on the wrong thing ends most tasks: the score drops to -100, the rewards add up to -1. ``success`` means
    score 100. ``state_key`` is a hash of what the agent sees, its inventory and the task's progress. Other rooms are
    left out, and temperatures, which change with every turn: with them no state would occur twice.
    """

    metadata = {**TextEnv.metadata, "thread_safe": True, "memory_mb": 400}  # noqa: RUF012 - gymnasium's own attribute

    def __init__(
        self,
        task: str | Sequence[str] | None = None,
        split: str = "train",
        simplification: str = "easy",
        admissible: bool = False,
        max_steps: int | None = 100,
        heap_mb: int = 256,
    ) -> None:
        super().__init__(max_steps)
        names = [task] if isinstance(task, str) else TASKS if task is None else task
        check(isinstance(names, Sequence) and len(names) > 0, "task", "the name of a task, or several of them", task)
        self._tasks = [_task(name) for name in names]
        check(split in SPLITS, "split", f"one of {', '.join(SPLITS)}", split)
        for word in simplification.split(",") if simplification else ():
            if word not in SIMPLIFICATIONS:
                raise EnvironmentKwargsError(
                    f"ScienceWorld has no simplification {word!r}{did_you_mean(word, SIMPLIFICATIONS) or '.'} "
                    f"There are {', '.join(SIMPLIFICATIONS)}; several are separated by commas without spaces"
                )
        check(is_count(heap_mb) and heap_mb >= 64, "heap_mb", "a whole number of at least 64", heap_mb)
        self._split, self._simplification = split, simplification
        self._admissible, self._heap_mb = admissible, heap_mb
        self._engine: ScienceWorldEnv | None = None
        self._variations: dict[str, list[int]] = {}
        self._loaded: tuple[str, int] = ("", 0)
        self._score = 0
        if shutil.which("java") is None:
            raise MissingPackageError(
                "ScienceWorld needs a Java runtime, and there is no `java` on the PATH: "
                "apt-get install default-jre-headless",
                name="java",
            )

    def begin(self, seed: int) -> tuple[StepResult, str]:
        task = self._tasks[seed % len(self._tasks)]
        of_task = self._of_split(task)
        self._load(task, of_task[seed // len(self._tasks) % len(of_task)])
        self._score = 0
        return self._now(self._simulator.step("look around")), self.engine.get_task_description()

    def task_ids(self) -> list[str]:
        """Task and number of the variation, ``find-plant/241``; variations of a task come again after its last."""
        of_tasks = [self._of_split(task) for task in self._tasks]
        rounds = max(map(len, of_tasks))
        return [
            f"{task}/{numbers[turn % len(numbers)]}"
            for turn in range(rounds)
            for task, numbers in zip(self._tasks, of_tasks, strict=True)
        ]

    def _of_split(self, task: str) -> list[int]:
        """The variations of a task that are played, in the package's order."""
        self._engine = self._engine or _start(self._heap_mb)
        if task not in self._variations:  # the simulator lists those of the loaded task only
            self._load(task, 0)
            self._variations[task] = list(getattr(self._engine, f"get_variations_{self._split}")())
        return self._variations[task]

    def act(self, action: str) -> StepResult:
        # Not the package's own step(): it lists all commands every time, which takes longer than the step itself.
        answer = self._simulator.step(action)
        # The simulator lists some commands that it then refuses: an action from the list is valid all the same.
        listed = action in (self._last_result.admissible or ())
        return self._now(answer, invalid=answer.startswith(UNKNOWN) and not listed)

    def oracle(self) -> list[str] | None:
        """The package's gold path, up to the step that wins; None where that takes more than ``max_steps``."""
        self._load(*self._loaded, gold=True)
        simulator, path = self._simulator, []
        for action in self.engine.get_gold_action_sequence()[: self.max_steps]:
            simulator.step(action)
            path.append(action)
            if simulator.getCompleted():
                break
        solved = simulator.getCompleted() and simulator.getScore() >= 1
        self._load(*self._loaded)
        return path if solved else None

    def close(self) -> None:
        """Stop the Java process. A further reset starts a new one."""
        engine, self._engine, self._running = self._engine, None, False
        if engine is not None:
            process: Any = engine._gateway.java_process
            with contextlib.suppress(Exception):  # it may be gone already
                engine.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def engine(self) -> ScienceWorldEnv:
        """The package's environment, from the first reset until ``close``."""
        assert self._engine is not None, "reset comes first"
        return self._engine

    @property
    def _simulator(self) -> Any:
        return self.engine.server

    def _load(self, task: str, variation: int, gold: bool = False) -> None:
        """Put the simulator at the start of a variation, with a gold path if asked for."""
        try:
            self.engine.load(task, variation, self._simplification, generateGoldPath=gold)
        except ValueError as error:
            raise EnvironmentKwargsError(f"ScienceWorld cannot load the task {task!r}: {error}") from error
        self._loaded = (task, variation)

    def _now(self, answer: str, invalid: bool = False) -> StepResult:
        engine, simulator = self.engine, self._simulator
        score = round(100 * simulator.getScore())
        reward, self._score = (score - self._score) / 100, score
        question = answer if answer.startswith(AMBIGUOUS) else ""
        return StepResult(
            observation=answer.strip(),
            state_key=digest(*self._loaded, engine.look(), engine.inventory(), engine.get_goal_progress(), question),
            admissible=sorted(engine.get_valid_action_object_combinations()) if self._admissible else None,
            reward=reward,
            success=score == 100,
            terminated=bool(simulator.getCompleted()) or score < 0,
            invalid=invalid,
        )


def _task(name: Any) -> str:
    """The simulator's name of a task that is given by name, or by its id in the paper."""
    task = infer_task(name) if isinstance(name, str) else name
    if task not in TASKS:
        raise UnknownEnvironmentError(
            f"ScienceWorld has no task {name!r}{did_you_mean(name, TASKS) or '.'} It has {', '.join(TASKS)}"
        )
    return task


def _start(heap_mb: int) -> ScienceWorldEnv:
    # The simulator keeps things in sets ordered by identity hashes, which depend on all that the process did before:
    # rooms would list their things in another order after every load. With equal hashes the order is fixed.
    same_order = "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockExperimentalVMOptions -XX:hashCode=2"
    with _starting, _java_options(f"-Xmx{heap_mb}m -XX:+UseSerialGC {same_order}"):
        return ScienceWorldEnv("", envStepLimit=2**31 - 1)  # steps are counted by TextEnv


@contextlib.contextmanager
def _java_options(options: str) -> Iterator[None]:
    """Pass options to Java by the variable that it reads; the package has no argument for them."""
    name = "JAVA_TOOL_OPTIONS"
    before = os.environ.get(name)
    os.environ[name] = f"{options} {before}" if before else options  # Java takes the last one of several
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
