"""Ranks of training workers without Ray: real workers of verl in processes of their own, over gloo.

``python training_ranks.py ADDRESS FOLDER WORLD...`` imports verl once and forks every rank of groups of these sizes.
Each connects to ADDRESS and does what :class:`Ranks` asks for.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

ENV = {"TURNKEY_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ENV |= {"VERL_LOGGING_LEVEL": "ERROR", "TQ_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}


class Ranks:
    """The ranks of one group, seen from the test."""

    def __init__(self, lines: Sequence[Connection]) -> None:
        self.lines = lines

    def ask(self, name: str, parts: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method ``name`` of :class:`Rank`, each rank with its own arguments, all at once."""
        for line, arguments in zip(self.lines, parts, strict=True):
            line.send_bytes(pickle.dumps((name, arguments)))
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self.lines):  # the first error counts: the other ranks may wait for that one for ever
            for line in wait([line for line in self.lines if line not in answers]):
                answers[line], error = pickle.loads(line.recv_bytes())
                assert error is None, error
        return [answers[line] for line in self.lines]

    def ask_all(self, name: str, *arguments: Any) -> list[Any]:
        return self.ask(name, [arguments] * len(self.lines))


class Processes:
    """Groups of ranks by their size, until :meth:`stop`."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        with Listener() as listener:
            command = [sys.executable, __file__, listener.address, str(folder), *map(str, sizes)]
            self.process = subprocess.Popen(command, env={**os.environ, **ENV}, start_new_session=True)
            lines: dict[tuple[int, int], Connection] = {}
            while len(lines) < sum(sizes):
                line = listener.accept()
                lines[pickle.loads(line.recv_bytes())] = line
        self.groups = {size: Ranks([lines[size, rank] for rank in range(size)]) for size in sizes}

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Rank:
    """What a rank can do: hold workers, run their methods, and show the gradients of an update."""

    def __init__(self, rank: int) -> None:
        self.is_first = rank == 0
        self.built: dict[str, dict[str, Any]] = {}
        self.workers: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self.micro_batches: list[int] = []

    def build(self, engines: str, actor: Any, critic: Any) -> None:
        """The workers of actor and critic, as verl's trainer makes them of its configuration.

        Those with the same ``engines`` are kept, with fresh losses: nothing has trained them as long as learning rates
        are 0.
        """
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss, value_loss

        if engines not in self.built:
            self.built[engines] = self._build(actor, critic)
        self.workers = self.built[engines]
        losses = [(self.workers["actor"].actor, ppo_loss, actor.actor)]
        if "critic" in self.workers:
            losses.append((self.workers["critic"], value_loss, critic))
        for worker, loss, config in losses:
            vars(worker.engine).pop("train_batch", None)  # where a loss has taken hold of it
            worker.set_loss_fn(partial(loss, config=omega_conf_to_dataclass(config)))

    def _build(self, actor: Any, critic: Any) -> dict[str, Any]:
        import torch
        from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

        pack_without_flash_attention()
        torch.manual_seed(0)  # of the critic's head
        policy = ActorRolloutRefWorker(actor, role="actor")
        policy.init_model()
        self._watch(policy.actor.engine)
        if not critic.enable:
            return {"actor": policy}
        value = TrainingWorker(critic_config(critic))
        value.reset()
        self._watch(value.engine)
        return {"actor": policy, "critic": value}

    def build_prm(self, config: Any, prm: Any) -> None:
        """The worker of a process reward model, as the trainer makes it; a fresh one each time."""
        import torch

        from verl_turnkey.plugins.config.scorers import PRM_FOLDER
        from verl_turnkey.plugins.prm.worker import PrmWorker, worker_config

        torch.manual_seed(0)  # of a head
        self.workers[PRM_FOLDER] = PrmWorker(worker_config(config, prm, offload=False))
        self._watch(self.workers[PRM_FOLDER].engine)

    def build_heads(self, critic: Any, heads: Any, seed: int = 0) -> list[Any]:
        """A fresh critic with these heads, as the trainer makes it; weights and bias of its last layer."""
        import torch
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import value_loss

        from verl_turnkey.plugins.critic.worker import critic_with

        torch.manual_seed(seed)
        worker = critic_with(heads)(critic_config(critic))
        worker.reset()
        worker.set_loss_fn(partial(value_loss, config=omega_conf_to_dataclass(critic)))
        self._watch(worker.engine)
        self.workers = {**self.workers, "critic": worker}
        return [parameter.full_tensor().detach() for parameter in worker.engine.module.score.parameters()]

    def checkpoint(self, role: str, method: str, folder: str) -> None:
        """``save_checkpoint`` or ``load_checkpoint``."""
        getattr(self.workers[role], method)(folder)

    def _watch(self, engine: Any) -> None:
        step, forward = engine.optimizer_step, engine.forward_step

        def optimizer_step() -> Any:
            self.gradients = {
                name: p.grad.full_tensor().detach().clone() for name, p in engine.module.named_parameters()
            }
            return step()

        def forward_step(data: Any, *args: Any, **more: Any) -> Any:
            self.micro_batches.append(len(data))
            return forward(data, *args, **more)

        engine.optimizer_step, engine.forward_step = optimizer_step, forward_step

    def run(self, role: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """``function(worker, *arguments)``."""
        return function(self.workers[role], *arguments)

    def call(self, role: str, method: str, data: Any) -> Any:
        """A method of the worker on this rank's part of the batch."""
        self.gradients, self.micro_batches = {}, []
        return getattr(self.workers[role], method)(data)

    def seen(self) -> tuple[dict[str, Any], list[int]]:
        """Whole gradients of the last call, on the first rank, and the number of rows of each micro-batch."""
        return (self.gradients if self.is_first else {}), self.micro_batches


def pack_without_flash_attention() -> None:
    """Compute packed rows of Qwen2-VL and 2.5-VL on a CPU: verl calls flash attention for them, as here."""
    import torch
    from verl.models.transformers import qwen2_vl

    def flash_attn_varlen_func(q: Any, k: Any, v: Any, cu_seqlens_q: Any, softmax_scale: Any, **_: Any) -> Any:
        """Query, key, value, output: (tokens, heads, width); a token sees those before it in its row."""
        row = torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:], right=True)
        seen = (row[:, None] == row).tril()
        heads = (part.transpose(0, 1)[None] for part in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=softmax_scale)
        return out[0].transpose(0, 1)

    def flash_attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
        """Of a single row, (1, tokens, heads, width)."""
        ends = torch.tensor([0, q.shape[1]])
        return flash_attn_varlen_func(q[0], k[0], v[0], ends, None)[None]

    stand_ins = {"flash_attn_varlen_func": flash_attn_varlen_func, "_flash_attention_forward": flash_attention}
    switches = ("_flash_use_top_left_mask", "_flash_supports_window_size", "_flash_supports_deterministic")
    vars(qwen2_vl).update(stand_ins, **dict.fromkeys(switches, False))
    qwen2_vl.fa_peft_integration_check = lambda q, k, v, target_dtype: (q, k, v)


def critic_config(critic: Any) -> Any:
    """What verl's trainer hands the worker of its critic."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig

    config = omega_conf_to_dataclass(critic)
    config.engine.infer_max_token_len_per_gpu = config.ppo_infer_max_token_len_per_gpu
    config.engine.max_token_len_per_gpu = config.ppo_infer_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=config.model,
        engine_config=config.engine,
        optimizer_config=config.optim,
        checkpoint_config=config.checkpoint,
    )


def serve(rank: int, world: int, line: Connection, folder: str) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    line.send_bytes(pickle.dumps((world, rank)))
    me = Rank(rank)
    while True:
        try:
            name, arguments = pickle.loads(line.recv_bytes())
        except EOFError:  # the test is over
            return
        try:
            answer = getattr(me, name)(*arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        line.send_bytes(pickle.dumps(answer))


def main(address: str, folder: str, sizes: Sequence[int]) -> None:
    # Once for all ranks; it loads the plugin, too.
    import verl.workers.engine_workers  # noqa: F401

    devnull = os.open(os.devnull, os.O_WRONLY)
    for world in sizes:
        for rank in range(world):
            if os.fork() == 0:
                os.dup2(devnull, 1)  # verl prints the model
                with Client(address) as line:
                    serve(rank, world, line, folder)
                os._exit(0)
    for _ in range(sum(sizes)):
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3:]])
