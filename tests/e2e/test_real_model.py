"""A real language model through the quickstart: fetched, imitating, trained, validated, shown, evaluated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from verl_turnkey.plugins.view.join import read

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from real_tokenizers import tokenizer

pytestmark = pytest.mark.long

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.py"
TURNKEY = Path(sys.executable).with_name("turnkey")
TASKS = 8


VALIDATION = "actor_rollout_ref.rollout.val_kwargs"
# verl's V1 trainers are greedy at temperature 0, whatever do_sample says.
GREEDY = [f"--override={VALIDATION}.temperature=0", f"--override={VALIDATION}.do_sample=false"]


def precision(generation: str, training: str) -> list[str]:
    """Overrides that fix what depends on the processor."""
    trained = "fsdp_config.mixed_precision.param_dtype"
    options = [f"rollout.dtype={generation}", f"actor.{trained}={training}", f"ref.{trained}={training}"]
    return [f"--override=actor_rollout_ref.{option}" for option in options]


FLOAT32 = precision("float32", "fp32")
BFLOAT16 = precision("bfloat16", "bf16")


def quickstart(out: Path, *options: str) -> Path:
    """A run of the quickstart with SmolLM2-135M on errands, which computes log-probabilities on both sides."""
    both = "--override=algorithm.rollout_correction.bypass_mode=false"
    command = [sys.executable, QUICKSTART, "--out", out, "--n-val", str(TASKS), both, *options]
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE)
    assert result.returncode == 0, result.stdout[-4000:]
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of gigpo in bf16, validated greedily, one episode after another."""
    options = ["--steps", "2", "--override=trainer.save_freq=2", "--override=data.val_batch_size=1", *GREEDY, *BFLOAT16]
    return quickstart(tmp_path_factory.mktemp("real") / "run", *options)


def metrics(out: Path) -> dict[int, dict[str, float]]:
    lines = (json.loads(line) for path in out.glob("metrics-*.jsonl") for line in path.read_text().splitlines())
    return {line["step"]: line["data"] for line in lines}


def test_it_trains_in_merged_rows_and_both_sides_agree_on_probabilities(trained: Path) -> None:
    steps = metrics(trained)
    assert set(steps) == {0, 1, 2}
    for step in (1, 2):
        # bf16 on both sides, but by other kernels.
        assert steps[step]["training/rollout_probs_diff_mean"] < 0.02
        assert steps[step]["actor/grad_norm"] > 0
        assert steps[step]["episode/failed"] == 0
    episodes = read(trained / "turnkey_log", "episodes")
    turns = read(trained / "turnkey_log", "turns")
    rows = turns[turns["episode"].isin(episodes[episodes["split"] == "train"]["episode"])].groupby("episode")["row"]
    assert (rows.nunique() == 1).all(), "a conversation is one row"
    assert (trained / "view.html").stat().st_size > 100_000


def test_after_the_warm_start_most_of_its_actions_are_valid(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["invalid_before"] < 0.5
    assert 0 < summary["success_before"] < 1
    assert summary["n_val"] == TASKS


def test_evaluating_its_checkpoint_greedily_repeats_the_validation(trained: Path, tmp_path: Path) -> None:
    """One episode at a time on both sides: what is computed together changes logits in their last digits."""
    checkpoint = trained / "checkpoints" / "global_step_2"
    options = ["--checkpoint", checkpoint, "--tasks", trained / "tasks" / "val.parquet", "--greedy", "--out", tmp_path]
    options += ["--concurrency", "1"]
    overrides = [
        "data.max_prompt_length=160",
        "data.max_response_length=400",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    ]
    subprocess.run([TURNKEY, "eval", "errands", *options, *overrides], check=True, timeout=1800)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["complete"], result["samples"]) == (True, TASKS)
    episodes = read(trained / "turnkey_log", "episodes")
    validated = episodes[episodes["validation"] & (episodes["global_step"] == 2)]
    assert len(validated) == TASKS
    solved = dict(zip(validated["seed"], validated["success"], strict=True))
    assert {task["seed"]: bool(task["solved"]) for task in result["tasks"]} == solved


def test_a_critic_trains_on_merged_rows(tmp_path: Path) -> None:
    steps = metrics(quickstart(tmp_path / "run", "--steps", "2", "--method", "turn_gae"))
    for step in (1, 2):
        assert steps[step]["critic/grad_norm"] > 0
        assert steps[step]["actor/grad_norm"] > 0
        assert 0 < steps[step]["critic/vf_loss"] < 10
    assert abs(steps[2]["critic/values/mean"]) < 2


def test_lora_trains_it_as_vllm_plays_it(tmp_path: Path) -> None:
    options = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"]
    options += ["actor_rollout_ref.actor.optim.lr=1e-3"]
    overrides = [f"--override={option}" for option in options]
    steps = metrics(quickstart(tmp_path / "run", "--steps", "2", *overrides))
    assert all(steps[step]["training/rollout_probs_diff_mean"] < 0.02 for step in (1, 2))
    assert steps[2]["actor/grad_norm"] > 0


def test_bf16_and_fp32_agree_within_bounds(trained: Path, tmp_path: Path) -> None:
    exact = metrics(quickstart(tmp_path / "run", "--steps", "1", *GREEDY, *FLOAT32))
    rounded = metrics(trained)
    assert exact[1]["training/rollout_probs_diff_mean"] < 1e-4
    assert exact[1]["training/rollout_probs_diff_mean"] < rounded[1]["training/rollout_probs_diff_mean"]
    # The same model plays the same tasks greedily: where rounding turns a near tie, an episode may go another way.
    success = [next(v for k, v in run[0].items() if k.startswith("val-core/")) for run in (exact, rounded)]
    assert abs(success[0] - success[1]) <= 2 / TASKS
    assert exact[1]["actor/entropy"] == pytest.approx(rounded[1]["actor/entropy"], rel=0.5)


def gemma(folder: Path) -> Path:
    """Gemma 3 with random weights, two layers, one of them with a sliding window, and the tokenizer as published."""
    made = tokenizer("gemma3")
    torch.manual_seed(0)
    ends = made.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=256, sliding_window=64, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=2048, bos_token_id=2, eos_token_id=ends, pad_token_id=0,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def test_another_family_whose_roles_must_alternate(tmp_path: Path) -> None:
    run = quickstart(tmp_path / "run", "--model", str(gemma(tmp_path / "gemma")), "--steps", "1", *FLOAT32)
    step = metrics(run)[1]
    assert step["training/rollout_probs_diff_mean"] < 1e-4
    assert step["actor/grad_norm"] > 0
    assert step["episode/failed"] == 0
    episodes, turns = (read(run / "turnkey_log", table) for table in ("episodes", "turns"))
    played = turns[turns["episode"].isin(episodes[episodes["split"] == "train"]["episode"])].groupby("episode")
    assert played["turn"].nunique().max() > 1
    assert (played["row"].nunique() == 1).all()
