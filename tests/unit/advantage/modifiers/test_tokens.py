"""Modifiers of single tokens: their order, penalties, what a step has of them, and what is refused."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from teacher_rows import credit, table, teacher_rows

from verl_turnkey.advantage import (
    ConfigError,
    StepBatch,
    Tokens,
    compute_credit,
    modifiers,
    modifying,
    register_modifier,
    register_token_modifier,
)


@dataclass(frozen=True)
class Amount:
    by: float = 2.0


@pytest.fixture(autouse=True)
def own():
    """Modifiers whose effect is easy to see; gone afterwards."""
    before = dict(modifying._MODIFIERS)

    @register_token_modifier("add_gap", params=Amount)
    def add_gap(advantage, tokens, batch, params):
        return advantage + params.by * tokens.gap

    @register_token_modifier("times", params=Amount)
    def times(advantage, tokens, batch, params):
        return advantage * params.by

    @register_modifier("plus", params=Amount)
    def plus(batch, params, estimate):
        from dataclasses import replace

        estimated = estimate(batch)
        return replace(estimated, advantage=estimated.advantage + params.by)

    yield
    modifying._MODIFIERS.clear()
    modifying._MODIFIERS.update(before)


BATCH = {"group": [0, 1, 1], "trajectory": [0, 1, 1], "step": [0, 0, 1], "reward": [1.0, 0.0, 3.0]}
TOKENS = Tokens([0, 0, 2, 2, 2], [0.5, -0.5, 1.0, 0.0, 2.0])


def of(*modify, tokens=TOKENS, **columns):
    return compute_credit("grpo_steps", StepBatch(**BATCH, **columns), modify=modify, tokens=tokens, singleton="score")


def test_tokens_come_after_steps_and_in_their_own_order():
    assert of("add_gap", "times").tokens.tolist() == [4.0, 0.0, 10.0, 6.0, 14.0]
    assert of("times", "add_gap").tokens.tolist() == [3.0, 1.0, 8.0, 6.0, 10.0]
    assert of("add_gap", "plus").tokens.tolist() == of("plus", "add_gap").tokens.tolist() == [4.0, 2.0, 7.0, 5.0, 9.0]
    assert of("plus").tokens is None


def test_a_step_has_the_mean_of_its_tokens_and_a_part_of_each_modifier():
    got = of("times", "add_gap")
    assert got.advantage.tolist() == [2.0, 3.0, 8.0]  # a step without tokens keeps its own
    assert {name: part.tolist() for name, part in got.parts.items()} == {
        "episode_level": [1.0, 3.0, 3.0],
        "penalty": [0.0, 0.0, 0.0],
        "times": [1.0, 0.0, 3.0],
        "add_gap": [0.0, 0.0, 2.0],
    }
    assert got.metrics["credit/add_gap/mean"] == pytest.approx(2 / 3)
    assert got.metrics["credit/add_gap/tokens/mean"] == pytest.approx(6 / 5)
    assert got.metrics["credit/add_gap/tokens/share_nonzero"] == pytest.approx(4 / 5)


def test_penalties_are_not_modified():
    plain, got = of("times"), of("times", penalty=[0.25, 0.0, 0.5])
    assert (plain.tokens - got.tokens).tolist() == [0.25, 0.25, 0.5, 0.5, 0.5]
    assert (plain.advantage - got.advantage).tolist() == [0.25, 0.0, 0.5]


@given(teacher_rows())
def test_sums_of_parts_are_the_advantages(rows):
    got = credit(rows, "add_gap", "times")
    np.testing.assert_allclose(sum(got.parts.values()), got.advantage, rtol=1e-9, atol=1e-9)
    batch, tokens = table(rows)
    own = np.where(batch.tokens > 0, tokens.means(got.tokens, len(batch)), got.advantage)
    np.testing.assert_allclose(got.advantage, own, rtol=1e-9, atol=1e-9)


def test_no_tokens_at_all():
    got = of("add_gap", tokens=Tokens([], []))
    assert got.tokens.tolist() == []
    assert got.advantage.tolist() == of().advantage.tolist()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (([0, 1], [0.5]), r"Tokens: expected step and gap of shape \(T,\), got \(2,\) and \(1,\)"),
        (([[0]], [[0.5]]), r"expected step and gap of shape \(T,\)"),
        (([0, 0], [np.nan, 0.5]), "expected finite gaps, got 1 that are not: 0 stands for a row without a text"),
    ],
)
def test_tokens_that_are_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        Tokens(*columns)


def test_a_modifier_of_tokens_asks_for_them():
    with pytest.raises(ConfigError, match=r"modifier 'times' changes the credit of single tokens: pass tokens=Tokens"):
        of("times", tokens=None)
    assert of("plus", tokens=None).advantage.tolist() == [3.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("result", "words"), [([1.0], r"got shape \(1,\)"), ([1.0, np.inf, 0.0, 0.0, np.nan], "got 2 that are not finite")]
)
def test_a_rule_that_gives_no_number_per_token_is_named(result, words):
    @register_token_modifier("careless", params=Amount)
    def careless(advantage, tokens, batch, params):
        return result

    with pytest.raises(ValueError, match=f"modifier 'careless': expected 5 finite numbers, one per token, {words}"):
        of("careless")


def test_it_is_registered_like_any_other():
    spec = modifiers()["rlsd"]
    assert spec.fn.__module__ == "verl_turnkey.advantage.modifiers.rlsd"
    assert "lam" in (spec.fn.__doc__ or "")
    with pytest.raises(ValueError, match="modifier 'rlsd' is already registered by verl_turnkey"):
        register_token_modifier("rlsd", params=Amount)(lambda *_: None)
