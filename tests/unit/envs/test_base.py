"""The base class of the adapters: limits, flags, errors, seeds, and the search for oracles."""

import pytest
from gymnasium.utils.env_checker import check_env

from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, shortest_plan, words
from verl_turnkey.envs.errors import EnvironmentKwargsError, EpisodeOverError


class Corridor(TextEnv):
    """Go on until the end; the length comes from the seed."""

    def __init__(self, max_steps: int | None = None, engine_limit: int | None = None) -> None:
        super().__init__(max_steps)
        self.engine_limit = engine_limit

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self.seed, self.length, self.place, self.taken = seed, 3 + seed % 4, 0, 0
        return self.now(), f"Walk {self.length} steps."

    def act(self, action: str) -> StepResult:
        if words(action) != "go on":
            return self.refused()
        self.place += 1
        self.taken += 1
        arrived = self.place == self.length
        cut = self.taken == self.engine_limit
        return self.now(reward=1.0 + arrived, terminated=arrived, truncated=cut, success=arrived)

    def now(self, **outcome) -> StepResult:
        return StepResult(f"You are at {self.place}.", digest(self.length, self.place), ["go on"], **outcome)


def test_gymnasium_accepts_it():
    check_env(Corridor(max_steps=5), skip_render_check=True)


def test_an_episode():
    env = Corridor()
    observation, info = env.reset(seed=4)
    assert observation == "You are at 0."
    assert info == {
        "state_key": digest(3, 0),
        "admissible": ["go on"],
        "success": False,
        "won": False,
        "invalid": False,
        "task": "Walk 3 steps.",
    }
    answers = [env.step(action) for action in ("go on", "GO \n on ", "go on")]
    assert [answer[1:4] for answer in answers] == [(1.0, False, False), (1.0, False, False), (2.0, True, False)]
    assert [answer[4]["success"] for answer in answers] == [False, False, True]
    assert "task" not in answers[0][4]


def test_a_refused_action_changes_nothing_but_counts():
    env = Corridor(max_steps=4)
    env.reset(seed=0)
    after = env.step("go on")
    for step, action in enumerate(["fly", "x" * 100_000, "\x00\u202e☃\ud800"], start=2):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (observation, reward, terminated, truncated) == (after[0], 0.0, False, step == 4)
        assert info == {**after[4], "invalid": True}


def test_step_before_reset_and_after_the_end_is_an_error():
    env = Corridor(max_steps=1)
    with pytest.raises(EpisodeOverError, match="call reset first"):
        env.step("go on")
    env.reset(seed=0)
    assert env.step("go on")[2:4] == (False, True)
    with pytest.raises(EpisodeOverError, match="call reset first"):
        env.step("go on")
    env.reset(seed=0)
    assert env.step("go on")[0] == "You are at 1."


def test_a_reset_that_fails_leaves_no_episode_behind():
    env = Corridor()
    env.reset(seed=0)
    env.begin = lambda seed: 1 / 0
    with pytest.raises(ZeroDivisionError):
        env.reset(seed=0)
    with pytest.raises(EpisodeOverError):
        env.step("go on")


def test_a_subclass_learns_what_its_methods_must_return():
    class Forgetful(Corridor):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"^Forgetful.__init__ must call super\(\).__init__\(max_steps\)$"):
        Forgetful().reset(seed=0)
    for wrong, form in ((StepResult("a", "b"), "StepResult"), (("a", "b"), r"\(str, str\)"), (None, "NoneType")):
        env = Corridor()
        env.begin = lambda seed, wrong=wrong: wrong
        with pytest.raises(TypeError, match=rf"^begin must return \(StepResult, task\), not {form}$"):
            env.reset(seed=0)
    for wrong, form in (("done", "str"), (None, "NoneType"), ((StepResult("a", "b"), ""), r"\(StepResult, str\)")):
        env = Corridor()
        env.reset(seed=0)
        env.act = lambda action, wrong=wrong: wrong
        with pytest.raises(TypeError, match=rf"^act must return a StepResult, not {form}; return self.refused\(\) if"):
            env.step("go on")
    with pytest.raises(NotImplementedError, match=r"TextEnv must have a method begin\(self, seed\)"):
        TextEnv().reset(seed=0)
    with pytest.raises(NotImplementedError, match=r"TextEnv must have a method act\(self, action\)"):
        TextEnv().act("go on")


@pytest.mark.parametrize("limits", [{"max_steps": 3}, {"engine_limit": 3}, {"max_steps": 3, "engine_limit": 3}])
def test_flags_are_never_both_set(limits):
    for seed, flags in ((0, (True, False)), (1, (False, True))):  # of length 3 and 4
        env = Corridor(**limits)
        env.reset(seed=seed)
        env.step("go on")
        assert env.step("go on")[2:4] == (False, False)
        assert env.step("go on")[2:4] == flags


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "9"])
def test_max_steps_is_a_positive_integer_or_nothing(value):
    with pytest.raises(EnvironmentKwargsError, match=f"max_steps must be a positive integer or null, not {value!r}"):
        Corridor(max_steps=value)
    assert Corridor(max_steps=None).max_steps is None


def test_without_a_seed_one_is_drawn_and_the_draw_follows_the_last_seed():
    def drawn(first: int) -> list[int]:
        env = Corridor()
        env.reset(seed=first)
        seeds = []
        for _ in range(5):
            env.reset()
            seeds.append(env.seed)
        return seeds

    assert len(set(drawn(0))) == 5
    assert drawn(0) == drawn(0) != drawn(1)


def test_spaces_belong_to_one_instance():
    corridor, other = Corridor(), Corridor()
    corridor.action_space.seed(1)
    other.action_space.seed(1)
    first = corridor.action_space.sample()
    other.action_space.seed(2)
    assert corridor.action_space.sample() != first
    assert other.action_space is not corridor.action_space


def test_the_shortest_plan_wins():
    def moves(place):
        yield "one", place + 1, place + 1 == 10
        yield "double", place * 2, place * 2 == 10

    plan = shortest_plan(1, moves)
    place = 1
    for action in plan:
        place = place + 1 if action == "one" else place * 2
    assert place == 10
    assert len(plan) == 4
    assert shortest_plan(0, lambda place: [("back", 0, False)]) is None
    assert shortest_plan(0, lambda place: [("on", place + 1, place == 50)], max_states=20) is None
    assert len(shortest_plan(0, lambda place: [("on", place + 1, place == 50)])) == 51


def test_check_names_what_was_expected_and_what_came():
    check(True, "size", "anything", 3)
    with pytest.raises(EnvironmentKwargsError, match="size must be even, not 3"):
        check(False, "size", "even", 3)
