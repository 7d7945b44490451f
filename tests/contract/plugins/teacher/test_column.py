"""The columns of the teacher with verl's real workers, against transformers, and across row layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
from contract_tools import EOS, PARTITION, read, write
from hinted import LETTERS, TEMPLATE, batch, chat, log_probs, played, taught, with_text
from row_layouts import FIXED, PACKED, row

from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.config.scorers import TeacherConfig
from verl_turnkey.plugins.rollout.merging import merge_rows
from verl_turnkey.plugins.teacher.column import PARTITION as TEACHERS
from verl_turnkey.plugins.teacher.column import Teacher

TEACHER = [
    "turnkey.teacher.source=task_skill",
    f"turnkey.teacher.template='{TEMPLATE}'",
    "turnkey.teacher.max_tokens=64",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=400",
]
Episodes = dict[tuple[str, int], list[Any]]
TURNS = {("a", 0): ["A", "xy", "B"], ("a", 1): ["C"], ("b", 0): ["D!", "A"], ("b", 1): ["B"]}
SKILLS = {"a": {"skill": "B"}, "b": {"skill": None}}


class Counted:
    """A worker group that counts its forward passes."""

    def __init__(self, group: Any) -> None:
        self.group, self.forwards = group, 0

    def __getattr__(self, name: str) -> Any:
        self.forwards += name == "compute_log_prob"
        return getattr(self.group, name)


@pytest.fixture(scope="module")
def reader_dir(model_dir: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(model_dir, tmp_path_factory.mktemp("reader"), tokenizer)


@pytest.fixture(scope="module")
def reader(reader_dir: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(reader_dir, dtype=torch.float32)


@pytest.fixture
def built(ready, reader_dir, tokenizer) -> Callable[..., Any]:
    """A trainer whose workers hold the reader."""

    def build(*overrides: str, world: int = 1) -> Any:
        model = f"actor_rollout_ref.model.path={reader_dir}"
        made = ready(world, *TEACHER, model, "critic.enable=false", *overrides, recipe="gigpo")
        made.tokenizer = tokenizer
        made.actor_rollout_wg._group = Counted(made.actor_rollout_wg._group)
        return made

    return build


def scored(made: Any, rows: Any) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, bool], Any]:
    """Old log-probabilities, the teacher's, whether it had a text, and the metrics."""
    metrics: dict[str, Any] = {}
    rows = made._compute_old_log_prob(rows, metrics)
    assert not TEACHERS.tags(), "it is empty after each step"
    old, teacher, has_text = (read(rows, name) for name in ("old_log_probs", "teacher_log_prob", "has_teacher"))
    return old, teacher, has_text, metrics


def episodes(tokenizer: Any, layout: str = "steps") -> Episodes:
    made = {
        (group, session): played(tokenizer, chat(tokenizer, f"task {session}"), answers, session == 0)
        for (group, session), answers in TURNS.items()
    }
    made["a", 2] = [row([5, 6, EOS], [EOS], [0], [0.0], [])]  # a failed one
    return {key: merge_rows(rows) for key, rows in made.items()} if layout == "merged" else made


def check_rows(tokenizer: Any, reader: Any, made: Episodes, result: Sequence[Any], text: str | None) -> None:
    """Each row's column against transformers; ``text`` is that of group a."""
    old, teacher, has_text, _ = result
    for (group, session), outputs in made.items():
        first = outputs[0].prompt_ids
        for index, output in enumerate(outputs):
            key = f"{group}_{session}_{index}"
            assert has_text[key] == (group == "a" and session < 2)
            if not has_text[key]:
                assert teacher[key] == old[key], "bit for bit"
                continue
            # Rendered with the text in the message, and not spliced.
            prompt = with_text(tokenizer, f"task {session}", text) + output.prompt_ids[len(first) :]
            assert len(teacher[key]) == len(output.response_ids)
            # On masked tokens verl's engine may write 0.
            model = [i for i, trained in enumerate(output.response_mask) if trained]
            expected = log_probs(reader, prompt, output.response_ids)[model]
            assert [teacher[key][i] for i in model] == pytest.approx(expected.tolist(), abs=1e-4)
            assert max(abs(teacher[key][i] - old[key][i]) for i in model) > 0.1
    assert all(teacher[key] == old[key] and not has_text[key] for key in teacher if key[0] not in "ab")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("settings", [[], PACKED, FIXED], ids=["padded", "packed", "fixed"])
@pytest.mark.parametrize("layout", ["steps", "merged"])
def test_the_column_is_what_transformers_says(built, tokenizer, reader, layout, settings, world):
    made, played_episodes = built(*settings, world=world), episodes(tokenizer, layout)
    with batch(played_episodes, SKILLS, rows=16 if settings is FIXED else 10) as rows:
        result = scored(made, rows)
    check_rows(tokenizer, reader, played_episodes, result, "B")
    metrics = result[-1]
    number = 4 if layout == "steps" else 2
    assert metrics["teacher/rows_with_text"] == number
    assert metrics["teacher/text_tokens"] == number * len(tokenizer.encode(TEMPLATE.replace("{text}", "B")))
    assert made.actor_rollout_wg._group.forwards == 2
    if settings is FIXED and number % (4 * world):  # rows without a text fill the micro-batches
        assert metrics["teacher/gap_abs/control"] < 1e-5 < metrics["teacher/gap_abs/mean"]


def test_steps_and_one_row_of_a_conversation_have_the_same_gap(built, tokenizer):
    by_layout = []
    for layout in ("steps", "merged"):
        made, tokens = built(), dict[str, list[float]]()
        episodes_of_layout = episodes(tokenizer, layout)
        with batch(episodes_of_layout, SKILLS, rows=10) as rows:
            old, teacher, _, _ = scored(made, rows)
        for (group, session), outputs in episodes_of_layout.items():
            for index, output in enumerate(outputs):
                key = f"{group}_{session}_{index}"
                gaps = [t - o for t, o, m in zip(teacher[key], old[key], output.response_mask, strict=True) if m]
                tokens.setdefault(f"{group}_{session}", []).extend(gaps)
        by_layout.append(tokens)
    steps, merged = by_layout
    assert steps.keys() == merged.keys()
    for name, gaps in steps.items():
        assert merged[name] == pytest.approx(gaps, abs=1e-5)
    assert max(map(abs, steps["a_0"])) > 0.1


def test_without_any_text_nothing_is_sent(built, tokenizer):
    made = built()
    with batch(episodes(tokenizer), {"a": {"skill": None}, "b": {"skill": ""}}) as rows:
        old, teacher, has_text, metrics = scored(made, rows)
        assert made.teacher.contrast(rows) == {}
    assert teacher == old
    assert not any(has_text.values())
    assert made.actor_rollout_wg._group.forwards == 1
    assert metrics["teacher/rows_with_text"] == 0
    assert "teacher/gap/mean" not in metrics


def test_a_row_whose_text_finds_no_place_has_none(built, tokenizer):
    """Its prompt is not of the chat template; it enters neither the gaps nor the contrast."""
    made, placed = built(), episodes(tokenizer)["a", 1]
    with batch({("a", 0): played(tokenizer, [5, 6, 7], ["A"], True), ("a", 1): placed}, SKILLS) as rows:
        old, teacher, has_text, metrics = scored(made, rows)
        assert made.teacher._gaps.keys() == {"a_1_0"}
    assert has_text == {"a_0_0": False, "a_1_0": True}
    assert teacher["a_0_0"] == old["a_0_0"]
    assert (metrics["teacher/no_place"], metrics["teacher/rows_with_text"]) == (1, 1)


@pytest.mark.parametrize(("weights", "added"), [("old", 2), ("ref", 0)])
def test_rows_are_added_to_measure_noise_where_their_gap_is_noise(monkeypatch, weights, added):
    """Of a large batch, which fills the ranks by itself."""
    teacher = Teacher(SimpleNamespace(config=None), TurnkeyConfig(teacher=TeacherConfig(weights=weights)))
    monkeypatch.setattr(teacher._forward, "multiple", lambda: 2)
    rows = {i: {"input_ids": torch.zeros(3)} for i in range(32)}
    assert len(teacher._controls(rows, 32)) == added
    assert len(teacher._controls(rows, 31)) == 1
    assert teacher._noisy == (added > 0)


def hinted_turns(tokenizer: Any, hints: str) -> tuple[Episodes, dict[str, Any]]:
    """A group of four one-turn episodes, one for each letter, per hint."""
    made = {
        (f"g{n}", session): played(tokenizer, chat(tokenizer, f"task {n}"), [letter], letter == "A")
        for n in range(len(hints))
        for session, letter in enumerate(LETTERS)
    }
    return made, {f"g{n}": {"skill": hint} for n, hint in enumerate(hints)}


@pytest.mark.parametrize("hints", ["AAAA", "xxxx"])
def test_the_gap_is_positive_on_right_actions_and_negative_on_wrong_ones(built, tokenizer, hints):
    """The action A is right. A hint that says so tells right from wrong ones; one that says nothing does not."""
    made = built("turnkey.teacher.placebo=true")
    with batch(*hinted_turns(tokenizer, hints)) as rows:
        old, teacher, _, metrics = scored(made, rows)
        write(rows, "advantages", lambda key, i: 1.0 if "_0_" in key else -0.5)
        contrast = made.teacher.contrast(rows)["teacher/contrast"]
        masks = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION, select_fields=["response_mask"])
        masks = masks["response_mask"].unbind()
        flipped = [m * (-1.0 if "_0_" in key else 0.5) for key, m in zip(rows.keys, masks, strict=True)]
        signs = torch.nested.as_nested_tensor(flipped, layout=torch.jagged)
        assert made.teacher.contrast(rows, signs)["teacher/contrast"] == pytest.approx(-contrast)
    gaps = {key: teacher[key][0] - old[key][0] for key in teacher}
    right = [gap for key, gap in gaps.items() if "_0_" in key]
    wrong = [gap for key, gap in gaps.items() if "_0_" not in key]
    if hints[0] == "A":
        assert min(right) > 1.0  # ln 4 = 1.386 at most
        assert max(wrong) < -2.0
        assert contrast > 3.0
    else:
        assert max(map(abs, right + wrong)) < 0.5
        assert abs(contrast) < 1.0
    assert metrics["teacher/gap/mean"] == pytest.approx(sum(gaps.values()) / len(gaps), abs=1e-5)
    assert made.actor_rollout_wg._group.forwards == 2, "placebo rows go along with those of the text"
