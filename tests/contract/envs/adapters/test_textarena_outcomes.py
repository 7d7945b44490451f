"""TextArena's games whose final reward does not say whether they are won."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from verl_turnkey.envs.adapters.textarena import TextArenaText


def started(game: str, **kwargs: Any) -> tuple[TextArenaText, Any]:
    env = TextArenaText(game, **kwargs)
    env.reset(seed=0)
    return env, env._game


def ended(env: TextArenaText, actions: list[str]) -> tuple[float, bool]:
    """Reward and success of the last step."""
    for action in actions:
        _, reward, terminated, truncated, info = env.step(action)
    assert terminated or truncated
    return reward, info["success"]


@pytest.mark.parametrize(("tiles", "outcome"), [([1024, 1024], (1.0, True)), ([2, 2], (0.95, False))])
def test_2048_is_won_with_the_tile_and_not_with_a_high_score(tiles, outcome):
    env, game = started("2048-v0")
    rest = [[8, 16, 32, 64], [128, 256, 512, 8], [16, 32, 64, 128]]
    game.state.game_state |= {"board": [[*tiles, 512, 256], *rest], "score": 20_000}
    won = ended(env, ["left"]) if outcome[1] else ended(env, ["nowhere"] * 2)
    assert won == outcome


def test_slitherlink_is_won_with_one_loop_and_not_with_the_numbers_alone():
    square = ["h 0 0", "h 1 0", "v 0 0", "v 0 1"]
    env, game = started("Slitherlink-v0")
    game.clues = [[4, None, None, None], *[[None] * 4 for _ in range(3)]]
    assert ended(env, square) == (1.0, True)
    env, game = started("Slitherlink-v0")
    game.clues = [[4, None, None, None], *[[None] * 4 for _ in range(3)]]
    assert ended(env, ["h 4 3", *square, *["no edge"] * 2]) == (0.95, False)


@pytest.mark.parametrize("misses", [0, 1])
def test_set_is_won_with_a_set_in_every_turn(misses):
    env, game = started("Set-v0")
    last: Any = None
    for turn in range(20):
        board = game.state.game_state["board"]
        sets, others = [], []
        for cards in combinations(range(len(board)), 3):
            kinds = [len({board[card][i] for card in cards}) for i in range(4)]
            (others if 2 in kinds else sets).append(cards)
        chosen = others[0] if turn < misses or not sets else sets[0]
        last = env.step(str([card + 1 for card in chosen]))
    assert (last[1], last[4]["success"]) == ((20 - misses) / 20, misses == 0)


def test_three_times_one_card_is_not_a_set():
    env, _ = started("Set-v0")
    assert env.step("1, 1, 1")[4]["invalid"]


@pytest.mark.parametrize(
    ("results", "outcome"),
    [((2, 1, 1), (0.6, True)), ((1, 0, 3), (0.6, True)), ((1, 2, 1), (0.4, False)), ((1, 1, 2), (0.5, False))],
)
def test_blackjack_is_won_with_more_hands_won_than_lost_and_pays_more_than_half(results, outcome):
    env, game = started("Blackjack-v0")
    game.state.game_state |= {"hand_number": 5, "player_hand": ["K♠", "K♠"], "dealer_hand": ["K♠", "K♠"]}  # a draw
    game.state.game_state["results_summary"] = dict(zip(("win", "lose", "draw"), results, strict=True))
    assert ended(env, ["Stand"]) == outcome
    env, game = started("Blackjack-v0")
    game.state.game_state["results_summary"] = dict(zip(("win", "lose", "draw"), (4, 0, 0), strict=True))
    assert ended(env, ["fold"] * 2) == (0.5, False)  # nor does a game that an invalid move ends


def test_cryptarithm_pays_for_the_equation_alone():
    env, _ = started("Cryptarithm-v0")
    assert ended(env, ["S 1", "E 2", "N 3", "D 4", "M 5", "O 6", "R 7", *["no digit"] * 2]) == (0.0, False)


def test_lights_out_begins_with_a_light_on_and_pays_no_less_than_nothing():
    env = TextArenaText("LightsOut-v0")
    boards = []
    for seed in (10_067, 10_067, 0):  # the presses of the first two cancel
        env.reset(seed=seed)
        boards.append(str(env._game.state.game_state["grid"]))
        assert "True" in boards[-1]
    assert boards[0] == boards[1] != boards[2]
    env._game._initial_on = 1  # more lights are on in the end than at the beginning
    assert ended(env, ["0 0"] * 20) == (0.0, False)


def test_pegs_jump_along_the_lines_of_the_triangle_and_no_others():
    env, game = started("PegJump-v0", error_allowance=100)
    triangle = [(row, place) for row in range(5) for place in range(row + 1)]
    lines = {
        tuple(triangle.index((row + k * down, place + k * right)) + 1 for k in range(3))
        for row, place in triangle
        for down, right in ((1, 0), (1, 1), (0, 1))
        if (row + 2 * down, place + 2 * right) in triangle
    }
    assert {*game.ALLOWED_MOVES} == lines | {line[::-1] for line in lines}
    game.state.game_state["board"] = [hole in (7, 11, 12) for hole in range(16)]
    assert env.step("7 13")[4]["invalid"]  # over 11, round a corner
    assert not env.step("11 13")[4]["invalid"]


def test_set_shows_no_board_without_a_set():
    env = TextArenaText("Set-v0")
    sizes = set()
    for seed in range(30):
        page, _ = env.reset(seed=seed)
        board = env._game.state.game_state["board"]
        sizes.add(len(board))
        assert page.endswith(f"{len(board)}: {' '.join(board[-1])}")
        assert any(all(len({card[k] for card in cards}) != 2 for k in range(4)) for cards in combinations(board, 3))
    assert sizes == {12, 18}  # the first twelve of seed 29 have none, nor have the first fifteen


@pytest.mark.parametrize(
    ("secret", "guess", "won"),
    [
        *(("plane", "[plane]", True), ("plane", "It must be [A plane].", True), ("plane", "[car plane ship]", False)),
        *(("TV presenter", "[tv presenter]", True), ("yo-yo", "[yo-yo]", True), ("yo-yo", "[yo yo]", True)),
    ],
)
def test_twenty_questions_are_won_with_the_secret_alone(monkeypatch, secret, guess, won):
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    env = TextArenaText("TwentyQuestions-v0")
    env._blank.word_list = {"things": [secret]}
    env.reset(seed=0)
    env._game.gamemaster = lambda prompt: "Yes"
    for question in ("Is it alive", "Is it a [robot]?"):
        observation, _, terminated, _, info = env.step(question)
        assert (observation, terminated, info["invalid"]) == ("Yes", False, False)
    assert ended(env, [guess]) == (float(won), won)


def test_places_of_vehicles_are_part_of_the_state():
    env, game = started("RushHour-v0", error_allowance=100)
    start = env._last_result.state_key
    keys = {start}
    for car in game.state.game_state["vehicles"]:
        for way in "+-":
            result = env.step(f"{car}{way}")
            if not result[4]["invalid"]:
                keys.add(result[4]["state_key"])
    assert len(keys) > 1


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"])
def test_an_invalid_move_ends_the_games_that_swap_its_reason_and_its_reward(game):
    env, _ = started(game)
    forgiven = env.step("no such move")
    assert "Reason: Bad action" in forgiven[0] or "Reason: Invalid action format" in forgiven[0]
    _, reward, terminated, _, info = env.step("no such move")
    assert (terminated, info["success"], info["invalid"]) == (True, False, True)
    assert 0 <= reward < 1
