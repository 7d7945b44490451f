"""Checks of the cells that verl's data set reads of every row: it fails at a bad one in the middle of the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.envs.tasks import open_parquet
from verl_turnkey.plugins.checks.files import json_rows, rows
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit.rows import VERLS_LOOPS

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
        problem = f"{key}={file}, row {other[0]}, column {prompt!r}: expected {MESSAGES}, got {other[1]}"
        why = "verl's data set iterates over it" if verls is None else f"the agent loop {verls} renders it"
        fix = "write [{role: user, content: ...}], as `turnkey tasks` does"
        refuse("prompt-not-messages", f"{problem}, and {why}: {fix}")
    if "extra_info" in columns and (other := _first_other(file, "extra_info", (MAPPING, NULL))):
        problem = f"{key}={file}, row {other[0]}, column 'extra_info': expected {MAPPING}, got {other[1]}"
        refuse("extra-info-not-mapping", f"{problem}, and verl's data set reads its fields: write a struct, not JSON")
    elif "data_source" not in columns:
        _check_tools(config, key, file, columns)
    reader = next(
        (name for name in ("answer", "function") if name in [entry.get("name") for entry in turnkey.rewards]), None
    )
    reader = f"turnkey.rewards ({reader})" if reader else verls
    if reader and "reward_model" in columns and (other := _first_other(file, "reward_model", (MAPPING, NULL))):
        problem = f"{key}={file}, row {other[0]}, column 'reward_model': expected {MAPPING}, got {other[1]}"
        refuse("reward-model-not-mapping", f"{problem}, and {reader} reads its ground_truth: write a struct with it")
    _check_places(config, key, file, columns, prompt)


def _check_tools(config: DictConfig, key: str, file: str, columns: Sequence[str]) -> None:
    """Check rows without ``data_source``, which verl names where a row lacks the ``tools_kwargs`` that it needs."""
    default, names = config.data.get("need_tools_kwargs", False), [name for name in ("extra_info",) if name in columns]
    for number, (extra,) in enumerate(rows(file, names) if names else [({},)] if default else ()):
        extra = extra or {}
        if extra.get("need_tools_kwargs", default) and not extra.get("tools_kwargs"):
            problem = f"{key}={file}, row {number}: extra_info.tools_kwargs is empty, though need_tools_kwargs is true"
            effect = "verl's warning about it fails without a column 'data_source'"
            refuse("tools-kwargs-missing", f"{problem}; {effect}: add one of the two, or set need_tools_kwargs=false")
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
                    problem = f"{key}={file}, row {number}, column {name!r}: {count} entries, but {prompt!r} has"
                    refuse("images-without-place", f"{problem} {places} times {mark}: write it once for each entry")
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
