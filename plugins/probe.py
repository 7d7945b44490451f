"""The first moment of the first task, played in the driver: seconds instead of a GPU-minute to find what is wrong."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import make
from verl_turnkey.envs.actions import INSTRUCTIONS, TOOL_CALL
from verl_turnkey.envs.memory import Memory, View
from verl_turnkey.envs.prompts import build_messages, fit_prompt, load_template
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins.config import TurnkeyConfig


def first_task(file: str) -> Task:
    """The first task of a parquet file.

    Raises:
        ConfigError: the file has no column ``turnkey_task``.
        TaskFormatError: the column holds something else than a task.
    """
    import pyarrow.parquet as pq

    table = pq.ParquetFile(Path(file).expanduser())
    if COLUMN not in table.schema_arrow.names:
        raise ConfigError(
            f"{file} has no column {COLUMN!r}, which the agent loop turnkey_env plays (columns: "
            f"{', '.join(table.schema_arrow.names)}): write the file with `turnkey tasks`, or choose another loop with "
            "actor_rollout_ref.rollout.agent.default_agent_loop"
        )
    if table.metadata.num_rows == 0:
        raise ConfigError(f"{file} holds no tasks: write some with `turnkey tasks`")
    return Task.from_json(next(table.iter_batches(batch_size=1, columns=[COLUMN])).column(0)[0].as_py())


def probe(config: DictConfig, turnkey: TurnkeyConfig, file: str) -> None:
    """Make the environment, reset it, and measure the first prompt with the model's tokenizer.

    Raises:
        ConfigError: the environment raises or hangs, its prompt exceeds the budget, or the model's chat template shows
            no tools although the action is a tool call; and what :func:`envs.make` raises.
    """
    task = first_task(file)
    env_id = task.env_id or turnkey.env.id
    if not env_id:
        raise ConfigError("neither the task nor turnkey.env.id names an environment: add +turnkey/env=<name>")
    way_out = "Its arguments are turnkey.env.kwargs and the task's; turnkey.env.probe=false leaves this check out"
    with _deadline(turnkey.env.reset_timeout, f"environment {env_id!r} with seed {task.seed}", way_out):
        env = make(env_id, {**turnkey.env.kwargs, **task.kwargs})
        try:
            observation, info = env.reset(seed=task.seed)
        except Exception as error:
            raise ConfigError(
                f"environment {env_id!r} raises in reset(seed={task.seed}): {type(error).__name__}: {error}. {way_out}"
            ) from error
        with suppress(Exception):  # not after a failure: what is half built may hang, and this process ends anyway
            env.close()
    if not isinstance(observation, str):
        raise ConfigError(
            f"environment {env_id!r} must return text as its observation, got {type(observation).__name__}: wrap it"
        )
    if not info.get("images"):  # the processor's tokens of an image are left to the agent loop
        _measure(config, turnkey, observation, str(info.get("task") or ""), info.get("admissible"))


class _Overdue(BaseException):
    """Raised inside the environment's code when its time is up; not for it to catch."""


@contextmanager
def _deadline(seconds: float, what: str, way_out: str) -> Iterator[None]:
    """Interrupt what hangs, with the line it hangs in; only a main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_: int, frame: Any) -> None:
        raise _Overdue(f"{frame.f_code.co_filename}, line {frame.f_lineno}")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Overdue as overdue:
        raise ConfigError(
            f"{what} has not begun after {seconds:g} s (turnkey.env.reset_timeout), but is in {overdue}. {way_out}"
        ) from overdue
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _measure(
    config: DictConfig, turnkey: TurnkeyConfig, observation: str, goal: str, admissible: list[str] | None
) -> None:
    model = config.actor_rollout_ref.model
    path = Path(model.path).expanduser()
    special = any(model.get(key) for key in ("tokenizer_path", "trust_remote_code", "custom_chat_template"))
    if not path.is_dir() or special:
        return  # not a plain local tokenizer: the agent loop measures each prompt anyway
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    kwargs = dict(config.data.get("apply_chat_template_kwargs") or {})
    if turnkey.rollout.action_format == TOOL_CALL:
        from verl_turnkey.plugins.action_reader import ACT, check_tool_template

        check_tool_template(tokenizer, **kwargs)
        kwargs["tools"] = [ACT]

    def encode(past: View) -> list[int]:
        messages = build_messages(
            system=turnkey.rollout.system,
            template=load_template(turnkey.rollout.template),
            task=goal,
            history=past.turns,
            observation=observation,
            admissible=admissible,
            instruction=INSTRUCTIONS.get(turnkey.rollout.action_format, ""),
        )
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    fit_prompt(encode, Memory(0), config.actor_rollout_ref.rollout.prompt_length)
