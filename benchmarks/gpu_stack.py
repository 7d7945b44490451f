"""The parts of gpu_check.py that need verl or vLLM, each in processes of its own.

In training the model writes 60 tokens in each turn, none of them an action, and the game answers with text, so that
episodes are as long as those of text games. ``stack`` compares the costs of two steps of each layout and loss with
random weights, of which the second is measured.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from verl_turnkey.plugins.view.runs import read

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
MATRIX = (TESTS / "contract" / "plugins" / "actor", TESTS / "unit")
"""whose cases and processes the part ``sequence-parallel`` shares"""
sys.path.insert(0, str(HERE.parent / "examples" / "quickstart"))

LAYOUTS = ("row per step", "conversation")
ON_STACK = ("vanilla", "st_ppo")
PARTS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")
SECOND = "actor/clipping_bias/seconds"
LONGEST = 32_768
"""tokens of prompt and responses that the model and the tokenizer allow"""
PACKAGES = {
    "sleep": ("vllm",),
    "tensor-parallel": ("vllm",),
    "sequence-parallel": ("verl", "peft", "pytest", "flash_attn"),
}
"""packages that a part needs; all other parts need verl and vLLM"""
GPUS = {"tensor-parallel": 2, "sequence-parallel": 2, "preset-7b": 4}
"""how many a part needs; all other parts need one"""
ON_CPU = ("sequence-parallel", "smollm2", "stack")
"""parts that a CPU runs with --tiny"""
TRAINED = {
    "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", None),
    "preset-7b": ("Qwen/Qwen2.5-7B-Instruct", "gigpo_alfworld_7b"),
}
"""part -> model and preset"""
STEPS = 4
MOST_SECONDS = 3600.0
"""of a program, with the download of a model"""
UPDATES_ALONE = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")
"""neither validations nor checkpoints, which of 7 B are 91 GB"""
AGREES = "training/rollout_actor_probs_pearson_corr"
"""verl's correlation of vLLM's probabilities with those of the trained model"""
SETUPS = {"1 rank": (1, 1, True, 0, ()), "2 ranks per sequence": (2, 2, True, 0, ())}
OFF, OFF_IN_BFLOAT16 = 1e-4, 0.4
"""how far a gradient may be from float64's, of its size: each in float32; in bfloat16 the median, 0.20 on a CPU"""
FURTHER = 1.5, 0.02
"""limit of the error on two ranks in bfloat16: this factor (1.31 on a CPU) times that on one rank, plus this"""
APART = 0.25
"""how far log-probabilities of one token may be apart in bfloat16"""


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """A model with random weights, and a tokenizer of bytes, which uses the first part of its vocabulary."""
    from model import build_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer([], [], pieces=r"\s+")  # of no texts: a token for each byte
    tokenizer.model_max_length = LONGEST
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=LONGEST,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)


def overrides(layout: str, loss: str, turns: int, answer: int, groups: int) -> list[str]:
    """Overrides of the launch line for a layout and a loss."""
    observation = 2 * answer + 100  # with the marks of a message
    length = turns * (answer + observation)
    prompts = {
        "row per step": ["turnkey.rollout.prompt=template", f"data.max_response_length={answer}"],
        "conversation": [
            "turnkey.rollout.prompt=conversation",
            f"turnkey.rollout.max_tokens_per_turn={answer}",
            f"data.max_response_length={length}",
        ],
    }
    return [
        f"+turnkey/loss={loss}",
        *prompts[layout],
        "turnkey.rollout.action_format=plain",
        f"turnkey.rollout.max_turns={turns}",
        f"++turnkey.env.kwargs={{turns: {turns}, length: {answer}}}",
        "data.max_prompt_length=4096",
        f"data.train_batch_size={groups}",
        # Two optimizer steps; with so narrow a clip the second pass of st_ppo has most rows, which is its worst case.
        f"actor_rollout_ref.actor.ppo_mini_batch_size={max(1, groups // 2)}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *(["turnkey.loss.clip_low=0.001", "turnkey.loss.clip_high=0.001"] if loss == "st_ppo" else []),
        "actor_rollout_ref.actor.strategy=fsdp2",
        *UPDATES_ALONE,
    ]


def command(model: Path | str, folder: Path, device: str, launch: Sequence[str], steps: int = 2) -> list[str]:
    """``turnkey train``, which checks the launch line and becomes verl's program."""
    turnkey = [
        str(Path(sys.executable).with_name("turnkey")),
        "train",
        f"{HERE / 'text_game.py'}:benchmarks/TextGame-v0",
    ]
    what = ["--model", str(model), "--device", "gpu" if device == "cuda" else device, "--steps", str(steps)]
    return [*turnkey, *what, "--out", str(folder), "--train", "64", "--val", "8", *launch]


def stack(
    name: str, shape: dict[str, int], turns: int, answer: int, groups: int, device: str, out: Path, more: list[str]
) -> list[dict[str, Any]]:
    """A row for each layout and loss; finished runs are not repeated. ``more``: further overrides."""
    model = out / name / "model"
    if not (model / "config.json").is_file():
        write_model(model, shape)
    table = []
    for layout, loss in product(LAYOUTS, ON_STACK):
        folder = out / name / f"{layout} {loss}".replace(" ", "-")
        if not (folder / "measured.json").is_file():
            eager = "actor_rollout_ref.rollout.enforce_eager=true"  # graphs take minutes to capture
            run(folder, command(model, folder, device, [*overrides(layout, loss, turns, answer, groups), eager, *more]))
            (folder / "measured.json").write_text(json.dumps(measured(folder), indent=1))
        row = {"model": name, "layout": layout, "loss": loss}
        table.append(row | json.loads((folder / "measured.json").read_text()))
    return table


def run(folder: Path, line: Sequence[str], **variables: str) -> None:
    """Run a program, whose output is in ``folder``.

    Raises:
        RuntimeError: it failed; with its last line.
        TimeoutExpired: it took longer than :data:`MOST_SECONDS`, and was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options: Any = {"stderr": subprocess.STDOUT, "env": {**os.environ, **variables}, "start_new_session": True}
    with (folder / "output.log").open("w") as log, subprocess.Popen(line, stdout=log, **options) as process:
        print(log.name, file=sys.stderr, flush=True)
        try:
            status = process.wait(MOST_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # and everything that it started
            raise
    if status:
        last = (folder / "output.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"status {status}, see {folder}/output.log: {''.join(last)}")


def judged(off: dict[str, dict[str, float]], exact: bool) -> list[dict[str, Any]]:
    """A row for each setup, from the errors of its cases; the first is that with one rank.

    In bfloat16 a token may be on the other side of a clip, which changes a gradient by any amount: other setups are
    compared with the first, case by case.
    """
    first, table = next(iter(off.values())), []
    for setup, cases in off.items():
        limits = {case: OFF if exact else FURTHER[0] * error + FURTHER[1] for case, error in first.items()}
        beyond = [case for case, error in cases.items() if not error < limits[case]]
        worst, middle = max(cases, key=lambda case: cases[case]), statistics.median(cases.values())
        row = {"setup": setup, "cases": len(cases), "worst": worst, "gradient_off": cases[worst], "median": middle}
        ok = not beyond and (exact or middle < OFF_IN_BFLOAT16)
        table.append(row | {"beyond the limit": ", ".join(beyond) or None, "ok": ok})
    return table


def measured(folder: Path) -> dict[str, Any]:
    """Tokens, seconds by part, our share of them, and the device's peak memory in the last step of a run."""
    last = {metric: float(values[-1]) for metric, values in read(folder).metrics.items()}
    parts = {part: last[f"timing_s/{part}"] for part in PARTS if f"timing_s/{part}" in last}
    ours = parts["adv"] + last.get(SECOND, 0.0)
    return {
        "tokens": int(last["perf/total_num_tokens"]),
        "seconds": parts["step"],
        "share": ours / parts["step"],
        "gib": last.get("perf/max_memory_allocated_gb"),
        "parts": {part: seconds for part, seconds in parts.items() if part != "step"}
        | ({"second pass": last[SECOND]} if SECOND in last else {}),
    }


@dataclass(frozen=True)
class Node:
    """The machine, and the sizes of gpu_check.py."""

    device: str
    gpus: int
    out: Path
    sizes: Any
    override: list[str]

    @property
    def tiny(self) -> bool:
        return "tiny" in self.sizes.models

    def lacks(self, part: str) -> str | None:
        """What the machine lacks for a part; None: nothing."""
        on_gpu = self.device == "cuda"
        packages = [name for name in PACKAGES.get(part, ("verl", "vllm")) if name != "flash_attn" or on_gpu]
        if absent := [name for name in packages if find_spec(name) is None]:
            return f"{' and '.join(absent)} not installed"
        if part == "sequence-parallel" and not TESTS.is_dir():
            return f"there is no {TESTS}"
        if not on_gpu and part in ON_CPU:
            return None if self.tiny else "on a CPU only with --tiny"
        number = GPUS.get(part, 1)
        return f"it needs {number} GPU{'s' * (number > 1)}, and there are {self.gpus}" if self.gpus < number else None

    def measure(self, part: str) -> list[dict[str, Any]]:
        """The table of a part."""
        if part == "stack":
            models = self.sizes.models.items()
            return [row for of in models for row in stack(*of, *self.lengths, self.device, self.out, self.override)]
        if part in TRAINED:
            return self.training(part)
        return {"sleep": self.sleep, "tensor-parallel": self.tensor, "sequence-parallel": self.sequence}[part]()

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Turns, tokens of an answer, and groups."""
        return self.sizes.turns, self.sizes.answer, max(2, self.sizes.groups // 4)

    def model(self) -> Path:
        """The smallest model, with random weights."""
        folder = self.out / next(iter(self.sizes.models)) / "model"
        if not (folder / "config.json").is_file():
            write_model(folder, next(iter(self.sizes.models.values())))
        return folder

    def in_vllm(self, task: str, parallel: int = 1) -> Any:
        """What ``task`` writes as JSON, in a process of its own."""
        folder = self.out / f"{task}-{parallel}"
        run(folder, [sys.executable, str(HERE / "gpu_stack.py"), task, str(self.model()), str(parallel), str(folder)])
        return json.loads((folder / "done.json").read_text())

    def sleep(self) -> list[dict[str, Any]]:
        return self.in_vllm("sleep")

    def tensor(self) -> list[dict[str, Any]]:
        """Log-probabilities of the same tokens on one GPU and on two."""
        log_probs = [self.in_vllm("log-probs", parallel) for parallel in (1, 2)]
        apart = [abs(a - b) for a, b in zip(*log_probs, strict=True)]
        mean = sum(apart) / len(apart)
        return [{"tokens": len(apart), "mean": mean, "furthest": max(apart), "ok": max(apart) < APART}]

    def sequence(self) -> list[dict[str, Any]]:
        """Gradients of every loss, by setup; on the CPU over gloo with a stand-in for flash attention."""
        sys.path[:0] = map(str, MATRIX)
        import test_parallel_matrix as matrix

        folder = self.out / "sequence"
        shutil.rmtree(folder, ignore_errors=True)  # with the rendezvous of a run that failed, ranks would wait
        folder.mkdir(parents=True)
        results = matrix.computed(folder, self.model(), SETUPS, self.device)
        off = {
            setup: {
                case: matrix.gradient_off(results.done[setup, 0][case], truth)
                for case, truth in results.expected[0].items()
            }
            for setup in SETUPS
        }
        return judged(off, exact=self.device != "cuda")

    def line(self, part: str) -> list[str]:
        """The command of a part that trains."""
        name, preset = TRAINED[part]
        of_preset = [f"+turnkey/preset={preset}", *UPDATES_ALONE]
        words = of_preset if preset else overrides(LAYOUTS[0], ON_STACK[0], *self.lengths)
        model = self.model() if self.tiny else name
        return command(model, self.out / part, self.device, [*words, *self.override], STEPS)

    def training(self, part: str) -> list[dict[str, Any]]:
        shutil.rmtree(self.out / part, ignore_errors=True)  # metrics of an earlier run would be taken for this one's
        run(self.out / part, self.line(part))
        metrics = read(self.out / part).metrics
        steps, norm = len(metrics["timing_s/step"]), float(metrics["actor/grad_norm"][-1])
        agrees = float(metrics[AGREES][-1]) if AGREES in metrics else None
        row = {"steps": steps, "gradient norm": norm, "vLLM agrees": agrees, **measured(self.out / part)}
        return [row | {"ok": steps == STEPS and math.isfinite(norm)}]


def vllm_task(task: str, model: str, parallel: int, folder: Path) -> None:
    """``sleep`` or ``log-probs``, in a process of its own."""
    from vllm import LLM, SamplingParams

    options: Any = {"dtype": "bfloat16", "seed": 0, "gpu_memory_utilization": 0.5, "max_model_len": 2048}
    engine = LLM(model, tensor_parallel_size=parallel, enable_sleep_mode=task == "sleep", **options)
    prompts: Any = [{"prompt_token_ids": [3 + (7 * i + j) % 200 for j in range(64)]} for i in range(8)]

    def generated() -> list[list[int]]:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
        return [list(output.outputs[0].token_ids) for output in outputs]

    if task == "log-probs":
        outputs = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        result: Any = [
            entry[token].logprob
            for output, prompt in zip(outputs, prompts, strict=True)
            for entry, token in zip(output.prompt_logprobs[1:], prompt["prompt_token_ids"][1:], strict=True)
        ]
    else:
        import torch

        before, result = generated(), []
        for level in (1, 2):  # 2 discards the weights, as verl does before an update
            awake = torch.cuda.mem_get_info()[0]
            engine.sleep(level=level)
            freed = torch.cuda.mem_get_info()[0] - awake
            engine.wake_up(tags=["weights"])
            if level == 2:
                engine.collective_rpc("reload_weights")
            engine.wake_up(tags=["kv_cache"])
            same = generated() == before
            result.append({"level": level, "freed, GB": freed / 1e9, "same tokens": same, "ok": same and freed > 0})
    (folder / "done.json").write_text(json.dumps(result))


if __name__ == "__main__":
    vllm_task(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
