"""Real verl on the CPU. One Ray, one TransferQueue and one tiny model serve all contract tests of a session."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before verl is imported: its entry points read the opt-in, and its loggers their levels.
os.environ.update(TURNKEY_DEVICE="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(VERL_LOGGING_LEVEL="ERROR", TQ_LOGGING_LEVEL="ERROR", TRANSFORMERS_VERBOSITY="error")

import pytest
import torch
import verl  # loads the plugin as every user's program does
import yaml
from contract_tools import PARTITION, Compose
from coroutine_tests import pytest_pyfunc_call as pytest_pyfunc_call
from known_differences import FOLDER, KnownDifferences, known
from omegaconf import DictConfig

from verl_turnkey.envs.tasks import Task, write_parquet


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KnownDifferences(known(FOLDER, verl.__version__), verl.__version__))


@pytest.fixture(scope="session", autouse=True)
def _parse_each_yaml_once() -> Iterator[None]:
    """A thousand tests compose verl's configuration, of which most time goes to the same thirty files."""
    parse, parsed = yaml.load, {}

    def load(stream: Any, Loader: type) -> Any:
        text = stream if isinstance(stream, (str, bytes)) else stream.read()
        key = text, Loader.__name__
        if key not in parsed:
            parsed[key] = parse(text, Loader)
        return copy.deepcopy(parsed[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "load", load)
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of a few thousand parameters, with a tokenizer of one token per byte and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        ["a"], trainers.BpeTrainer(vocab_size=259, special_tokens=special, initial_alphabet=alphabet)
    )
    template = (
        "{% for m in messages %}"
        "{% if single_question and m['role'] == 'user' and not loop.first %}"
        "{{ raise_exception('only one question') }}{% endif %}"
        "<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=special[2], pad_token=special[0], chat_template=template
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(7)  # the same in every session: how far float32 is from float64 depends on the weights
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def strong_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with larger weights: fresh ones are so small that nothing depends on anything."""
    from transformers import Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("strong")
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="session")
def task_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``train.parquet`` (8 tasks) and ``val.parquet`` (4 tasks) of MiniGrid."""
    folder = tmp_path_factory.mktemp("tasks")
    for split, seeds in (("train", range(8)), ("val", range(100, 104))):
        tasks = [Task("turnkey/MiniGrid-v0", seed) for seed in seeds]
        write_parquet(folder / f"{split}.parquet", tasks, "MiniGrid", split)
    return folder


@pytest.fixture(scope="session")
def stock_overrides(model_dir: Path, task_files: Path) -> list[str]:
    """What a launch command says without us: model, data, sizes."""
    return [
        f"actor_rollout_ref.model.path={model_dir}",
        f"data.train_files={task_files}/train.parquet",
        f"data.val_files={task_files}/val.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=1200",
        "data.max_response_length=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",  # verl's 2 does not divide the model's one head
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.temperature=1.0",
    ]


@pytest.fixture(scope="session")
def compose(stock_overrides: list[str]) -> Compose:
    """See :data:`contract_tools.Compose`."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from omegaconf import open_dict

    def composed(*overrides: str) -> DictConfig:
        groups = [o for o in overrides if o.startswith("+turnkey")]
        rest = [o for o in overrides if not o.startswith("+turnkey")]
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra_compose("ppo_trainer", overrides=[*groups, *stock_overrides, *rest])
        with open_dict(config):
            config.transfer_queue.enable = True
        return config

    return composed


@pytest.fixture(scope="session")
def ray_queue(compose: Compose) -> Iterator[None]:
    """A Ray of our own with a TransferQueue of one storage unit, as ``TaskRunnerV1`` starts it."""
    import ray
    import transfer_queue as tq

    folder = tempfile.mkdtemp(prefix="tkc", dir="/tmp")
    env_vars = {name: os.environ[name] for name in ("TURNKEY_DEVICE", "VERL_LOGGING_LEVEL", "TQ_LOGGING_LEVEL")}
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        runtime_env={"env_vars": env_vars},
    )
    try:
        tq.init(compose("transfer_queue.backend.SimpleStorage.num_data_storage_units=1").transfer_queue)
        yield
        tq.close()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def queue(ray_queue) -> Iterator[None]:
    """The queue, emptied after the test."""
    import transfer_queue as tq

    yield
    left = list(tq.kv_list(PARTITION).get(PARTITION, {}))
    if left:
        tq.kv_clear(keys=left, partition_id=PARTITION)


@pytest.fixture
def trainer(compose: Compose) -> Callable[..., Any]:
    """A real trainer that has not started its workers."""
    from verl_turnkey.plugins.trainer.trainer import TurnkeyTrainerSync

    def build(*overrides: str, recipe: str = "gigpo") -> Any:
        made = TurnkeyTrainerSync(compose(f"+turnkey={recipe}", *overrides))
        made.global_steps = 1
        return made

    return build
