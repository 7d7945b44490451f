"""Adapters alike: gymnasium accepts them, a seed is an episode, and wrong arguments are refused by name."""

import random
from pathlib import Path

import pytest
import yaml
from env_cases import play
from gymnasium.utils.env_checker import check_env

from verl_turnkey.envs import errors, make

REFUSED = yaml.safe_load((Path(__file__).parents[2] / "data/refused_arguments_unit.yaml").read_text(encoding="utf-8"))
CASES = [(env_id, *case) for env_id, cases in REFUSED.items() for case in cases]
HARD = {"errands": 2, "hint": False, "cupboards": True, "max_steps": 24}
CART = {
    "env": "CartPole-v1",
    "actions": ["left", "right"],
    "names": ["position", "velocity", "angle", "spin"],
    "task": "Balance the pole.",
}
CARDS = ("NumberLine", "EZPoints", "Points24", "BlackJack")
PLAYED = [
    *(("Errands", kwargs) for kwargs in ({}, HARD, {"rooms": 10, "things": 30, "errands": 12, "max_steps": None})),
    ("Errands", {"rooms": 2, "things": 1}),
    *(("Service", kwargs) for kwargs in ({}, {"details": True, "subgoal_reward": 0.1})),
    ("Service", {"requests": 3, "orders": 5, "forbid": 0.5, "max_steps": None}),
    *((name, {}) for name in ("MiniGrid", "FrozenLake", "Taxi", "CliffWalking", *CARDS)),
    ("FrozenLake", {"slippery": True}),
    ("Points24", {"solvable": True, "treat_face_cards_as_10": False}),
    ("Gymnasium", CART),
    ("Gymnasium", {"env": "Blackjack-v1"}),
]


@pytest.mark.parametrize(("name", "kwargs"), PLAYED, ids=str)
def test_gymnasium_accepts_it(name, kwargs):
    check_env(make(f"turnkey/{name}-v0", kwargs).unwrapped, skip_render_check=True)


@pytest.mark.parametrize(("name", "kwargs"), PLAYED, ids=str)
def test_a_seed_is_an_episode_and_the_global_random_state_is_left_alone(name, kwargs):
    def made():
        return make(f"turnkey/{name}-v0", kwargs)

    env = made()
    words = env.reset(seed=7)[1]["admissible"] or ["nonsense"]
    state = random.getstate()
    for actions in (random.Random(1).choices(words, k=40), env.unwrapped.oracle() or words):
        first, reused = play(made(), 7, actions), made()
        play(reused, 99, actions)
        assert play(reused, 7, actions) == first
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("name", "kwargs", "cost"),
    [
        *((name, {}, 0.0) for name in ("Errands", "MiniGrid", "FrozenLake", "Service")),
        *((name, {}, -1.0) for name in ("Taxi", "CliffWalking", *CARDS)),
        *((name, {"reward": "success"}, 0.0) for name in ("MiniGrid", "Taxi", "CliffWalking", *CARDS)),
    ],
    ids=str,
)
def test_what_is_no_action_changes_nothing_but_counts(name, kwargs, cost):
    env = make(f"turnkey/{name}-v0", {**kwargs, "max_steps": 4})
    observation, start = env.reset(seed=0)
    for step, action in enumerate(["fly", "", "x" * 100_000, "\x00\u202e☃"], 1):
        text, *outcome, info = env.step(action)
        assert outcome == [cost, False, step == 4]
        assert text == observation or name == "Service"  # which says what is wrong
        assert (info["invalid"], info["state_key"]) == (True, start["state_key"])


@pytest.mark.parametrize(("env_id", "kwargs", "error", "words"), CASES, ids=str)
def test_wrong_arguments_are_refused(env_id, kwargs, error, words):
    with pytest.raises(getattr(errors, error), match=words):
        make(env_id, kwargs)
