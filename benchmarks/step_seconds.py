"""Where a training step of the quickstart spends its time.

    python benchmarks/step_seconds.py run runs/quickstart             # seconds of each phase, as the run timed them
    python benchmarks/step_seconds.py engine runs/quickstart/model    # an update of padded rows, and one of trees

``engine`` builds verl's FSDP2 engine and gives it the conversations of a step: groups of one task, by noisy players. It
runs the forward and backward passes of one update, in turn with and without shared prefixes, on one thread. It prints
CPU seconds, which other programs change less than the clock's, and how far the gradients differ.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from tensordict import TensorDict

sys.path.append(str(Path(__file__).parents[1] / "examples" / "quickstart"))

from imitation import IGNORE, demonstrations, encode
from report import read_metrics

from verl_turnkey.plugins.cli.tables import table

PHASES = {"rollout": "gen", "old log-probs": "old_log_prob", "advantages": "adv", "update": "update_actor"}
PHASES |= {"weights to the server": "update_weights", "checkpoint": "save_checkpoint", "validation": "testing"}

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def run(folder: Annotated[Path, typer.Argument(help="of a run of examples/quickstart.sh")]) -> None:
    """Print the seconds of each phase, step by step; the rest is what verl does not time by name."""
    rows = []
    for step, data in read_metrics(folder).items():
        seconds = {name: data.get(f"timing_s/{key}", 0.0) for name, key in PHASES.items()}
        whole = data.get("timing_s/step", sum(seconds.values()))
        rows.append([str(step), *(f"{s:.1f}" for s in seconds.values()), f"{whole:.1f}"])
    print(table(["step", *PHASES, "whole step"], rows), end="")


@app.command()
def engine(
    model: Annotated[Path, typer.Argument(help="folder of a chat model")],
    groups: Annotated[int, typer.Option(help="tasks")] = 4,
    rollouts: Annotated[int, typer.Option(help="conversations of each")] = 8,
    tokens: Annotated[int, typer.Option(help="of a micro-batch")] = 1024,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    reshard: Annotated[bool, typer.Option(help="free gathered weights after each forward pass")] = True,
    repeats: Annotated[int, typer.Option(help="of each way")] = 2,
) -> None:
    """Print CPU seconds of forward and backward passes over one batch: padded rows, then trees."""
    os.environ.update(TURNKEY_DEVICE="cpu", HF_HUB_OFFLINE="1", VERL_LOGGING_LEVEL="ERROR")  # before verl's import
    torch.set_num_threads(1)
    trained = engine_of(model, dtype, reshard)
    rows = conversations(model, groups, rollouts)
    seconds: dict[str, list[float]] = {"padded rows": [], "trees": []}
    grads: dict[str, torch.Tensor] = {}
    sizes: dict[str, list[int]] = {}
    forward = trained.module.register_forward_pre_hook(
        lambda module, args, kwargs: sizes[way].append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    for _ in range(repeats):
        for way, switch in zip(seconds, "01", strict=True):
            os.environ["TURNKEY_SHARED_PREFIXES"], sizes[way] = switch, []
            trained.optimizer_zero_grad()
            began = time.process_time()
            with trained.train_mode():
                trained.forward_backward_batch(batch_of(rows, tokens), negative_log_likelihood)
                seconds[way].append(time.process_time() - began)
                grads[way] = torch.cat([p.grad.full_tensor().flatten() for p in trained.module.parameters()])
    forward.remove()
    cells = [[way, len(sizes[way]), sum(sizes[way]), f"{median(seconds[way]):.1f}"] for way in seconds]
    print(f"{len(rows)} rows, {sum(len(ids) for ids, _ in rows)} tokens, {dtype}, {reshard=}")
    print(table(["computed as", "micro-batches", "tokens with padding", "CPU seconds"], cells))
    error = (grads["trees"] - grads["padded rows"]).norm() / grads["padded rows"].norm()
    ratio = median(seconds["trees"]) / median(seconds["padded rows"])
    print(f"trees take {ratio:.2f} of the time of padded rows; their gradients differ by {error:.1e} of the norm")


def conversations(model: Path, groups: int, rollouts: int) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of noisy players' conversations, ``rollouts`` of each task; rows of a task adjoin."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    players = [demonstrations({}, range(groups), noise=0.3, seed=player) for player in range(rollouts)]
    of_player = [[encode(tokenizer, messages) for messages in player] for player in players]
    return [rows[group] for group in range(groups) for rows in of_player]


def batch_of(rows: list[tuple[list[int], list[int]]], tokens: int) -> TensorDict:
    """What verl's engine gets: the prompt's tokens outside of the loss mask."""
    from verl.utils import tensordict_utils as tu

    def nested(columns: list[list[int]]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(column) for column in columns], layout=torch.jagged)

    starts = [next(i for i, label in enumerate(labels) if label != IGNORE) for _, labels in rows]
    mask = nested([[int(x != IGNORE) for x in labels[start:]] for (_, labels), start in zip(rows, starts, strict=True)])
    columns: dict[str, Any] = {"input_ids": nested([ids for ids, _ in rows]), "loss_mask": mask}
    columns |= {"position_ids": nested([list(range(len(ids))) for ids, _ in rows]), "response_mask": mask}
    data = TensorDict({**columns, "temperature": torch.ones(len(rows))}, batch_size=len(rows))
    tu.assign_non_tensor(data, use_remove_padding=False, use_dynamic_bsz=True, max_token_len_per_gpu=tokens)
    return data


def negative_log_likelihood(model_output: dict[str, Any], data: TensorDict, dp_group: Any) -> tuple[torch.Tensor, dict]:
    """Mean over the tokens of the batch."""
    return -model_output["log_probs"].values().sum() / data["batch_num_tokens"], {}


def engine_of(model: Path, dtype: str, reshard: bool) -> Any:
    """verl's engine with FSDP2 in this process, as the quickstart's actor has it."""
    import torch.distributed as dist
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    config = HFModelConfig(
        path=str(model),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    made = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=config,
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            dtype="float32",
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            reshard_after_forward=reshard,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-5, total_training_steps=10),
        checkpoint_config=None,
    )
    made.initialize()
    return made


if __name__ == "__main__":
    app()
