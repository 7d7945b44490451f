"""RAGEN-2's mutual-information proxy: its formula as a loop, check values, and the thoughts that it scores."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from verl_turnkey.plugins.trainer.mutual_information import prompt_information, thoughts

ORACLE = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "teacher_check_values.json").read_text())["mi"]


def test_check_values():
    sums, lengths = np.array([[-2.0, -6.0], [-5.0, -3.0]]), np.array([2, 2])
    values = prompt_information(sums, lengths)
    of_sequences = ORACLE["sequence"]
    assert values["sequence"] == pytest.approx(of_sequences["mi"], abs=1e-6)
    assert values["entropy"] == pytest.approx(of_sequences["H_cond"], abs=1e-6)
    assert values["bound"] == pytest.approx(of_sequences["bound"], abs=1e-6)
    assert (values["retrieval"], values["chance"]) == (of_sequences["acc"], of_sequences["chance"])
    assert values["per_token"] == pytest.approx(ORACLE["per_token"]["mi"], abs=1e-6)


def test_a_template_says_nothing_about_its_prompt():
    values = prompt_information(np.array([[-2.0, -2.0], [-3.0, -3.0]]), np.array([1, 4]))
    assert values["sequence"] == values["per_token"] == 0
    assert values["retrieval"] == ORACLE["collapsed"]["acc"] == values["chance"]


def naive(sums: list[list[float]], lengths: list[int]) -> tuple[float, float, float]:
    total = per_token = right = 0.0
    number = len(sums)
    for i in range(number):
        total += math.log(math.exp(sums[i][i]) / (sum(math.exp(x) for x in sums[i]) / number))
        means = [x / lengths[i] for x in sums[i]]
        per_token += math.log(math.exp(means[i]) / (sum(math.exp(x) for x in means) / number))
        right += max(range(number), key=lambda j: sums[i][j]) == i
    return total / number, per_token / number, right / number


@pytest.mark.parametrize("number", [2, 3, 9])
def test_equal_to_the_loop_and_never_above_the_bound(number: int):
    rng = np.random.default_rng(number)
    sums, lengths = -rng.exponential(5, (number, number)), rng.integers(1, 20, number)
    values = prompt_information(sums, lengths)
    total, per_token, right = naive(sums.tolist(), lengths.tolist())
    assert (values["sequence"], values["per_token"], values["retrieval"]) == pytest.approx((total, per_token, right))
    assert max(values["sequence"], values["per_token"]) <= values["bound"] == pytest.approx(math.log(number))


def test_long_responses_do_not_underflow():
    values = prompt_information(np.array([[-2000.0, -6000.0], [-5000.0, -3000.0]]), np.array([900, 900]))
    assert values["sequence"] == pytest.approx(math.log(2))


class Letters:
    """A tokenizer with a token for each of these."""

    WORDS = ("<think>", "</think>", "ab", " ", "go", "é")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("ids", "inside"),
    [
        ([0, 2, 3, 2, 1, 4], slice(1, 4)),
        ([2, 5, 1, 4], slice(0, 2)),  # the generation prompt opened them
        ([2, 1, 0, 4, 1], slice(0, 1)),  # the generation prompt opened the first ones
        ([0, 1, 4], None),
        ([4, 3, 4], None),
        ([0, 2, 3], None),  # cut before their end
    ],
)
def test_thoughts_are_the_tokens_between_their_marks(ids: list[int], inside: slice | None):
    assert thoughts(ids, Letters()) == inside
