"""Components one by one, their sum, and what a wrong configuration or a wrong reward says."""

from __future__ import annotations

import asyncio
import io
import math
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.envs import ModuleImportError
from verl_turnkey.envs.rewards import RewardError, RewardStep, compose, register_reward, rewards
from verl_turnkey.envs.rewards.components import _REWARDS

ONE = pytest.approx


def episode(n: int = 3, **last) -> list[RewardStep]:
    steps = [
        RewardStep(
            observation=f"room {t}",
            action="go",
            reward=0.5 * t,
            tokens=10 + t,
            text="<think>x</think>\n<action>go</action>",
            extra={"potential": float(t), "progress": t / n},
            next_extra={"potential": t + 1.0, "progress": (t + 1) / n},
        )
        for t in range(n)
    ]
    return [*steps[:-1], RewardStep(**{**vars(steps[-1]), **last})]


def values(steps, name: str, weight: float = 1.0, **options) -> list[float]:
    shaped = compose([{"name": name, "weight": weight, **options}])(steps)
    assert list(shaped.parts) == [name]
    assert shaped.parts[name] == shaped.rewards
    return shaped.rewards


def test_step_and_outcome():
    assert values(episode(), "step") == [0.0, 0.5, 1.0]
    assert values(episode(), "outcome") == [0.0, 0.0, 0.0]
    assert values(episode(), "outcome", lost=-1) == [0.0, 0.0, -1.0]
    assert values(episode(success=True, terminated=True), "outcome", lost=-1) == [0.0, 0.0, 1.0]
    assert values(episode(1, success=True), "outcome", 2.0) == [2.0]


def test_penalties():
    steps = episode(valid=False, action=None, unparsed=True, text="hm", reason="no action")
    assert values(steps, "invalid", -0.1) == [0.0, 0.0, -0.1]
    assert values(steps, "format", -0.2) == [0.0, 0.0, -0.2]
    steps = episode(valid=False, text="<think>x</think>", reason="cannot go there")
    assert values(steps, "invalid", -0.1) == [0.0, 0.0, -0.1]
    assert values(steps, "format", -0.2) == [0.0, 0.0, 0.0]
    pattern = r"<think>.*</think>\s*<action>.*</action>"
    assert values(steps, "format", -0.2, pattern=pattern) == [0.0, 0.0, -0.2]
    assert values(episode(text=" <think>a\nb</think><action>c</action>\n"), "format", -1, pattern=pattern)[-1] == 0
    assert values(episode(text="<think>a</think><action>c</action> so"), "format", -1, pattern=pattern)[-1] == -1


def test_length():
    assert values(episode(), "length", -0.5) == [-5.0, -5.5, -6.0]
    assert values(episode(), "length", -0.5, unit="turns") == [-0.5, -0.5, -0.5]


def test_potential_by_hand():
    # Phi = 0, 1, 2 and 3 after the last step; gamma 0.5
    assert values(episode(terminated=True), "potential", gamma=0.5) == [0.5, 0.0, -2.0]
    assert values(episode(truncated=True), "potential", gamma=0.5) == [0.5, 0.0, -2.0]
    kept = values(episode(truncated=True), "potential", gamma=0.5, at_truncation="keep")
    assert kept == [0.5, 0.0, -0.5]
    # a terminal state has none, even where the environment gives one
    assert values(episode(terminated=True), "potential", gamma=0.5, at_truncation="keep") == [0.5, 0.0, -2.0]


def test_a_number_of_the_environments_counts_for_the_step_that_led_to_it():
    steps = [RewardStep("", "a", extra={"n": 5}, next_extra={"n": 1}), RewardStep("", "b", next_extra={"n": 2.5})]
    before = {"n": 2.5}
    assert values([*steps, RewardStep("", None, extra=before, next_extra=before)], "extra", key="n") == [1, 2.5, 0]
    with pytest.raises(RewardError, match=r"step 1: .*'m'"):
        values([RewardStep("", "a", next_extra={"m": 1}), *steps], "extra", key="m")


def test_grounding():
    steps = [RewardStep("", "a"), RewardStep("", None, valid=False), RewardStep("", "b", valid=False)]
    assert values(steps, "grounded") == [1.0, 0.0, 1.0]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=12),
    st.floats(0, 1),
    st.sampled_from(["terminated", "zero", "keep"]),
)
def test_shaping_telescopes(phi, gamma, end):
    """Terminated: the discounted sum is -Phi(s_0), whatever was done. Cut and kept: plus gamma^T Phi(s_T)."""
    pairs = list(pairwise(phi))
    steps = [
        RewardStep("", "a", terminated=end == "terminated", extra={"potential": a}, next_extra={"potential": b})
        for a, b in pairs
    ]
    cut = {} if end == "terminated" else {"at_truncation": end}
    rewards = values(steps, "potential", gamma=gamma, **cut)
    kept = gamma ** len(steps) * phi[-1] if end == "keep" else 0.0
    assert sum(gamma**t * reward for t, reward in enumerate(rewards)) == ONE(kept - phi[0], abs=1e-9)


def test_the_sum_and_its_parts():
    composition = compose(
        [
            {"name": "step"},
            {"name": "length", "weight": -0.1},
            {"name": "length", "weight": -1, "unit": "turns", "label": "turns"},
        ]
    )
    assert composition.labels == ("step", "length", "turns")
    shaped = composition(episode())
    assert shaped.parts == {
        "step": [0.0, 0.5, 1.0],
        "length": ONE([-1.0, -1.1, -1.2]),
        "turns": [-1.0, -1.0, -1.0],
    }
    assert shaped.rewards == ONE([-2.0, -1.6, -1.2])
    assert shaped.sums == ONE({"step": 1.5, "length": -3.3, "turns": -3.0})
    assert composition(episode()) == shaped, "a composition has no memory"


def test_a_component_may_give_a_column_instead_of_a_reward():
    entries = [{"name": "step"}, {"name": f"{__name__}:last_word", "weight": 2, "label": "prm", "column": "turn_score"}]
    composition = compose(entries)
    assert (composition.labels, composition.columns) == (("step", "prm"), ("turn_score",))
    shaped = composition(episode())
    assert shaped.rewards == compose([{"name": "step"}])(episode()).rewards
    assert shaped.columns == {"turn_score": [2.0, 2.0, 2.0]}
    assert shaped.sums == ONE({"step": 1.5, "prm": 6.0}), "it is logged all the same"
    # What is to be avoided in a reward may be counted in a column.
    turns = {"name": "length", "unit": "turns", "column": "turns"}
    assert compose([{"name": "step"}, turns])(episode()).columns == {"turns": [1.0, 1.0, 1.0]}
    # Components with the same column add up.
    both = [{"name": "step"}, {"name": "outcome", "column": "q"}, {**turns, "weight": 10, "column": "q"}]
    assert compose(both)(episode(success=True)).columns == {"q": [10.0, 10.0, 11.0]}
    assert compose(both).columns == ("q",)
    # A column is under the same limits as a reward, and its failure costs the episode too.
    with pytest.raises(RewardError, match=r"rewards\[1\] \(infinite\): expected finite numbers"):
        compose([{"name": "step"}, {"name": f"{__name__}:infinite", "column": "q"}])(episode())


def scaled(steps, scale):
    return [scale for _ in steps]


def takes_nothing():
    return []


def last_word(steps, word="go", bonus=1.0):
    return [bonus * (step.action == word) for step in steps]


async def slow(steps):
    await asyncio.sleep(0)
    return [float(len(steps))] * len(steps)


class Counted:
    def __init__(self, start: int = 0):
        self.calls = start

    def __call__(self, steps):
        self.calls += 1
        return [self.calls] * len(steps)


def test_ones_own():
    here = __name__
    assert compose([{"name": f"{here}:last_word", "weight": 2, "bonus": 3.0}])(episode()).rewards == [6.0] * 3
    assert compose([{"name": f"{here}:slow"}])(episode(2)).parts == {"slow": [2.0, 2.0]}
    counted = compose([{"name": f"{here}:Counted", "start": 4}])
    assert [counted(episode(1)).rewards, counted(episode(1)).rewards] == [[5.0], [6.0]]
    assert asyncio.run(counted.run(episode(1))).rewards == [7.0]


def test_ones_own_by_name():
    with pytest.raises(ValueError, match=r"'step' is already registered by verl_turnkey\.envs\.rewards"):
        register_reward("step")(rewards()["step"].cls)
    with pytest.raises(ValueError, match=r"@dataclass\(frozen=True\)"):
        register_reward("mine")(Counted)

    @register_reward("mine", cost=True)
    @dataclass(frozen=True)
    class Mine:
        """Mine.

        More.
        """

        how_much: float = 1.0

        def __call__(self, steps):
            return [self.how_much] * len(steps)

    try:
        assert rewards()["mine"].summary == "Mine."
        assert compose([{"name": "mine", "weight": -1, "how_much": 2}])(episode(1)).rewards == [-2.0]
    finally:
        del _REWARDS["mine"]


REFUSED = yaml.safe_load((Path(__file__).parents[3] / "data/refused_rewards.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("entries", "message"), REFUSED, ids=str)
def test_wrong_configurations(entries, message):
    with pytest.raises(ConfigError, match=message):
        compose(entries)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:f", r"^turnkey\.rewards\[0\]\.name: cannot load 'no\.such\.module:f' \(ModuleNotFoundError"),
        ("math:nothing", r"cannot load 'math:nothing' \(AttributeError"),
        ("math:pi", r"pi is a float, not a function"),
        ("nothing.py:f", r"cannot load 'nothing\.py:f' \(FileNotFoundError"),
    ],
)
def test_functions_that_are_not_there(name, message):
    with pytest.raises(ModuleImportError, match=message):
        compose([{"name": name}])


def too_few(steps):
    return [0.0]


def infinite(steps):
    return [0.0, math.inf, 0.0]


def huge(steps, value=1e308):
    return [0.0, value, 0.0]


def broken(steps):
    return {}["x"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": f"{__name__}:too_few"}, r"^turnkey\.rewards\[0\] \(too_few\): expected 3 numbers, .*, got 1"),
        ({"name": f"{__name__}:infinite"}, r"expected finite numbers, got inf at step 1"),
        ({"name": f"{__name__}:huge"}, r"\(huge\): expected rewards up to 1e18 in size, got 1e\+308 at step 1"),
        ({"name": f"{__name__}:huge", "weight": 10}, r"got 1e\+308 at step 1 with weight 10$"),
        (
            {"name": f"{__name__}:huge", "value": 1e10, "weight": -1e9},
            r"got 10000000000.0 at .* weight -1e\+09$",
        ),
        ({"name": f"{__name__}:broken"}, r"\(broken\) failed: KeyError: 'x'"),
        (
            {"name": "potential", "gamma": 1, "key": "phi"},
            r"\(potential\): step 0: .*info\['extra'\]\['phi'\], got None",
        ),
    ],
)
def test_rewards_that_fail(entry, message):
    with pytest.raises(RewardError, match=message):
        compose([entry])(episode())


def test_a_sum_that_is_too_large_fails_like_a_component():
    """Each of the two is within the limit; the record would refuse the sum, and that costs the whole group."""
    entry = {"name": f"{__name__}:huge", "value": 9e17}
    with pytest.raises(RewardError, match=r"sum up to 1\.8e\+18 at step 1: expected up to 1e18"):
        compose([entry, {**entry, "label": "again"}])(episode())


UNDER_WAY: list[str] = []


async def for_ever(steps):
    UNDER_WAY.append("for_ever")
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(100):  # it has much to tidy up
            await asyncio.sleep(0)
        UNDER_WAY.remove("for_ever")


async def gone(steps):
    await asyncio.sleep(0)
    assert UNDER_WAY == ["for_ever"]
    raise RewardError("the judge is gone")


def test_a_failed_component_ends_its_siblings():
    """Cancelled, and done with it, before the error goes on: nothing of a lost episode keeps on asking a server."""
    composition = compose([{"name": f"{__name__}:{name}"} for name in ("for_ever", "gone")])

    async def run():
        with pytest.raises(RewardError, match=r"rewards\[1\] \(gone\): the judge is gone"):
            await asyncio.wait_for(composition.run(episode()), timeout=30)
        assert UNDER_WAY == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_steps():
    with pytest.raises(RewardError, match="without steps"):
        compose([{"name": "step"}])([])
    info = {"documents": ["old"]}
    assert RewardStep("", "a", extra=info, next_extra=info).brought == {}
    assert RewardStep("", "a", extra=info, next_extra=dict(info)).brought == info
    assert RewardStep("a room", "go", success=True).won is True
    assert RewardStep("a room", "go").won is False


def test_what_the_room_imports():
    code = (
        "import sys, verl_turnkey.envs.rewards; "
        "print([name for name in ('scipy', 'sklearn', 'torch', 'ray', 'verl', 'httpx') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


PAGE = (Path(__file__).parents[4] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for kind in ("python", "yaml")}


@pytest.mark.parametrize("name", sorted(set(rewards()) - {"arena", "judge", "scorer", "r1_router"}))
def test_a_component_with_its_options_and_defaults(name):
    [row] = re.findall(rf"^\| `{name}` \|.*\| (.*)\|$", PAGE, re.MULTILINE)
    options = fields(rewards()[name].cls)
    assert re.findall(r"`(\w+)`", row) == [option.name for option in options]
    for option in options:
        if option.default is not MISSING:
            default = (
                "null"
                if option.default is None
                else f"{option.default:g}"
                if isinstance(option.default, float)
                else str(option.default).lower()
                if isinstance(option.default, bool)
                else option.default
            )
            assert re.search(rf"`{option.name}` \({default}\b", row)


def test_costs():
    [names] = re.findall(r"^(.*): they need a `weight`", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", names)) == {name for name, spec in rewards().items() if spec.cost}


def test_the_options_of_the_judge():
    table = PAGE.split("## A model as the judge\n")[1].split("\n## ")[0]
    cells = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    options = {option.name: option for option in fields(rewards()["judge"].cls)}
    assert {*cells} < set(options)
    for name in ("per", "score_range", "binary"):
        default = options[name].default
        assert yaml.safe_load(cells[name]) == (list(default) if isinstance(default, tuple) else default)


def test_the_options_of_the_scorer():
    section = PAGE.split("## A process reward model\n")[1]
    cells = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    options = {option.name: option for option in fields(rewards()["scorer"].cls)}
    assert {*cells} < set(options)
    assert yaml.safe_load(cells["api"]) == options["api"].default


def test_the_examples(monkeypatch, tmp_path):
    (tmp_path / "my_rewards.py").write_text(next(block for block in BLOCKS["python"] if "my_rewards.py" in block))
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in BLOCKS["yaml"]:
        assert compose(yaml.safe_load(block)["turnkey"]["rewards"]).labels
    for block in BLOCKS["python"]:
        comments = re.findall(r"print\(.*\)  # (.*)", block)
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, "docs/rewards.md", "exec"), {})
        assert printed.getvalue().splitlines() == comments
    assert BLOCKS["yaml"]
