"""The key ``turnkey.rollout.examples``: example turns, inline or in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_turnkey.advantage.params import ConfigError, parse
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.prompting.prompts import KEY, ExampleTurn


def load_examples(value: str | Sequence[Any]) -> tuple[ExampleTurn, ...]:
    """The turns of ``turnkey.rollout.examples``: a list of mappings, or the path of a YAML, JSON or JSONL file of one.

    Raises:
        ConfigError: there is no such file, or an entry is not a turn; names it.
    """
    entries: Any = value
    where = KEY
    if isinstance(value, str):
        import yaml

        path = Path(value).expanduser()
        where = f"{KEY}={value}"
        try:
            text = read_text(path)
            lines = [line for line in text.split("\n") if line.strip()]
            entries = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{where}: a list of turns cannot be read from this file: {error}") from None
    if not isinstance(entries, Sequence) or isinstance(entries, str | Mapping):
        raise ConfigError(f"{where}: expected a list of turns, each with observation and action, got {entries!r}")
    return tuple(parse(ExampleTurn, entry, f"{where}[{n}]") for n, entry in enumerate(entries))
