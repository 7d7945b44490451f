"""A row per step and merged rows are the same training: the same credit, log-probabilities, values and gradients.

One rollout goes twice through the trainer's own steps, on a real TransferQueue, to real workers of verl: FSDP2 in
float32, on one rank and on two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import naive
import numpy as np
import pytest
import torch
import transfer_queue as tq
from contract_tools import AWKWARD, PARTITION
from naive.common import turns_of
from PIL import Image
from row_layouts import (
    EVERYTHING,
    FAMILIES,
    FIXED,
    KL_IN_REWARD,
    OFF_POLICY,
    PACKED,
    Rollout,
    Sampler,
    Seeing,
    Step,
    Trained,
    Turn,
    apart,
    conversation,
    credit,
    filled,
    flat,
    looked,
    merged,
    noise,
    onlooker,
    row,
    seeing,
    train,
)
from transformers import AutoModelForImageTextToText, Glm4vConfig, Glm4vModel
from verl.models.transformers import glm4v

from verl_turnkey.advantage import RecordError, estimators
from verl_turnkey.plugins.rollout import worker as loop_worker

CLOSE = 1e-5
"""relative, of gradients; absolute, of log-probabilities and values"""


def check_same(reference: Trained, other: Trained) -> None:
    """Everything that a training step comes to."""
    assert reference.actor.norm() > 1e-2
    assert apart(reference.actor, other.actor) < CLOSE
    assert reference.critic.norm() > 1e-2
    assert apart(reference.critic, other.critic) < CLOSE
    check_columns(reference, other)


def check_columns(reference: Trained, other: Trained) -> None:
    assert reference.columns.keys() == other.columns.keys()
    for name, column in reference.columns.items():
        assert column.keys() == other.columns[name].keys()
        for step, values in column.items():
            assert values == pytest.approx(other.columns[name][step], rel=CLOSE, abs=CLOSE), (name, step)


def test_the_rollout_is_what_it_is_for(rollout):
    def runs(rows: Rollout) -> list[int]:
        return [len(turns_of(output.response_mask)) for outputs in rows.values() for output in outputs]

    assert sorted(runs(rollout)) == [0] * 2 + [1] * 40  # a failed episode and a turn without tokens
    assert sorted(runs(merged(rollout))) == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 10]
    lengths = [len(output.response_ids) for outputs in rollout.values() for output in outputs]
    assert (min(lengths), max(lengths)) == (1, 8)
    assert max(len(o.prompt_ids) + len(o.response_ids) for outputs in rollout.values() for o in outputs) < 300


NEED_NO_MORE = [  # than the rollout's records have
    name
    for name, spec in sorted(estimators().items())
    if {need for need in spec.needs if need.startswith("extra.")} <= {"extra.tool_calls"}
]


@pytest.mark.parametrize("name", NEED_NO_MORE)
def test_credit_is_the_same(ray_queue, trainer, rollout, name):
    bounded = estimators()[name].bounded_outcomes
    rollout = between_0_and_1(rollout) if bounded else rollout
    made = trainer("critic.enable=true", *([] if bounded else KL_IN_REWARD), recipe=name)
    steps = credit(made, rollout)
    made.advantage_step.state = {}  # what it remembers of the first would change the second
    joined = credit(made, merged(rollout))
    check_columns(steps, joined)
    for column, values in steps.table.items():
        np.testing.assert_allclose(joined.table[column], values, rtol=1e-6, atol=1e-6)
    assert len({round(values[0], 5) for values in steps.columns["advantages"].values()}) > 5
    by_steps, other = (
        {metric: value for metric, value in done.metrics.items() if metric.startswith(("credit/", "episode/"))}
        for done in (steps, joined)
    )
    assert other == pytest.approx(by_steps, rel=CLOSE, abs=CLOSE)


def between_0_and_1(rows: Rollout) -> Rollout:
    """The rows with smaller rewards, whose sums over an episode are success rates."""

    def smaller(step: dict[str, Any]) -> dict[str, Any]:
        return {**step, "reward": step["reward"] / 16}

    def change(o: Any) -> dict[str, Any]:
        record = o.extra_fields["turnkey"]
        shrunk = {**record, "steps": [smaller(step) for step in record["steps"]]}
        return {"extra_fields": {**o.extra_fields, "turnkey": shrunk}}

    return {key: [o.model_copy(update=change(o)) for o in outputs] for key, outputs in rows.items()}


LOSSES = {"vanilla": [], **{name: [f"+turnkey/loss={name}"] for name in ("turn_ratio", "st_ppo", "dgpo")}}
BY = "turnkey.update.weight_by="
CASES: dict[str, tuple[int, list[str]]] = {}
for name, chosen in LOSSES.items():
    CASES |= {
        f"{name}": (1, chosen),
        f"{name}, 2 ranks, everything": (2, [*chosen, *EVERYTHING]),
        f"{name}, fixed micro-batches, everything": (1, [*chosen, *FIXED, *EVERYTHING]),
        f"{name}, 2 ranks, fixed micro-batches": (2, [*chosen, *FIXED]),
    }
CASES |= {
    "vanilla, packed, everything": (1, [*PACKED, *EVERYTHING]),
    "turn_ratio over turns": (1, ["+turnkey/loss=turn_ratio", "turnkey.loss.aggregate=turns", *EVERYTHING]),
    "segment_mask, everything": (1, ["+turnkey/loss=segment_mask", *EVERYTHING]),
    "a3po": (1, ["+turnkey/loss=a3po"]),
    **{f"by {unit}, 2 ranks, everything": (2, [BY + unit, *EVERYTHING]) for unit in ("step", "episode", "task")},
    "st_ppo by step, fixed micro-batches": (1, [*LOSSES["st_ppo"], BY + "step", *FIXED]),
    "turn_ratio by episode": (1, [*LOSSES["turn_ratio"], BY + "episode"]),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same(ready, rollout, name):
    """Of actor and critic, whatever stands on the ids between the turns of a merged row."""
    world, overrides = CASES[name]
    made = ready(world, *overrides)
    steps, joined = train(made, rollout), train(made, merged(rollout), poison=30.0)
    check_same(steps, joined)
    assert all(len(rows) > 1 for done in (steps, joined) for rows in done.micro_batches)
    assert sum(map(sum, joined.micro_batches)) < sum(map(sum, steps.micro_batches))
    if "dgpo" not in name:
        assert steps.metrics["actor/pg_clipfrac"] > 0
    if "st_ppo" in name:
        assert steps.metrics["actor/clipping_bias/rows"] >= joined.metrics["actor/clipping_bias/rows"] > 0
        assert steps.metrics["actor/clipping_bias/norm"] == pytest.approx(
            joined.metrics["actor/clipping_bias/norm"], rel=1e-5
        )


def test_hdpos_second_advantage_too(ready, rollout):
    made = ready(1, "+turnkey/loss=hdpo", recipe="hdpo")
    check_same(train(made, rollout), train(made, merged(rollout), poison=30.0))


def test_what_the_rollout_said_of_late_turns_is_what_the_actor_says(ready, model, tokenizer, monkeypatch):
    """A conversation that the loop plays: the sampler's log-probabilities, token by token, against the actor's."""
    made = ready(
        1,
        f"turnkey.modules=[{AWKWARD}]",
        "turnkey.env.hosts=1",
        "turnkey.rollout.prompt=conversation",
        "turnkey.rollout.max_turns=10",
        "turnkey.rollout.max_tokens_per_turn=6",
        "data.max_prompt_length=1200",
        "data.max_response_length=2800",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4000",
        "critic.ppo_max_token_len_per_gpu=4000",
    )
    monkeypatch.setattr(loop_worker, "_process", None)
    rows = {("u", 0): conversation(made.config, tokenizer, Sampler(model))}
    assert [len(turns_of(output.response_mask)) for output in rows["u", 0]] == [10]
    done = train(made, rows)
    for turn in range(10):
        rollout_log_probs, actor_log_probs = (
            done.columns[name]["u", 0, turn] for name in ("rollout_log_probs", "old_log_probs")
        )
        assert rollout_log_probs == pytest.approx(actor_log_probs, abs=CLOSE), turn
    assert done.metrics["training/rollout_probs_diff_max"] < CLOSE


def mask_shifted(rows: Rollout) -> Rollout:
    """Masks begin one token too late."""

    def change(output: Any) -> dict[str, Any]:
        late = [0, *output.response_mask[:-1]]
        return {"response_mask": late} if len(turns_of(late)) == len(turns_of(output.response_mask)) else {}

    return changed(rows, change)


def observations_swapped(rows: Rollout) -> Rollout:
    """Other ids between the turns than the model saw."""
    return changed(
        rows,
        lambda o: {"response_ids": [i if m else 7 for i, m in zip(o.response_ids, o.response_mask, strict=True)]},
    )


def rewards_swapped(rows: Rollout) -> Rollout:
    """The steps of the records in another order than the turns."""
    return changed(
        rows, lambda o: {"extra_fields": {**o.extra_fields, "turnkey": backwards(o.extra_fields["turnkey"])}}
    )


def backwards(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "steps": record["steps"][::-1]}


def changed(rows: Rollout, change: Callable[[Any], dict[str, Any]]) -> Rollout:
    """The rows with several turns, changed."""
    return {
        key: [o.model_copy(update=change(o)) if len(turns_of(o.response_mask)) > 1 else o for o in outputs]
        for key, outputs in rows.items()
    }


def test_a_wrong_merge_does_not_go_unnoticed(ready, rollout):
    made = ready(1)
    steps = train(made, rollout)
    for broken in (mask_shifted, observations_swapped, rewards_swapped):
        trained = train(made, broken(merged(rollout)))
        assert apart(steps.actor, trained.actor) > 100 * CLOSE, broken.__name__
        assert apart(steps.critic, trained.critic) > 100 * CLOSE, broken.__name__


def test_turns_that_touch_are_refused(ray_queue, trainer, rollout):
    first, second = rollout["a", 0][:2]
    steps = [output.extra_fields["turnkey"]["steps"][0] for output in (first, second)]
    ids, log_probs = first.response_ids + second.response_ids, first.response_logprobs + second.response_logprobs
    touching = {("a", 0): [row(first.prompt_ids, ids, [1] * len(ids), log_probs, steps)]}
    with pytest.raises(RecordError, match="a_0_0: its record has 2 steps but its response mask has 1 runs of ones"):
        credit(trainer("critic.enable=true", recipe="turn_gae"), touching)


def test_a_mean_over_rows_means_something_else_in_each_layout(ready, rollout):
    mode = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-"
    made = ready(1, f"{mode}mean")
    assert apart(train(made, rollout).actor, train(made, merged(rollout)).actor) > 0.1
    made = ready(1, f"{mode}sum")  # a sum over tokens, divided by the number of rows
    steps, joined = train(made, rollout), train(made, merged(rollout))
    assert apart(41 * steps.actor, 14 * joined.actor) < CLOSE


# --- pictures ---------------------------------------------------------------------------------------------------------

SEES = [
    f"turnkey.modules=[{AWKWARD}]",
    "turnkey.env.hosts=1",
    "turnkey.rollout.prompt=conversation",
    "turnkey.rollout.max_turns=3",
    "turnkey.rollout.max_tokens_per_turn=12",
    "data.max_prompt_length=300",
    "data.max_response_length=300",
]


@dataclass
class Pictured:
    """A model that sees, its episodes in both layouts, and the twin of an update on them."""

    model: Seeing
    rollouts: dict[str, Rollout]
    turns: list[Turn]
    log_probs: dict[Step, list[float]]
    credit: dict[Step, float]
    gradient: torch.Tensor

    def __str__(self) -> str:
        return self.model.hf_model_type


@pytest.fixture(scope="module", params=FAMILIES)
def pictured(request, ray_queue, compose, tokenizer, tmp_path_factory) -> Pictured:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "template.txt").write_text("{task}: {observation}\n")
    model, rollouts = seeing(folder, request.param, tokenizer), {}
    for layout in ("steps", "merged"):
        chosen = f"turnkey.rollout.layout={layout}", f"turnkey.rollout.template={folder}/template.txt"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop_worker, "_process", None)
            rollouts[layout], servers = looked(compose("+turnkey=gigpo", *SEES, *chosen), model)
    turns = onlooker(servers)
    return Pictured(model, rollouts, turns, *twin(model, turns))


def twin(model: Seeing, turns: list[Turn]) -> tuple[dict[Step, list[float]], dict[Step, float], torch.Tensor]:
    """Log-probabilities, credit and gradient of PPO: each turn by itself, by transformers alone, in float64."""
    policy = AutoModelForImageTextToText.from_pretrained(model.folder, dtype=torch.float64)
    rows = [
        {"group": g, "trajectory": (g, n), "step": t, "reward": turn.reward, "penalty": 0.0, "anchor": turn.state}
        for turn in turns
        for g, n, t in [turn.step]
    ]
    credit = {turn.step: value for turn, value in zip(turns, naive.gigpo(rows), strict=True)}
    number, log_probs, loss = noise("old_log_probs", OFF_POLICY), {}, torch.zeros((), dtype=torch.float64)
    for turn in turns:
        ids = torch.tensor([turn.prompt + turn.answer])
        inputs: dict[str, Any] = {"input_ids": ids}
        if turn.pictures:
            images = [Image.fromarray(picture) for picture in turn.pictures]
            inputs |= model.processor.image_processor(images, return_tensors="pt")
            inputs["pixel_values"] = inputs["pixel_values"].double()
            inputs["mm_token_type_ids"] = (ids == model.processor.image_token_id).int()
        logits = policy(**inputs).logits[0, len(turn.prompt) - 1 : -1].log_softmax(-1)
        now = logits.gather(1, torch.tensor(turn.answer)[:, None])[:, 0]
        log_probs[turn.step] = now.tolist()
        drift = torch.tensor([number((turn.step, place)) for place in range(len(now))], dtype=torch.float64)
        ratio, advantage = (now - (now.detach() + drift)).exp(), credit[turn.step]
        term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        loss = loss + (torch.clamp(term, max=-3 * advantage) if advantage < 0 else term).sum()
    (loss / sum(len(turn.answer) for turn in turns)).backward()
    return log_probs, credit, flat({name: parameter.grad for name, parameter in policy.named_parameters()})


def updated(ready: Callable[..., Any], pictured: Pictured, rows: Rollout, *overrides: str) -> Trained:
    path = f"actor_rollout_ref.model.path={pictured.model.folder}"
    size = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=400"
    made = ready(1, "critic.enable=false", path, size, *overrides, recipe="gigpo")
    return train(made, rows, **pictured.model.parts("processor", "tokenizer"))


def pictures_of(rows: Rollout) -> list[int]:
    return [len(o.multi_modal_data.get("images", ())) for outputs in rows.values() for o in outputs]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", ["merged", "steps"])
def test_an_update_on_pictures_is_that_of_each_turn_by_itself(ready, pictured, layout, packed):
    """Among the rows are some without a picture, a failed one, and in each micro-batch several."""
    rows, steps = pictured.rollouts[layout], pictured.log_probs.keys()
    done = updated(ready, pictured, rows, *(PACKED[:1] if packed else ()))
    assert done.columns["old_log_probs"].keys() == done.columns["advantages"].keys() == steps
    assert {*pictures_of(rows)} >= {0, 1, 3}
    assert sum(map(sum, done.micro_batches)) == len(pictures_of(rows)) > sum(map(len, done.micro_batches))
    differences = []
    for step, values in pictured.log_probs.items():
        differences += [abs(a - b) for a, b in zip(done.columns["old_log_probs"][step], values, strict=True)]
        assert done.columns["advantages"][step] == pytest.approx([pictured.credit[step]] * len(values), abs=CLOSE), step
    gradient = apart(pictured.gradient, done.actor)
    print(f"{pictured}, {layout}, {packed=}: log-probs {max(differences):.1e}, gradient {gradient:.1e}")
    assert max(differences) < CLOSE
    assert pictured.gradient.norm() > 1e-2
    assert gradient < CLOSE


def test_rows_without_pictures_are_a_micro_batch(ready, pictured):
    """Of words alone, of a failed episode, and verl's padding: verl's forward computes a blank picture."""
    rows = pictured.rollouts["merged"]
    words = {key: outputs for key, outputs in rows.items() if not sum(pictures_of({key: outputs}))}
    assert [*words] == [("a", 3), ("b", 0), ("b", 1)]
    done = updated(ready, pictured, words, "turnkey.update.mini_batches=2")
    assert sum(map(sum, done.micro_batches)) == 4
    for step, values in done.columns["old_log_probs"].items():
        assert values == pytest.approx(pictured.log_probs[step], abs=CLOSE), step
    assert done.actor.isfinite().all()
    assert done.actor.norm() > 1e-2


def test_pictures_of_another_turn_do_not_go_unnoticed(ready, pictured):
    rows = {key: outputs for key, outputs in pictured.rollouts["merged"].items() if key[0] == "a"}
    reversed_rows = changed(rows, lambda o: {"multi_modal_data": {"images": o.multi_modal_data["images"][::-1]}})
    right, wrong = (updated(ready, pictured, variant) for variant in (rows, reversed_rows))
    assert apart(right.actor, wrong.actor) > 100 * CLOSE


def test_only_pictures_tell_states_apart(pictured):
    """After their first moves the episodes 0 and 2 are where they have been, the episode 1 is elsewhere."""
    rows = pictured.rollouts["steps"]
    left, right, again = (rows["a", n][1].extra_fields["turnkey"]["steps"][0]["anchor"] for n in range(3))
    assert left == again != right
    assert {text for turn in pictured.turns for text, *_ in [turn.state]} == {"a room"}


def test_pictures_are_stored_once_per_episode(queue, pictured):
    """In the layout steps a conversation of one picture per turn holds T (T + 1) / 2 of them, a merged row T."""
    stored = {}
    for layout, rows in pictured.rollouts.items():
        with filled(rows, **pictured.model.parts("processor", "tokenizer")) as batch:
            data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["multi_modal_inputs"])
        inputs = data["multi_modal_inputs"]
        stored[layout] = sum(row["pixel_values"].nbytes for row in inputs if "pixel_values" in row)
    sizes = {turn.step: sum(picture.nbytes for picture in turn.pictures) for turn in pictured.turns}
    last = {step[:2]: size for step, size in sizes.items()}  # steps are in order
    times = 4 * 2  # float32, and both frames of a patch
    assert stored == {"steps": times * sum(sizes.values()), "merged": times * sum(last.values())}
    print(f"{pictured}: bytes of pixels {stored}")


@pytest.mark.parametrize("count", [0, 1])
def test_verls_forward_of_glm_reads_pictures(count):
    """Without its engine, which a GPU's attention is written into."""
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 8, "pad_token_id": 0}
    config = Glm4vConfig(text_config=text, vision_config=sight, image_token_id=7, video_token_id=6)
    ids = torch.tensor([[1, *[7] * 4 * count, 2]])
    pixels = {"pixel_values": torch.ones(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    model = Glm4vModel(config)
    embedded, _ = glm4v._get_input_embeds(model, ids, **(pixels if count else {}))
    torch.testing.assert_close(embedded[:, [0, -1]], model.get_input_embeddings()(ids[:, [0, -1]]))
    if count:
        seen = model.visual(pixels["pixel_values"], grid_thw=pixels["image_grid_thw"])
        torch.testing.assert_close(embedded[0, 1:-1], getattr(seen, "pooler_output", seen))
    else:
        assert embedded.shape == (1, 2, 32)
