"""Small household problems in ALFWorld's own format, to test or try ALFWorld without its download.

A problem is a room of ALFRED's floor plans with about ten things in it and a task of one of the six types. Rooms, kinds
of things, what fits where and the goals come from ALFWorld's own tables; the things, their places and the goal of a
problem are drawn from the seed. A problem is written only if ALFWorld's planner solves it.

    python -m verl_turnkey.envs.adapters.alfworld.generate FOLDER --train 60
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alfworld.gen
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from alfworld.agents.utils.misc import add_task_to_grammar
from alfworld.gen import constants
from alfworld.gen.goal_library import gdict
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from textworld import EnvInfos
from textworld.envs import PddlEnv

from verl_turnkey.envs.adapters.alfworld.env import SPLITS, TREE, own_argv

UNSEEN_SCENES = frozenset(constants.TEST_SCENE_NUMBERS)
LAYOUTS = Path(alfworld.gen.__file__).parent / "layouts"

SAME_KIND = 3
"""receptacles of one kind that are kept in a room: the engine's speed depends on the size of a room"""
OTHER_THINGS = 8
"""things in a room beside those the task is about"""
DRAWS = 20
"""attempts to draw one problem of the data set; the planner solves nearly every first one"""

LAMP, LAMP_STANDS = "DeskLamp", ("Desk", "Dresser", "SideTable")
# ALFWorld's domain file names these types, so every problem has to declare them.
DOMAIN_RECEPTACLES, DOMAIN_THINGS = {"Fridge", "Microwave", "SinkBasin"}, {"ButterKnife", "Knife"}


@dataclass(frozen=True)
class Rule:
    """What a task type asks of its room: an ability of the thing, the appliance that gives it, how many things."""

    ability: str = ""
    appliance: str = ""
    copies: int = 1
    lamp: bool = False


RULES = {
    "pick_and_place_simple": Rule(),
    "look_at_obj_in_light": Rule(lamp=True),
    "pick_clean_then_place_in_recep": Rule("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": Rule("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": Rule("Coolable", "Fridge"),
    "pick_two_obj_and_place": Rule(copies=2),
}


@dataclass(frozen=True)
class Receptacle:
    id: str
    kind: str


@dataclass(frozen=True)
class Thing:
    id: str
    kind: str
    holder: Receptacle


@dataclass(frozen=True)
class Problem:
    """A room, what is in it, and what is to be done. ``target`` is a kind of receptacle, empty for the lamp's task."""

    task_type: str
    scene: int
    thing: str
    target: str
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]
    sentence: str

    @property
    def toggle(self) -> str:
        return LAMP if RULES[self.task_type].lamp else ""


def generate(out: Path, counts: Mapping[str, int], seed: int = 0) -> Iterator[Path]:
    """Write problems and yield the file of each game as soon as it is there.

    The task types take turns. A problem depends on ``seed``, its split and its number alone, so a larger data set
    begins with the smaller one. ``valid_unseen`` has rooms of its own, as in ALFRED.

    Args:
        out: a data folder for ``$ALFWORLD_DATA``; must not hold problems yet.
        counts: number of problems of each split.

    Raises:
        FileExistsError: ``out`` already holds problems.
    """
    if (out / TREE).exists():
        raise FileExistsError(f"{out} already holds ALFWorld problems ({TREE}): choose another folder")
    logic = out / "logic"
    logic.mkdir(parents=True, exist_ok=True)
    for source in (ALFRED_PDDL_PATH, ALFRED_TWL2_PATH):
        shutil.copy(source, logic)
    for split in SPLITS:
        (out / TREE / split).mkdir(parents=True)
        for number in range(counts.get(split, 0)):
            problem, game = solved(seed, split, number)
            yield write(problem, game, out / TREE / split, f"trial_{seed:04d}_{number:05d}")


def solved(seed: int, split: str, number: int) -> tuple[Problem, dict[str, Any]]:
    """Problem ``number`` of a split, and its game with the planner's walkthrough."""
    types = list(RULES)
    # Seeded by a text, which Python hashes the same way in every process.
    rng = random.Random(f"{seed}/{split}/{number}")
    for _ in range(DRAWS):
        problem = draw(rng, types[number % len(types)], unseen=split == "valid_unseen")
        game = game_of(problem)
        game["walkthrough"] = plan(game)
        game["solvable"] = bool(game["walkthrough"])
        if game["solvable"]:
            return problem, game
    raise RuntimeError(f"none of {DRAWS} problems drawn for {split} number {number} of seed {seed} can be solved")


def draw(rng: random.Random, task_type: str, unseen: bool) -> Problem:
    """A problem of this type in a room that allows it."""
    rule = RULES[task_type]
    rooms = [
        number
        for room in sorted(constants.GOALS_VALID[task_type])
        for number in constants.SCENE_TYPE[room]
        if (number in UNSEEN_SCENES) == unseen
    ]
    for scene in rng.sample(rooms, len(rooms)):
        receptacles, kinds = room_of(scene, rng)
        choices = goals(rule, {r.kind for r in receptacles}, kinds)
        if choices:
            break
    else:
        raise RuntimeError(f"no floor plan of ALFWorld allows a task of type {task_type}")
    thing, target = rng.choice(choices)
    others = [kind for kind in kinds if kind not in (thing, LAMP) and homes(kind, {r.kind for r in receptacles})]
    things = [put(rng, thing, receptacles, avoid=target) for _ in range(rule.copies)]
    things += [put(rng, kind, receptacles) for kind in rng.sample(others, min(OTHER_THINGS, len(others)))]
    if rule.lamp:
        stand = rng.choice([r for r in receptacles if r.kind in LAMP_STANDS])
        things.append(Thing(new_id(rng, LAMP), LAMP, stand))
    words = {"obj": thing.lower(), "recep": target.lower(), "toggle": LAMP.lower()}
    sentence = rng.choice(gdict[task_type]["templates"]).format(**words)
    return Problem(task_type, scene, thing, target, tuple(receptacles), tuple(things), sentence)


def room_of(scene: int, rng: random.Random) -> tuple[list[Receptacle], list[str]]:
    """Receptacles of a floor plan, at most ``SAME_KIND`` of a kind, and the kinds of things that belong there."""
    by_kind: dict[str, list[Receptacle]] = {}
    for name in sorted(json.loads((LAYOUTS / f"FloorPlan{scene}-openable.json").read_text())):
        parts = name.split("|")
        kind = parts[-1] if parts[-1].isalpha() else parts[0]  # Sink|x|y|z|SinkBasin
        by_kind.setdefault(kind, []).append(Receptacle(name, kind))
    receptacles = [
        receptacle
        for same in by_kind.values()
        for receptacle in sorted(rng.sample(same, min(SAME_KIND, len(same))), key=lambda r: r.id)
    ]
    kinds = set(json.loads((LAYOUTS / f"FloorPlan{scene}-objects.json").read_text()))
    return receptacles, sorted(kinds & (constants.NON_RECEPTACLES_SET | {LAMP}))


def homes(kind: str, receptacles: set[str]) -> set[str]:
    """The kinds of receptacles, out of these, that may hold a thing of this kind."""
    return {r for r in receptacles if kind in constants.VAL_RECEPTACLE_OBJECTS.get(r, ())}


def goals(rule: Rule, receptacles: set[str], kinds: list[str]) -> list[tuple[str, str]]:
    """Pairs of a thing and the kind of receptacle it has to come to, in a room like this."""
    if rule.appliance and rule.appliance not in receptacles:
        return []
    if rule.lamp:
        lit = LAMP in kinds and receptacles.intersection(LAMP_STANDS)
        return [(kind, "") for kind in kinds if kind != LAMP and homes(kind, receptacles)] if lit else []
    able = [kind for kind in kinds if not rule.ability or kind in constants.VAL_ACTION_OBJECTS[rule.ability]]
    # At least two kinds may hold it: the thing must not begin where it has to go.
    return [
        (kind, target)
        for kind in able
        for target in sorted(homes(kind, receptacles) - {rule.appliance})
        if len(homes(kind, receptacles)) > 1
    ]


def put(rng: random.Random, kind: str, receptacles: list[Receptacle], avoid: str = "") -> Thing:
    """A thing of this kind somewhere it may be, not in a receptacle of the kind ``avoid``."""
    places = [r for r in receptacles if r.kind != avoid and homes(kind, {r.kind})]
    return Thing(new_id(rng, kind), kind, rng.choice(places))


def new_id(rng: random.Random, kind: str) -> str:
    """An id as ALFRED gives them: the kind and three coordinates."""
    return "|".join([kind, *(f"{rng.uniform(-9, 9):+06.2f}" for _ in range(3))])


def symbol(name: str) -> str:
    """An ALFRED id as ALFWorld spells it in PDDL."""
    for mark, word in (("|", "bar"), ("+", "plus"), ("-", "minus"), (".", "dot")):
        name = name.replace(mark, f"_{word}_")
    return name


def pddl(problem: Problem) -> str:
    """The problem in PDDL. The planner reads the sections in this order only."""
    # A location for each receptacle: the engine's text does not distinguish several at one location.
    location = {r.id: f"loc|{number}" for number, r in enumerate(problem.receptacles, start=1)}
    start = "loc|0"
    thing_kinds = sorted({t.kind for t in problem.things} | DOMAIN_THINGS)
    receptacle_kinds = sorted({r.kind for r in problem.receptacles} | DOMAIN_RECEPTACLES)
    declared = {
        "agent": ["agent1"],
        "receptacle": [symbol(r.id) for r in problem.receptacles],
        "object": [symbol(t.id) for t in problem.things],
        "location": [symbol(name) for name in (start, *location.values())],
        "otype": [f"{kind}Type" for kind in thing_kinds],
        "rtype": [f"{kind}Type" for kind in receptacle_kinds],
    }
    facts = ["= (total-cost) 0", f"atLocation agent1 {symbol(start)}"]
    for kind in receptacle_kinds:
        facts += [f"canContain {kind}Type {thing}Type" for thing in thing_kinds if homes(thing, {kind})]
    for r in problem.receptacles:
        name = symbol(r.id)
        facts += [f"receptacleType {name} {r.kind}Type", f"receptacleAtLocation {name} {symbol(location[r.id])}"]
        facts += [f"openable {name}"] if r.kind in constants.OPENABLE_CLASS_SET else []
    for t in problem.things:
        name, holder = symbol(t.id), symbol(t.holder.id)
        facts += [f"objectType {name} {t.kind}Type", f"inReceptacle {name} {holder}"]
        facts += [f"objectAtLocation {name} {symbol(location[t.holder.id])}"]
        facts += [f"pickupable {name}"] if t.kind != LAMP else []
        facts += [
            f"{ability.lower()} {name}" for ability, able in constants.VAL_ACTION_OBJECTS.items() if t.kind in able
        ]
    goal = gdict[problem.task_type]["pddl"].replace("#", "-")  # ALFWorld's templates write # for the dash
    goal = goal.format(obj=problem.thing, recep=problem.target, toggle=problem.toggle)
    lines = ["(define (problem generated)", "(:domain alfred)", "(:objects"]
    lines += [f"{name} - {kind}" for kind, names in declared.items() for name in names]
    return "\n".join([*lines, ")", "(:init", *(f"({fact})" for fact in facts), ")", goal])


def traj_data(problem: Problem) -> dict[str, Any]:
    """What ALFWorld reads of ALFRED's ``traj_data.json``; the sentence is in the place of a human annotation."""
    return {
        "task_type": problem.task_type,
        "pddl_params": {
            "object_target": problem.thing,
            "parent_target": problem.target,
            "toggle_target": problem.toggle,
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {"floor_plan": f"FloorPlan{problem.scene}"},
        "turk_annotations": {"anns": [{"task_desc": problem.sentence}]},
    }


def game_of(problem: Problem) -> dict[str, Any]:
    """The content of ``game.tw-pddl``, before the planner has solved it."""
    grammar = Path(ALFRED_TWL2_PATH).read_text()
    rng: Any = random.Random(0)
    # Probability 1: always the sentence of traj_data, since ALFWorld's choice of a template cannot be seeded.
    grammar = add_task_to_grammar(grammar, traj_data(problem), goal_desc_human_anns_prob=1.0, rng=rng)
    return {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": grammar,
        "pddl_problem": pddl(problem),
        "solvable": None,
        "walkthrough": None,
    }


def plan(game: Mapping[str, Any]) -> list[str]:
    """Commands that win the game, from ALFWorld's planner; empty when it finds none."""
    engine = AlfredDemangler(PddlEnv(EnvInfos(policy_commands=True)), shuffle=False)
    with own_argv():
        engine.load(game)
        start: Any = engine.reset()
    return list(start.policy_commands)


def write(problem: Problem, game: Mapping[str, Any], split: Path, trial: str) -> Path:
    """Write the files of a problem where ALFWorld looks for them; returns the one of the game."""
    name = "-".join([problem.task_type, problem.thing, "None", problem.target or problem.toggle, str(problem.scene)])
    folder = split / name / trial
    folder.mkdir(parents=True)
    (folder / "initial_state.pddl").write_text(game["pddl_problem"])
    (folder / "traj_data.json").write_text(json.dumps({**traj_data(problem), "task_id": trial}))
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(game))
    return path


def main(words: Sequence[str] | None = None) -> None:
    """The command line; exit 2 where the folder holds problems already."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_turnkey.envs.adapters.alfworld.generate",
        description="Make small ALFWorld problems without a download. All six task types; its planner solves each.",
    )
    parser.add_argument("out", type=Path, help="data folder to make; name it in $ALFWORLD_DATA afterwards")
    parser.add_argument("--train", type=int, default=60, help="number of training problems")
    parser.add_argument("--valid-seen", type=int, default=12, help="problems in rooms like those of training")
    parser.add_argument("--valid-unseen", type=int, default=12, help="problems in rooms that training never has")
    parser.add_argument("--seed", type=int, default=0, help="draws rooms, things and tasks")
    chosen = parser.parse_args(words)
    counts = {split: getattr(chosen, split) for split in ("train", "valid_seen", "valid_unseen")}
    total = sum(counts.values())
    try:
        for number, _ in enumerate(generate(chosen.out, counts, chosen.seed), 1):
            print(f"\r{number} of {total} problems", end="", file=sys.stderr, flush=True)
    except FileExistsError as error:
        parser.error(str(error))
    print(f"\n{total} problems in {chosen.out}. Use them: export ALFWORLD_DATA={chosen.out.resolve()}")


if __name__ == "__main__":
    main()
