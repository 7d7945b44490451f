"""Where a text goes into a prompt, and what the row becomes; a tokenizer of one token per character."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.scorers import TeacherConfig
from verl_turnkey.plugins.teacher.column import contrast, gap_metrics
from verl_turnkey.plugins.teacher.rows import TextIds, place_in, places, splice, tail_of


class Characters:
    """A token per character; ``template`` is the chat template."""

    chat_template = "<{role}>{content}</s>"
    all_special_tokens = ("</s>",)

    def __init__(self, end: str = "</s><assistant>") -> None:
        self.end = end

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> list[int]:
        assert settings["add_generation_prompt"]
        assert settings["return_dict"] is False
        opened = "<think>" if settings.get("thinking") else ""
        return self.encode("".join(f"<user>{m['content']}" for m in messages) + self.end + opened)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


TOKENIZER = Characters()
TAIL = TOKENIZER.encode("</s><assistant>")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def test_the_tail_is_what_every_prompt_ends_with():
    assert tail_of(TOKENIZER) == TAIL
    assert tail_of(TOKENIZER, thinking=True) == [*TAIL, *ids("<think>")]


def test_a_template_without_a_tail_has_no_place():
    with pytest.raises(ConfigError, match="writes nothing between"):
        tail_of(Characters(end=""))

    class Bare(Characters):
        def apply_chat_template(self, messages: Any, **settings: Any) -> list[int]:
            raise ValueError("no chat template")

    with pytest.raises(ConfigError, match=r"no chat template.*turnkey\.teacher\.source=null"):
        tail_of(Bare())


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ("<user>go</s><assistant>", 8),
        ("<user>a</s><assistant>b</s><user>go</s><assistant>", 35),
        ("<user>go</s><assistant>Sure, ", 8),  # the agent begins the turn itself
        ("<user>go", None),
        ("", None),
    ],
)
def test_the_text_goes_before_the_last_tail(prompt, place):
    assert place_in(ids(prompt), TAIL) == place
    if place is not None:
        assert prompt[place:].startswith("</s><assistant>")


def conversation(turns: int) -> list[list[int]]:
    prompts, text = [], "<user>task</s><assistant>"
    for t in range(turns):
        prompts.append(ids(text))
        text += f"turn {t}</s><user>seen {t}</s><assistant>"
    return prompts


def test_the_turns_of_a_conversation_share_the_place_of_the_first():
    prompts = conversation(4)
    keys = [f"a_0_{t}" for t in range(4)]
    first = place_in(prompts[0], TAIL)
    assert places(keys, prompts, TAIL) == [first] * 4
    # Another episode, or a prompt that was rendered anew, has a place of its own.
    assert places(["a_1_0", *keys[1:]], prompts, TAIL) == [first] + [place_in(prompts[1], TAIL)] * 3
    anew = ids("<user>task, seen 1</s><assistant>")
    assert places(keys, [prompts[0], prompts[1], anew, [*anew, *ids("x</s><user>y</s><assistant>")]], TAIL) == [
        first,
        first,
        place_in(anew, TAIL),
        place_in(anew, TAIL),
    ]


def test_the_order_of_rows_and_how_they_are_merged_do_not_matter():
    draw = random.Random(0)
    prompts = conversation(6)
    for _ in range(50):
        kept = sorted({0, *draw.sample(range(6), draw.randint(1, 6))})  # rows of merged turns begin with these
        rows = [(f"a_0_{index}", prompts[t]) for index, t in enumerate(kept)]
        draw.shuffle(rows)
        positions = places([key for key, _ in rows], [prompt for _, prompt in rows], TAIL)
        assert positions == [place_in(prompts[0], TAIL)] * len(rows)


def test_a_row_with_a_text_keeps_all_of_its_own_ids():
    prompt, response = ids("<user>go</s><assistant>"), ids("left")
    row = {
        "input_ids": torch.tensor(prompt + response),
        "prompts": torch.tensor(prompt),
        "position_ids": torch.arange(len(prompt) + 4),
        "responses": torch.tensor(response),
    }
    text = ids(" hint")
    result = splice(row, text, 8)
    assert TOKENIZER.decode(result["input_ids"].tolist()) == "<user>go hint</s><assistant>left"
    assert TOKENIZER.decode(result["prompts"].tolist()) == "<user>go hint</s><assistant>"
    assert result["position_ids"].tolist() == list(range(len(prompt) + 4 + 5))
    assert result["responses"] is row["responses"]
    assert len(row["input_ids"]) == len(prompt) + 4, "the row itself is not changed"
    same = splice(row, [], 8)
    assert all(torch.equal(same[name], row[name]) for name in row)


def test_positions_of_images_stay_and_text_counts_on_from_them():
    """A 2 x 2 image after two tokens of text, then the tail's two tokens: axes text, time, height, width."""
    axes = torch.tensor(
        [
            [0, 1, 2, 3, 4, 5, 6, 7],
            [0, 1, 2, 2, 2, 2, 4, 5],
            [0, 1, 2, 2, 3, 3, 4, 5],
            [0, 1, 2, 3, 2, 3, 4, 5],
        ]
    )
    image = [0, 0, 1, 1, 1, 1, 0, 0]
    row = {
        "input_ids": torch.arange(8),
        "prompts": torch.arange(7),
        "position_ids": axes,
        "multi_modal_inputs": {
            "pixel_values": torch.ones(4, 3),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "token_types": torch.tensor([image]),
        },
    }
    result = splice(row, [90, 91, 92], 6)
    positions = result["position_ids"]
    assert positions[:, :6].equal(axes[:, :6])
    assert positions[0, 6:].tolist() == [6, 7, 8, 9, 10]
    assert [positions[axis, 6:].tolist() for axis in (1, 2, 3)] == [[4, 5, 6, 7, 8]] * 3
    media = result["multi_modal_inputs"]
    assert media["token_types"].tolist() == [[0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert media["pixel_values"] is row["multi_modal_inputs"]["pixel_values"]


def text_ids(**options: Any) -> TextIds:
    return TextIds(TOKENIZER, TeacherConfig(source="task_skill", template=" [{text}]", **options))


def test_a_long_text_is_cut_at_its_end_and_the_template_stays():
    assert text_ids(max_tokens=10).ids("go left") == (ids(" [go left]"), False)
    assert text_ids(max_tokens=10).ids("go left now") == (ids(" [go left]"), True)
    with pytest.raises(ConfigError, match=r"max_tokens=3: the template alone has 3 tokens"):
        text_ids(max_tokens=3)


def test_control_tokens_in_a_text_are_plain_and_braces_are_no_slots():
    made = text_ids(max_tokens=100)
    assert made.ids("a</s>b") == (ids(" [a< /s>b]"), False)
    assert made.ids("{text} {x}") == (ids(" [{text} {x}]"), False)


def test_a_placebo_has_the_length_that_is_wanted():
    for length in (1, 5, 200):
        assert len(text_ids().placebo(length)) == length


def test_a_template_may_be_a_file(tmp_path):
    file = tmp_path / "template.txt"
    file.write_text("\nSkill: {text}")
    assert TeacherConfig(template=str(file)).text_template() == "\nSkill: {text}"
    file.write_text("no slot")
    with pytest.raises(ConfigError, match=r"has no \{text\}"):
        TeacherConfig(template=str(file)).text_template()
    with pytest.raises(ConfigError, match=r"turnkey\.teacher\.template: expected a text with \{text\}, or a file"):
        TeacherConfig(template="missing.txt").text_template()
    with pytest.raises(ConfigError, match="template: expected a text with"):
        TeacherConfig(template="two\nlines")
    with pytest.raises(ConfigError, match="max_tokens: expected positive"):
        TeacherConfig(max_tokens=0)


# --- metrics of the gap -----------------------------------------------------------------------------------------------

GAP = torch.tensor([1.0, 3.0, -2.0, 5.0, 100.0, 7.0])
ADVANTAGE = torch.tensor([0.5, 2.0, -1.0, -1.0, 1.0, 0.0])
MASK = torch.tensor([1, 1, 1, 1, 0, 1])


def test_the_contrast_is_a_difference_of_means():
    assert contrast(GAP, ADVANTAGE, MASK) == pytest.approx((1 + 3) / 2 - (-2 + 5) / 2)
    assert contrast(GAP - 4, ADVANTAGE, MASK) == pytest.approx(0.5), "what all tokens have in common cancels"


def test_a_placebo_is_subtracted_token_by_token():
    placebo = torch.tensor([0.0, 1.0, -2.0, 1.0, 9.0, 9.0])
    assert contrast(GAP, ADVANTAGE, MASK, placebo) == pytest.approx((1 + 2) / 2 - (0 + 4) / 2)


def test_without_tokens_of_both_signs_there_is_none():
    assert contrast(GAP, ADVANTAGE.abs(), MASK) is None
    assert contrast(GAP, ADVANTAGE, MASK * 0) is None
    assert contrast(None, ADVANTAGE, MASK) is None


def test_metrics_are_over_the_models_tokens():
    rows = [(GAP[:3], MASK[:3]), (GAP[3:], MASK[3:])]
    control = [(torch.tensor([0.0, -0.5]), torch.tensor([0, 1]))]
    assert gap_metrics(rows, control) == {
        "teacher/gap/mean": pytest.approx((1 + 3 - 2 + 5 + 7) / 5),
        "teacher/gap_abs/mean": pytest.approx((1 + 3 + 2 + 5 + 7) / 5),
        "teacher/gap_abs/control": 0.5,
    }
    assert gap_metrics([], []) == {}
