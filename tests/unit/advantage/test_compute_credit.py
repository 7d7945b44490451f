"""Estimators by name: what ``compute_credit`` asks of them, and one of a user's own."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from verl_turnkey.advantage import (
    ConfigError,
    Credit,
    StepBatch,
    ValueHead,
    compute_credit,
    estimators,
    modifiers,
    parse_modify,
    register_estimator,
    register_modifier,
    register_token_modifier,
)
from verl_turnkey.advantage import registry as registry_module
from verl_turnkey.advantage.registry import TIERS

# --- The registry: estimators by name, and errors that say what to change ---------------------------------------------
ROWS = {"group": ["g", "g"], "trajectory": ["a", "b"], "step": [0, 0], "reward": [0.0, 1.0]}


@pytest.fixture
def own_registry(monkeypatch):
    """Estimators registered by a test are gone after it."""
    monkeypatch.setattr(registry_module, "_ESTIMATORS", dict(registry_module._ESTIMATORS))


@dataclass(frozen=True)
class NoParams:
    pass


def test_estimators_lists_the_specs():
    specs = estimators()
    assert {"gigpo", "grpo_steps"} <= set(specs)
    assert list(specs) == sorted(specs)
    assert specs["gigpo"].needs == ("anchor",)
    assert specs["grpo_steps"].needs == ()
    assert specs["gigpo"].params() == specs["gigpo"].params(
        gamma=0.95, step_advantage_w=1.0, norm="mean_std", scope="outcomes", singleton="zero", epsilon=1e-6
    )
    for spec in specs.values():
        assert spec.paper
        assert spec.summary
        assert spec.tier in TIERS
    assert [name for name, spec in specs.items() if spec.tier == "reproduced"] == ["hae", "marshal", "seeupo"]
    specs.clear()
    assert estimators(), "the caller's copy is not the registry"


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("gigop", {}, r"unknown estimator 'gigop'; did you mean 'gigpo'\? known: .*gigpo.*grpo_steps"),
        ("GiGPO", {}, r"did you mean 'gigpo'\?"),
        ("zzz", {}, r"unknown estimator 'zzz'; known: .*gigpo"),
        ("gigpo", {"gama": 0.9}, r"gigpo\.gama: unknown key; did you mean 'gamma'\? Known keys: epsilon, gamma,"),
        ("gigpo", {"gamma": 1.5}, r"gigpo\.gamma: expected a number in \[0, 1\], got 1\.5"),
        ("gigpo", {"gamma": float("nan")}, r"gigpo\.gamma: expected a number in \[0, 1\], got nan"),
        ("gigpo", {"gamma": "0.9"}, r"gigpo\.gamma: expected a number, got '0\.9' \(str\)"),
        ("gigpo", {"gamma": True}, r"gigpo\.gamma: expected a number, got True \(bool\)"),
        ("gigpo", {"step_advantage_w": -1}, r"gigpo\.step_advantage_w: expected a finite number >= 0, got -1\.0"),
        ("gigpo", {"epsilon": 0.0}, r"gigpo\.epsilon: expected a finite number > 0, got 0\.0"),
        ("grpo_steps", {"epsilon": -1.0}, r"grpo_steps\.epsilon: expected a finite number > 0"),
        (
            "gigpo",
            {"norm": "mean_sdt"},
            r"gigpo\.norm: expected one of 'mean_std', 'mean', .*did you mean 'mean_std'\?",
        ),
        ("gigpo", {"scope": "rows"}, r"gigpo\.scope: expected one of 'trajectories', 'steps'"),
        ("grpo_steps", {"singleton": None}, r"grpo_steps\.singleton: expected one of 'zero', 'score', got None"),
        ("grpo_steps", {"gamma": 0.9}, r"grpo_steps\.gamma: unknown key"),
    ],
)
def test_wrong_names_and_values(name, params, message):
    with pytest.raises(ConfigError, match=message):
        compute_credit(name, StepBatch(**ROWS, anchor=["s", "s"]), **params)


def test_missing_anchor_says_who_has_to_set_it():
    with pytest.raises(
        ConfigError, match=r"'gigpo' needs the column 'anchor'.*info\[\"state_key\"\].*field \"anchor\""
    ):
        compute_credit("gigpo", StepBatch(**ROWS))


@pytest.mark.usefixtures("own_registry")
def test_missing_extra_column_names_the_record_field():
    @register_estimator("needs_prior", params=NoParams, needs=("extra.prior",))
    def needs_prior(batch, params):
        return Credit(batch.extra["prior"])

    with pytest.raises(
        ConfigError,
        match=r"'extra\.prior'.*info\[\"extra\"\]\[\"prior\"\].* loop \"prior\" in the record field \"extra\"",
    ):
        compute_credit("needs_prior", StepBatch(**ROWS))
    assert compute_credit("needs_prior", StepBatch(**ROWS, extra={"prior": [1, 2]})).advantage.tolist() == [1, 2]


@pytest.mark.usefixtures("own_registry")
def test_a_column_of_the_state_before_a_step_is_to_be_given_with_the_reset():
    @register_estimator(
        "needs_both", params=NoParams, needs=("extra.of_state", "extra.of_answer"), before=("extra.of_state",)
    )
    def needs_both(batch, params):
        raise AssertionError

    assert estimators()["needs_both"].names_before() == {"of_state"}
    for missing, when in (("of_state", " with the reset and every step"), ("of_answer", "")):
        extra = {name: [1.0, 1.0] for name in ("of_state", "of_answer") if name != missing}
        with pytest.raises(ConfigError, match=rf'info\["extra"\]\["{missing}"\]{when}, or your own agent loop'):
            compute_credit("needs_both", StepBatch(**ROWS, extra=extra))


@pytest.mark.usefixtures("own_registry")
def test_a_modifier_may_need_a_column_of_the_state_before_a_step():
    assert modifiers()["trace"].before == ("extra.gold_probability",)
    with pytest.raises(ConfigError, match=r'info\["extra"\]\["gold_probability"\] with the reset and every step'):
        compute_credit("grpo_steps", StepBatch(**ROWS), modify=["trace"])
    with pytest.raises(ValueError, match=r"modifier 'typo': before names 'role', expected extra\.<name>"):
        register_modifier("typo", params=NoParams, before=("role",))
    own, of_both = (estimators()["progress"].names_before(parse_modify(modify)) for modify in ([], ["trace"]))
    assert of_both - own == {"gold_probability"}


@pytest.mark.usefixtures("own_registry")
def test_a_taken_name_is_refused():
    def mine(batch, params):
        return Credit(batch.reward)

    with pytest.raises(
        ValueError, match=r"'gigpo' is already registered by verl_turnkey\.advantage\.methods\.gigpo\.gigpo"
    ):
        register_estimator("gigpo", params=NoParams)(mine)
    register_estimator("mine", params=NoParams)(mine)
    with pytest.raises(ValueError, match=r"'tiered': tier: expected one of 'core', 'reproduced', .* got 'best'"):
        register_estimator("tiered", params=NoParams, tier="best")
    with pytest.raises(ValueError, match=r"'mine' is already registered"):
        register_estimator("mine", params=NoParams)


@pytest.mark.usefixtures("own_registry")
def test_registration_refuses_mutable_params_and_unknown_columns():
    @dataclass
    class Mutable:
        gamma: float = 1.0

    with pytest.raises(ValueError, match=r"expected params to be a class with @dataclass\(frozen=True\)"):
        register_estimator("mutable", params=Mutable)
    with pytest.raises(ValueError, match=r"expected params to be a class"):
        register_estimator("plain", params=dict)
    with pytest.raises(ValueError, match=r"needs names 'anchors'.*did you mean 'anchor'\?"):
        register_estimator("typo", params=NoParams, needs=("anchors",))
    with pytest.raises(ValueError, match=r"'typo': before names 'role', expected extra\.<name>"):
        register_estimator("typo", params=NoParams, before=("role",))
    with pytest.raises(ValueError, match=r"'typo': expected needs to be a tuple of names such as \('anchor',\), got a"):
        register_estimator("typo", params=NoParams, needs="anchor")
    assert not {"mutable", "plain", "typo"} & set(estimators())


@pytest.mark.usefixtures("own_registry")
def test_registration_refuses_a_function_of_other_arguments():
    """Training would notice it after the first rollout."""
    with pytest.raises(ValueError, match=r"'short': expected a function of \(batch, params\), got one of \(batch\)$"):
        register_estimator("short", params=NoParams)(lambda batch: Credit(batch.reward))
    with pytest.raises(ValueError, match=r"'short': expected a function of \(batch, params, state\), got one of"):
        register_estimator("short", params=NoParams, stateful=True)(lambda batch, params: Credit(batch.reward))
    with pytest.raises(ValueError, match=r"'short': expected a function of \(batch, params, estimate\), got one of"):
        register_modifier("short", params=NoParams)(lambda batch, params: Credit(batch.reward))
    with pytest.raises(ValueError, match=r"'short' of tokens: expected a function of \(advantage, tokens, batch"):
        register_token_modifier("short", params=NoParams)(lambda advantage, tokens: advantage)
    assert "short" not in {*estimators(), *modifiers()}
    register_estimator("further", params=NoParams)(lambda *both, scale=1.0: Credit(both[0].reward))


def test_parts_are_one_number_per_step():
    assert Credit.of_parts({"own": [1, 2]}, np.array([0.0, 0.5])).advantage.tolist() == [1.0, 1.5]
    with pytest.raises(ValueError, match=r"part 'own': expected 2 numbers, one per step, got \(1,\)$"):
        Credit.of_parts({"own": np.zeros(1)}, np.zeros(2))


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Credit(np.array([0.0, np.nan])), r"expected advantage to be 2 finite numbers.* got 1 that are not finite"),
        (Credit(np.zeros(3)), r"expected advantage to be 2 finite numbers, one per step, got shape \(3,\)$"),
        (Credit(np.zeros(2), metrics={"kind": "text"}), "expected Credit.metrics to hold numbers by name, got 'text'"),
        (Credit(np.zeros(2), returns=np.full(2, np.inf)), r"expected returns to be 2 .* got 2 that are not finite"),
        (Credit(np.zeros(2), targets={"low": np.array([np.nan, np.inf])}), r"expected target 'low' to be 2 numbers"),
        (Credit(np.zeros(2), targets={"low": np.zeros(3)}), r"expected target 'low' to be 2 numbers, one per step"),
        (np.zeros(2), r"expected it to return a Credit, got ndarray"),
    ],
)
def test_what_an_estimator_returns_is_checked(result, message):
    @register_estimator("broken", params=NoParams)
    def broken(batch, params):
        return result

    with pytest.raises(ValueError, match=message):
        compute_credit("broken", StepBatch(**ROWS))


@dataclass(frozen=True)
class PlansParams:
    heads: int = 1

    @property
    def value_heads(self):
        return (ValueHead("low"), ValueHead("plan"))[: self.heads]


@pytest.mark.usefixtures("own_registry")
def test_each_head_of_a_critic_has_a_target_which_modifiers_leave_as_it_is():
    @register_estimator("plans", params=PlansParams)
    def plans(batch, params):
        return Credit(np.zeros(2), targets={"low": np.array([1.0, np.nan])})

    credit = compute_credit("plans", StepBatch(**ROWS, success=[True] * 2, tokens=[1, 2]), modify=["length_gate"])
    np.testing.assert_array_equal(credit.targets["low"], [1.0, np.nan])
    with pytest.raises(ValueError, match=r"'plans': expected Credit.targets of each of its value heads.* none of plan"):
        compute_credit("plans", StepBatch(**ROWS), heads=2)


@pytest.mark.parametrize("table", [ROWS, list(ROWS.items()), None])
def test_what_is_no_table_is_refused(table):
    with pytest.raises(ConfigError, match=rf"expected a StepBatch, got a {type(table).__name__}: .*StepBatch\(group="):
        compute_credit("gigpo", table)


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("returned", [(), ("tool",), ("tool", "prior", "other"), ("tool", "other")])
def test_what_an_estimator_gives_is_what_it_declared(returned):
    """A loss asks for the columns by name: one that is missing must not be found out by the loss."""

    @register_estimator("giver", params=NoParams, gives=("tool", "prior"))
    def giver(batch, params):
        return Credit(np.zeros(2), extra={name: np.ones(2) for name in returned})

    with pytest.raises(ValueError, match=r"'giver': expected Credit\.extra to hold \('tool', 'prior'\), got "):
        compute_credit("giver", StepBatch(**ROWS))
    returned = ("prior", "tool")
    assert set(compute_credit("giver", StepBatch(**ROWS)).extra) == {"tool", "prior"}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("state", [{"p": float("nan")}, {"p": np.inf}, {1: 0.0}])
def test_a_state_that_could_not_be_saved_is_refused(state):
    @register_estimator("keeper", params=NoParams, stateful=True)
    def keeper(batch, params, state_before):
        return Credit(np.zeros(len(batch)), state=state)

    with pytest.raises(ValueError, match=r"'keeper': expected Credit.state to hold finite numbers by name, got"):
        compute_credit("keeper", StepBatch(**ROWS))


def test_importing_the_room_loads_numpy_alone():
    script = (
        "import sys, verl_turnkey.advantage\n"
        "heavy = {'torch', 'verl', 'sklearn', 'scipy', 'ray', 'gymnasium', 'pandas', 'tensordict'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "others = {m for m in sys.modules if m.startswith('verl_turnkey.')} "
        "- {m for m in sys.modules if m.startswith('verl_turnkey.advantage')}\n"
        "assert not others, others"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- The example of an own estimator runs, in a process of its own as a user's would ----------------------------------
EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_estimator.py"

SCRIPT = """
import runpy, sys
from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit, estimators
assert "return_baseline" not in estimators()
runpy.run_path(sys.argv[1])
assert "return_baseline" in estimators()
steps = StepBatch(group=["t"] * 3, trajectory=["good", "good", "bad"], step=[0, 1, 0], reward=[0.0, 1.0, 0.0])
assert compute_credit("return_baseline", steps, gamma=0.5).advantage.tolist() == [0.0, 0.5, -0.5]
try:
    compute_credit("return_baseline", steps, gama=0.5)
except ConfigError as error:
    assert "did you mean 'gamma'" in str(error), error
else:
    raise AssertionError("a misspelt parameter passed")
"""


def test_importing_the_file_is_all_it_takes():
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_file_runs_by_itself():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "advantage=array([ 0. ,  0.5, -0.5])" in done.stdout
