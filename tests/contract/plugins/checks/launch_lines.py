"""Launch lines of ``tests/data/launch_lines.yaml``, behind an ordinary script of a user's own (``BASE``).

``{train}`` and the like stand for what :func:`write_files` makes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import yaml
from transformers import AutoTokenizer

from verl_turnkey.advantage import EstimatorSpec
from verl_turnkey.envs.tasks import Task, make_panel, write_parquet
from verl_turnkey.plugins.cli.tables import shipped
from verl_turnkey.plugins.config import playing
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.foreign_keys import WITHOUT_INPUT

ROOT = Path(__file__).parents[4]
BASE = """
    data.train_files={train} data.val_files={val} data.train_batch_size=4 data.max_prompt_length=1200
    data.max_response_length=16 data.filter_overlong_prompts=True data.truncation=error
    actor_rollout_ref.model.path={model} actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=2
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=2
    trainer.critic_warmup=0 trainer.logger=[console] trainer.project_name=ours trainer.experiment_name=first
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15
    trainer.default_local_dir={tmp}/checkpoints
"""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0
"""

PICTURES = """
import gymnasium
import numpy

class Pictures(gymnasium.Env):
    def __init__(self, images=1, size=28):
        self.images = [numpy.zeros((size, size, 3), "uint8")] * images

    def reset(self, *, seed=None, options=None):
        return "you see", {"task": "look", "images": self.images}

    def step(self, action):
        return "you saw", 1.0, True, False, {}

gymnasium.register("lines/Pictures-v0", Pictures)
"""


def write_llava(folder: Path, model: Path) -> None:
    """A vision-language model that transformers knows and verl does not."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    LlavaProcessor(CLIPImageProcessor(), tokenizer, patch_size=14).save_pretrained(folder)
    LlavaConfig().save_pretrained(folder)


def write_qwen_vl(folder: Path, model: Path) -> None:
    """The files of a vision-language model that verl knows, but its weights: a token is a square of 28 pixels."""
    from transformers import Qwen2_5_VLConfig

    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    Qwen2_5_VLConfig().save_pretrained(folder)
    sizes = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    processor = {"processor_class": "Qwen2_5_VLProcessor", "image_processor_type": "Qwen2VLImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def columns_from_answers(spec: EstimatorSpec) -> str:
    """The rewards of a line with the method ``spec``: where it reads columns, components that give them."""
    columns = [name.removeprefix("extra.") for name in spec.needs if name.startswith("extra.")]
    parts = ["{name: step}", *(f"{{name: step, label: {name}, column: {name}}}" for name in columns)]
    return f"'turnkey.rewards=[{','.join(parts)}]'" if columns else ""


def write_files(folder: Path, model: Path) -> dict[str, str]:
    """The files of all lines; their paths by placeholder."""
    write_parquet(folder / "train.parquet", [Task("turnkey/MiniGrid-v0", seed) for seed in range(8)], "grid", "train")
    write_parquet(
        folder / "val.parquet", [Task("turnkey/MiniGrid-v0", seed) for seed in range(100, 104)], "grid", "val"
    )
    settings = playing.settings(
        composed(["+turnkey=base", "data.max_prompt_length=1200", "data.max_response_length=16"])
    )
    panel = make_panel("panel", "turnkey/MiniGrid-v0", {}, settings, number=4, with_starts=False)
    panel.write_parquet(folder / "panel.parquet", panel.tasks({}))
    good = pd.read_parquet(folder / "train.parquet")
    good[["prompt", "turnkey_task"]].to_json(folder / "two.jsonl", orient="records", lines=True)
    (folder / "shout.py").write_text(
        "def shout(text, admissible):\n    return text\n\n\nshout.instruction = 'Shout.'\n"
    )

    def with_task(name: str, row: int, text: str | None) -> None:
        rows = good.copy()
        rows.loc[row, "turnkey_task"] = text
        rows.to_parquet(folder / f"{name}.parquet")

    def task(env_id: str = "turnkey/MiniGrid-v0", **kwargs: object) -> str:
        return Task(env_id, 1, kwargs).to_json()

    with_task("prose_in_row_5", 5, "DoorKey, please")
    with_task("nothing_in_row_6", 6, None)
    with_task("list_in_row_1", 1, "[1, 2]")
    with_task("text_seed_in_row_7", 7, json.dumps({"env_id": "turnkey/MiniGrid-v0", "seed": "one"}))
    with_task("no_seed_in_row_2", 2, json.dumps({"env_id": "turnkey/MiniGrid-v0"}))
    with_task("more_fields_in_row_3", 3, json.dumps({"env_id": "turnkey/MiniGrid-v0", "seed": 1, "level": "x"}))
    with_task("unknown_id_in_row_4", 4, task("turnkey/MiniGird-v0"))
    with_task("unregistered_in_row_7", 7, task("mine/Shop-v0"))
    with_task("unknown_kwarg_in_row_6", 6, task(levle="MiniGrid-DoorKey-5x5-v0"))
    with_task("no_id_in_row_3", 3, task(""))
    loops = ["single_turn_agent"] * 7
    good.assign(agent_name=[*loops, "tool_agnet"]).to_parquet(folder / "loop_in_row_7.parquet")
    good.assign(agent_name=["turnkey_env", *loops]).drop(columns="turnkey_task").to_parquet(
        folder / "mixed_without_tasks.parquet"
    )
    good.assign(agent_name=["turnkey_env"] * 4 + ["tool_agent"] * 4).to_parquet(folder / "mixed.parquet")
    good.assign(agent_name="turnkey_env").to_parquet(folder / "own.parquet")
    harbor = {name: str(ROOT / "examples/harbor" / name) for name in ("median", "missing")}
    for name, path in harbor.items():
        write_parquet(folder / f"harbor_{name}.parquet", [Task("harbor", 0, {"path": path})] * 8, "harbor", "train")
    math = good.drop(columns="turnkey_task")
    math.to_parquet(folder / "math.parquet")
    math.assign(agent_name="tool_agent").to_parquet(folder / "tool.parquet")
    both = pd.concat([math.assign(agent_name="tool_agent"), good.assign(agent_name="turnkey_env")])
    both.to_parquet(folder / "both.parquet")
    good.drop(columns="prompt").to_parquet(folder / "promptless.parquet")
    good.rename(columns={"prompt": "question"}).to_parquet(folder / "question.parquet")
    good.iloc[:0].to_parquet(folder / "none.parquet")
    good.iloc[:3].to_parquet(folder / "few.parquet")
    rows = good.to_dict("records")
    for row in rows:
        row["prompt"] = list(row["prompt"])
    for name, cells in {
        "null_prompt_in_row_3": {"prompt": [*good["prompt"][:3], None, *good["prompt"][4:]]},
        "text_info": {"extra_info": '{"index": 0}'},
        "text_truth": {"reward_model": '{"ground_truth": "7"}'},
        "pictured": {"images": [[]] * 7 + [["a.png"]]},
    }.items():
        good.assign(**cells).to_parquet(folder / f"{name}.parquet")
    (folder / "odd_tools.yaml").write_bytes("tools: []  # Tür\n".encode("latin-1"))
    good.assign(__rollout_n__=2).to_parquet(folder / "counted.parquet")
    good.assign(turnkey_hint="go left").to_parquet(folder / "hinted.parquet")
    (folder / "run[1]").mkdir()
    good.to_parquet(folder / "run[1]" / "train.parquet")
    (folder / "taskless.txt").write_text("{observation}\n")
    (folder / "train.json").write_text(json.dumps(rows))
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "broken.jsonl").write_text('{"prompt": [}\n')
    (folder / "texts.jsonl").write_text('"a"\n"b"\n')
    (folder / "garbage.parquet").write_bytes(b"PAR1 this is not parquet PAR1")
    (folder / "empty.parquet").write_bytes(b"")
    (folder / "folder.parquet").mkdir()
    (folder / "train.csv").write_text("prompt\nhello\n")
    (folder / "plain_file").write_text("")
    (folder / "odd.txt").write_text("{observaton}\n{observation}\n")
    (folder / "bare").mkdir()
    (folder / "pictures.py").write_text(PICTURES)
    write_parquet(folder / "pictures.parquet", [Task("lines/Pictures-v0", seed) for seed in range(8)], "x", "train")
    write_llava(folder / "llava", model)
    write_qwen_vl(folder / "qwen_vl", model)
    (folder / "reward.py").write_text(REWARD)
    (folder / "loops.yaml").write_text("- name: mine\n  _target_: mine.Loop\n")
    (folder / "no_loops.yaml").write_text("name: mine\n")
    balancer = "verl.workers.rollout.router.GlobalRequestLoadBalancer"
    (folder / "router.yaml").write_text(f"router_class: {balancer}\n")
    (folder / "lost_router.yaml").write_text("router_class: no.such.Router\n")
    (folder / "dataset.py").write_text("from torch.utils.data import Dataset\n\n\nclass Mine(Dataset):\n    pass\n")
    for name, tool in {"tools": "verl.tools.base_tool.BaseTool", "strange_tools": "nowhere.tools.Hammer"}.items():
        (folder / f"{name}.yaml").write_text(f"tools: [{{class_name: {tool}, config: {{type: native}}}}]\n")
    for name, own in {"model": {}, "short": {"max_position_embeddings": 1024}, "distilled": {}}.items():
        (folder / name).mkdir()
        for file in model.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                text = file.read_text()  # like DeepSeek-R1's distills, which have Qwen's type and not its tokens
                (folder / name / file.name).write_text(text.replace("im_end", "end") if name == "distilled" else text)
        shape = json.loads((model / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**shape, "num_attention_heads": 4, **own}))
    shutil.copytree(folder / "model", folder / "weights")
    shutil.copytree(folder / "model", folder / "other_tokens")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder / "other_tokens")
    shutil.copy(model / "model.safetensors", folder / "weights")
    placeholders = {"train": "train.parquet", "val": "val.parquet", "model": "model", "tmp": ""}
    return {name: str(folder / path) for name, path in placeholders.items()}


def filled(line: str, files: dict[str, str]) -> str:
    """``BASE`` and the line, with the paths of the files."""
    text = f"{BASE} {line}"
    for name, path in files.items():
        text = text.replace(f"{{{name}}}", path)
    return text


TABLE = yaml.load((ROOT / "tests/data/launch_lines.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
REFUSED: list[tuple[str, str]] = [
    *(
        (f"{part.get('start', '')} {row['line']}".strip(), row["words"])
        for part in TABLE["refused"].values()
        for row in part["lines"]
    ),
    *(
        (f"+turnkey=base algorithm.adv_estimator={name}", f"algorithm.adv_estimator={name} | choose another")
        for name in WITHOUT_INPUT
    ),
]
"""lines, and the words of the message, between bars"""
STARTS: list[str] = [
    *TABLE["starts"],
    *(
        f"+turnkey={name} {columns_from_answers(spec)}".strip()
        for name, spec in shipped().items()
        if "value" not in spec.needs
    ),
]
