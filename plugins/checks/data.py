"""Checks of the data: whether verl can read the files, every cell that it reads, and the task of every row."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from glob import escape, glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.envs.agents.harbor import ENV_ID, HarborTask, sandbox_for
from verl_turnkey.envs.errors import MissingPackageError, SandboxError, TaskFormatError, UnknownEnvironmentError
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.registry import check_call
from verl_turnkey.envs.rewards import RewardError, RewardStep, right_answers
from verl_turnkey.envs.tasks import COLUMN, HINT, Panel, Task, open_parquet, panel_of, task_of
from verl_turnkey.plugins.checks.files import (
    FORMATS,
    LOOP_COLUMN,
    columns,
    json_rows,
    listed,
    local_parquet,
    patterns,
    rows,
    shared_tasks,
    taken,
)
from verl_turnkey.plugins.checks.findings import Refusal, refusal, refuse, warn
from verl_turnkey.plugins.checks.resources import absent
from verl_turnkey.plugins.checks.run import FILTER, CheckedRun
from verl_turnkey.plugins.checks.values import unset
from verl_turnkey.plugins.config.agent import AgentConfig, sandbox_of
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.config.playing import differing
from verl_turnkey.plugins.config.schema import TurnkeyConfig, closest
from verl_turnkey.plugins.verl_api.internals import own_manager
from verl_turnkey.plugins.verl_api.ledger import VERLS_LOOPS


def check_data(config: DictConfig, turnkey: TurnkeyConfig, loops: Sequence[str]) -> list[str]:
    """Refuse data that the run could not use; returns the local training files.

    ``loops``: names of the known agent loops. Files that are not on this machine are not read, nor are those of a
    dataset class of the user's own (``data.custom_cls``).
    """
    if path := (config.data.get("custom_cls") or {}).get("path"):
        if "://" not in path and not Path(path).expanduser().is_file():
            absent(config, f"data.custom_cls.path={path}: there is no such file")
        return []
    local: dict[str, list[str]] = {}
    for key in ("train_files", "val_files"):
        files = listed(config, key)
        if not files:
            unused = ", also for a run that never validates (the training file will do)" if key == "val_files" else ""
            refuse("data-file-missing", key=key, unused=unused)
            continue
        for name in patterns(config, key):
            if Path(name).is_file() and not glob(name):  # verl would read no file
                refuse("data-brackets", key=key, name=name, argument=override(f"data.{key}", escape(name)))
        local[key] = [file for file in files if _readable(config, f"data.{key}", file)]
        by_presence = {LOOP_COLUMN in columns(file): file for file in local[key]}
        if len(by_presence) > 1:  # verl joins the files, and rows without an entry have no loop
            key_of_file, without = f"data.{key}", by_presence[False]
            refuse("agent-name-in-some-files", key=key_of_file, with_column=by_presence[True], without=without)
        number = sum(_check_file(config, turnkey, f"data.{key}", file, loops) for file in local[key])
        if len(local[key]) == len(files):  # else some are elsewhere and cannot be counted
            _check_number(config, key, number)
    return local["train_files"]


def _readable(config: DictConfig, key: str, file: str) -> bool:
    """Whether ``file`` is on this machine; refused if it should be and is not, or if verl could not read it."""
    path, setting = Path(file).expanduser(), f"{key}={file}"
    if path.suffix not in FORMATS:
        kind = "a folder: name the files in it" if path.is_dir() else path.suffix or "no suffix"
        refuse("data-format", key=key, file=file, formats=", ".join(FORMATS), suffix=kind)
        return False
    if "://" in file:
        return False
    if file.startswith("~") and unset(config, key):
        refuse("data-file-default", key=key, file=file)
        return False
    if file.startswith("~"):
        refuse("data-tilde", key=key, file=file, path=path)
        return False
    if not path.is_file():
        absent(config, f"{setting}: there is no such file; `turnkey tasks` writes them")
        return False
    try:
        columns(file)
    except Exception as error:
        refuse("data-unreadable", key=key, file=file, suffix=path.suffix, kind=type(error).__name__, error=error)
        return False
    return True


def without_tasks(file: str, file_columns: Sequence[str]) -> Refusal:
    """The error for a file that has the columns ``file_columns`` but not the one with the tasks."""
    return refusal("task-column-missing", file=file, columns=", ".join(file_columns))


def _check_file(config: DictConfig, turnkey: TurnkeyConfig, key: str, file: str, loops: Sequence[str]) -> int:
    """Check all rows of a local file; returns their number."""
    file_columns, prompt = columns(file), str(config.data.prompt_key)
    if file_columns and prompt not in file_columns:
        refuse("prompt-column-missing", key=key, file=file, prompt=prompt, closest=closest(prompt, file_columns))
    default = str(config.actor_rollout_ref.rollout.agent.default_agent_loop)
    own_loops = own_manager(config) is not None
    checked: set[tuple[str, ...]] = set()
    read_columns = [column for column in (LOOP_COLUMN, COLUMN) if column in file_columns]
    number, loops_of_rows = 0, set[str]()
    for number, values in enumerate(rows(file, read_columns or file_columns[:1]), start=1):
        row = dict(zip(read_columns, values, strict=False))
        loop, where = row.get(LOOP_COLUMN, default), f"{key}={file}, row {number - 1}"
        loops_of_rows.add(str(loop))
        if loop not in loops and not own_loops:
            refuse("unknown-agent-name", where=where, loop=loop, closest=closest(str(loop), list(loops)))
        if loop == "turnkey_agent" and COLUMN in row and turnkey.agent.run is not None:
            try:
                task_of(row)
            except TaskFormatError as error:
                raise TaskFormatError(f"{where}: {error}") from error
            check_harbor(turnkey.agent, where, row[COLUMN])
        if loop != "turnkey_env":
            continue
        if COLUMN not in row:
            raise without_tasks(file, file_columns)
        _check_task(turnkey, where, row[COLUMN], checked)
    check_cells(config, turnkey, key, file, file_columns, loops_of_rows)
    return number


def _check_task(turnkey: TurnkeyConfig, where: str, text: Any, checked: set[tuple[str, ...]]) -> None:
    """Check the format of a task, and once per environment and set of argument names whether they exist."""
    try:
        task = Task.from_json(text)
    except TaskFormatError as error:
        raise TaskFormatError(f"{where}: {error}") from error
    env_id = task.env_id or turnkey.env.id
    if not env_id:
        refuse("task-without-environment", where=where)
        return
    arguments = {**turnkey.env.kwargs, **task.kwargs}
    kind = (env_id, *sorted(arguments))
    if kind in checked:
        return
    checked.add(kind)
    try:
        check_call(env_id, arguments)
    except MissingPackageError:
        if turnkey.env.probe:  # else the packages may be on the other machines only
            raise
    except (LookupError, TypeError) as error:
        reason = error.args[0] if error.args else error
        if isinstance(error, UnknownEnvironmentError) and not turnkey.modules:
            reason = f"{reason}. turnkey.modules is empty: set turnkey.modules=[FILE], where FILE registers {env_id}"
        refuse("task-invalid", where=where, reason=reason)


def _check_number(config: DictConfig, key: str, rows: int) -> None:
    """Refuse fewer tasks than a batch has: verl divides by the number of batches."""
    rows = taken(config, key, rows)
    for size in ("train_batch_size", "gen_batch_size") if key == "train_files" else ():
        batch_size = config.data.get(size)
        if batch_size and rows < batch_size:
            refuse("too-few-tasks", key=key, rows=rows, size=size, batch_size=batch_size)
    if not rows:
        refuse("no-tasks", key=key)


def warn_of_shared(config: DictConfig) -> None:
    """Warn of validation tasks that are trained on."""
    if config.trainer.test_freq is None or (config.trainer.test_freq <= 0 and not config.trainer.val_before_train):
        return
    shared, total, compared = shared_tasks(config)
    if shared:
        warn("validation-tasks-trained", shared=shared, total=total, compared=compared)


NULL, TEXT, MAPPING, LIST, MESSAGES = "null", "a text", "a mapping", "a list", "a list of messages"
PLACES = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}
"""keys of ``data`` that name the columns of images and the like, with verl's defaults"""


def check_cells(
    config: DictConfig, turnkey: TurnkeyConfig, key: str, file: str, columns: Sequence[str], loops: Collection[str]
) -> None:
    """Refuse a row of a local file that verl's data set, or the loop or the reward of a row, cannot read.

    ``loops``: those that play the rows.
    """
    prompt = str(config.data.prompt_key)
    verls = next((loop for loop in VERLS_LOOPS if loop in loops), None)
    allowed = (MESSAGES,) if verls else (MESSAGES, LIST, TEXT)
    if prompt in columns and (other := _first_other(file, prompt, allowed)):
        why = "verl's data set iterates over it" if verls is None else f"the agent loop {verls} renders it"
        refuse("prompt-not-messages", key=key, file=file, row=other[0], prompt=prompt, kind=other[1], why=why)
    if "extra_info" in columns and (other := _first_other(file, "extra_info", (MAPPING, NULL))):
        refuse("extra-info-not-mapping", key=key, file=file, row=other[0], kind=other[1])
    elif "data_source" not in columns:
        _check_tools(config, key, file, columns)
    names = [entry.get("name") for entry in turnkey.rewards]
    reader = next((f"turnkey.rewards ({name})" for name in ("answer", "function") if name in names), verls)
    if reader and "reward_model" in columns and (other := _first_other(file, "reward_model", (MAPPING, NULL))):
        refuse("reward-model-not-mapping", key=key, file=file, row=other[0], kind=other[1], reader=reader)
    _check_places(config, key, file, columns, prompt)


def _check_tools(config: DictConfig, key: str, file: str, columns: Sequence[str]) -> None:
    """Check rows without ``data_source``, which verl names where a row lacks the ``tools_kwargs`` that it needs."""
    default, names = config.data.get("need_tools_kwargs", False), [name for name in ("extra_info",) if name in columns]
    for number, (extra,) in enumerate(rows(file, names) if names else [({},)] if default else ()):
        extra = extra or {}
        if extra.get("need_tools_kwargs", default) and not extra.get("tools_kwargs"):
            refuse("tools-kwargs-missing", key=key, file=file, number=number)
            return


def _check_places(config: DictConfig, key: str, file: str, columns: Sequence[str], prompt: str) -> None:
    """Check that each image, video and audio of a row has its place in the prompt."""
    names = {str(config.data.get(name) or default): f"<{default[:-1]}>" for name, default in PLACES.items()}
    names = {name: mark for name, mark in names.items() if name in columns}
    if prompt not in columns or not names:
        return
    for number, (messages, *parts) in enumerate(rows(file, [prompt, *names])):
        if isinstance(messages, list) and any(parts):
            texts = [m["content"] for m in messages if isinstance(m, Mapping) and isinstance(m.get("content"), str)]
            for (name, mark), entries in zip(names.items(), parts, strict=True):
                if (places := sum(text.count(mark) for text in texts)) != (count := len(entries or ())):
                    refuse(
                        "images-without-place",
                        key=key,
                        file=file,
                        number=number,
                        name=name,
                        count=count,
                        prompt=prompt,
                        places=places,
                        mark=mark,
                    )
                    return


def _first_other(file: str, name: str, allowed: Collection[str]) -> tuple[int, str] | None:
    """The first row whose cell of the column ``name`` is of no kind that is ``allowed``, and its kind."""
    path = Path(file).expanduser()
    if path.suffix != ".parquet":
        kinds = enumerate(_kind(row.get(name)) for row in json_rows(path))
        return next(((number, kind) for number, kind in kinds if kind not in allowed), None)
    whole, before = open_parquet(path), 0
    kind = _kind_of_type(whole.schema_arrow.field(name).type)
    bad = [null for null, is_null in ((True, NULL), (False, kind)) if is_null not in allowed]
    for batch in whole.iter_batches(columns=[name]) if bad else ():
        nulls = batch.column(0).is_null()
        first = [place for null in bad if (place := nulls.index(null).as_py()) >= 0]
        if first:
            return before + min(first), NULL if nulls[min(first)].as_py() else kind
        before += batch.num_rows
    return None


def _kind(value: Any) -> str:
    if value is None:
        return NULL
    if isinstance(value, list):
        messages = all(isinstance(entry, Mapping) and {"role", "content"} <= entry.keys() for entry in value)
        return MESSAGES if messages else LIST
    kinds = {str: TEXT, dict: MAPPING}
    return kinds.get(type(value), repr(value))


def _kind_of_type(of: Any) -> str:
    from pyarrow import types

    if types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of):
        inner = of.value_type
        messages = types.is_struct(inner) and {"role", "content"} <= {inner.field(i).name for i in range(len(inner))}
        return MESSAGES if messages else LIST
    if types.is_null(of):
        return NULL
    is_text = types.is_string(of) or types.is_large_string(of) or types.is_dictionary(of)
    return TEXT if is_text else MAPPING if types.is_struct(of) or types.is_map(of) else str(of)


def check_harbor(agent: AgentConfig, where: str, text: Any) -> None:
    """Refuse a Harbor task that cannot be run; other tasks are the agent's own business.

    ``where``: file and row, for errors. ``text``: the row's task.
    """
    try:
        task = json.loads(text)
        if not isinstance(task, dict) or task.get("env_id") != ENV_ID:
            return
    except (TypeError, ValueError):
        return
    if isinstance(agent.run, str):
        refuse("harbor-needs-command", where=where, run=agent.run)
        return
    if agent.cwd is not None:
        refuse("harbor-working-folder", where=where, cwd=agent.cwd)
    try:
        sandbox_for(HarborTask.load(**task.get("kwargs") or {}).filled(agent.inherit), sandbox_of(agent))
    except SandboxError:  # check_agent says so
        pass
    except (TaskFormatError, TypeError) as error:
        refuse("harbor-task", where=where, error=error)


def validation_panel(config: DictConfig) -> dict[str, str] | None:
    """Name and hash of the panel that a run validates on; None: no panel, or one played with other settings."""
    panel = _of_validation(config)
    return None if panel is None or differing(panel, config, arguments=False) else panel.mark


def check_panel(config: DictConfig) -> None:
    """Warn if the validation tasks are those of a panel and are played with other settings."""
    panel = _of_validation(config)
    if panel is not None and (lines := differing(panel, config, arguments=False)):
        warn("panel-changed", panel=panel.name, changes="; ".join(lines))


def check_starts(panel: Panel, tasks: Sequence[Task], places: Mapping[str, Any]) -> None:
    """Refuse to play a panel whose tasks start in other states on this machine."""
    if other := panel.other_starts(tasks, places):
        spec = panel.content["environment"]
        refuse(
            "panel-start-differs",
            panel=panel.name,
            differing=len(other),
            tasks=len(tasks),
            example=other[0],
            package=spec["package"],
            version=spec["version"],
        )


def _of_validation(config: DictConfig) -> Panel | None:
    files = listed(config, "val_files")
    return panel_of(files[0]) if len(files) == 1 else None


def check_hints(run: CheckedRun) -> None:
    hint_high, template = run.value_text("turnkey.groups.hint_high"), run.turnkey.rollout.template
    run.needs_our_loop("hints-agent-loop", hint_high=hint_high)
    if "{task}" not in load_template(template):
        refuse("hints-template", hint_high=hint_high, template=template)
    if lacking := [file for file in run.files if HINT not in columns(file)]:
        refuse("hints-missing", hint_high=hint_high, file=lacking[0])
    run.needs_off("hints-filter-groups", FILTER, hint_high=hint_high)


def check_skill(run: CheckedRun) -> None:
    """Refuse a text of the data that no prompt would show."""
    skill, template = run.turnkey.rollout.skill, run.turnkey.rollout.template
    if skill is None:
        return
    run.needs_our_loop("skill-agent-loop", skill=skill)
    if "{task}" not in load_template(template):
        refuse("skill-template", skill=skill, template=template)
    if lacking := [file for file in run.files if not has_text(file, skill)]:
        refuse("skill-missing", skill=skill, file=lacking[0])


def has_text(file: str, name: str) -> bool:
    """Whether ``file`` has a column ``name``, or its first row such a key in ``extra_info``."""
    if name in (names := columns(file)):
        return True
    extra = next(rows(file, ["extra_info"]), (None,))[0] if "extra_info" in names else None
    return isinstance(extra, Mapping) and name in extra


def task_file(config: DictConfig) -> str | None:
    """The first training file with tasks that can be read here; None when there is none."""
    return next((file for file in local_parquet(config) if COLUMN in columns(file)), None)


def first_task(file: str) -> Task:
    """The first task of a local data file."""
    if COLUMN not in (file_columns := columns(file)):
        raise without_tasks(file, file_columns)
    for (text,) in rows(file, [COLUMN]):
        if text is not None:  # a row of another agent loop
            return Task.from_json(text)
    raise refusal("data-file-empty", file=file)


def check_answer(file: str, strategy: str, first: RewardStep) -> None:
    """Refuse a first task without a right answer: if none has one, no value is ever measured."""
    field = "reward_model"
    row = {field: next(rows(file, [field]))[0]} if field in columns(file) else {}
    try:
        right_answers(replace(first, row=row))
    except RewardError as error:
        refuse("answer-missing", strategy=strategy, file=file, error=error)
