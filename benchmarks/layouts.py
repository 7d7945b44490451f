"""What prompts and rows cost: the actor's log-probabilities and update on the same episodes, prompted in three ways.

    python benchmarks/layouts.py                       # a few minutes on two CPU cores; on a GPU where there is one

Template with two past turns, template with all of them (both a row per step), and conversation (merged rows). A script
plays the environment and the model: observations of 60 words, answers of 20. Prompts and rows are made by the code that
the agent loop calls; verl's FSDP engine passes over the rows with a model of 10 M parameters, micro-batches by tokens.
Where an episode has more than ``--timed-tokens`` tokens, every k-th row is timed and the seconds are scaled by tokens.
Each case has a process of its own, for its peak memory. Writes runs/layouts/summary.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(VERL_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
os.environ.update(PYTHONWARNINGS="ignore", **({} if Path("/dev/nvidia0").exists() else {"TURNKEY_DEVICE": "cpu"}))

import torch
import typer
import verl.workers.engine  # noqa: F401  loads the plugin, and once for all cases
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from quickstart_runs import ROOT
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested

from verl_turnkey.advantage import make_step
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import ControlTokens, parse_action
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.rollout.action_reader import action_reader
from verl_turnkey.plugins.rollout.episode import Episode, Generated, PlayedStep, RowBuilder
from verl_turnkey.plugins.rollout.prompts import ConversationPrompts, PromptSettings, TemplatePrompts
from verl_turnkey.plugins.rollout.turn_tail import learn
from verl_turnkey.plugins.verl_api.builders import builder_of

GPU = "TURNKEY_DEVICE" not in os.environ  # not asked of torch: its contexts do not survive the fork of the cases
PROMPTS = {
    "template, history 2": ("template", 2),
    "template, full history": ("template", 10_000),
    "conversation": ("conversation", 0),
}
OBSERVATION, RESPONSE = 60, 20  # words, each a token
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
WORDS = [a + b for a in SYLLABLES[:30] for b in SYLLABLES[30:50]]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_model(folder: Path) -> None:
    """A model of 10 M parameters, and a tokenizer with a token per word."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=special, initial_alphabet=alphabet)
    tokens.train_from_iterator([" ".join(["", *WORDS]), load_template("default"), "<action></action>"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=special[0], pad_token=special[2])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8, "head_dim": 64}
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 32_768}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **size, **heads))
    model.save_pretrained(folder)


def configuration(folder: Path, prompt: str, history: int, micro_batch: int) -> DictConfig:
    grows = prompt == "conversation"
    overrides = [
        "+turnkey=gigpo",
        *([] if GPU else ["+turnkey/device=cpu"]),
        f"turnkey.rollout.prompt={prompt}",
        f"turnkey.rollout.history={history}",
        "turnkey.rollout.action_format=tags",
        "turnkey.rollout.max_tokens_per_turn=64",
        f"data.max_prompt_length={512 if grows else micro_batch - 64}",
        f"data.max_response_length={micro_batch - 512 if grows else 64}",
        override("actor_rollout_ref.model.path", folder),
        "actor_rollout_ref.model.use_remove_padding=false",
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={micro_batch}",
        f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={micro_batch}",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def play(config: DictConfig, tokenizer: Any, turns: int, seed: int) -> list[AgentLoopOutput]:
    """One episode as the agent loop ``turnkey_env`` plays it, with a script for the environment and the model."""
    draw, options = random.Random(seed), turnkey_config(config).rollout
    reader = action_reader(options.action_format, "hermes", tokenizer)
    builder = builder_of(config, tokenizer, None, "qwen3")
    settings = PromptSettings(
        options=options,
        template=load_template("default"),
        summarize=None,
        instruction=reader.instruction,
        tools=None,
        builder=builder,
        control=ControlTokens(tokenizer),
        prompt_length=config.data.max_prompt_length,
        response_length=config.data.max_response_length,
    )
    task = " ".join(draw.choices(WORDS, k=20))
    if options.prompt == "conversation":
        prompts: Any = ConversationPrompts(settings, task, learn(builder, tokenizer, None, options.observation_role))
    else:
        prompts = TemplatePrompts(settings, task)
    episode = Episode(task=task)
    for t in range(turns):
        info = {"task": task, "admissible": None, "state_key": None, "success": None, "invalid": False}
        answer = Answer(" ".join(draw.choices(WORDS, k=OBSERVATION)), info)
        prompt = prompts.next(answer, None)
        thought, action = " ".join(draw.choices(WORDS, k=RESPONSE - 8)), " ".join(draw.choices(WORDS, k=2))
        text = f"{thought} <action>{action}</action>"
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        turn = Generated(ids, [-1.0] * len(ids), text, {"min_global_steps": 0, "max_global_steps": 0}, 0, 0.0)
        prompts.heard(turn, parse_action(text, options.action_format, None))
        last = t + 1 == turns
        record = make_step(step=t, reward=float(last), anchor=answer.observation, action=action, terminated=last)
        record["composed_reward"] = record["reward"]
        episode.steps.append(PlayedStep(prompt, turn, record, answer.observation, "", None, False, 0.0, {}, {}))
    episode.end(True)
    return RowBuilder(
        tokenizer.eos_token_id, True, merged=options.layout == "merged", max_response_length=settings.response_length
    ).played(episode)


def batch_of(rows: list[AgentLoopOutput]) -> TensorDict:
    """What the engine reads of the rows; advantages are random, since their values do not change the cost."""
    columns: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        prompt, response, mask = map(torch.tensor, (row.prompt_ids, row.response_ids, row.response_mask))
        fields = {"prompts": prompt, "responses": response, "response_mask": mask, "loss_mask": mask}
        fields |= {"input_ids": torch.cat([prompt, response]), "advantages": torch.randn(len(mask)) * mask}
        fields |= {"position_ids": torch.arange(len(prompt) + len(response))}
        for name, value in fields.items():
            columns.setdefault(name, []).append(value)
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    return TensorDict(nested, batch_size=len(rows))


def measure(folder: Path, name: str, turns: int, episodes: int, micro_batch: int, timed_tokens: int) -> dict[str, Any]:
    """Measure one case, in a process of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # verl prints the model
    prompt, history = PROMPTS[name]
    torch.set_num_threads(1)
    config = configuration(folder, prompt, history, micro_batch)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = [row for seed in range(episodes) for row in play(config, tokenizer, turns, seed)]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rendezvous = f"file://{tempfile.mkdtemp(dir=folder)}/rendezvous"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo", rendezvous, rank=0, world_size=1)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()

    def log_probs(batch: TensorDict) -> TensorDict:
        data = batch.clone(recurse=False)
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, temperature=1.0)
        return worker.compute_log_prob(data)

    def update(batch: TensorDict) -> None:
        data = batch.clone(recurse=False)
        of_verl = {"calculate_entropy": False, "distillation_use_topk": False, "distillation_only": False, "seed": 0}
        of_verl |= {"global_batch_size": len(batch), "dataloader_kwargs": {"shuffle": False}, "temperature": 1.0}
        tensordict_utils.assign_non_tensor(data, num_mini_batch=1, epochs=1, **of_verl)
        worker.update_actor(data)

    tokens = sum(map(length, rows))
    every = -(-tokens // (timed_tokens * episodes))
    chosen = rows[every // 2 :: every]
    timed(partial(log_probs, batch_of(rows[:1])))  # warms up
    batch = batch_of(chosen)
    output, seconds = timed(partial(log_probs, batch))
    batch["old_log_probs"] = response_from_nested(output["log_probs"], batch["response_mask"])
    _, update_seconds = timed(partial(update, batch))
    used = torch.cuda.max_memory_allocated() if GPU else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    share = sum(map(length, chosen)) / tokens
    sums = {"rows": len(rows), "tokens": tokens, "trained": sum(sum(row.response_mask) for row in rows)}
    sums |= {"log_probs": seconds / share, "update": update_seconds / share}
    per_episode = {name: value / episodes for name, value in sums.items()}
    return {"turns": turns, "prompts": name, **per_episode, "memory": used / 2**30}


def length(row: AgentLoopOutput) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What ``call`` returns, and its seconds: CPU time of its one core, which other programs do not lengthen."""
    clock = time.perf_counter if GPU else time.process_time
    started = clock()
    result = call()
    if GPU:
        torch.cuda.synchronize()
    return result, clock() - started


def main(
    turns: str = "10,30,50",
    episodes: int = 16 if GPU else 1,
    micro_batch: int = 6144,
    timed_tokens: int = 1_000_000 if GPU else 10_000,
    jobs: int = 1 if GPU else 2,
    out: Path = ROOT / "runs" / "layouts",
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="layouts-"))
    cases = [
        (folder, name, number, episodes, micro_batch, timed_tokens)
        for number in sorted(map(int, turns.split(",")), reverse=True)  # long ones first: two at a time end together
        for name in PROMPTS
    ]
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        pool.apply(build_model, (folder,))
        results = pool.starmap(measure, cases, chunksize=1)
    shutil.rmtree(folder)
    print("| turns | prompts | rows | tokens | trained | log-probs s | update s | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    results.sort(key=lambda f: f["turns"])
    for f in results:
        sizes = f"{f['rows']:.0f} | {f['tokens']:,.0f} | {f['trained']:,.0f}"
        print(
            f"| {f['turns']} | {f['prompts']} | {sizes} | {f['log_probs']:.1f} | {f['update']:.1f} | "
            f"{f['memory']:.2f} |"
        )
    print("\n| turns | tokens | log-probs | update |\n|---|---|---|---|")
    for i in range(1, len(results), len(PROMPTS)):
        full, conversation = results[i], results[i + 1]
        ratios = [f"{full[name] / conversation[name]:.1f}" for name in ("tokens", "log_probs", "update")]
        print(f"| {full['turns']} | {' | '.join(ratios)} |")
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    typer.run(main)
