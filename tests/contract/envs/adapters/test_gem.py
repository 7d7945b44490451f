"""GEM's own games through the adapter: every id that needs no download, seeds, flags, keys, solutions."""

from __future__ import annotations

import copy
import math
import random
import subprocess
import sys

import numpy as np
import pytest

from verl_turnkey.envs import EnvironmentKwargsError, EpisodeOverError, make
from verl_turnkey.envs.adapters.gem import GAMES, GEMText, _plain
from verl_turnkey.envs.errors import MissingPackageError

LEVELS = ("easy", "hard", "random")
READY = [
    *(f"{game}-v0-{level}" for game in ("GuessTheNumber", "Mastermind") for level in LEVELS),
    *(f"{game}-v0-{level}" for game in ("Sudoku", "TowerofHanoi", "Sokoban") for level in LEVELS),
    *(f"Game2048-v0-{level}" for level in (*LEVELS, "extreme-hard")),
    *(f"Crosswords-v0-{level}" for level in ("easy", "hard")),
]
SLOW = ("Sokoban-v0-hard", "Sokoban-v0-random")  # seconds for a reset, with some seeds
WORDS = "cat dog sun hat map pen able idea table stone river lemon summer winter picture kitchen"


def some_action(game, rng: random.Random) -> str:
    """Of the right form, sensible or not."""
    name = type(game).__name__.removesuffix("Env")
    actions = GAMES[name].actions
    if actions:
        return rng.choice(actions)
    if name == "GuessTheNumber":
        return str(rng.randint(1, game.max_number + 1))
    if name == "Mastermind":
        return " ".join(str(rng.randint(1, game.num_numbers)) for _ in range(game.code_length))
    if name == "Sudoku":
        return " ".join(str(rng.randint(1, game.scale)) for _ in range(3))
    if name == "Crosswords":
        return f"{rng.randrange(len(game.board))} {rng.randrange(len(game.board))} {rng.choice('aeinrst')}"
    raise AssertionError(name)


def play(env: GEMText, seed: int, rollout: int = 0, steps: int = 20) -> list[tuple]:
    rng = random.Random(rollout)
    observation, info = env.reset(seed=seed)
    seen: list[tuple] = [(observation, info)]
    for _ in range(steps):
        seen.append(env.step(some_action(env.game, rng)))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


@pytest.fixture(scope="module")
def sokoban():
    return GEMText("Sokoban-v0-easy")


@pytest.mark.parametrize("game", READY)
def test_an_episode_of_every_game(game):
    outside = random.getstate(), str(np.random.get_state())
    env = GEMText(game)
    trace = play(env, 1)
    assert play(GEMText(game) if game not in SLOW else env, 1) == trace
    assert (random.getstate(), str(np.random.get_state())) == outside

    observation, info = trace[0]
    assert info["task"].startswith("You are")
    assert observation.strip()
    assert "Enter your" in observation
    for observation, reward, terminated, truncated, info in trace[1:]:
        assert "At turn" not in observation
        assert isinstance(reward, float)
        assert math.isfinite(reward)
        assert not (terminated and truncated)
        assert terminated or not info["success"]
    if trace[-1][2] or trace[-1][3]:
        with pytest.raises(EpisodeOverError):
            env.step("up")


@pytest.mark.parametrize("game", [game for game in READY if game not in SLOW])
def test_equal_keys_are_equal_states(game):
    """The key names some of a game's attributes: nothing else in the game, but the turn number, may differ."""
    env, state_of = GEMText(game), {}
    for seed in (1, 2):
        for rollout in range(6):
            rng = random.Random(rollout)
            _, info = env.reset(seed=seed)
            for _ in range(15):
                state = {name: _plain(value) for name, value in vars(env.game).items() if name != "turn_count"}
                assert state_of.setdefault(info["state_key"], repr(state)) == repr(state)
                *_, terminated, truncated, info = env.step(some_action(env.game, rng))
                if terminated or truncated:
                    break
    assert len(state_of) > 1


@pytest.mark.parametrize("game", ["Game2048-v0-easy", "Crosswords-v0-easy", "Sokoban-v0-easy", "Mastermind-v0-random"])
def test_instances_do_not_disturb_each_other(game):
    alone = [play(GEMText(game), seed, rollout=seed) for seed in range(3)]
    envs = [GEMText(game) for _ in alone]
    together = [[env.reset(seed=seed)] for seed, env in enumerate(envs)]
    rngs = [random.Random(seed) for seed in range(3)]
    for _ in range(20):
        for env, trace, rng in zip(envs, together, rngs, strict=True):
            if len(trace) == 1 or not (trace[-1][2] or trace[-1][3]):
                trace.append(env.step(some_action(env.game, rng)))
            random.seed(0)  # somebody else's business
            np.random.seed(0)
    assert together == alone


def test_a_copy_goes_on_like_the_original():
    env = GEMText("Game2048-v0-easy")
    env.reset(seed=1)
    env.step("left")
    twin = copy.deepcopy(env)
    actions = ["up", "right", "down", "left"] * 3
    assert [env.step(action) for action in actions] == [twin.step(action) for action in actions]


@pytest.mark.parametrize("game", [game for game in READY if not game.startswith("Game2048") and game not in SLOW])
def test_the_oracle_wins(game):
    env, won = GEMText(game), 0
    for seed in range(4):
        task = env.reset(seed=seed)
        plan = env.oracle()
        assert env.oracle() == plan  # and asking changes nothing
        if plan is None:
            continue
        answers = [env.step(action) for action in plan]
        assert answers[-1][2:4] == (True, False), (task, plan)
        assert [answer[4]["success"] for answer in answers] == [False] * (len(plan) - 1) + [True]
        assert not any(answer[4]["invalid"] for answer in answers)
        assert answers[-1][0].startswith("Congratulations")
        assert answers[-1][1] > 0
        won += 1
    assert won >= 3


def test_where_there_is_no_oracle():
    env = GEMText("Game2048-v0-easy")
    env.reset(seed=0)
    assert env.oracle() is None
    short = GEMText("TowerofHanoi-v0-easy", max_turns=6)  # it takes 7
    short.reset(seed=0)
    assert short.oracle() is None


def test_the_text_is_gems(sokoban):
    env = GEMText("Sokoban-v0-easy", num_boxes=1)
    observation, info = env.reset(seed=2)
    assert info["task"].startswith("You are solving the Sokoban puzzle.")
    assert "\\boxed{}" in info["task"]
    assert info["admissible"] == ["up", "down", "left", "right"]
    assert observation == f"Here is the current board layout:\n{env.game._render_board()}\nEnter your move."
    assert "P" in observation
    move = env.oracle()[0]
    moved = env.step(move)[0]
    assert (
        moved == f"You moved {move}.\nHere is the current board layout:\n{env.game._render_board()}\nEnter your move."
    )


def test_reward_for_success_alone():
    native, success = GEMText("Sudoku-v0-easy"), GEMText("Sudoku-v0-easy", reward="success")
    for env in (native, success):
        env.reset(seed=0)
    plan = native.oracle()
    rewards = [native.step(action)[1] for action in plan]
    assert rewards == pytest.approx([1 / len(plan)] * len(plan))
    assert [success.step(action)[1] for action in plan] == [0.0] * (len(plan) - 1) + [1.0]


def test_gems_turn_limit_truncates_and_partial_credit_is_no_win():
    env = GEMText("TowerofHanoi-v0-easy", max_turns=1)
    env.reset(seed=0)
    assert env.turn_limit == 1
    _, reward, terminated, truncated, info = env.step("A C")
    assert (terminated, truncated, info["success"]) == (False, True, False)
    assert reward == pytest.approx(1 / 3)
    env = GEMText("TowerofHanoi-v0-easy", max_turns=7)
    env.reset(seed=0)
    assert [env.step(action) for action in env.oracle()][-1][1:4] == (1.0, True, False)  # won on the last turn


@pytest.mark.parametrize("text", ["fly", "", "up} \\boxed{down", "x" * 100_000, "\x00\u202e☃\ud800", "٣"])
@pytest.mark.parametrize("game", ["Sokoban-v0-easy", "GuessTheNumber-v0-easy", "Sudoku-v0-easy"])
def test_what_is_no_action_changes_nothing_but_takes_a_turn(game, text):
    env = GEMText(game, max_turns=2)
    observation, info = env.reset(seed=0)
    for last in (False, True):
        after = env.step(text)
        assert after[:4] == (observation, 0.0, False, last)
        assert after[4]["invalid"]
        assert after[4]["state_key"] == info["state_key"]


@pytest.mark.parametrize(
    ("game", "applied", "refused"),
    [
        ("GuessTheNumber-v0-hard", ["50"], ["50", "51"]),
        ("Mastermind-v0-easy", ["6 6"], ["6 6", "1", "1 7"]),
        ("Sudoku-v0-easy", [], ["9 1 1", "1 1 9"]),
    ],
)
def test_what_gem_refuses_is_invalid(game, applied, refused):
    env = GEMText(game)
    env.reset(seed=1)
    for action in applied:
        assert not env.step(action)[4]["invalid"], action
    for action in refused:
        assert env.step(action)[4]["invalid"], action


def test_a_move_into_a_wall_leads_nowhere_and_a_way_back_to_the_same_key(sokoban):
    _, info = sokoban.reset(seed=2)
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}
    nowhere, returned = 0, 0
    for action in back:
        sokoban.reset(seed=2)
        text, *_, after = sokoban.step(action)
        assert not after["invalid"]
        assert text.startswith("You cannot move") == (after["state_key"] == info["state_key"])
        nowhere += text.startswith("You cannot move")
        if text.startswith("You moved"):
            returned += sokoban.step(back[action])[4]["state_key"] == info["state_key"]
    assert nowhere
    assert returned


@pytest.mark.parametrize("game", ["Sokoban-v0-easy", "TowerofHanoi-v0-easy", "Game2048-v0-easy"])
def test_what_is_admissible_is_never_invalid(game):
    env = GEMText(game)
    for rollout in range(4):
        assert not any(entry[-1]["invalid"] for entry in play(env, 1, rollout))


def test_what_is_hidden_is_part_of_the_key():
    env, keys = GEMText("GuessTheNumber-v0-hard"), {}
    for seed in range(30):
        key = env.reset(seed=seed)[1]["state_key"]
        keys[key] = env.game.game_number
    assert len(keys) == len(set(keys.values())) > 10


def test_seeds_of_any_size(sokoban):
    assert sokoban.reset(seed=2**40 + 1)[0] == sokoban.reset(seed=1)[0]
    drawn = {sokoban.reset()[0] for _ in range(4)}
    assert len(drawn) > 1


@pytest.fixture
def word_list(tmp_path, monkeypatch):
    import nltk
    from nltk.corpus import words

    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text(WORDS.replace(" ", "\n"))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_: False)  # the games try on their own
    yield
    if hasattr(words, "_unload"):
        words._unload()


def test_wordle_with_a_word_list(word_list):
    env = GEMText("Wordle-v0-easy")
    starts = [env.reset(seed=seed) for seed in (1, 1, 2)]
    assert starts[0] == starts[1] != starts[2]
    env.reset(seed=1)
    answers = [env.step(action) for action in env.oracle()]
    assert answers[-1][4]["success"]
    assert answers[-1][2:4] == (True, False)


def test_wordle_without_a_word_list(word_list, monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(MissingPackageError, match="NLTK_DATA"):
        make("turnkey/GEM-v0", {"game": "Wordle-v0-easy"})


def test_gems_prefix_is_accepted():
    assert GEMText("game:TowerofHanoi-v0-easy").reset(seed=0) == GEMText("TowerofHanoi-v0-easy").reset(seed=0)


def test_logging_of_the_process_is_left_alone():
    code = "import logging, verl_turnkey.envs.adapters.gem; print(logging.root.handlers, logging.root.level)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[] 30\n"


def played(env: GEMText, actions: list[str]) -> tuple[float, bool, bool, bool, bool]:
    """The return; whether terminated, truncated, a success; and whether the last action was invalid."""
    total = 0.0
    for action in actions:
        _, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            break
    return round(total, 9), terminated, truncated, info["success"], info["invalid"]


@pytest.mark.parametrize(("game", "goal", "moves"), [("hard", 512, 50), ("extreme-hard", 2048, 100)])
def test_2048_that_no_number_of_turns_allows_to_win_is_refused_where_only_winning_pays(game, goal, moves):
    name = f"Game2048-v0-{game}"
    with pytest.raises(EnvironmentKwargsError, match=rf"never won with max_turns={moves}.*a tile of {goal} takes"):
        GEMText(name, reward="success")
    assert GEMText(name).game.max_turns == moves
    assert GEMText(name, reward="success", max_turns=goal).game.target_tile == goal
    for fine in ("easy", "random"):
        GEMText(f"Game2048-v0-{fine}", reward="success")


def test_2048_is_won_with_the_tile_and_lost_without_a_move():
    env = GEMText("Game2048-v0-easy")
    env.reset(seed=0)
    start = env.game.max_tile_achieved
    env.game.board = [[32, 32, 0, 0], *[[0] * 4 for _ in range(3)]]
    assert played(env, ["left"]) == (1.0, True, False, True, False)
    env.reset(seed=0)
    assert env.game.max_tile_achieved == start
    env.game.board = [[8 << (row + column) % 2 for column in range(4)] for row in range(4)]
    env.game.board[0] = [0, *env.game.board[0][:-1]]
    total, *end = played(env, ["left"])
    assert end == [True, False, False, False]
    assert total < 1


def test_sokoban_as_pictures():
    """The board is drawn and not told; what is told, the rewards and the keys are those of the game in words."""
    drawn, written = (GEMText("Sokoban-v0-easy", num_boxes=1, images=images, tile=8) for images in (True, False))
    (text, info), (board, in_words) = drawn.reset(seed=3), written.reset(seed=3)
    assert (text, "# " in board) == ("Enter your move.", True)
    assert "goals have a red spot" in info["task"]
    assert not {"'P'", "'#'", "√"} & {*info["task"].split()}
    assert info["state_key"] == in_words["state_key"]
    kinds = {}
    while True:
        (image,), room = info["images"], drawn.game.room_state
        assert (image.shape, image.dtype) == ((8 * room.shape[0], 8 * room.shape[1], 3), np.uint8)
        for (row, column), kind in np.ndenumerate(room):
            colors = [tuple(image[8 * row + at, 8 * column + at].tolist()) for at in (1, 4)]
            kinds.setdefault((int(kind), int(drawn.game.room_fixed[row, column])), set()).add(tuple(colors))
        plan = drawn.oracle()
        if info["success"] or not plan:
            break
        results = [env.step(plan[0]) for env in (drawn, written)]
        assert results[0][1:4] == results[1][1:4]
        info = results[0][-1]
    assert info["success"]
    assert all(len(drawn_as) == 1 for drawn_as in kinds.values())  # a cell's look is that of what stands there
    assert len({colors for drawn_as in kinds.values() for colors in drawn_as}) == len(kinds) >= 5
    with pytest.raises(EnvironmentKwargsError, match="images must be false, since Mastermind-v0-easy is not drawn"):
        GEMText("Mastermind-v0-easy", images=True)
