"""OpenSpiel's games: hidden cards stay hidden, ends are the game's own, and optimal players are optimal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pyspiel
import pytest

from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.openspiel import CARDS, ROLES, kuhn_bet, playable
from verl_turnkey.envs.checking.report import check

GAMES = ("kuhn_poker", "tic_tac_toe", "leduc_poker", "connect_four", "nim", "liars_dice", "hex(board_size=3)")


def play(env: Any, seed: int, choose: Callable[[dict[str, Any]], str]) -> list[tuple[str, dict[str, Any], str]]:
    """Observation, info and action of each turn; the last one has no action."""
    observation, info = env.reset(seed=seed)
    turns, over = [], False
    while not over:
        turns.append((observation, info, choose(info)))
        observation, reward, terminated, truncated, info = env.step(turns[-1][2])
        assert reward == 0
        over = terminated or truncated
    return [*turns, (observation, info, "")]


@pytest.mark.parametrize("game", GAMES)
def test_a_seed_is_a_deal_and_the_end_is_the_games_own(game: str):
    env, ends = make("turnkey/OpenSpiel-v0", {"game": game}), set()
    for seed in range(12):
        courses = []
        for _ in range(2):
            rng = random.Random(seed)
            courses.append(play(env, seed, lambda info, rng=rng: rng.choice(info["admissible"])))
        assert courses[0] == courses[1]
        returns = env.unwrapped._state.returns()
        last = courses[0][-1][1]
        assert last["outcome"] == dict(zip(ROLES, returns, strict=True))
        assert last["success"] == (returns[0] > 0)
        ends.add(returns[0])
    assert len(ends) > 1


def test_no_role_sees_the_card_of_the_other():
    env, cards = make("turnkey/OpenSpiel-v0"), set()
    for seed in range(30):
        turns = play(env, seed, lambda info: "Pass" if info["extra"]["role"] == ROLES[0] else "Bet")
        dealt = [CARDS[int(number)] for number in str(env.unwrapped._state).split()[:2]]
        cards.add(tuple(dealt))
        for observation, info, _ in turns[:-1]:
            player = ROLES.index(info["extra"]["role"])
            assert f"Your card: {dealt[player]}." in observation
            assert dealt[1 - player] not in observation
            assert info["task"].endswith(f"You are {ROLES[player]}.")
        assert "card" not in turns[-1][0]
    assert cards == set(itertools.permutations(CARDS, 2))


def test_moves_are_read_in_any_case_and_others_change_nothing():
    env = make("turnkey/OpenSpiel-v0", {"game": "tic_tac_toe"})
    _, start = env.reset(seed=0)
    observation, _, terminated, _, info = env.step("o(0,0)")
    assert (info["invalid"], terminated, info["state_key"]) == (True, False, start["state_key"])
    observation, *_, info = env.step(" X(0,0) ")
    assert (observation, info["invalid"], info["extra"]) == ("x..\n...\n...", False, {"role": "player 1"})


def test_optimal_players_of_tic_tac_toe_draw_and_one_of_them_never_loses():
    env = make("turnkey/OpenSpiel-v0", {"game": "tic_tac_toe"})
    for seed in range(10):
        rng = random.Random(seed)

        def choose(info: dict[str, Any], optimal: int | None, rng: random.Random = rng) -> str:
            if optimal not in (None, ROLES.index(info["extra"]["role"])):
                return rng.choice(info["admissible"])
            return rng.choices(*zip(*env.unwrapped.policy().items(), strict=True))[0]

        assert play(env, seed, lambda info: choose(info, None))[-1][1]["outcome"] == dict.fromkeys(ROLES, 0.0)
        for player in (0, 1):
            assert play(env, seed, lambda info, p=player: choose(info, p))[-1][1]["outcome"][ROLES[player]] >= 0


@pytest.mark.parametrize("bluff", [0.0, 1 / 6, 1 / 3])
def test_nobody_gains_against_the_equilibrium_of_kuhn_poker(bluff: float):
    """All deterministic answers of either player against it, by every deal."""
    states = {0: [f"{card}{moves}" for card in range(3) for moves in ("", "pb")]}
    states[1] = [f"{card}{moves}" for card in range(3) for moves in ("p", "b")]

    def value(bet: Callable[[str], float]) -> float:
        """What player 0 gets on average."""

        def of(state: Any) -> float:
            if state.is_terminal():
                return state.returns()[0]
            if state.is_chance_node():
                return sum(p * of(state.child(action)) for action, p in state.chance_outcomes())
            p = bet(state.information_state_string(state.current_player()))
            return (1 - p) * of(state.child(0)) + p * of(state.child(1))

        return of(pyspiel.load_game("kuhn_poker").new_initial_state())

    assert value(lambda state: kuhn_bet(state, bluff)) == pytest.approx(-1 / 18)
    for player, sign in ((0, 1), (1, -1)):
        answers = [dict(zip(states[player], bets, strict=True)) for bets in itertools.product((0.0, 1.0), repeat=6)]
        gains = [sign * value(lambda state, own=own: own.get(state, kuhn_bet(state, bluff))) for own in answers]
        assert max(gains) == pytest.approx(sign * -1 / 18)


@pytest.mark.parametrize(("game", "warned"), [("kuhn_poker", []), ("tic_tac_toe", ["seeds_differ", "key_repeats"])])
def test_env_check_finds_only_what_a_game_without_chance_is(game: str, warned: list[str]):
    """All its seeds are one start, and random play seldom comes to a state twice."""
    report = check("turnkey/OpenSpiel-v0", {"game": game})
    assert (report.failed, report.warned) == ([], warned)


def test_games_that_are_for_two_in_turn_and_shown_in_text():
    for name, why in {
        "goofspiel": "same time",
        "blackjack": "players",
        "negotiation": "seed",
        "breakthrough": None,
    }.items():
        reason = playable(pyspiel.load_game(name))
        assert reason is None if why is None else why in str(reason)
