"""compute_credit(modify=[...]): order, what a modifier sees and keeps, penalties, state, and what is refused."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from estimator_cases import as_batch, step_rows, table
from hypothesis import given, settings

from verl_turnkey.advantage import (
    ConfigError,
    Credit,
    StepBatch,
    compute_credit,
    estimators,
    modifiers,
    modifying,
    parse_modify,
    register_estimator,
    register_modifier,
    registry,
)


@dataclass(frozen=True)
class Amount:
    by: float = 2.0


@dataclass(frozen=True)
class Nothing:
    pass


@pytest.fixture(autouse=True)
def own():
    """Modifiers and estimators whose effect is easy to see; gone afterwards."""
    before = dict(modifying._MODIFIERS), dict(registry._ESTIMATORS)

    @register_estimator("counting", params=Nothing, gives=("twice",), stateful=True)
    def counting(batch, params, state):
        extra = {"twice": 2 * batch.score}
        now = {"batches": state.get("batches", 0) + 1, "seen/score": float(batch.score[0])}
        return Credit(batch.score, returns=batch.reward, metrics={"own": 1.0}, extra=extra, state=now)

    @register_modifier("times", params=Amount)
    def times(batch, params, estimate):
        credit = estimate(batch)
        return replace(credit, advantage=credit.advantage * params.by, metrics={"credit/by": params.by})

    @register_modifier("plus", params=Amount, stateful=True)
    def plus(batch, params, estimate, state):
        calls = state.get("batches", 0.0) + 1
        return Credit(estimate(batch).advantage + params.by, metrics={"calls": calls}, state={"batches": calls})

    @register_modifier("richer", params=Amount)
    def richer(batch, params, estimate):
        return estimate(batch.replaced(score=batch.score * params.by, reward=batch.reward * params.by))

    yield
    for registered, kept in zip((modifying._MODIFIERS, registry._ESTIMATORS), before, strict=True):
        registered.clear()
        registered.update(kept)


def batch(**columns):
    return StepBatch(**{"group": [0, 0], "trajectory": [0, 1], "step": [0, 0], "reward": [1.0, 3.0], **columns})


def test_the_first_is_next_to_the_estimator():
    def credit(*modify):
        return compute_credit("counting", batch(), modify=modify).advantage.tolist()

    assert credit("times", "plus") == [4.0, 8.0]
    assert credit("plus", "times") == [6.0, 10.0]
    assert credit({"name": "plus", "by": 1}, {"name": "richer", "by": 10.0}, {"name": "times"}) == [22.0, 62.0]
    assert credit() == [1.0, 3.0]


def test_what_the_estimator_gives_stays_and_each_modifier_has_a_part_and_metrics():
    credit = compute_credit("counting", batch(), modify=["richer", "times", "plus"])
    assert credit.returns.tolist() == [2.0, 6.0]
    assert credit.extra["twice"].tolist() == [4.0, 12.0]
    assert credit.metrics["own"] == 1.0
    assert credit.metrics["credit/times/by"] == 2.0
    assert credit.metrics["credit/plus/calls"] == 1.0
    assert credit.metrics["credit/advantage/mean"] == 10.0
    assert {name: part.tolist() for name, part in credit.parts.items()} == {
        "method": [2.0, 6.0],  # of an estimator without parts; what it made of the table that "richer" gave it
        "richer": [0.0, 0.0],
        "times": [2.0, 6.0],
        "plus": [2.0, 2.0],
    }
    assert credit.metrics["credit/plus/mean"] == 2.0


@pytest.mark.parametrize("scope", ["outcomes", "steps"])
def test_the_parts_of_the_method_are_those_it_has_alone(scope):
    table = batch(penalty=[0.5, 0.0])
    plain, modified = (compute_credit("grpo_steps", table, modify=m, scope=scope) for m in ([], ["times"]))
    own = {name: part.tolist() for name, part in modified.parts.items() if name != "times"}
    assert own == {name: part.tolist() for name, part in plain.parts.items()}
    np.testing.assert_allclose(sum(modified.parts.values()), modified.advantage, rtol=1e-12)
    assert modified.groups.keys() == {"episode_level"}


def test_state_goes_from_batch_to_batch_and_does_not_clash():
    state = {}
    for number in (1.0, 2.0):
        credit = compute_credit("counting", batch(), modify=["plus"], state=state)
        state = credit.state
        assert state == {"batches": number, "seen/score": 1.0, "modify/plus/batches": number}
    assert compute_credit("counting", batch(), state=state).state == {"batches": 3.0, "seen/score": 1.0}


def test_an_estimators_state_may_not_look_like_a_modifiers():
    @register_estimator("greedy", params=Nothing, stateful=True)
    def greedy(batch, params, state):
        return Credit(batch.score, state={"modify/plus/batches": 1.0})

    with pytest.raises(ValueError, match=r"greedy.*'modify/plus/batches' begins like the state of modifiers"):
        compute_credit("greedy", batch())


@pytest.mark.parametrize("params", [{}, {"scope": "steps"}, {"scope": "trajectories"}], ids=str)
@settings(max_examples=25)
@given(rows=step_rows())
def test_penalties_are_not_modified(params, rows):
    """Only their effect on the estimator's own credit is added."""
    free = as_batch([{**row, "penalty": 0.0} for row in rows])
    plain, without = (compute_credit("grpo_steps", b, **params).advantage for b in (as_batch(rows), free))
    got = compute_credit("grpo_steps", as_batch(rows), modify=["times"], **params).advantage
    np.testing.assert_allclose(got, 2 * without + (plain - without), rtol=1e-9, atol=1e-9)


def test_the_columns_of_a_run_are_those_of_estimator_and_modifiers():
    modify = parse_modify(["times", {"name": "empg", "zeta": 0.05}])
    spec = estimators()["hdpo"]
    assert spec.columns(spec.params(), modify) == ("success", "extra.tool_calls", "extra.entropy")
    assert spec.columns(spec.params()) == ("success", "extra.tool_calls")
    assert [modifier.entry for modifier in modify][1] == {"name": "empg", "k": 1.0, "k_next": 1.0, "zeta": 0.05}
    assert parse_modify(modify) == modify
    assert parse_modify(None) == ()


@pytest.mark.parametrize(
    ("modify", "message"),
    [
        (["empgg"], r"modify\[0\]: unknown modifier 'empgg'; did you mean 'empg'\?"),
        (["times", {"name": "times", "bye": 1.0}], r"modify\[1\] \(times\)\.bye: unknown key; did you mean 'by'"),
        ([{"name": "times", "by": "two"}], r"modify\[0\] \(times\)\.by: expected a number, got 'two'"),
        ([{"name": "a_grae", "alpha": 0}], r"modify\[0\] \(a_grae\)\.alpha: expected a number in \(0, 1\], got 0"),
        (["times", {"name": "times"}], r"modify\[1\]: 'times' is in the list twice"),
        ("times", r"modify: expected a list .*, got 'times'"),
        ({"name": "times"}, r"modify: expected a list .*, got \{'name': 'times'\}"),
        ([{"by": 2.0}], r"modify\[0\]: expected a modifier's name, or a mapping with its name, got \{'by': 2\.0\}"),
        (["empg"], r"modifier 'empg' needs the column 'extra\.entropy', which this batch does not have"),
    ],
)
def test_what_is_refused(modify, message):
    with pytest.raises(ConfigError, match=message):
        compute_credit("counting", batch(), modify=modify)


def test_a_modifier_that_returns_no_credit_is_named():
    def refused(fn, message):
        register_modifier("wrong", params=Nothing)(fn)
        with pytest.raises(ValueError, match=message):
            compute_credit("counting", batch(), modify=["wrong"])
        modifying._MODIFIERS.pop("wrong")

    refused(lambda batch, params, estimate: estimate(batch).advantage, "'wrong'.*expected a Credit.*got one ndarray")
    refused(lambda batch, params, estimate: Credit(batch.score), "'wrong'.*without a call of estimate")
    refused(lambda batch, params, estimate: Credit(estimate(batch).advantage[:1]), "modifier 'wrong'.*got shape")
    refused(lambda batch, params, estimate: Credit(estimate(batch).advantage * np.inf), "2 that are not finite")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("empg", Nothing), "modifier 'empg' is already registered by verl_turnkey.advantage.modifiers.empg"),
        (("fresh", dict), "modifier 'fresh': expected params to be a class with @dataclass"),
        (("fresh", Nothing, ("anker",)), "modifier 'fresh': needs names 'anker'.*did you mean 'anchor'"),
    ],
)
def test_what_cannot_be_registered(arguments, message):
    name, params, *needs = arguments
    with pytest.raises(ValueError, match=message):
        register_modifier(name, params=params, needs=needs[0] if needs else ())
    assert "fresh" not in modifiers()


def test_reserved_names_of_parameters():
    @dataclass(frozen=True)
    class Name:
        name: str = ""

    @dataclass(frozen=True)
    class Modify:
        modify: float = 0.0

    with pytest.raises(ValueError, match="modifier 'x': a parameter cannot be called name"):
        register_modifier("x", params=Name)
    with pytest.raises(ValueError, match="estimator 'x': a parameter cannot be called 'modify'"):
        register_estimator("x", params=Modify)


def test_a_table_with_other_numbers():
    table = batch(penalty=[0.0, 0.5])
    other = table.replaced(reward=np.array([5.0, 6.0]), score=np.array([7.0, 8.0]))
    assert (other.reward.tolist(), other.score.tolist()) == ([5.0, 6.0], [7.0, 8.0])
    assert (table.reward.tolist(), table.score.tolist()) == ([1.0, 3.0], [1.0, 3.0])
    assert other.penalty.tolist() == [0.0, 0.5]
    assert other.given == {"penalty", "score"}
    with pytest.raises(ValueError, match="read-only"):
        other.reward[0] = 0.0
    for columns, message in (
        ({"anchor": np.zeros(2)}, "expected reward, outcome, score or penalty, got anchor"),
        ({"score": np.zeros(3)}, "score: expected 2 entries"),
        ({"penalty": np.array([0.0, -1.0])}, "penalty: row 1.*expected a number from 0"),
        ({"reward": np.array([0.0, np.nan])}, "reward: row 1"),
    ):
        with pytest.raises(ValueError, match=message):
            table.replaced(**columns)


def test_a_score_that_was_not_given_follows_the_rewards():
    other = batch(trajectory=[0, 0], step=[0, 1]).replaced(reward=np.array([5.0, 6.0]))
    assert other.score.tolist() == [11.0, 11.0]
    assert other.given == set()
    kept = batch(score=[1.0, 2.0]).replaced(reward=np.array([5.0, 6.0]))
    assert kept.score.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("method", ["turn_gae", "vc_gae", "rebn", "gigpo"])
def test_targets_of_a_critic_and_metrics_are_those_of_the_method_alone(method):
    table = batch(penalty=[0.5, 0.0], value=[0.5, 0.5], anchor=["s", "s"])
    plain, modified = (compute_credit(method, table, modify=modify) for modify in ([], ["times"]))
    assert modified.returns.tolist() == plain.returns.tolist()
    other = ("credit/advantage/", "credit/times/")
    assert {k: v for k, v in modified.metrics.items() if not k.startswith(other)} == {
        k: v for k, v in plain.metrics.items() if not k.startswith(other)
    }


@pytest.mark.parametrize("method", ["rae", "tree", "grpo_steps", "gigpo", "maxrl"])
def test_a_factor_of_one_on_the_rewards_changes_nothing(method):
    """Methods that treat a given score in another way than a sum of rewards must not see one."""
    batch = table(
        [1.0, -1.0, 3.0, 0.5, 2.0],
        [0, 0, 0, 1, 1],
        anchor=list("abcab"),
        tokens=[3, 1, 2, 2, 4],
        role=[*"xyxyx"],
        parent=["r", "a", "b", "r", "a"],
        log_prob=[-1.0, -2.0, -0.5, -1.5, -0.1],
    )
    plain = compute_credit(method, batch).advantage
    assert len(set(plain.round(9))) > 1
    same = compute_credit(method, batch, modify=[{"name": "unlikeliness", "beta": 0}]).advantage
    np.testing.assert_array_equal(same, plain)


@pytest.mark.parametrize("later", [[], ["times"]], ids=["last", "not last"])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize(("gives", "words"), [([1.0], "got shape"), ([1.0, np.nan], "got 1 that are not finite")])
def test_a_modifier_that_gives_no_number_per_step_is_named(later, penalty, gives, words):
    @register_modifier("careless", params=Nothing)
    def careless(batch, params, estimate):
        return replace(estimate(batch), advantage=np.array(gives))

    with pytest.raises(ValueError, match=rf"modifier 'careless': expected advantage to be 2 finite numbers.*{words}"):
        compute_credit("counting", batch(penalty=[penalty, 0.0]), modify=["careless", *later])


def test_what_a_modifier_gives_beside_credit_does_not_count():
    @register_modifier("generous", params=Nothing)
    def generous(batch, params, estimate):
        return replace(estimate(batch), returns=np.zeros(2), extra={"twice": np.zeros(2), "more": np.zeros(2)})

    credit = compute_credit("counting", batch(), modify=["generous"])
    assert credit.returns.tolist() == [1.0, 3.0]
    assert {name: column.tolist() for name, column in credit.extra.items()} == {"twice": [2.0, 6.0]}


def test_a_method_does_not_take_the_modifier_it_is_made_of():
    with pytest.raises(ConfigError, match=r"modify\[1\]: the method 'a_grae' does this already; leave it out"):
        compute_credit("a_grae", batch(reward=[0.0, 1.0]), modify=["times", "a_grae"])
    with pytest.raises(ValueError, match="modifier 'a/b': a name cannot contain a slash"):
        register_modifier("a/b", params=Nothing)
