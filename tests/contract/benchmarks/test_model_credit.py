"""The exact values are those of the game, and the page has the tables that the kept results give."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import credit_errors
import credit_quality
import known_values
import model_credit
import numpy as np
import pytest
import typer
from credit_errors import KEYS, NUMBER, STATE, TURN
from exact_values import WON, WORDS, Game, play
from known_values import END, Family, Table, dense, dialogue, doorkey, maze, softmax
from model_credit import Branching, World
from training import HISTORY
from typer.testing import CliRunner

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.advantage.group_ops import joint_codes
from verl_turnkey.plugins.cli.tables import between
from verl_turnkey.plugins.rollout.strategies.builtin import EntropyBranch, Tree

ROOT = Path(__file__).parents[3]


HORIZON = 3


@pytest.fixture(scope="module")
def game() -> Game:
    """Two situations with prompts of their own and one that shares its prompt with the start."""
    draw = np.random.default_rng(0)
    policy = draw.dirichlet(np.ones(len(WORDS)), size=2)
    following = np.array([[1, 2, 0, 1, 2, 0], [WON, 2, 1, 0, 0, 1], [0, 1, 2, WON, 1, 2]])
    return Game(["a", "b", "c"], ["", "", ""], np.array([0, 1, 0]), policy[[0, 1, 0]], following)


def _success(game: Game, policy: np.ndarray, situation: int = 0, turns: int = HORIZON) -> float:
    """The sum over all sequences of actions."""
    total = 0.0
    for actions in product(range(len(WORDS)), repeat=turns):
        chance, here = 1.0, situation
        for place, action in enumerate(actions):
            chance *= policy[game.prompt[here], action]
            here = game.following[here, action]
            if here == WON:  # counted once, however the sequence goes on
                total += chance if not any(actions[place + 1 :]) else 0.0
                break
    return total


def test_values_are_the_sums_over_all_sequences_of_actions(game: Game):
    values = game.values(HORIZON)
    policy = game.policy[:2]
    for turns, situation in product(range(HORIZON + 1), range(3)):
        assert values[turns, situation] == pytest.approx(_success(game, policy, situation, turns), abs=1e-12)


def test_the_gradient_is_that_of_the_success(game: Game):
    logits = np.log(game.policy[:2])

    def at(moved: np.ndarray) -> float:
        odds = np.exp(moved)
        return _success(game, odds / odds.sum(axis=1, keepdims=True))

    gradient = game.gradient(HORIZON, prompts=2)
    for place in np.ndindex(gradient.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-5
        assert gradient[place] == pytest.approx((at(logits + step) - at(logits - step)) / 2e-5, abs=1e-8)


def test_episodes_win_and_end_as_often_as_computed(game: Game):
    won, situations, _ = play([game], np.zeros(20_000, dtype=int), HORIZON, np.random.default_rng(1))
    turns = (situations >= 0).sum(axis=1)
    assert won.mean() == pytest.approx(game.values(HORIZON)[HORIZON, 0], abs=0.015)
    assert turns.mean() == pytest.approx(game.turns(HORIZON)[HORIZON, 0], abs=0.02)


def test_many_batches_with_exact_advantages_have_the_exact_gradient(game: Game):
    world = model_credit.World.of([game], HORIZON, prompts=2)
    batch = world.batch(4000, 4000, np.random.default_rng(2))
    assert model_credit.cosine(world.estimate(batch, batch.exact), world.truth(batch)) > 0.995


def _two(first: list[float], second: list[float], horizon: int) -> model_credit.World:
    """Every action leads from the first situation to the second, where action 0 wins and the others stay."""
    following = np.array([[1] * len(WORDS), [WON, *[1] * (len(WORDS) - 1)]])
    game = Game(["a", "b"], ["", ""], np.array([0, 1]), np.array([first, second]), following)
    return model_credit.World.of([game], horizon, prompts=2)


def test_the_credit_of_a_fork_is_the_true_advantage_times_the_scale_of_two_leaves():
    """Two leaves, one fork before the only step that matters: 1 and 0 are 2 * 0.5 / sqrt(0.5) apart from their mean.

    So a step that wins has sqrt(2) where the other leaf loses, and 0 else: on average sqrt(2) (1 - p), and one that
    loses -sqrt(2) p. True are 1 - p and -p.
    """
    p = 0.3
    world = _two([1 / 6] * 6, [p, *[0.7 / 5] * 5], 2)
    way, draw = Branching(Tree(first=1, depth=1), 1, "siblings"), np.random.default_rng(3)
    credits: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(4000):
        batch = world.forked(way, 1, draw)
        advantage = compute_credit("tree", batch.steps, rule=way.rule).advantage
        assert batch.steps.step.tolist() == [0, 1, 1]
        assert advantage[0] == 0
        assert batch.exact[0] == pytest.approx(0, abs=1e-12)
        won = batch.steps.success[1:]
        unequal = won[0] != won[1]
        assert advantage[1:] == pytest.approx(np.where(won, 1, -1) * unequal * 2**0.5, abs=1e-5)
        assert batch.exact[1:] == pytest.approx(np.where(won, 1 - p, -p), abs=1e-12)
        for success, value in zip(won, advantage[1:], strict=True):
            credits[bool(success)].append(value)
    assert np.mean(credits[True]) == pytest.approx(2**0.5 * (1 - p), abs=0.05)
    assert np.mean(credits[False]) == pytest.approx(-(2**0.5) * p, abs=0.05)


def _chain(n: int = 1) -> model_credit.World:
    """``n`` games: action 0 leads on and wins after the third time, action 1 leads back, the others stay."""
    policy = np.tile([0.5, 0.2, *[0.3 / 4] * 4], (3, 1))
    following = np.array([[1, 0, *[0] * 4], [2, 0, *[1] * 4], [WON, 1, *[2] * 4]])
    game = Game(["a", "b", "c"], ["", "", ""], np.arange(3), policy, following)
    return model_credit.World.of([game] * n, 6, prompts=3)


def test_methods_get_the_state_after_each_step_and_after_the_last_one():
    world = _chain()
    batch = world.batch(8, 8, np.random.default_rng(5))
    steps = batch.steps
    key = np.array(world.games[0].key)
    ahead = steps.extra["next_anchor"]
    last = steps.terminated | steps.truncated
    assert ahead[~last].tolist() == key[batch.situation[1:][~last[:-1]]].tolist()
    assert set(ahead[steps.terminated]) == {model_credit.SOLVED}
    cut = batch.situation[steps.truncated], batch.action[steps.truncated]
    assert len(cut[0]), "no episode was truncated"
    assert ahead[steps.truncated].tolist() == key[world.games[0].following[cut]].tolist()
    without = StepBatch(
        **{name: getattr(steps, name) for name in ("group", "trajectory", "step", "reward", "terminated", "success")},
        anchor=[key[s] for s in batch.situation],
        action=[WORDS[a] for a in batch.action],
    )
    for method in ("graph", "salt"):
        advantage = model_credit.credit(method, batch.steps)
        assert not np.allclose(advantage, compute_credit(method, without).advantage), method


def test_hgpo_compares_as_many_past_states_as_the_prompt_shows():
    world = _chain()
    batch = world.batch(8, 8, np.random.default_rng(6))
    advantage = model_credit.credit("hgpo", batch.steps)
    expected, longer = (compute_credit("hgpo", batch.steps, history=k).advantage for k in (HISTORY, HISTORY + 1))
    assert advantage.tolist() == expected.tolist()
    assert not np.allclose(expected, longer)


def test_there_may_be_more_groups_than_games():
    world = _chain(2)
    several = world.batch(2, 10, np.random.default_rng(7))
    forked = world.forked(Branching(Tree(every=1), 2, "siblings"), 5, np.random.default_rng(7))
    for batch in (several, forked):
        assert batch.steps.n_groups == 5
        assert all(len(set(batch.game[batch.steps.group == group])) == 1 for group in range(5))
    for seed in range(10):
        assert set(world.batch(4, 8, np.random.default_rng(seed)).game) == {0, 1}, "one twice though there are two"


def test_the_price_of_continuations_is_their_turns():
    world = _chain()
    batch = world.batch(8, 8000, np.random.default_rng(9))
    assert len(batch.exact) / 8000 == pytest.approx(world.length, rel=0.01)
    assert model_credit._with_continuations(world, batch) / len(batch.exact) == pytest.approx(world.price, rel=0.01)


def test_a_row_has_as_many_turns_as_independent_episodes_or_says_that_it_has_not():
    measured = model_credit.measure(_chain(2), 2, 20, 0)["methods"]
    assert measured.pop(model_credit.VINE_ALL)["turns"] > 2
    assert all(measured[name]["turns"] == 1 for name in (*model_credit.METHODS, model_credit.EXACT))
    assert len(measured) == len(model_credit.METHODS) + 6
    for name, numbers in measured.items():
        assert numbers["turns"] == pytest.approx(1, abs=model_credit.TOLERANCE), name
        assert "turns" not in model_credit._cell(name, numbers)
        assert model_credit._cell(name, {**numbers, "turns": 0.9}).endswith(" (0.90 of the turns)")


def test_half_of_the_branches_begin_where_the_strategy_says():
    world = _two([1 / 6] * 6, [0, *[1 / 5] * 5], 4)
    batch = world.forked(Branching(Tree(first=1, every=2, depth=2), 1, "siblings"), 1, np.random.default_rng(10))
    assert sorted(model_credit._begins(batch)) == [1, 3, 3]


@pytest.mark.parametrize(("roots", "first"), [("shared", {"start": 2}), ("own", {"0": 1, "1": 1})])
def test_each_turn_of_a_tree_is_there_once_with_the_path_that_it_goes_on_from(roots: str, first: dict[str, int]):
    world = _two([1 / 6] * 6, [0, *[1 / 5] * 5], 3)
    batch = world.forked(Branching(Tree(every=1, roots=roots), 2, "siblings"), 1, np.random.default_rng(4))
    of_first = {"0.0.1": 2, "0.0.2": 2, "0.1.2": 2}
    of_second = {"1.0.1": 2, "1.0.2": 2, "1.1.2": 2}
    assert Counter(batch.steps.extra["parent"].tolist()) == {**first, **of_first, **of_second}
    assert batch.steps.n_trajectories == 8


@pytest.mark.parametrize(("second", "forks"), [([0.5, 0.5, 0, 0, 0, 0], 1), ([1, 0, 0, 0, 0, 0], 0)])
def test_forks_where_a_word_was_less_likely_than_the_first_one(second: list[float], forks: int):
    """One of two rollouts may fork, before the turn that it has written; the branch writes another one."""
    world = _two([0.7, 0, 0, 0, 0, 0.3], second, 2)
    way = Branching(EntropyBranch(trajectories=3), 2, "arpo")
    seen = set()
    for seed in range(50):
        batch = world.forked(way, 1, np.random.default_rng(seed))
        sure = batch.action[batch.left == 2] == 0  # else the first word was less likely than any second one
        seen.add(bool(sure.any()))
        assert batch.steps.n_trajectories == 2 + (forks if sure.any() else 0)
        begun = batch.steps.extra["parent"][2 * 2 :].tolist()
        assert begun == ([f"{int(np.argmax(sure))}.0.1"] if forks and sure.any() else [])
    assert seen == {True, False}


def test_a_level_is_unrolled_with_its_shortest_way():
    table = known_values.states("MiniGrid-DoorKey-5x5-v0", 0)
    assert len(table.moves) > 100
    assert any(None in moves for moves in table.moves.values()), "no action solves the task"
    assert all(there is None or there in table.moves for moves in table.moves.values() for there in moves)


def test_only_seeds_that_start_differently_are_taken():
    level = "MiniGrid-DoorKey-5x5-v0"
    seeds = known_values.different(level, range(50_000, 50_020))
    keys = []
    for seed in range(50_000, 50_020):
        _, info = known_values.make("turnkey/MiniGrid-v0", {"level": level}).reset(seed=seed)
        keys.append(info["state_key"])
    assert len(set(keys)) < 20, "there is nothing to leave out"
    assert seeds == [50_000 + k for k, key in enumerate(keys) if key not in keys[:k]]


def test_the_page_has_the_tables_of_the_kept_results():
    page = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    for part in model_credit.tables(json.loads(model_credit.RESULTS.read_text())).split("\n\n"):
        assert part in page


# --- variance and bias of estimates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_variance_and_bias_of_estimates_that_are_known(scale: float):
    """Of one cell's mean, of noise of its own, and of noise that a batch has in common; whatever the scale."""
    draw = np.random.default_rng(0)
    batches, size, cells = 4000, 20, 30
    exact, off = draw.normal(size=cells), 0.5 * draw.normal(size=cells)
    cell, batch = draw.integers(0, cells, batches * size), np.repeat(np.arange(batches), size)
    noise = 1.5 * draw.normal(size=len(cell)) + 0.7 * draw.normal(size=batches)[batch]
    errors = credit_errors.with_errors(scale * (exact[cell] + off[cell] + noise), exact[cell], cell, batch)
    true, mean = np.mean(exact[cell] ** 2), (exact + off)[cell]
    c = true / np.mean(mean * exact[cell])
    assert errors["measured"] == 1
    assert errors["variance"] == pytest.approx(c**2 * (1.5**2 + 0.7**2) / true, rel=0.03)
    assert errors["bias"] == pytest.approx(np.mean((c * mean - exact[cell]) ** 2) / true, rel=0.03)
    for what in ("variance", "bias"):
        assert 0 < errors[f"{what}_error"] < 0.1 * errors[what]


def test_cells_of_one_batch_are_not_split():
    """A cell that one batch alone has would have no variance, though its estimates share that batch's noise."""
    cell, batch = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1])
    errors = credit_errors.errors(np.array([9.0, 9.0, 1.0, 3.0]), np.array([5.0, 5.0, 2.0, 2.0]), cell, batch)
    assert errors["measured"] == 0.5
    assert errors["variance"] == pytest.approx((5 - 3) / 4), "E[a^2] is 5, the product of the two batches is 3"
    assert errors["bias"] == pytest.approx(3 / 4 - 1)


@pytest.fixture(scope="module")
def world() -> World:
    """Action 0 leads on and wins after the third time, action 1 leads back, the others stay; prompts tell the state."""
    return _chain(2)


def test_finer_keys_are_shared_less_and_follow_each_other(world: World):
    batch = world.batch(4, 64, np.random.default_rng(0))
    tables = {name: credit_errors.keyed(world, batch, name) for name in KEYS}
    groups = {name: joint_codes(steps.group, steps.anchor)[1] for name, steps in tables.items()}
    assert groups[STATE] == groups[TURN] < groups[NUMBER] < groups[credit_errors.HISTORY]
    for name, steps in tables.items():
        raw = steps.extra["next_anchor"]
        within = np.flatnonzero(steps.step[1:])  # steps that another one of their trajectory follows
        codes: dict[str, int] = {}
        for row in within:
            assert codes.setdefault(raw[row], steps.anchor[row + 1]) == steps.anchor[row + 1], name
        assert set(raw[steps.terminated]) == {"solved"}
    history = tables[credit_errors.HISTORY]
    seen: dict[int, tuple] = {}
    for trajectory in range(history.n_trajectories):
        rows = np.flatnonzero(history.trajectory == trajectory)
        past: tuple = ()
        for row in rows:
            past = (*past, int(batch.situation[row]))
            assert seen.setdefault(history.anchor[row], past) == past
            past = (*past, WORDS[batch.action[row]])
    assert len(seen) == len(set(seen.values()))


def test_methods_that_compare_states_see_the_keys_and_the_others_do_not(world: World):
    measured = credit_errors.measure(world, 20, 0)
    assert list(measured["keys"]) == list(KEYS)
    shared = [measured["keys"][name]["shared"] for name in KEYS]
    assert shared[0] > shared[2] > shared[3]
    correlations = {
        method: {round(measured["keys"][name]["methods"][method]["correlation"], 9) for name in KEYS if name != TURN}
        for method in credit_errors.KEYED
    }
    assert len(correlations.pop("grpo_steps")) == 1
    assert all(len(values) == 3 for values in correlations.values()), correlations
    exact = measured["keys"][STATE]["methods"][credit_errors.EXACT]
    assert exact["variance"] == pytest.approx(0, abs=1e-9)
    assert exact["bias"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", list(credit_errors.CONTENTS))
def test_the_page_has_the_kept_tables_of_errors(name: str):
    page = credit_errors.PAGE.read_text(encoding="utf-8")
    begin, end = between(page, name)
    table = credit_errors.CONTENTS[name](json.loads(credit_errors.RESULTS.read_text()))
    assert page[begin:end] == f"{table}\n"


# --- the quality of credit, of each way to name a method --------------------------------------------------------------


SMALL = Table(
    following=np.array([[[1, 0], [2, 1]], [[2, END], [0, 1]], [[END, 1], [2, 2]]]),
    chance=np.array([[[0.5, 0.5], [0.9, 0.1]], [[0.3, 0.7], [1.0, 0.0]], [[0.2, 0.8], [0.5, 0.5]]]),
    reward=np.array([[[0.0, -1.0], [0.5, 0.0]], [[0.0, 2.0], [0.0, 0.0]], [[1.0, 0.0], [-0.5, 0.0]]]),
    key=["a", "b", "c"],
    text=["in a", "in b", "in c"],
    row=np.array([0, 1, 0]),
)
LOGITS = np.array([[0.3, -0.2], [0.0, 0.7]])


def expected(table: Table, policy: np.ndarray, state: int, left: int) -> float:
    """The return, by all ways to go on."""
    if left == 0 or state == END:
        return 0.0
    return sum(
        policy[table.row[state], a]
        * table.chance[state, a, k]
        * (table.reward[state, a, k] + expected(table, policy, table.following[state, a, k], left - 1))
        for a, k in np.ndindex(2, 2)
    )


def test_values_and_gradient_are_those_of_all_ways_to_go_on():
    family = Family([SMALL, replace(SMALL, start=1)], softmax(LOGITS), 4)
    for place, table in enumerate(family.tables):
        assert family.values[place][0][4, table.start] == pytest.approx(expected(table, family.policy, table.start, 4))
        for row, action in np.ndindex(2, 2):
            step = np.zeros((2, 2))
            step[row, action] = 1e-6
            up, down = (expected(table, softmax(LOGITS + sign * step), table.start, 4) for sign in (1, -1))
            assert family.gradients[place][row, action] == pytest.approx((up - down) / 2e-6, abs=1e-7)


@pytest.mark.parametrize(
    "make",
    [lambda: maze(1, 0.4), lambda: dense(1), lambda: doorkey(1, 0.4), lambda: dialogue(1, 0.4)],
    ids=["maze", "dense", "doorkey", "dialogue"],
)
def test_episodes_are_those_of_the_tables(make):
    """Exact advantages of many episodes sum to the exact gradient, and the return is the value of the start."""
    family = make()
    draw = np.random.default_rng(0)
    batches = [family.draw(512, draw) for _ in range(4)]
    total = sum(family.gradient(batch, batch.exact) for batch, _ in batches)
    assert credit_quality.cosine(total, sum(truth for _, truth in batches)) > 0.97
    returns = [np.bincount(batch.steps.trajectory, batch.steps.reward) for batch, _ in batches]
    error = np.std(np.concatenate(returns)) / np.sqrt(2048)
    if family.tasks >= len(family.tables):  # all tasks are in each batch
        assert np.mean(np.concatenate(returns)) == pytest.approx(family.success, abs=5 * error)
    steps = batches[0][0].steps
    assert steps.step.max() < family.horizon
    assert set(steps.extra["turn_limit"]) == {float(family.horizon)}


def test_keys_recur_as_they_should():
    state, history, never = (
        maze(1, 0.4, keys).draw(64, np.random.default_rng(0))[0].steps for keys in ("state", "history", "never")
    )
    counts = [
        len({*zip(steps.group.tolist(), steps.anchor.tolist(), strict=True)}) for steps in (state, history, never)
    ]
    assert counts[0] < counts[1] < counts[2] == len(never)


def run(*words: str) -> str:
    result = CliRunner().invoke(credit_quality.app, ["run", *words], catch_exceptions=False)
    return result.output


FEW = ("--family", "maze .4", "--policies", "2", "--batches", "3")


def test_methods_by_name_with_parameters_and_of_a_file(tmp_path, monkeypatch):
    file = tmp_path / "own_credit_of_benchmark.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from verl_turnkey.advantage import Credit, register_estimator\n"
        "@dataclass(frozen=True)\n"
        "class Params: pass\n"
        "@register_estimator('exactly_nothing', params=Params, paper='none', summary='gives no credit')\n"
        "def nothing(batch, params):\n"
        "    return Credit.of_parts({'step_level': 0.0 * batch.reward}, batch.penalty)\n"
    )
    monkeypatch.setattr(credit_quality, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(credit_quality, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("<!-- credit quality: written -->\n<!-- /credit quality -->\n")
    printed = run("grpo_steps", "loo_td,lam=1.0", f"{file}:exactly_nothing", *FEW, "--save")
    assert "| one batch / sum of 3 | grpo_steps | loo_td, lam 1.0 | exactly_nothing | exact |" in printed
    kept = json.loads((tmp_path / "results.json").read_text())["families"]["maze .4"]
    assert {name: len(cells) for name, cells in kept.items()} == dict.fromkeys(kept, 2)
    assert kept["exactly_nothing"] == [[0.0, 0.0]] * 2
    assert np.mean(kept["loo_td, lam 1.0"]) > np.mean(kept["grpo_steps"])
    assert CliRunner().invoke(credit_quality.app, ["table"]).output.strip() in printed
    assert CliRunner().invoke(credit_quality.app, ["table"]).output in (tmp_path / "page.md").read_text()


def test_the_page_has_the_kept_table():
    results = json.loads(credit_quality.RESULTS.read_text())
    start, end = between(credit_quality.PAGE.read_text(), "credit quality")
    assert credit_quality.PAGE.read_text()[start:end] == credit_quality.tables(results) + "\n"


def test_what_is_not_there_is_refused():
    for words, message in (
        (("gigpoo", *FEW), r"expected one of .*gigpo.*, or FILE.py:NAME, got 'gigpoo'"),
        (("gigpo", "--family", "mase"), r"expected families of maze, success .2; .*, got mase"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            CliRunner().invoke(credit_quality.app, ["run", *words], standalone_mode=False, catch_exceptions=False)
