"""Modifiers of steps: numbers of papers, their twins, and their edge cases."""

import json
from pathlib import Path
from random import Random

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows, table, with_gaps, with_rates
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.modifiers import NAMES, phi, unlikely

from verl_turnkey.advantage import ConfigError, StepBatch, Tokens, compute_credit

# --- empg: the check values, its twin, and steps without an entropy ---------------------------------------------------
ROWS = step_rows("entropy").map(with_gaps)


def episodes(entropy, score=(1, 1, -1, -1)):
    """Two groups of two episodes; episodes 0 and 1 have two steps each, and rloo_steps gives them ``score``."""
    return table([0] * 6, [0, 0, 1, 1, 2, 3], group="aabbab", score=[*score, 0, 0], entropy=[*entropy, None, None])


def test_empg_check_values():
    """The four steps alone: base 1 1 -1 -1 from groups of one."""
    batch = table([0] * 4, [0, 0, 1, 1], group=[0, 0, 1, 1], score=[1, 1, -1, -1], entropy=[0.2, 0.8, 0.5, 1.4])
    credit = compute_credit("grpo_steps", batch, modify=["empg"], singleton="score")
    np.testing.assert_allclose(credit.advantage, [1.322119, 0.689814, -1.286076, -0.725857], atol=1e-6)
    assert credit.metrics["credit/empg/gain/max"] == pytest.approx(1.452849, abs=1e-6)


@settings(max_examples=60)
@given(ROWS, st.fixed_dictionaries({"k": st.sampled_from([0.0, 1.0, 3.0]), "zeta": st.sampled_from([0.0, 0.1])}))
def test_empg_equals_its_naive_twin(rows, params):
    free = [{**row, "penalty": 0.0} for row in rows]
    base = compute_credit("grpo_steps", as_batch(free)).advantage
    got = compute_credit("grpo_steps", as_batch(free), modify=[{"name": "empg", **params}]).advantage
    assert_same_credit(got, naive.empg(free, base, **params))


def test_empg_values():
    with pytest.raises(ConfigError, match=r"empg: extra\.entropy: expected a finite number"):
        compute_credit("grpo_steps", episodes([np.inf, 0, 0, 0]), modify=["empg"])
    for key in ("k", "k_next", "zeta"):
        with pytest.raises(ConfigError, match=rf"modify\[0\] \(empg\)\.{key}: expected a finite number >= 0, got -1"):
            compute_credit("grpo_steps", episodes([0] * 4), modify=[{"name": "empg", key: -1.0}])


# --- length_gate and tool_gate: twins, by hand, and where they stay silent --------------------------------------------
def free_gates(rows):
    return [{**row, "penalty": 0.0} for row in rows]


def four(success, **extra):
    """Four episodes of one step, of 2, 4, 6 and 8 tokens."""
    return table(success, success=success, tokens=[2, 4, 6, 8], extra=extra)


@settings(max_examples=50)
@given(step_rows("tokens", "success").map(free_gates))
def test_length_gate(rows):
    base = compute_credit("grpo_steps", as_batch(rows)).advantage
    got = compute_credit("grpo_steps", as_batch(rows), modify=[{"name": "length_gate", "weight": 0.5}]).advantage
    assert_same_credit(got, naive.length_gate(rows, base, weight=0.5))


@settings(max_examples=50)
@given(step_rows("tokens", "success", "tool_calls").map(free_gates), st.sampled_from(["rated", "all"]))
def test_tool_gate(rows, average):
    base = compute_credit("grpo_steps", as_batch(rows)).advantage
    entry = {"name": "tool_gate", "average": average}
    got = compute_credit("grpo_steps", as_batch(rows), modify=[entry]).advantage
    assert_same_credit(got, naive.tool_gate(rows, base, average=average))


def test_length_counts_only_where_all_are_solved():
    """Lengths 2, 4, 6, 8: mean 5, sample std 2.5820."""
    solved = compute_credit("grpo_steps", four([1, 1, 1, 1]), modify=["length_gate"])
    np.testing.assert_allclose(solved.advantage, [0.11619, 0.03873, -0.03873, -0.11619], atol=1e-5)
    assert solved.metrics["credit/length_gate/share_of_groups"] == 1.0
    for success in ([1, 1, 1, 0], [0, 0, 0, 0]):
        plain = compute_credit("grpo_steps", four(success))
        gated = compute_credit("grpo_steps", four(success), modify=["length_gate"])
        assert gated.advantage.tolist() == plain.advantage.tolist()
        assert gated.metrics["credit/length_gate/share_of_groups"] == 0.0


def test_calls_count_only_among_the_solved():
    """hdpo's check values for 0, 1 and 3 calls and an unsolved episode; 12 of 20 tokens are rated."""
    batch = four([1, 1, 1, 0], tool_calls=[0, 1, 3, 0])
    plain = compute_credit("grpo_steps", batch).advantage
    tool = np.array([1.0911, -0.2182, -0.8729, 0])
    for average, factor in (("all", 1.0), ("rated", 20 / 12)):
        entry = {"name": "tool_gate", "weight": 2.0, "average": average}
        credit = compute_credit("grpo_steps", batch, modify=[entry])
        np.testing.assert_allclose(credit.advantage - plain, 2 * factor * tool, atol=1e-3)
        assert credit.metrics["credit/tool_gate/factor"] == factor
        assert credit.metrics["credit/tool_gate/share_rated"] == 0.75


@pytest.mark.parametrize("name", ["length_gate", "tool_gate"])
def test_gates_values(name):
    with pytest.raises(ConfigError, match=rf"\({name}\)\.weight: expected a finite number >= 0, got -1"):
        compute_credit("grpo_steps", four([1, 1, 1, 1], tool_calls=[0] * 4), modify=[{"name": name, "weight": -1.0}])
    with pytest.raises(ConfigError, match=rf"modifier '{name}' needs the column 'success'"):
        compute_credit("grpo_steps", table([1]), modify=[name])


# --- trace: the check values, its twin, and where it changes nothing --------------------------------------------------
VALUES = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "teacher_check_values.json").read_text())["trace"]
LOG_PROBS = [-3.0, -2.5, -2.0, -1.5, -0.4]
ROWS_TRACE = step_rows("gold_probability").map(
    lambda rows: [{**row, "gold_probability": max(row["gold_probability"], 1e-6)} for row in rows]
)


def episode(outcome, probability):
    """One episode, which grpo_steps gives its outcome with singleton=score."""
    return StepBatch(
        group=[0] * len(probability),
        trajectory=[0] * len(probability),
        step=range(len(probability)),
        reward=[*[0] * (len(probability) - 1), outcome],
        extra={"gold_probability": probability},
    )


def credit(outcome, probability, **params):
    modify = [{"name": "trace", **params}]
    return compute_credit("grpo_steps", episode(outcome, probability), modify=modify, singleton="score")


@pytest.mark.parametrize("outcome", ["1.0", "-1.0"])
def test_trace_check_values(outcome):
    case, got = VALUES[outcome], credit(float(outcome), np.exp(LOG_PROBS))
    np.testing.assert_allclose(got.advantage, [*case["A"], case["answer_turn"]], atol=1e-6)
    np.testing.assert_allclose(got.levels["trace/gain"], [*case["delta"], 0], atol=1e-6)
    np.testing.assert_allclose(got.levels["trace/term"], [*case["turn"], 0], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    ROWS_TRACE,
    st.fixed_dictionaries(
        {
            "horizon": st.sampled_from([1, 2, 3, 50]),
            "gamma": st.sampled_from([0.0, 0.8, 1.0]),
            "outcome": st.sampled_from([0.0, 2.0]),
            "offset": st.sampled_from([0.1, 1.0]),
        }
    ),
)
def test_trace_equals_its_naive_twin(rows, params):
    free = [{**row, "penalty": 0.0} for row in rows]
    base = compute_credit("grpo_steps", as_batch(free)).advantage
    got = compute_credit("grpo_steps", as_batch(free), modify=[{"name": "trace", **params}]).advantage
    assert_same_credit(got, naive.trace(free, base, **params))


def test_an_answer_alone_keeps_the_outcome_and_a_probability_of_0_is_finite():
    assert credit(1.0, [0.0]).advantage.tolist() == [1.0]
    assert np.isfinite(credit(1.0, [0.0, 1.0, 0.0]).advantage).all()
    assert credit(1.0, [0.2, 0.9, 0.1], weight=0.0).advantage.tolist() == [1.0] * 3


def test_a_probability_out_of_range_is_an_error():
    with pytest.raises(ConfigError, match=r"trace: extra\.gold_probability"):
        credit(1.0, [0.5, 1.5])


# --- Modifiers that are methods too, on another method: against their twins from that method's credit -----------------
def free_shared(rows):
    return with_rates([{**row, "penalty": 0.0} for row in rows])


def both(rows, *modify, **params):
    """gigpo's credit, and it modified."""
    batch = as_batch(rows)
    return compute_credit("gigpo", batch).advantage, compute_credit("gigpo", batch, modify=modify, **params).advantage


@pytest.mark.parametrize(
    ("name", "columns", "params"),
    [
        ("a_grae", (), {"alpha": 0.5}),
        ("copo", ("answer",), {"rho": 0.6, "gamma": 3.0}),
        ("dynamo_modulation", ("tokens", "entropy", "log_prob"), {}),
        ("shrinkage", ("prior",), {"prior": "given"}),
    ],
)
@settings(max_examples=30)
@given(data=st.data())
def test_each_equals_its_naive_twin(name, columns, params, data):
    rows = data.draw(step_rows("anchor", *columns).map(free_shared))
    base, got = both(rows, {"name": name, **params})
    assert_same_credit(got, getattr(naive, name)(rows, base, **{k: v for k, v in params.items() if k != "prior"}))


@settings(max_examples=30)
@given(step_rows("anchor", "tokens", "log_prob").map(free_shared))
def test_unlikeliness(rows):
    """Step rewards change with the score, so that gigpo's returns do too."""
    _, got = both(rows, {"name": "unlikeliness", "beta": 0.5})
    expected = naive.gigpo(unlikely(rows, beta=0.5))
    assert_same_credit(got, expected)


@pytest.mark.parametrize("name", ["a_grae", "copo", "dynamo_modulation", "unlikeliness"])
def test_the_method_is_grpo_under_the_modifier(name):
    batch = table(
        [1, 0, 0, 1, 1, 0],
        group="aaabbb",
        penalty=[0, 0.1, 0, 0, 0, 0.1],
        tokens=[3] * 6,
        answer=[*"xyzxxy"],
        entropy=[0.1, 0.5, 0.9] * 2,
        log_prob=[-1, -2, -3] * 2,
    )
    method = compute_credit(name, batch)
    modified = compute_credit("grpo_steps", batch, modify=[name])
    np.testing.assert_allclose(modified.advantage, method.advantage, atol=1e-12)
    assert {key for key in method.metrics if key.startswith(f"credit/{name}/")} <= modified.metrics.keys()


def test_shrinkage_keeps_its_own_state_beside_the_methods():
    batch = table([1, 0], role=["t", "t"], task=["t", "t"])
    credit = compute_credit("rae", batch, modify=["shrinkage"], state={"t": 0.0, "modify/shrinkage/t": 1.0})
    assert credit.state["modify/shrinkage/t"] == 0.75
    assert credit.state["t"] == pytest.approx(0.04875)
    assert set(credit.state) == {"t", "modify/shrinkage/t"}


def test_a_grae_reads_outcomes_as_success_rates():
    batch = table([1, 10])
    with pytest.raises(ConfigError, match=r"a_grae: expected outcomes in \[0, 1\].*got 10 for trajectory 1"):
        compute_credit("grpo_steps", batch, modify=["a_grae"])


# --- rank_shaping: the check values, its twin over several batches, and the last token alone --------------------------
RANKS = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "learned_check_values.json").read_text())
RANKS = RANKS["effective_rank"]
NUMBERS = (RANKS["ER"], RANKS["ERV"], RANKS["ERA"])
STATE = {f"modify/rank_shaping/{name}": mu for name, mu in zip(NAMES, RANKS["mu"], strict=True)}


def three(**params):
    """Three episodes of one step with the check values' columns; their advantages are 0.8, -0.8 and 0."""
    columns = {name: [value] * 3 for name, value in zip(NAMES, NUMBERS, strict=True)}
    batch = table([0.0] * 3, group=[0, 1, 2], score=[0.8, -0.8, 0.0], extra=columns)
    modify = [{"name": "rank_shaping", **params}]
    tokens = Tokens([0, 0, 1, 2, 2, 2], [0.0] * 6)
    return compute_credit("grpo_steps", batch, modify=modify, state=STATE, tokens=tokens, singleton="score")


def test_rank_shaping_check_values():
    credit = three()
    np.testing.assert_allclose(credit.levels["rank_shaping/phi"], [RANKS["Phi"]] * 3, atol=1e-7)
    np.testing.assert_allclose(credit.advantage, RANKS["A' of A0 = 0.8, -0.8, 0.0 (kappa 2)"], atol=1e-7)
    assert phi(NUMBERS, RANKS["mu"]) == pytest.approx(RANKS["Phi"], abs=1e-7)
    b_low, phi_low = RANKS["mu 2.0, 0.3, 0.1: b, Phi"]
    assert phi(NUMBERS, (2.0, 0.3, 0.1)) == pytest.approx(phi_low, abs=1e-7)
    assert 0 < b_low < 0.01


def test_the_running_means_follow_the_batch_after_use():
    state = three(rate=0.3).state
    expected = [0.7 * mu + 0.3 * x for mu, x in zip(RANKS["mu"], NUMBERS, strict=True)]
    assert [state[f"modify/rank_shaping/{name}"] for name in NAMES] == pytest.approx(expected)


@pytest.mark.parametrize("gap", [0.0, np.nan])
def test_a_turn_without_tokens_has_no_rank(gap):
    """8, 8 and an empty turn are 8 on average; an empty batch leaves the means as they were."""

    def run(tokens, state=None):
        rows, ranks = range(len(tokens)), [8.0 if n else gap for n in tokens]
        columns = {"group": rows, "trajectory": rows, "step": [0] * len(tokens), "reward": [1.0] * len(tokens)}
        batch = StepBatch(**columns, tokens=tokens, extra=dict.fromkeys(NAMES, ranks))
        return compute_credit("grpo_steps", batch, modify=["rank_shaping"], state=state, singleton="score")

    first = run([5, 5, 0])
    assert [*first.state.values()] == [8.0] * 3
    assert first.metrics["credit/rank_shaping/rank/mean"] == 8.0
    assert run([0, 0], first.state).state == first.state
    lower = dict.fromkeys(first.state, 4.0)
    assert (run([5, 0], lower).advantage > 1).tolist() == [True, False]


def test_the_last_token_alone_is_raised():
    """As released; the step's advantage is the mean of its tokens."""
    every, last = three(), three(tokens="last")
    added = every.advantage - [0.8, -0.8, 0.0]
    np.testing.assert_allclose(last.tokens, [0.8, 0.8 + added[0], -0.8 + added[1], 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(last.advantage, [0.8 + added[0] / 2, -0.8 + added[1], 0.0], atol=1e-9)
    assert last.state == every.state


@settings(max_examples=40)
@given(
    step_rows(),
    st.integers(0, 99),
    st.fixed_dictionaries({"gain": st.sampled_from([0.0, 2.0]), "weight": st.sampled_from([0.5, 3.0]),
        "kappa": st.sampled_from([1.0, 2.0]), "rate": st.sampled_from([0.3, 1.0])}),
)  # fmt: skip
def test_equals_its_naive_twin_from_batch_to_batch(rows, seed, params):
    random = Random(seed)
    rows = [{**row, "penalty": 0.0} for row in rows]
    state, twins_state = {}, {}
    for _ in range(3):
        rows = [{**row, **{name: random.choice([-0.5, 0.0, 0.2, 3.0]) for name in NAMES}} for row in rows]
        batch = as_batch(rows)
        base = compute_credit("grpo_steps", batch).advantage
        credit = compute_credit("grpo_steps", batch, modify=[{"name": "rank_shaping", **params}], state=state)
        twin, twins_state = naive.rank_shaping(rows, base, twins_state, **params)
        assert_same_credit(credit.advantage, twin)
        state = credit.state
        assert [state[f"modify/rank_shaping/{name}"] for name in NAMES] == pytest.approx([*twins_state.values()])


@pytest.mark.parametrize("params", [{"kappa": 0}, {"rate": 0}, {"stride": 0}, {"window": 40}, {"tokens": "first"}])
def test_parameters_out_of_bounds(params):
    with pytest.raises(ConfigError, match=next(iter(params))):
        three(**params)
