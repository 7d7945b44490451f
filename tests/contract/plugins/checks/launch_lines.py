"""Launch lines as users type them, behind an ordinary script of their own (``BASE``): refused, warned about, started.

``{train}`` and the like stand for what :func:`write_files` makes. Under a start of the line: what follows it, and the
words that the message must hold, between bars.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
from transformers import AutoTokenizer

from verl_turnkey.advantage import EstimatorSpec
from verl_turnkey.envs.panels import make_panel
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.cli.recipes import shipped
from verl_turnkey.plugins.config import playing
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.foreign_keys import WITHOUT_INPUT

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
    def __init__(self, images=1):
        self.images = images

    def reset(self, *, seed=None, options=None):
        return "you see", {"task": "look", "images": [numpy.zeros((28, 28, 3), "uint8")] * self.images}

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
    harbor = {name: str(Path(__file__).parents[4] / "examples/harbor" / name) for name in ("median", "missing")}
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


GIGPO = "+turnkey=gigpo +turnkey/env=babyai"

SWITCHES = [
    ("+turnkey=gigop +turnkey/env=babyai", "gigop | gigpo"),
    ("+turnkey=gigpo +turnkey/env=babyia", "babyia | babyai"),
    ("+turnkey=gigpo +turnkey/loss=turnratio", "turnratio | turn_ratio"),
    ("+turnkey=gigpo +turnkey/device=tpu", "tpu | cpu"),
    ("+turnkey=gigpo +turnkey=hgpo", "turnkey"),
    ("turnkey=gigpo", "turnkey | +turnkey"),
    ("+turnkey=gigpo +turnkey/enviroment=babyai", "turnkey/enviroment | turnkey/env"),
    ("+turnkey=gigpo +turnkey/losses=st_ppo", "turnkey/losses | turnkey/loss"),
    ("+turnkey/env=babyai +turnkey=gigpo", "write +turnkey=gigpo before +turnkey/env=babyai"),
    ("+turnkey/loss=turn_ratio +turnkey=gigpo", "write +turnkey=gigpo before +turnkey/loss=turn_ratio"),
    ("+turnkey=base", "+turnkey=base | algorithm.adv_estimator"),
    ("+turnkey=base +turnkey/env=babyai critic.enable=true", "+turnkey=base | algorithm.adv_estimator"),
    ("+turnkey=base algorithm.adv_estimator=gpro", "algorithm.adv_estimator='gpro'"),
    ("+turnkey=base algorithm.adv_estimator=reinforce", "algorithm.adv_estimator='reinforce' | reinforce_plus"),
    ("algorithm.adv_estimator=gigpo", "trainer.v1.trainer_mode=turnkey_sync"),
    ("algorithm.adv_estimator=hgpo trainer.v1.trainer_mode=colocate_async", "turnkey_colocate_async"),
    ("algorithm.adv_estimator=grpo trainer.v1.trainer_mode=turnkey_snyc", "turnkey_snyc | turnkey_sync"),
    (
        "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=turn_ratio",
        "loss_mode=turn_ratio | trainer.v1.trainer_mode=turnkey_sync",
    ),
]

PARAMETERS = [
    ("turnkey.credit.gamma=1.5", "turnkey.credit.gamma | [0, 1] | 1.5"),
    ("turnkey.credit.gamma=high", "turnkey.credit.gamma | high"),
    ("turnkey.credit.gama=0.9", "gama"),
    ("+turnkey.credit.gama=0.9", "turnkey.credit.gama | 'gamma'"),
    ("turnkey.credit.norm=std", "turnkey.credit.norm | mean_std"),
    ("turnkey.credit.scope=epsiodes", "turnkey.credit.scope | trajectories"),
    ("turnkey.credit.step_advantage_w=lots", "turnkey.credit.step_advantage_w | lots"),
    ("turnkey.credit.epsilon=-1", "turnkey.credit.epsilon | -1"),
    ("'turnkey.credit.modify=[empgg]'", "turnkey.credit.modify[0] | 'empg'"),
    ("'turnkey.credit.modify=[{name: a_grae, alfa: 0.5}]'", "turnkey.credit.modify[0] (a_grae).alfa | 'alpha'"),
    ("'turnkey.credit.modify=[empg, empg]'", "turnkey.credit.modify[1] | 'empg' | twice"),
    ("turnkey.credit.modify=empg", "turnkey.credit.modify | a list | 'empg'"),
    ("+turnkey.loss.clip_low=0.1", "turnkey.loss | clip_low | vanilla"),
    ("turnkey.rollout.max_turns=0", "turnkey.rollout.max_turns | positive | 0"),
    ("turnkey.rollout.max_turns=many", "turnkey.rollout.max_turns | an integer | many"),
    ("turnkey.rollout.max_turn=5", "max_turn"),
    ("+turnkey.rollout.max_turn=5", "turnkey.rollout.max_turn | 'max_turns'"),
    ("turnkey.rollout.history=-1", "turnkey.rollout.history | zero or more"),
    ("\"turnkey.rollout.history_line='{step} {act}'\"", "turnkey.rollout.history_line | {act} | 'action'"),
    ("\"turnkey.rollout.history_line='{step}'\"", "turnkey.rollout.history_line | action"),
    ("turnkey.rollout.layout=trajectory", "turnkey.rollout.layout | steps | merged"),
    ("turnkey.rollout.anchor=observations", "turnkey.rollout.anchor | observation"),
    ("turnkey.rollout.action_format=tag", "turnkey.rollout.action_format | 'tags'"),
    ("turnkey.rollout.action_format=mine:act", "turnkey.rollout.action_format | mine:act"),
    ("turnkey.rollout.action_format=json", "turnkey.rollout.action_format=json | chat template"),
    (
        "turnkey.rollout.action_format=json actor_rollout_ref.rollout.multi_turn.format=hermess",
        "actor_rollout_ref.rollout.multi_turn.format=hermess | 'hermes'",
    ),
    ("turnkey.rollout.examples=absent.yaml", "turnkey.rollout.examples= | absent.yaml: a list of turns | No such file"),
    ("'turnkey.rollout.examples=[{observation: x, acton: go}]'", "examples[0].acton | 'action'"),
    (
        "turnkey.rollout.action_format=tags 'turnkey.rollout.examples=[{observation: x, response: go}]'",
        "turnkey.rollout.examples[0] | 'go' is not an example of turnkey.rollout.action_format=tags",
    ),
    (
        f"'turnkey.rollout.examples=[{{observation: {'wall ' * 2000}, action: go}}]'",
        "tokens, data.max_prompt_length allows | its examples",
    ),
    ("turnkey.rollout.template=defualt", "turnkey.rollout.template | defualt | 'default'"),
    ("turnkey.rollout.template={tmp}/odd.txt", "turnkey.rollout.template | {observaton} | 'observation'"),
    ("turnkey.rollout.template={tmp}/bare", "turnkey.rollout.template | bare"),
    ("actor_rollout_ref.model.path={tmp}/distilled", "model_type=qwen3 | <|im_end|> | model.tokenizer_path"),
    ("turnkey.rollout.summary=textwrap:shortn", "turnkey.rollout.summary | 'shorten'"),
    (
        "turnkey.rollout.summary=textwrap:shorten turnkey.rollout.template=minigrid",
        "turnkey.rollout.summary | {summary} | turnkey.rollout.template=minigrid",
    ),
    ("turnkey.rollout.stop=END", "turnkey.rollout.stop | a list | END"),
    ("turnkey.rollout.stop_token_ids=[end]", "turnkey.rollout.stop_token_ids | end"),
    ("turnkey.rollout.max_tokens_per_turn=0", "turnkey.rollout.max_tokens_per_turn | positive"),
    (
        "turnkey.rollout.max_tokens_per_turn=99",
        "turnkey.rollout.max_tokens_per_turn=99 | data.max_response_length=16",
    ),
    (
        "turnkey.rollout.prompt=conversation",
        "turnkey.rollout.max_tokens_per_turn, at most data.max_response_length=16",
    ),
    ("turnkey.rollout.prompt=chat", "turnkey.rollout.prompt | conversation"),
    ("turnkey.rollout.observation_role=tool", "turnkey.rollout.observation_role | json"),
    ("turnkey.rollout.invalid_action_penalty=-0.1", "turnkey.rollout.invalid_action_penalty | zero or more"),
    ("turnkey.update.mini_batches=0", "turnkey.update.mini_batches | positive"),
    ("turnkey.update.mini_batches=2.5", "turnkey.update.mini_batches | 2.5"),
    ("turnkey.update.order=reverse", "turnkey.update.order | reverse_turns"),
    ("turnkey.update.order=reverse_turns turnkey.update.mini_batches=2", "turnkey.update | mini_batches"),
    ("turnkey.update.ratio_clip=2", "turnkey.update.ratio_clip | (0, 1)"),
    ("turnkey.env.hosts=0", "turnkey.env.hosts | auto or a positive"),
    ("turnkey.env.hosts=some", "turnkey.env.hosts | some"),
    ("turnkey.env.step_timeout=0", "turnkey.env.step_timeout | positive seconds"),
    ("turnkey.env.reset_timeout=-5", "turnkey.env.reset_timeout | positive seconds"),
    ("turnkey.env.restarts=-1", "turnkey.env.restarts | zero or more"),
    ("turnkey.env.kwargs.level=BabyAI-GoToLokal-v0", "BabyAI-GoToLocal-v0"),
    ("+turnkey.env.kwargs.levle=x", "'levle' | 'level' | turnkey.env.kwargs"),
    ("+turnkey.enviroment.id=x", "turnkey.enviroment | env"),
    ("turnkey.modules=mine.py", "turnkey.modules | a list | mine.py"),
    ("turnkey.modules=[no_such_module]", "turnkey.modules | no_such_module"),
    ("turnkey.modules=[{tmp}/missing.py]", "turnkey.modules | missing.py"),
    ("turnkey.modules=[{tmp}/plain_file.py]", "turnkey.modules | plain_file.py"),
    ("turnkey.rewards=[]", "turnkey.rewards | at least one"),
    ("turnkey.rewards=step", "turnkey.rewards | a list | step"),
    ("'turnkey.rewards=[{name: stpe}]'", "turnkey.rewards[0].name | stpe | 'step'"),
    ("'turnkey.rewards=[{weight: 1}]'", "turnkey.rewards[0] | the name of a component"),
    ("'turnkey.rewards=[{name: length}]'", "turnkey.rewards[0].weight | below 0"),
    ("'turnkey.rewards=[{name: length, weight: 1}]'", "turnkey.rewards[0].weight | below 0"),
    ("'turnkey.rewards=[{name: step},{name: step}]'", "turnkey.rewards[1].label | 'step'"),
    ("'turnkey.rewards=[{name: potential}]'", "turnkey.rewards[0] | gamma"),
    ("'turnkey.rewards=[{name: step, column: turn_score}]'", "turnkey.rewards | none a reward | {name: step}"),
    (
        "'turnkey.rewards=[{name: step},{name: outcome, column: extra.turn_score}]'",
        "turnkey.rewards[1].column | extra.turn_score | write turn_score",
    ),
    ("'turnkey.rewards=[{name: step, wieght: 2}]'", "turnkey.rewards[0].wieght | 'weight'"),
    ("'turnkey.rewards=[{name: mine:bonus}]'", "turnkey.rewards[0].name | mine:bonus"),
    ("'turnkey.rewards=[{name: judge}]'", "turnkey.rewards[0] | url"),
    ("turnkey.log.trajectories=3", "turnkey.log.trajectories | 3"),
    ("turnkey.log.trajectories=hdfs://nn/log", "turnkey.log.trajectories=hdfs://nn/log | folder | every node"),
    ("turnkey.log.share=1.5", "turnkey.log.share | [0, 1] | 1.5"),
    ("turnkey.log.episodes_per_step=0", "turnkey.log.episodes_per_step | null or positive | 0"),
    ("turnkey.log.keep_text=5", "turnkey.log | keep_text"),
    ("data.max_prompt_length=50", "data.max_prompt_length allows 50"),
    ("trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode=turnkey_sync | gigpo"),
    ("trainer.v1.trainer_mode=turnkey_async", "turnkey_async | turnkey_"),
    ("trainer.use_v1=False", "trainer.use_v1=true"),
]

FILTER = "algorithm.filter_groups.enable=True"
DATA = [
    ("data.train_files={tmp}/missing.parquet", "data.train_files | missing.parquet | no such file"),
    ("data.val_files={tmp}/missing.parquet", "data.val_files | missing.parquet | no such file"),
    ("data.train_files=[{train},{tmp}/missing.parquet]", "data.train_files | missing.parquet | no such file"),
    (
        "'data.train_files=\"~/no/such/tasks.parquet\"'",
        "data.train_files | ~/no/such/tasks.parquet | no such file",
    ),
    ("data.train_files={tmp}/folder.parquet", "data.train_files | folder.parquet | no such file"),
    ("data.train_files={tmp}/train.csv", "data.train_files | train.csv | .parquet | .csv"),
    ("data.val_files={tmp}/train.csv", "data.val_files | train.csv | .parquet | .csv"),
    ("data.train_files={tmp}/plain_file", "data.train_files | plain_file | .parquet | no suffix"),
    ("data.train_files=hdfs://store/train.csv", "data.train_files | train.csv | .parquet"),
    ("data.train_files=null", "data.train_files is empty"),
    ("data.train_files=[]", "data.train_files is empty"),
    ("data.val_files=null", "data.val_files is empty | the training file"),
    ("data.val_files=[]", "data.val_files is empty"),
    ("data.train_files={tmp}/garbage.parquet", "data.train_files | garbage.parquet cannot be read"),
    ("data.val_files={tmp}/garbage.parquet", "data.val_files | garbage.parquet cannot be read"),
    ("data.train_files={tmp}/empty.parquet", "data.train_files | empty.parquet cannot be read"),
    ("data.train_files={tmp}/broken.jsonl", "data.train_files | broken.jsonl cannot be read"),
    ("data.train_files={tmp}/texts.jsonl", "data.train_files | texts.jsonl cannot be read | not an object"),
    ("data.train_files={tmp}/promptless.parquet", "data.train_files | 'prompt' | data.prompt_key"),
    ("data.val_files={tmp}/question.parquet", "data.val_files | 'prompt' | data.prompt_key"),
    ("data.prompt_key=promt", "'promt' | data.prompt_key | 'prompt'"),
    ("data.train_files={tmp}/math.parquet", "math.parquet has no column 'turnkey_task' | turnkey tasks"),
    ("data.val_files={tmp}/math.parquet", "math.parquet has no column 'turnkey_task' | turnkey tasks"),
    ("data.train_files=[{train},{tmp}/math.parquet]", "math.parquet has no column 'turnkey_task'"),
    ("data.train_files={tmp}/none.parquet", "data.train_files gives 0 tasks | data.train_batch_size=4"),
    ("data.val_files={tmp}/none.parquet", "data.val_files contains no tasks"),
    ("data.train_files={tmp}/few.parquet", "data.train_files gives 3 tasks | data.train_batch_size=4"),
    ("data.train_batch_size=9", "data.train_files gives 8 tasks | data.train_batch_size=9"),
    ("data.train_max_samples=2", "data.train_files gives 2 tasks | data.train_batch_size=4"),
    (
        f"{FILTER} algorithm.filter_groups.metric=acc data.gen_batch_size=64",
        "data.train_files gives 8 tasks | data.gen_batch_size=64",
    ),
    (
        "data.val_files={tmp}/null_prompt_in_row_3.parquet",
        "data.val_files | null_prompt_in_row_3.parquet, row 3, column 'prompt' | null",
    ),
    ("data.train_files={tmp}/prose_in_row_5.parquet", "row 5 | turnkey_task | DoorKey, please"),
    ("data.val_files={tmp}/prose_in_row_5.parquet", "data.val_files | row 5 | DoorKey, please"),
    ("data.train_files={tmp}/nothing_in_row_6.parquet", "row 6 | turnkey_task | None"),
    ("data.train_files={tmp}/list_in_row_1.parquet", "row 1 | turnkey_task | [1, 2]"),
    ("data.train_files={tmp}/text_seed_in_row_7.parquet", "row 7 | seed an integer"),
    ("data.train_files={tmp}/no_seed_in_row_2.parquet", "row 2 | seed"),
    ("data.train_files={tmp}/more_fields_in_row_3.parquet", "row 3 | unknown fields | level"),
    ("data.train_files={tmp}/unknown_id_in_row_4.parquet", "row 4 | MiniGird | turnkey/MiniGrid-v0"),
    ("data.val_files={tmp}/unknown_id_in_row_4.parquet", "data.val_files | row 4 | turnkey/MiniGrid-v0"),
    ("data.train_files={tmp}/unregistered_in_row_7.parquet", "row 7 | mine/Shop-v0 | turnkey.modules"),
    ("data.train_files={tmp}/unknown_kwarg_in_row_6.parquet", "row 6 | 'levle' | 'level'"),
    ("data.train_files={tmp}/no_id_in_row_3.parquet", "row 3 | turnkey.env.id | +turnkey/env="),
    ("data.train_files={tmp}/loop_in_row_7.parquet", "row 7 | 'tool_agnet' | agent_name | 'tool_agent'"),
    ("data.val_files={tmp}/loop_in_row_7.parquet", "data.val_files | row 7 | 'tool_agnet'"),
    ("data.train_files={tmp}/mixed_without_tasks.parquet", "has no column 'turnkey_task'"),
]

SIZES = [
    ("data.train_batch_size=0", "data.train_batch_size | 1 or more | 0"),
    ("data.train_batch_size=-4", "data.train_batch_size | 1 or more | -4"),
    ("data.train_batch_size=four", "data.train_batch_size | a whole number | 'four'"),
    ("data.train_batch_size=4.5", "data.train_batch_size | a whole number | 4.5"),
    ("data.max_response_length=0", "data.max_response_length | 1 or more | 0"),
    ("data.max_prompt_length=0", "data.max_prompt_length | 1 or more | 0"),
    ("data.max_prompt_length=1k", "data.max_prompt_length | a whole number | '1k'"),
    ("data.gen_batch_size=0", "data.gen_batch_size | 1 or more"),
    ("data.gen_batch_size=64", "data.gen_batch_size=64 | data.train_batch_size=4 | data.gen_batch_size=null"),
    ("data.gen_batch_size=3", "data.gen_batch_size=3 | data.train_batch_size=4 | a divisor"),
    ("actor_rollout_ref.rollout.n=0", "actor_rollout_ref.rollout.n: | 1 or more | 0"),
    ("actor_rollout_ref.rollout.n=-1", "actor_rollout_ref.rollout.n: | 1 or more | -1"),
    ("actor_rollout_ref.rollout.n=null", "actor_rollout_ref.rollout.n: | None"),
    ("actor_rollout_ref.rollout.val_kwargs.n=0", "actor_rollout_ref.rollout.val_kwargs.n | 1 or more"),
    (
        "actor_rollout_ref.rollout.agent.num_workers=0",
        "actor_rollout_ref.rollout.agent.num_workers | 1 or more",
    ),
    (
        "actor_rollout_ref.actor.ppo_mini_batch_size=0",
        "actor_rollout_ref.actor.ppo_mini_batch_size | 1 or more",
    ),
    ("actor_rollout_ref.actor.ppo_epochs=0", "actor_rollout_ref.actor.ppo_epochs | 1 or more"),
    ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node | 1 or more"),
    ("trainer.nnodes=0", "trainer.nnodes | 1 or more"),
    ("trainer.total_epochs=0", "trainer.total_epochs | 1 or more"),
    ("trainer.total_training_steps=0", "trainer.total_training_steps | 1 or more"),
    ("turnkey.groups.keep=0", "turnkey.groups.keep | a number in (0, 1]"),
    ("turnkey.groups.keep=0.2", "turnkey.groups.keep=0.2 | 4 groups | data.train_batch_size | 0.25 or more"),
    ("turnkey.groups.keep=0.5 actor_rollout_ref.rollout.n=1", "turnkey.groups.keep=0.5 | rollout.n=1 | 2 or more"),
    ("turnkey.groups.allocation=variances", "turnkey.groups.allocation | even | variance | prior"),
    (
        "turnkey.groups.allocation=variance",
        "allocation=variance | from 2 to 3 episodes | n_low < | rollout.n | < n_high",
    ),
    (
        "turnkey.groups.allocation=prior actor_rollout_ref.rollout.n=4 algorithm.filter_groups.enable=True "
        "algorithm.filter_groups.metric=acc",
        "turnkey.groups.allocation=prior | algorithm.filter_groups.enable=true | set it to false",
    ),
    ("turnkey.update.mini_batches=9", "turnkey.update.mini_batches=9 | 8 episodes | lower it to 8"),
    ("turnkey.update.mini_batches=1000", "turnkey.update.mini_batches=1000 | 8 episodes | lower it to 8"),
    (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024 | 1216 | data.max_prompt_length",
    ),
    (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=600 "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "ppo_max_token_len_per_gpu=600 | 2 GPUs | raise it to 608",
    ),
    (
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1024",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1024 | 1216",
    ),
    (
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1024",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1024 | 1216",
    ),
    (
        "critic.enable=true +critic.ppo_infer_max_token_len_per_gpu=1000",
        "+critic.ppo_infer_max_token_len_per_gpu=1000 | 1216",
    ),
    (
        "critic.enable=true data.max_prompt_length=32000 data.max_response_length=1000 "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40000",
        "critic.ppo_max_token_len_per_gpu=32768 | 33000",
    ),
    (
        "data.max_response_length=40000 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=50000",
        "41200 | max_position_embeddings | 32768 | data.max_response_length",
    ),
    (
        "actor_rollout_ref.model.path={tmp}/short",
        "1216 | max_position_embeddings | 1024 | data.max_prompt_length",
    ),
    (
        "actor_rollout_ref.rollout.max_model_len=1210",
        "1216 | actor_rollout_ref.rollout.max_model_len gives 1210",
    ),
    (
        "actor_rollout_ref.actor.use_dynamic_bsz=False",
        "actor_rollout_ref.actor.use_dynamic_bsz=false | ppo_micro_batch_size_per_gpu",
    ),
    (
        "actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size=16",
        "set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu | ppo_micro_batch_size=16 counts the rows of all",
    ),
    (
        "actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    ),
    (
        "actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    ),
    (
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.log_prob_use_dynamic_bsz=False",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false | ref.log_prob_micro_batch_size_per_gpu",
    ),
    (
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
        "actor_rollout_ref.actor.use_dynamic_bsz=True | actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
    ),
    (
        "actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 turnkey.update.order=reverse_turns",
        "turnkey.update.order=reverse_turns | actor_rollout_ref.actor.use_dynamic_bsz=true",
    ),
    ("critic.enable=true critic.use_dynamic_bsz=False", "critic | micro_batch_size"),
]

ENGINES = [
    ("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.name='hf' | sglang | vllm"),
    ("actor_rollout_ref.rollout.name=vlm", "actor_rollout_ref.rollout.name='vlm' | 'vllm'"),
    ("actor_rollout_ref.rollout.name=???", "actor_rollout_ref.rollout.name=vllm"),
    ("actor_rollout_ref.rollout.mode=sync", "actor_rollout_ref.rollout | mode=async"),
    ("+actor_rollout_ref.rollout.temprature=0.7", "actor_rollout_ref.rollout | temprature"),
    ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "actor_rollout_ref.rollout | pipeline"),
    ("actor_rollout_ref.rollout.agent.default_agent_loop=turnkey_evn", "'turnkey_evn' | 'turnkey_env'"),
    ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agnet", "'tool_agnet' | 'tool_agent'"),
    ("actor_rollout_ref.rollout.agent.default_agent_loop=mine", "default_agent_loop='mine' | tool_agent"),
    (
        "actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp}/missing.yaml",
        "agent_loop_config_path | missing",
    ),
    (
        "actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp}/no_loops.yaml",
        "agent_loop_config_path | read",
    ),
    ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", "enable_rollout_routing_replay=false"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "tensor_model_parallel_size | 3 GPUs | 8"),
    ("trainer.n_gpus_per_node=1", "tensor_model_parallel_size | 2 GPUs | 1 of trainer.nnodes"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=0", "tensor_model_parallel_size | 1 or more"),
    (
        "actor_rollout_ref.rollout.name=sglang turnkey.rollout.stop=[END]",
        "turnkey.rollout.stop | actor_rollout_ref.rollout.skip_tokenizer_init=true | stop_token_ids",
    ),
    (
        "actor_rollout_ref.rollout.name=sglang turnkey.rollout.strategy=probe",
        "turnkey.rollout.strategy.stop | actor_rollout_ref.rollout.skip_tokenizer_init=true | strategy.stop=[]",
    ),
    (
        "actor_rollout_ref.rollout.name=trtllm turnkey.rollout.max_tokens_per_turn=8",
        "turnkey.rollout.max_tokens_per_turn=8 | actor_rollout_ref.rollout.name=trtllm | data.max_response_length",
    ),
    (
        "actor_rollout_ref.rollout.name=trtllm turnkey.rollout.strategy=probe",
        "turnkey.rollout.strategy=probe | actor_rollout_ref.rollout.name=trtllm | name=vllm",
    ),
    (
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.strategy=megatron | model_engine=megatron",
    ),
    ("actor_rollout_ref.actor.strategy=fsdp3", "actor_rollout_ref.actor.strategy=fsdp3 | 'fsdp'"),
    ("actor_rollout_ref.actor.strategy=ddp", "actor_rollout_ref.actor.strategy=ddp | fsdp"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=gsop", "loss_mode='gsop' | 'gspo'"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=turnratio", "loss_mode='turnratio' | 'turn_ratio'"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=ppo", "loss_mode='ppo' | _ppo"),
    ("actor_rollout_ref.actor.loss_agg_mode=token_mean", "loss_agg_mode | token_mean"),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=rebel",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    ),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=a3po", "bypass_mode=true"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=hdpo", "loss_mode=hdpo | algorithm.adv_estimator=gigpo"),
    (
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var",
        "actor_rollout_ref.actor.kl_loss_type='low_var' | low_var_kl",
    ),
    ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=k4", "algorithm.kl_penalty='k4' | 'k"),
    ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=full", "algorithm.kl_penalty='full'"),
    ("trainer.logger=[console,wandbb]", "trainer.logger='wandbb' | 'wandb'"),
    ("trainer.logger=tensorbord", "trainer.logger='tensorbord' | 'tensorboard'"),
    ("trainer.logger=[console,swanlab]", "trainer.logger=swanlab | 'swanlab' | pip install"),
    ("trainer.logger=[console,clearml]", "trainer.logger=clearml | 'clearml' | pip install"),
    ("trainer.logger=[vemlp_wandb]", "trainer.logger=vemlp_wandb | 'volcengine_ml_platform' | pip install"),
    ("trainer.resume_mode=resume", "trainer.resume_mode='resume' | auto, disable, resume_path"),
    ("trainer.resume_mode=True", "trainer.resume_mode=True | auto, disable, resume_path"),
    ("trainer.resume_mode=resume_path", "trainer.resume_from_path | global_step_<number> | None"),
    (
        "trainer.resume_mode=resume_path trainer.resume_from_path={tmp}/new",
        "trainer.resume_from_path | global_step_<number> | /new",
    ),
    (
        "trainer.val_only=True trainer.val_before_train=False",
        "trainer.val_only=true | trainer.val_before_train=true",
    ),
    ("actor_rollout_ref.model.path={tmp}/no_model", "actor_rollout_ref.model.path | no_model | no such folder"),
    ("'actor_rollout_ref.model.path=\"~/models/Qwen2.5-7B\"'", "actor_rollout_ref.model.path | no such folder"),
    (
        "actor_rollout_ref.model.path=./models/qwen",
        "actor_rollout_ref.model.path=./models/qwen | no such folder",
    ),
    ("actor_rollout_ref.model.path=ckpt/global_step_5/actor", "actor_rollout_ref.model.path | no such folder"),
    (
        "'actor_rollout_ref.model.path=\"~/models/deepseek-llm-7b-chat\"'",
        "actor_rollout_ref.model.path | verl's default",
    ),
    ("actor_rollout_ref.model.path={tmp}/bare", "actor_rollout_ref.model.path | bare | config.json"),
    ("actor_rollout_ref.model.path=null", "actor_rollout_ref.model.path is null"),
    (
        "actor_rollout_ref.model.tokenizer_path={tmp}/no_tok",
        "actor_rollout_ref.model.tokenizer_path | no such folder",
    ),
    ("actor_rollout_ref.model.lora_adapter_path={tmp}/no_lora", "lora_adapter_path | no such folder"),
    ("critic.enable=true critic.model.path={tmp}/no_critic", "critic.model.path | no_critic | no such folder"),
    ("critic.enable=true critic.model.path={tmp}/bare", "critic.model.path | bare | config.json"),
    ("turnkey.log.trajectories={tmp}/plain_file/log", "turnkey.log.trajectories | plain_file is a file"),
    (
        "trainer.save_freq=10 trainer.default_local_dir={tmp}/plain_file/ckpt",
        "trainer.default_local_dir | plain_file is a file",
    ),
    ("trainer.rollout_data_dir={tmp}/plain_file/dump", "trainer.rollout_data_dir | plain_file is a file"),
    ("trainer.validation_data_dir={tmp}/plain_file/val", "trainer.validation_data_dir | plain_file is a file"),
    (
        "trainer.v1.trainer_mode=turnkey_separate_async",
        "data.train_batch_size | parameter_sync_step | 4 and 4 x 2",
    ),
    (
        "trainer.v1.trainer_mode=turnkey_separate_async trainer.v1.separate_async.parameter_sync_step=2",
        "turnkey_separate_async | actor_rollout_ref.rollout.nnodes | 0",
    ),
    (
        "trainer.v1.trainer_mode=turnkey_separate_async trainer.v1.separate_async.parameter_sync_step=2 "
        "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=0",
        "turnkey_separate_async | actor_rollout_ref.rollout.n_gpus_per_node | 0",
    ),
    (
        "trainer.v1.trainer_mode=turnkey_separate_async trainer.v1.separate_async.parameter_sync_step=2 "
        "actor_rollout_ref.rollout.nnodes=1",
        "turnkey_separate_async | actor_rollout_ref.rollout.checkpoint_engine.backend | naive",
    ),
    (
        "trainer.v1.trainer_mode=turnkey_separate_async trainer.v1.separate_async.parameter_sync_step=2 "
        "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=3",
        "tensor_model_parallel_size | 2 GPUs | 3 of actor_rollout_ref.rollout.nnodes",
    ),
]

PAY = [
    ("reward.custom_reward_function.path={tmp}/reward.py", "reward.custom_reward_function.path | {name: verl}"),
    (
        "reward.custom_reward_function.path={tmp}/none.py 'turnkey.rewards=[{name: verl}]'",
        "reward.custom_reward_function.path | none.py",
    ),
    (
        "reward.custom_reward_function.path={tmp}/reward.py reward.custom_reward_function.name=compute_scores "
        "'turnkey.rewards=[{name: verl}]'",
        "reward.custom_reward_function | compute_scores | 'compute_score'",
    ),
    ("'turnkey.rewards=[{name: verl}]'", "turnkey.rewards[0].path | reward.custom_reward_function.path"),
    (
        "custom_reward_function.path={tmp}/reward.py",
        "custom_reward_function.path | reward.custom_reward_function.path",
    ),
    ("reward_model.enable=True", "reward_model.enable | reward.reward_model.enable"),
    ("reward_model.reward_manager=dapo", "reward_model.reward_manager | reward.reward_manager.name"),
    (
        "reward.reward_model.enable=True reward.reward_model.model_path={model}",
        "reward.reward_model.enable=true | turnkey.rewards | judge",
    ),
    ("distillation.enabled=True", "distillation.enabled=false | turnkey_env"),
    (f"{FILTER} algorithm.filter_groups.metric=null", "algorithm.filter_groups.metric=reward"),
    (
        f"{FILTER} algorithm.filter_groups.metric=seq_reward",
        "algorithm.filter_groups.metric='seq_reward' | turnkey_env | reward, acc",
    ),
    (
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=None | must be provided",
    ),
    (
        "'algorithm.rollout_correction.rollout_rs=\"token_k2,token_k3\"' "
        "'algorithm.rollout_correction.rollout_rs_threshold=\"1,2,3\"'",
        "algorithm.rollout_correction.rollout_rs_threshold=1,2,3 | 2 thresholds",
    ),
    (
        "algorithm.rollout_correction.rollout_rs=geometric algorithm.rollout_correction.rollout_rs_threshold=2",
        "algorithm.rollout_correction.rollout_rs='geometric' | seq_mean_k1",
    ),
    (
        "algorithm.rollout_correction.rollout_is=tokens",
        "algorithm.rollout_correction.rollout_is='tokens' | 'token' | sequence",
    ),
    (
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0",
        "algorithm.rollout_correction.rollout_is_threshold=0 | positive",
    ),
    (
        "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.loss_type=reinforce | loss_mode=vanilla | loss_mode=bypass_mode",
    ),
    (
        "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is=token | bypass_mode=true | rollout_is=null",
    ),
    (
        "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs=token_k1 | bypass_mode=true | rollout_rs=null",
    ),
    (
        "+turnkey/loss=a3po algorithm.rollout_correction.rollout_is=sequence",
        "rollout_is=sequence | bypass_mode=true | +turnkey/loss=a3po sets it",
    ),
    (
        "algorithm.rollout_correction.rollout_is=token actor_rollout_ref.rollout.calculate_log_probs=False",
        "rollout_is=token | actor_rollout_ref.rollout.calculate_log_probs=true",
    ),
    (
        "algorithm.rollout_correction.bypass_mode=True actor_rollout_ref.rollout.calculate_log_probs=False",
        "bypass_mode=true | actor_rollout_ref.rollout.calculate_log_probs=true",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode algorithm.rollout_correction.rollout_is=token",
        "loss_mode=bypass_mode | algorithm.rollout_correction.bypass_mode=true",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode algorithm.rollout_correction.bypass_mode=True "
        "algorithm.rollout_correction.rollout_is=token "
        "+actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type=reinforce",
        "rollout_correction.rollout_is=token | policy_loss.rollout_correction is set | or drop one of the two",
    ),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=dro", "dro | policy_loss.dro_beta | None"),
    ("sandbox_fusion.url=http://sandbox", "sandbox_fusion.url=http://sandbox | reward.sandbox_fusion.url"),
    (
        "actor_rollout_ref.actor.checkpoint.async_save=True trainer.save_freq=5",
        "actor.checkpoint.async_save=true | Megatron | async_save=false",
    ),
    (
        "critic.enable=true critic.checkpoint.async_save=True trainer.save_freq=5",
        "critic.checkpoint.async_save=true | async_save=false",
    ),
    (
        "+turnkey/loss=rebel algorithm.rollout_correction.rollout_is=token",
        "rebel | algorithm.rollout_correction.rollout_is=null",
    ),
    (
        "+turnkey/loss=psft actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
        "+turnkey/loss=psft | loss_mode=vanilla | two policy losses | to train with psft | to train with vanilla",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo +turnkey/loss=turn_ratio",
        "drop actor_rollout_ref.actor.policy_loss.loss_mode=gspo to train with turn_ratio",
    ),
    ("+turnkey/loss=rebel actor_rollout_ref.actor.loss_agg_mode=token-mean", "seq-mean-token-mean"),
    ("+turnkey/loss=turn_ratio turnkey.loss.ratio=arithmetic", "turnkey.loss.ratio | geometric"),
    ("+turnkey/loss=turn_ratio +turnkey.loss.clip=0.1", "turnkey.loss.clip | 'clip_"),
    ("+turnkey/loss=hdpo", "hdpo | algorithm.adv_estimator=gigpo"),
]

EPISODES = "turnkey.update.weight_by=episode"
WEIGHTS = [
    ("turnkey.update.weight_by=turn", "turnkey.update.weight_by | 'token', 'step', 'episode', 'task' | 'turn'"),
    (
        "trainer.v1.trainer_mode=colocate_async turnkey.update.weight_by=task",
        "trainer.v1.trainer_mode=turnkey_colocate_async",
    ),
    *(
        (
            f"{EPISODES} actor_rollout_ref.actor.loss_agg_mode={mode}",
            f"{EPISODES} | actor_rollout_ref.actor.loss_agg_mode={mode} | {why} | =token-mean",
        )
        for mode, why in (
            ("token-sum", "number of tokens"),
            ("seq-mean-token-sum", "number of rows"),
            ("seq-mean-token-sum-norm", "their number and a factor"),
            ("seq-mean-token-mean", "weights all rows equally"),
        )
    ),
    (
        f"{EPISODES} critic.enable=true critic.loss_agg_mode=seq-mean-token-mean",
        f"{EPISODES} | critic.loss_agg_mode=seq-mean-token-mean",
    ),
    (
        f"{EPISODES} actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
        f"{EPISODES} | loss_mode=geo_mean | each micro-batch | weight_by=token",
    ),
    (
        f"{EPISODES} actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode "
        "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_rs=token_k1 "
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        f"{EPISODES} | loss_mode=bypass_mode | algorithm.rollout_correction.rollout_rs=null",
    ),
    (f"{EPISODES} +turnkey/loss=segment_mask", f"{EPISODES} | segment_mask weighs its tokens itself"),
    (
        f"{EPISODES} +turnkey/loss=turn_ratio turnkey.loss.aggregate=turns",
        f"{EPISODES} | turnkey.loss.aggregate=tokens with turnkey.update.weight_by=step",
    ),
    (
        f"{EPISODES} +turnkey/loss=rebel",
        f"{EPISODES} | rebel is one number per row",
    ),
    (
        f"{EPISODES} turnkey.update.order=reverse_turns actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        f"{EPISODES} | turnkey.update.order=batch",
    ),
]

CRITIC = [
    ("critic.model.lora_rank=16", "critic.model.lora_rank=16 | critic.model.lora_rank=0"),
    ("critic.enable=false", "turn_gae | critic.enable=true"),
    ("turnkey.credit.lam=2", "turnkey.credit.lam"),
]

TURNS = [
    ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "turnkey.update.order | row per turn"),
    ("data.train_files={tmp}/tool.parquet", "turnkey.update.order | row per turn | tool_agent | agent_name"),
    ("algorithm.rollout_correction.bypass_mode=True", "bypass_mode | turnkey.update.old_policy=iteration"),
    ("trainer.v1.trainer_mode=sync", "turnkey_sync"),
]

LOOP = [
    ("", "gigpo | anchor"),
]

ESTIMATORS = [
    (
        "+turnkey=base algorithm.adv_estimator=gae critic.enable=True algorithm.use_pf_ppo=True",
        "algorithm.use_pf_ppo=true | wrong rows | set it to false",
    ),
    *(
        (f"+turnkey=base algorithm.adv_estimator={name}", f"algorithm.adv_estimator={name} | choose another")
        for name in WITHOUT_INPUT
    ),
]

# The data name the loops of their rows.
NAMED = [
    ("+turnkey=gigpo data.train_files={tmp}/tool.parquet", "agent_name | tool_agent | gigpo needs 'anchor'"),
    (
        "+turnkey=gigpo data.train_files={tmp}/both.parquet",
        "agent_name | turnkey_env | tool_agent | a run of their own",
    ),
    ("+turnkey=grpo_steps data.train_files={tmp}/mixed.parquet", "adv_estimator=grpo_steps | in all rows | or in none"),
    ("+turnkey=gigpo data.train_files=[{train},{tmp}/own.parquet]", "own.parquet | 'agent_name' | into both"),
    (
        "+turnkey=grpo_steps data.train_files={tmp}/tool.parquet turnkey.rollout.strategy=probe",
        "turnkey.rollout.strategy=probe | tool_agent",
    ),
    (
        "+turnkey=gigpo data.train_files={tmp}/own.parquet "
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent turnkey.rollout.template=none",
        "no prompt template 'none'",
    ),
]

SEPARATE = (
    "trainer.v1.trainer_mode=turnkey_separate_async trainer.v1.separate_async.parameter_sync_step=2 "
    "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
)
# What verl's V1 trainers do not do, or find out about late.
UNREAD = [
    (
        "trainer.save_freq=5 trainer.default_local_dir=hdfs://store/run",
        "trainer.default_local_dir=hdfs://store/run | address | mounted",
    ),
    ("trainer.rollout_data_dir=s3://store/dump", "trainer.rollout_data_dir=s3://store/dump | address"),
    ("reward.reward_manager.name=prime", "reward.reward_manager.name='prime' | naive, | dapo"),
    (
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent reward.custom_reward_function.path={tmp}/no.py",
        "reward.custom_reward_function.path= | no.py: there is no such file",
    ),
    (
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent "
        "reward.custom_reward_function.path={tmp}/reward.py reward.custom_reward_function.name=scored",
        "reward.custom_reward_function.path= | name=scored | cannot be loaded",
    ),
    (
        "actor_rollout_ref.actor.optim.optimizer_impl=bitsandbites.optim",
        "optimizer_impl=bitsandbites.optim: the package is not installed",
    ),
    ("actor_rollout_ref.actor.optim.optimizer=AdamW8bit", "optimizer_impl=torch.optim has no | optimizer=AdamW8bit"),
    ("actor_rollout_ref.model.use_liger=True", "model.use_liger=true | liger_kernel"),
    (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=8",
        "actor.ulysses_sequence_parallel_size=8 does not divide the model's 4 attention heads",
    ),
    (
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=3",
        "fsdp_config.ulysses_sequence_parallel_size=3 does not divide the 8 GPUs",
    ),
    ("actor_rollout_ref.rollout.max_model_len=1000000", "max_model_len=1000000 | positions of the model | lower it to"),
    (
        "transfer_queue.backend.SimpleStorage.total_storage_size=399",
        "total_storage_size=399 | 400 rows | total_storage_size=null",
    ),
    ("trainer.logger=[rl_insight]", "trainer.logger=rl_insight | 'rl_insight'"),
    (
        "trainer.default_hdfs_dir=hdfs://store/run trainer.save_freq=5",
        "trainer.default_hdfs_dir=hdfs://store/run | strategy=fsdp | default_local_dir",
    ),
    ("skip.rollout_tq.enable=True skip.rollout_tq.steps=[1]", "skip.rollout_tq.enable=true | set it to false"),
    (
        "actor_rollout_ref.rollout.full_determinism=True",
        "rollout.full_determinism=true | the same seed | set it to false",
    ),
    ("+actor_rollout_ref.actor.veomni.router_replay.mode=R3", "actor.veomni.router_replay.mode=R2 | routed experts"),
    (
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True "
        "+actor_rollout_ref.actor.megatron.router_replay.mode=R3",
        "rollout.enable_rollout_routing_replay=false and actor_rollout_ref.actor.megatron.router_replay.mode=R2",
    ),
    ("actor_rollout_ref.rollout.trace.backend=weave", "rollout.trace.backend=weave | package 'weave' | null"),
    (
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptiv",
        "algorithm.kl_ctrl.type='adaptiv' | 'adaptive'",
    ),
    (
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=80",
        "algorithm.kl_ctrl.type=adaptive | kl_ctrl.horizon=80 | up to 400 | kl_ctrl.horizon=4000 | type=fixed",
    ),
    ("trainer.critic_warmup=20", "trainer.critic_warmup=20 | before step 20 | set it to 0"),
    ("trainer.v1.sampler.max_off_policy_threshold=0", "max_off_policy_threshold=0 | positive | null"),
    ("trainer.v1.sampler.max_off_policy_strategy=dorp", "max_off_policy_strategy='dorp' | 'drop'"),
    ("data.custom_cls.path={tmp}/missing.py data.custom_cls.name=Mine", "data.custom_cls.path= | no such file"),
    (
        f"{SEPARATE.replace('nccl', 'ncll')}",
        "actor_rollout_ref.rollout.checkpoint_engine.backend='ncll' | 'nccl'",
    ),
    (
        "actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp}/missing.yaml",
        "multi_turn.tool_config_path= | missing.yaml: there is no such file | any agent loop",
    ),
    ("actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp}/missing.py", "function_tool_path= | no such file"),
    (
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/config/tools.yaml",
        "multi_turn.tool_config_path=examples/config/tools.yaml: there is no such file",
    ),
    (
        "actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp}/strange_tools.yaml",
        "multi_turn.tool_config_path= | there is no module 'nowhere.tools' of the tool nowhere.tools.Hammer",
    ),
]
LORA = [
    ("actor_rollout_ref.model.lora.rank=32", "model.lora.rank=32 | Megatron | model.lora_rank=32"),
    ("actor_rollout_ref.model.lora_adapter_path={model}", "lora_adapter_path= | model.lora_rank"),
    (f"{SEPARATE} actor_rollout_ref.model.lora_rank=16", "lora_rank=16 | separate_async | lora.merge=true"),
    (
        f"{SEPARATE} actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.lora_adapter_path={{model}}",
        "lora.merge",
    ),
]

GROUPS = [
    (
        "+turnkey=tree turnkey.rollout.strategy=tree turnkey.groups.keep=0.5",
        "turnkey.groups.keep=0.5 | turnkey.rollout.strategy=tree",
    ),
]

TURN_SCORE = [
    ("turnkey.credit.rule=mt_grpo", "turn_norm | extra.turn_score | make_record"),
]

REFUSED = [
    ("", SWITCHES),
    ("", ESTIMATORS),
    ("", GROUPS),
    ("", NAMED),
    ("+turnkey=gigpo", LORA),
    ("+turnkey=gigpo", UNREAD),
    (GIGPO, PARAMETERS),
    ("+turnkey=gigpo", DATA),
    ("+turnkey=gigpo", SIZES),
    ("+turnkey=gigpo", ENGINES),
    ("+turnkey=gigpo", PAY),
    ("+turnkey=gigpo", WEIGHTS),
    ("+turnkey=turn_gae", CRITIC),
    ("+turnkey=seeupo", TURNS),
    ("+turnkey=gigpo actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", LOOP),
    ("+turnkey=turn_norm actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", TURN_SCORE),
]

FIXED = (
    "actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"
)
KL = (
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 "
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl"
)
STARTS = [
    "+turnkey=gigpo data.train_files={tmp}/two.jsonl data.val_files={tmp}/two.jsonl",
    *(
        f"+turnkey={name} {columns_from_answers(spec)}".strip()
        for name, spec in shipped().items()
        if "value" not in spec.needs
    ),
    "+turnkey=turn_gae",
    "+turnkey=vc_gae critic.model.path={model}",
    *(f"+turnkey=gigpo +turnkey/loss={name}" for name in ("turn_ratio", "st_ppo", "s_ppo", "psft", "rebel", "a3po")),
    "+turnkey=gigpo +turnkey/modifier=grsd +turnkey/loss=sdpo_sampled",
    "+turnkey=gigpo +turnkey/loss=skill_sd turnkey.teacher.source=group_success",
    "+turnkey=base algorithm.adv_estimator=grpo +turnkey/loss=sdar turnkey.teacher.source=group_success",
    "+turnkey=hdpo +turnkey/loss=hdpo 'turnkey.rewards=[{name: step},{name: step, label: q, column: tool_calls}]'",
    "+turnkey=gigpo +turnkey/env=babyai +turnkey/device=cpu trainer.n_gpus_per_node=1 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "+turnkey=base algorithm.adv_estimator=grpo",
    "+turnkey=base algorithm.adv_estimator=gae critic.model.path={model}",
    "+turnkey=base algorithm.adv_estimator=reinforce_plus_plus",
    f"+turnkey=gigpo {FIXED}",
    f"+turnkey=gigpo {FIXED} {KL}",
    f"+turnkey=gigpo {KL}",
    f"+turnkey=gigpo {KL} actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32",
    f"+turnkey=gigpo {SEPARATE} actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.lora.merge=true",
    "+turnkey=gigpo critic.model.lora_rank=16",
    "+turnkey=gigpo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001",
    f"+turnkey=gigpo {KL} algorithm.use_kl_in_reward=True",
    "+turnkey=gigpo actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.target_modules=all-linear",
    "+turnkey=gigpo data.val_files=[{val},{train}]",
    "+turnkey=gigpo data.train_files=[{train},{val}]",
    "+turnkey=gigpo data.train_files={tmp}/train.json data.val_files={tmp}/train.jsonl",
    "+turnkey=gigpo data.train_files=hdfs://store/tasks/train.parquet",
    "+turnkey=gigpo data.train_files={tmp}/own.parquet data.val_files={tmp}/tool.parquet",
    "+turnkey=gigpo data.train_files={tmp}/own.parquet actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "+turnkey=grpo_steps data.train_files={tmp}/tool.parquet reward.custom_reward_function.path={tmp}/reward.py",
    "+turnkey=grpo_steps data.train_files={tmp}/tool.parquet reward.reward_model.enable=True "
    "reward.reward_model.model_path={model}",
    "+turnkey=base algorithm.adv_estimator=grpo data.train_files={tmp}/both.parquet "
    "reward.custom_reward_function.path={tmp}/reward.py",
    "+turnkey=grpo_steps actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent "
    "data.train_files={tmp}/math.parquet data.val_files={tmp}/math.parquet",
    "+turnkey=grpo_steps actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent "
    "reward.custom_reward_function.path={tmp}/reward.py",
    "+turnkey=gigpo reward.custom_reward_function.path={tmp}/reward.py "
    "'turnkey.rewards=[{name: step},{name: verl, weight: 0.5}]'",
    "+turnkey=gigpo actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct",
    "+turnkey=gigpo actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    "+turnkey=gigpo actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=608",
    "+turnkey=gigpo actor_rollout_ref.actor.ppo_epochs=2 actor_rollout_ref.actor.entropy_coeff=0.001",
    "+turnkey=gigpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
    "+turnkey=gigpo actor_rollout_ref.actor.policy_loss.loss_mode=turnkey/turn_ratio",
    "+turnkey=gigpo +turnkey/loss=turn_ratio actor_rollout_ref.actor.policy_loss.loss_mode=turnkey/turn_ratio",
    "+turnkey=gigpo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
    "+turnkey=gigpo algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_rs=token_k1 "
    "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
    "+turnkey=gigpo actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode "
    "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce "
    "algorithm.rollout_correction.rollout_rs=seq_mean_k3 algorithm.rollout_correction.rollout_rs_threshold=0.01",
    "+turnkey=gigpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=composed_return.step",
    "+turnkey=gigpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=reward data.gen_batch_size=3",
    "+turnkey=gigpo data.gen_batch_size=2",
    "+turnkey=gigpo trainer.v1.trainer_mode=turnkey_colocate_async data.gen_batch_size=3",
    "+turnkey=gigpo trainer.val_only=True",
    f"+turnkey=gigpo {EPISODES} {KL} {FIXED}",
    f"+turnkey=turn_gae {EPISODES} +turnkey/loss=st_ppo",
    f"+turnkey=base algorithm.adv_estimator=grpo {EPISODES} actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
    "+turnkey=base algorithm.adv_estimator=grpo turnkey.update.weight_by=step "
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent "
    "data.train_files={tmp}/math.parquet data.val_files={tmp}/math.parquet",
    "+turnkey=gigpo actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode "
    "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_is=token",
    "+turnkey=gigpo actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode "
    "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_is=token "
    "+actor_rollout_ref.actor.policy_loss.rollout_correction={rollout_is:token}",
    "+turnkey=gigpo trainer.v1.trainer_mode=turnkey_colocate_async",
    f"+turnkey=gigpo {SEPARATE}",
    f"+turnkey=gigpo {SEPARATE} actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded",
    "+turnkey=grpo_steps algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive "
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent trainer.v1.sampler.max_off_policy_threshold=null "
    "data.train_files={tmp}/math.parquet data.val_files={tmp}/math.parquet",
    "+turnkey=gigpo trainer.critic_warmup=1",
    "+turnkey=gigpo transfer_queue.backend.SimpleStorage.total_storage_size=400",
    "+turnkey=gigpo trainer.save_freq=5 'trainer.default_local_dir=\"~/checkpoints\"'",
    "+turnkey=gigpo actor_rollout_ref.actor.optim.optimizer=SGD",
    "+turnkey=gigpo trainer.default_hdfs_dir=hdfs://store/run",
    "+turnkey=turn_gae actor_rollout_ref.rollout.n=1 actor_rollout_ref.rollout.full_determinism=True",
    "+turnkey=gigpo actor_rollout_ref.rollout.trace.backend=console",
    "+turnkey=grpo_steps actor_rollout_ref.rollout.name=trtllm turnkey.rollout.max_tokens_per_turn=8 "
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent "
    "data.train_files={tmp}/math.parquet data.val_files={tmp}/math.parquet",
    f"+turnkey=gigpo {SEPARATE} actor_rollout_ref.hybrid_engine=False trainer.n_gpus_per_node=3 "
    "actor_rollout_ref.rollout.n_gpus_per_node=4",
    "+turnkey=gigpo trainer.save_freq=10 trainer.default_local_dir={tmp}/new/folder",
    "+turnkey=gigpo trainer.logger=[console,wandb]",
    "+turnkey=gigpo trainer.resume_mode=disable trainer.val_before_train=False trainer.test_freq=-1",
    "+turnkey=gigpo actor_rollout_ref.rollout.val_kwargs.do_sample=True "
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.4 actor_rollout_ref.rollout.val_kwargs.n=2",
    "+turnkey=gigpo critic.enable=true",
    "+turnkey=gigpo turnkey.groups.keep=0.25 turnkey.groups.keep_by=groups",
    f"+turnkey=gigpo {SEPARATE} turnkey.groups.keep=0.5 turnkey.groups.allocation=prior actor_rollout_ref.rollout.n=4",
    "+turnkey=base algorithm.adv_estimator=grpo turnkey.groups.keep=0.9 turnkey.groups.keep_by=spread "
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent turnkey.groups.allocation=variance "
    "turnkey.groups.n_low=1 data.train_files={tmp}/math.parquet data.val_files={tmp}/math.parquet",
    "+turnkey=gigpo turnkey.update.mini_batches=8 turnkey.log.trajectories={tmp}/episodes",
    "+turnkey=gigpo turnkey.log.trajectories={tmp}/log turnkey.log.share=0.5 turnkey.log.episodes_per_step=null "
    "turnkey.log.keep_texts=null",
    "+turnkey=gigpo turnkey.rollout.stop=[END] actor_rollout_ref.rollout.name=vllm",
    "algorithm.adv_estimator=gigpo trainer.v1.trainer_mode=turnkey_sync "
    "actor_rollout_ref.rollout.agent.default_agent_loop=turnkey_env actor_rollout_ref.actor.use_dynamic_bsz=True",
    "algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
]

# They start, and say what will not be as the line suggests; under gigpo where the line names no method.
WARNED: list[tuple[str, str]] = [
    ("actor_rollout_ref.actor.shuffle=True", "actor_rollout_ref.actor.shuffle=true | whole episodes"),
    (
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 | no effect | use_dynamic_bsz=false",
    ),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size=64", "log_prob_micro_batch_size=64 | no effect"),
    ("critic.enable=true", "critic.model.path | the actor's model"),
    ("critic.enable=true critic.ppo_max_token_len_per_gpu=4096", "critic.ppo_max_token_len_per_gpu=4096 | copied"),
    ("reward.reward_manager.name=dapo", "reward.reward_manager.name=dapo | no effect"),
    ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.name=sglang | untested"),
    (
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=10",
        "max_assistant_turns=10 | turnkey.rollout.max_turns",
    ),
    ("algorithm.gamma=0.9", "algorithm.gamma=0.9 | turnkey.credit.gamma"),
    ("algorithm.lam=0.9", "algorithm.lam=0.9 | no effect"),
    (
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=4096",
        "multi_turn.max_tool_response_length=4096 has no effect | not cut",
    ),
    ("reward.sandbox_fusion.url=http://sandbox", "reward.sandbox_fusion.url=http://sandbox | no effect"),
    (
        "trainer.save_freq=5 actor_rollout_ref.actor.checkpoint.save_contents=[model] "
        "actor_rollout_ref.actor.checkpoint.load_contents=[model,optimizer,extra]",
        "loads optimizer and extra, which save_contents=['model'] does not save | load_contents to the same list",
    ),
    ("algorithm.use_pf_ppo=True", "algorithm.use_pf_ppo=true has no effect with algorithm.adv_estimator=gigpo"),
    (
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=81",
        "algorithm.kl_ctrl.type=adaptive | kl_ctrl.horizon=81 a step | a row per turn, up to 400",
    ),
    ("algorithm.norm_adv_by_std_in_grpo=False", "norm_adv_by_std_in_grpo | turnkey.credit.norm"),
    ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n=1 | nothing to compare"),
    (
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "loss_agg_mode=seq-mean-token-sum-norm | loss_scale_factor=16 | the longest response of a micro-batch",
    ),
    ("trainer.resume_from_path=/x/global_step_5", "trainer.resume_from_path=/x/global_step_5 | no effect | auto"),
    ("trainer.val_only=True", "none: one validation (trainer.val_only=true)"),
    ("actor_rollout_ref.actor.grad_clip=0.2", "actor.grad_clip=0.2 | no effect | actor.optim.clip_grad, which is 1.0"),
    (
        "critic.grad_clip=0.5 critic.enable=true",
        "critic.grad_clip=0.5 | critic.optim.clip_grad, which is 1.0",
    ),
    ("actor_rollout_ref.actor.clip_ratio=0.1", "clip_ratio=0.1 | no effect | clip_ratio_low=0.2 | clip_ratio_high=0.2"),
    ("actor_rollout_ref.actor.freeze_vision_tower=True", "freeze_vision_tower=true | no effect"),
    ("actor_rollout_ref.actor.use_prefix_grouper=True", "use_prefix_grouper=true | no effect"),
    ("actor_rollout_ref.model.tiled_mlp.enabled=True", "model.tiled_mlp.enabled=true | no effect"),
    ("actor_rollout_ref.nccl_timeout=7200", "actor_rollout_ref.nccl_timeout=7200 | no effect"),
    ("skip.rollout.enable=True", "skip.rollout.enable=true | no effect | skip.rollout_tq"),
    (
        "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        "actor.fsdp_config.strategy=fsdp2 | no effect | actor_rollout_ref.actor.strategy, which is fsdp",
    ),
    (
        "+turnkey=turn_gae critic.fsdp.strategy=fsdp2",
        "critic.fsdp.strategy=fsdp2 | no effect | critic.strategy, which is fsdp",
    ),
    (
        "+turnkey=turn_gae critic.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2 | no effect | critic.fsdp.ulysses_sequence_parallel_size, which is 1",
    ),
    (
        "trainer.total_training_steps=500",
        "steps at most 30 | total_training_steps=500 is not reached | end after 30 steps, and before | "
        "trainer.total_epochs=250",
    ),
    (
        "trainer.total_training_steps=31 trainer.save_freq=7 trainer.test_freq=4",
        "trainer.total_epochs=15 end after 30 steps without a last checkpoint and validation",
    ),
    ("trainer.total_training_steps=20", "steps 20"),
    (
        "+turnkey=turn_gae trainer.critic_warmup=5",
        "steps at most 30; only the critic before step 5 (trainer.critic_warmup)",
    ),
    (
        "actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp}/tools.yaml",
        "multi_turn.tool_config_path= | no effect with the agent loop turnkey_env",
    ),
    ("actor_rollout_ref.actor.strategy=fsdp_turbo", "actor_rollout_ref.actor.strategy=fsdp_turbo | untested"),
    ("actor_rollout_ref.rollout.val_kwargs.n=4", "val_kwargs: n=4 at temperature=0 | greedy"),
    (
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "val_kwargs: do_sample=True at temperature=0 | set val_kwargs.temperature",
    ),
    (
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        "actor.checkpoint.load_contents=['hf_model'] | no model | the weights are the initial ones",
    ),
    (
        "critic.enable=true critic.checkpoint.save_contents=[model]",
        "critic.checkpoint.load_contents=['model'] | no optimizer and no extra | start over",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode algorithm.rollout_correction.bypass_mode=True "
        "algorithm.rollout_correction.loss_type=reinforce",
        "bypass_mode (verl's): loss_type=reinforce",
    ),
    (
        "+turnkey=turn_gae critic.ppo_micro_batch_size_per_gpu=32",
        "critic.ppo_micro_batch_size_per_gpu=32 | no effect | critic.ppo_max_token_len_per_gpu",
    ),
    (f"+turnkey=hdpo {columns_from_answers(shipped()['hdpo'])}", "hdpo gives tool_advantages | +turnkey/loss=hdpo"),
    (
        "+turnkey=seeupo actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
        "loss_mode=vanilla | seeupo | gspo | not the method as published",
    ),
    ("+turnkey=seeupo actor_rollout_ref.actor.loss_agg_mode=token-mean", "token-mean | seq-mean-token-mean"),
    (
        "actor_rollout_ref.model.path=/elsewhere/model +ray_kwargs.ray_init.address=auto",
        "actor_rollout_ref.model.path=/elsewhere/model | Ray cluster",
    ),
    (
        "data.train_files=/elsewhere/train.parquet +ray_kwargs.ray_init.address=auto",
        "data.train_files=/elsewhere/train.parquet | Ray cluster",
    ),
]
