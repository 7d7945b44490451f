"""Which method estimates the true advantage best? Against exact values, for group sizes and horizons.

    python benchmarks/model_credit.py run NAME=FOLDER ...    # models or checkpoints of the quickstart
    python benchmarks/model_credit.py table                  # the tables, from the saved results

Every game is unrolled to a table of its situations, and the probability of success of each is computed exactly, under
the model as policy (``exact_values.py``). Then batches of episodes are played, and each method's advantages of their
steps are compared with the exact ones of the undiscounted success rate. Nothing is trained, so the luck of a training
run plays no part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from exact_forks import forked
from exact_values import WON, WORDS, Floats, Game, Ints, Policy, play, unroll
from known_values import cosine, different
from numpy.typing import NDArray
from page_tables import packages
from rich.progress import track

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.advantage.group_ops import describe_groups, joint_codes
from verl_turnkey.plugins.eval.checkpoint import resolve
from verl_turnkey.plugins.rollout.strategies.builtin import EntropyBranch, Tree

RESULTS = Path(__file__).parent / "results" / "model_credit.json"
LEVEL, SEEDS, EPISODES = "MiniGrid-DoorKey-5x5-v0", range(50_000, 50_400), 64
USUAL_GROUP, USUAL_HORIZON = 8, 20
GROUPS, HORIZONS = (2, 4, 8, 16), (10, 20, 40)
METHODS = ("grpo_steps", "rloo_steps", "gigpo", "hgpo", "salt", "proxmo", "graph", "dual_level")
PARAMETERS = {"hgpo": {"history": 1}}
"""what the quickstart's launch line must change in a recipe: as many past states as its prompt shows"""
SOLVED = "solved"
"""key of the state after a step that solves the task"""
CONTINUATIONS = 4
FORKED = ("as many turns", "exact advantages")
VINE, VINE_ALL, EXACT = "vine, as many turns", "vine, as many episodes", "exact advantages"
TOLERANCE = 0.03
"""a row prints its turns if they differ by more from those of independent episodes"""

app = typer.Typer(add_completion=False, no_args_is_help=True)


@dataclass(frozen=True)
class Batch:
    """S played steps: their StepBatch, exact advantages, situation (game, number), action, turns left before them."""

    steps: StepBatch
    exact: Floats
    game: NDArray[np.int64]
    situation: NDArray[np.int64]
    action: NDArray[np.int64]
    left: NDArray[np.int64]


@dataclass(frozen=True)
class Branching:
    """A strategy that trains its branches, the rollouts of each task, and the rule of the method ``tree``."""

    strategy: Tree | EntropyBranch
    rollouts: int
    rule: str

    @classmethod
    def of(cls, group: int) -> dict[str, Branching]:
        """As in ``benchmarks/evidence/studies.py`` for a group of 8, others in proportion.

        So the number of tasks stays about the same, and the gradient is as easy to estimate.
        """
        return {
            "tree": cls(Tree(first=4, every=4, depth=2), max(1, round(3 * group / 8)), "siblings"),
            "entropy_branch": cls(EntropyBranch(trajectories=group), max(1, group // 2), "arpo"),
        }


@dataclass(frozen=True)
class World:
    """The games under one policy and one horizon, with all that can be computed before an episode is played."""

    games: list[Game]
    horizon: int
    prompts: int
    values: list[Floats]
    action_values: list[Floats]
    turns: list[Floats]
    gradients: list[Floats]

    @classmethod
    def of(cls, games: list[Game], horizon: int, prompts: int, *, exact: bool = True) -> World:
        """``exact``: with the expected turns and the exact gradients, which take most of the time."""
        values = [game.values(horizon) for game in games]
        return cls(
            games,
            horizon,
            prompts,
            values,
            [game.action_values(value) for game, value in zip(games, values, strict=True)],
            [game.turns(horizon) for game in games] if exact else [],
            [game.gradient(horizon, prompts) for game in games] if exact else [],
        )

    @cached_property
    def price(self) -> float:
        """Expected turns of an episode with continuations from each of its states, relative to one without."""
        ahead = [
            (game.visits(self.horizon) * turns[:0:-1]).sum() for game, turns in zip(self.games, self.turns, strict=True)
        ]
        return 1 + CONTINUATIONS * float(np.mean(ahead)) / self.length

    @cached_property
    def length(self) -> float:
        """Expected turns of an episode."""
        return float(np.mean([turns[self.horizon, 0] for turns in self.turns]))

    def batch(self, group: int, episodes: int, draw: np.random.Generator) -> Batch:
        """``episodes`` episodes in groups of ``group``, each group in a game of its own while there are enough."""
        number = np.arange(episodes) // group
        which = self._tasks(number[-1] + 1, draw)[number]
        won, situations, actions = play(self.games, which, self.horizon, draw)
        episode, turn = np.nonzero(situations >= 0)
        situation, action = situations[episode, turn], actions[episode, turn]
        return self._batch(number[episode], which[episode], episode, turn, situation, action, won[episode])

    def forked(self, way: Branching, tasks: int, draw: np.random.Generator) -> Batch:
        """Rollouts of ``tasks`` games and their branches; shared turns occur once."""
        games = [(int(g), self.games[g]) for g in self._tasks(tasks, draw)]
        columns = forked(games, way.rollouts, self.horizon, way.strategy, draw)
        parent = columns.pop("parent")
        arrays = {name: np.array(column) for name, column in columns.items()}
        return self._batch(**arrays, extra={"parent": parent, "leaf_outcome": arrays["won"].astype(float)})

    def _tasks(self, groups: int, draw: np.random.Generator) -> Ints:
        """The game of each group."""
        return draw.choice(len(self.games), groups, replace=groups > len(self.games))

    def _batch(
        self,
        group: Ints,
        game: Ints,
        trajectory: Ints,
        turn: Ints,
        situation: Ints,
        action: Ints,
        won: NDArray[np.bool_],
        extra: dict[str, Any] | None = None,
    ) -> Batch:
        """Of steps in the order of their trajectories; ``won``: whether the trajectory of the step did."""
        left = self.horizon - turn
        last = np.r_[trajectory[1:] != trajectory[:-1], True]
        exact = [
            self.action_values[g][n - 1, s, a] - self.values[g][n, s]
            for g, s, a, n in zip(game, situation, action, left, strict=True)
        ]
        following = [self.games[g].following[s, a] for g, s, a in zip(game, situation, action, strict=True)]
        ahead = [SOLVED if s == WON else self.games[g].key[s] for g, s in zip(game, following, strict=True)]
        steps = StepBatch(
            group=group,
            trajectory=trajectory,
            step=turn,
            reward=(won & last).astype(float),
            anchor=[self.games[g].key[s] for g, s in zip(game, situation, strict=True)],
            text=[self.games[g].text[s] for g, s in zip(game, situation, strict=True)],
            action=[WORDS[a] for a in action],
            terminated=won & last,
            truncated=~won & last,
            success=won,
            extra={"next_anchor": ahead, **(extra or {})},
        )
        return Batch(steps, np.array(exact), game, situation, action, left)

    def estimate(self, batch: Batch, advantage: Floats) -> Floats:
        """The policy gradient of the batch with ``advantage``, summed over its steps: (prompts, A)."""
        gradient = np.zeros((self.prompts, len(WORDS)))
        prompt = np.array([self.games[g].prompt[s] for g, s in zip(batch.game, batch.situation, strict=True)])
        policy = np.array([self.games[g].policy[s] for g, s in zip(batch.game, batch.situation, strict=True)])
        np.add.at(gradient, prompt, advantage[:, None] * (np.eye(len(WORDS))[batch.action] - policy))
        return gradient

    def truth(self, batch: Batch) -> Floats:
        """The exact gradient in the tasks of the batch, each weighted by its episodes."""
        games, counts = np.unique(batch.game[batch.left == self.horizon], return_counts=True)
        return sum(self.gradients[g] * count for g, count in zip(games, counts, strict=True))


def credit(name: str, steps: StepBatch) -> Floats:
    """Advantages by a method with the defaults of its recipe, except for ``PARAMETERS``."""
    return compute_credit(name, steps, **PARAMETERS.get(name, {})).advantage


def vine(world: World, batch: Batch, draw: np.random.Generator) -> Floats:
    """VinePPO: the value before and after a step is the share of ``CONTINUATIONS`` further episodes that win."""

    def measured(game: int, situation: int, left: int) -> float:
        return draw.binomial(CONTINUATIONS, min(world.values[game][left, situation], 1.0)) / CONTINUATIONS

    places = list(zip(batch.game, batch.situation, batch.left, strict=True))
    before = np.array([measured(*place) for place in places])
    ends = np.r_[batch.left[1:] >= batch.left[:-1], True]
    after = np.where(ends, 0.0, np.r_[before[1:], 0.0])
    return batch.steps.reward + after - before


class Pace:
    """Sizes of batches that together have as many turns as those of another row.

    Args:
        expected: turns of an episode, or of a task with all its paths.
    """

    def __init__(self, expected: float) -> None:
        self._expected, self._left = expected, 0.0

    def size(self, turns: float) -> int:
        """Episodes or tasks for ``turns`` more; at least one."""
        self._left += turns
        return max(1, round(self._left / self._expected))

    def played(self, turns: float) -> None:
        self._left -= turns


class Tally:
    """How one method's advantages of all batches agree with the exact ones, and the turns that it played."""

    def __init__(self) -> None:
        self.turns = 0.0
        self._pairs: list[NDArray] = []
        self._cosines: list[float] = []
        self._estimate: Floats | float = 0.0
        self._truth: Floats | float = 0.0

    def add(self, world: World, batch: Batch, advantage: Floats, turns: float) -> None:
        self.turns += turns
        estimate, truth = world.estimate(batch, advantage), world.truth(batch)
        self._pairs.append(np.stack([advantage, batch.exact]))
        self._cosines.append(cosine(estimate, truth))
        self._estimate, self._truth = self._estimate + estimate, self._truth + truth

    def result(self) -> dict[str, float]:
        """``wrong`` and ``none``: share of all \\|exact advantage\\| at steps with the wrong sign, and with 0."""
        advantage, exact = np.concatenate(self._pairs, axis=1)
        size = np.abs(exact)
        return {
            "correlation": correlation(advantage, exact),
            "wrong": float(size[advantage * exact < 0].sum() / size.sum()),
            "none": float(size[advantage == 0].sum() / size.sum()),
            "cosine": float(np.mean(self._cosines)),
            "cosine_error": float(np.std(self._cosines, ddof=1) / np.sqrt(len(self._cosines))),
            "cosine_all": cosine(self._estimate, self._truth),
        }


def correlation(a: Floats, b: Floats) -> float:
    """Pearson's; 0 where an array is constant."""
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else 0.0


def with_extra(steps: StepBatch, **extra: Floats) -> StepBatch:
    """The steps with other extra columns."""
    names = ("group", "trajectory", "step", "reward", "anchor", "action", "terminated", "truncated", "success")
    return StepBatch(**{name: getattr(steps, name) for name in names}, extra=extra)


def measure(world: World, group: int, batches: int, seed: int) -> dict[str, Any]:
    """Every method on the same ``batches`` batches, and branching rollouts that play as many turns as these do.

    ``turns`` of a method: relative to those of the batches. ``begins``: the median turn at which branches begin; None
    without a branch.
    """
    draw = np.random.default_rng(seed)
    ways = Branching.of(group)
    tallies = {name: Tally() for name in (*METHODS, *(f"{way}, {what}" for way in ways for what in FORKED))}
    tallies |= {name: Tally() for name in (VINE, VINE_ALL, EXACT)}
    forks = np.random.default_rng([seed, 1])  # a separate stream, so that batches are the same without forks
    paces = {name: Pace(_turns_of_task(world, way)) for name, way in ways.items()}
    paces[VINE] = Pace(world.price * world.length)
    begins: dict[str, list[int]] = {name: [] for name in ways}
    shared, won, turns = [], [], []
    for _ in range(batches):
        batch = world.batch(group, EPISODES, draw)
        turns.append(len(batch.exact))
        for name in METHODS:
            tallies[name].add(world, batch, credit(name, batch.steps), turns[-1])
        tallies[EXACT].add(world, batch, batch.exact, turns[-1])
        tallies[VINE_ALL].add(world, batch, vine(world, batch, draw), _with_continuations(world, batch))
        few = world.batch(1, paces[VINE].size(turns[-1]), draw)
        spent = _with_continuations(world, few)
        paces[VINE].played(spent)
        tallies[VINE].add(world, few, vine(world, few, draw), spent)
        for name, way in ways.items():
            many = world.forked(way, paces[name].size(turns[-1]), forks)
            paces[name].played(len(many.exact))
            begins[name] += _begins(many)
            from_tree = compute_credit("tree", many.steps, rule=way.rule).advantage
            for what, advantage in zip(FORKED, (from_tree, many.exact), strict=True):
                tallies[f"{name}, {what}"].add(world, many, advantage, len(many.exact))
        groups = describe_groups("anchor", *joint_codes(batch.steps.group, batch.steps.anchor))
        shared.append(groups["credit/share_steps_in_anchor_groups"])
        won.append(batch.steps.success[batch.left == world.horizon].mean())
    total = sum(turns)
    return {
        "success": float(np.mean(won)),
        "turns": total / batches / EPISODES,
        "shared": float(np.mean(shared)),
        "vine_price": world.price,
        "begins": {name: float(np.median(counts)) if counts else None for name, counts in begins.items()},
        "methods": {name: {**tally.result(), "turns": tally.turns / total} for name, tally in tallies.items()},
    }


def _turns_of_task(world: World, way: Branching) -> float:
    """Turns of a task with its branches, measured."""
    draw = np.random.default_rng(0)
    return float(np.mean([len(world.forked(way, len(world.games), draw).exact) for _ in range(5)])) / len(world.games)


def _with_continuations(world: World, batch: Batch) -> float:
    """Turns of the batch, with the expected turns of continuations from all of its states."""
    ahead = [world.turns[g][n, s] for g, s, n in zip(batch.game, batch.situation, batch.left, strict=True)]
    return float(len(ahead) + CONTINUATIONS * sum(ahead))


def _begins(batch: Batch) -> list[int]:
    """The turn at which each branch begins."""
    runs = batch.steps.runs
    first = batch.steps.step[runs.order[runs.starts]]
    return first[first > 0].tolist()


@app.command()
def run(
    models: Annotated[list[str], typer.Argument(help="NAME=FOLDER: of Hugging Face or a checkpoint of verl's")],
    batches: Annotated[int, typer.Option(help="batches of 64 episodes for each setting")] = 200,
    seed: int = 0,
) -> None:
    """Measure, save the results, print the tables."""
    starts = different(LEVEL, SEEDS)
    measured = {name: list(_settings(*of_model, batches, seed)) for name, *of_model in unrolled(models, starts)}
    about = {"level": LEVEL, "games": len(starts), "episodes": EPISODES, "batches": batches, "seed": seed}
    RESULTS.write_text(json.dumps({**about, "packages": packages(), "models": measured}, indent=1) + "\n")
    table()


def unrolled(models: Sequence[str], starts: Sequence[int]) -> Iterator[tuple[str, list[Game], int]]:
    """For each NAME=FOLDER: the name, the games from ``starts`` under the model, the number of their prompts."""
    for name, _, folder in (model.partition("=") for model in models):
        with TemporaryDirectory() as merged:
            policy = Policy(resolve(Path(folder), Path(merged)))
        games = [unroll(LEVEL, start, policy) for start in track(starts, f"games of {name}")]
        yield name, games, len(policy)


def _settings(games: list[Game], prompts: int, batches: int, seed: int) -> Iterator[dict[str, Any]]:
    for horizon in HORIZONS:
        world = World.of(games, horizon, prompts)
        for group in GROUPS if horizon == USUAL_HORIZON else (USUAL_GROUP,):
            print(f"horizon {horizon}, groups of {group}", flush=True)
            yield {"horizon": horizon, "group": group, **measure(world, group, batches, seed)}


@app.command()
def table() -> None:
    """Print the tables from the saved results."""
    print(tables(json.loads(RESULTS.read_text())))


def tables(results: dict[str, Any]) -> str:
    """Markdown: for each model every method at the usual setting, then cosines by group size and by horizon."""
    parts = []
    for name, settings in results["models"].items():
        usual = next(s for s in settings if (s["horizon"], s["group"]) == (USUAL_HORIZON, USUAL_GROUP))
        begins = ", ".join(f"{turns:.0f} in `{way}`" for way, turns in usual["begins"].items() if turns)
        parts.append(
            f"**{name}**: {results['games']} different starts, success {usual['success']:.2f} in {USUAL_HORIZON} "
            f"turns, {usual['shared']:.0%} of the steps share their state; turns before the median branch: {begins}\n\n"
            "| method | turns | correlation | wrong sign | no credit | cosine of a batch | of all batches |\n"
            "|---|---|---|---|---|---|---|\n" + "\n".join(_row(name, tally) for name, tally in usual["methods"].items())
        )
        heads = [f"groups of {setting['group']}, {setting['horizon']} turns" for setting in settings]
        shares = [f"success {setting['success']:.2f}, shared {setting['shared']:.0%}" for setting in settings]
        lines = [
            f"| {method} | " + " | ".join(_cell(method, setting["methods"][method]) for setting in settings) + " |"
            for method in usual["methods"]
        ]
        parts.append(
            f"| cosine of a batch | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|\n"
            f"| | {' | '.join(shares)} |\n" + "\n".join(lines)
        )
    return "\n\n".join(parts)


def _row(name: str, tally: dict[str, float]) -> str:
    """Without the cosine over all batches where they are too small for it."""
    whole = "-" if name == VINE else f"{tally['cosine_all']:.2f}"
    return (
        f"| {name} | {tally['turns']:.2f} | {tally['correlation']:.2f} | {tally['wrong']:.0%} | {tally['none']:.0%} | "
        f"{cosine_cell(tally)} | {whole} |"
    )


def cosine_cell(tally: dict[str, float]) -> str:
    return f"{tally['cosine']:.2f} ± {2 * tally['cosine_error']:.2f}"


def _cell(name: str, tally: dict[str, float]) -> str:
    """The cosine, with the turns where they differ from those of the batches."""
    unequal = name != VINE_ALL and abs(tally["turns"] - 1) > TOLERANCE
    return f"{tally['cosine']:.2f}" + f" ({tally['turns']:.2f} of the turns)" * unequal


if __name__ == "__main__":
    app()
