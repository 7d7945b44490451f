"""A run as the blocks of data that a page decodes: an index of all turns, then numbers and texts, a block per group.

Every block is compressed with gzip. ``run-<i>`` is an index: a JSON header (episodes by column, charts, health), then
the credit of all turns as 16-bit numbers, with a scale per column. ``numbers-<i>-<g>`` and ``texts-<i>-<g>`` are JSON:
the exact columns of a group's turns, and its texts without repeats, with the numbers of single tokens. Groups that
exceed the page's size are left out whole, texts and numbers together, and the header says so.

For a page of limited size the most informative groups that fit are selected. Building a group's blocks is slow, so they
are built in that order, and only until the page is full.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import warnings
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_turnkey.advantage import describe_part
from verl_turnkey.envs.model_texts import FAMILIES
from verl_turnkey.plugins.log.schema import PICTURE, TABLES
from verl_turnkey.plugins.view.headline import headline
from verl_turnkey.plugins.view.health import findings
from verl_turnkey.plugins.view.join import REASONS, LoggedRun, flag, parts, read
from verl_turnkey.plugins.view.notes import read_notes
from verl_turnkey.plugins.view.training import charts

if TYPE_CHECKING:
    import pandas as pd


Blocks = dict[str, bytes]
GROUP_BYTES = 8 << 20
"""most bytes of a group's pictures on a page; the others are only named"""

MISSING = -32768
"""in the index: no credit"""
OF_EPISODE = [column.name for column in TABLES["episodes"].columns if column.name != "group"]
NOT_SHOWN = {"episode", "at", "reason", "trained_turn", "next_anchor", "started"}
REPEATING = {
    column.name
    for table in (TABLES["episodes"], TABLES["turns"])
    for column in table.columns
    if column.type == "string" and column.name != "episode"
}
"""columns of texts that several rows share"""
TEMPLATES = (
    (r"<\|im_start\|>([a-z_-]+)\n", r"<\|im_end\|>\s*"),
    (r"(?:<\|begin_of_text\|>)?<\|start_header_id\|>([a-z_-]+)<\|end_header_id\|>\n\n", r"<\|eot_id\|>"),
    (r"(?:<bos>)?<start_of_turn>([a-z_-]+)\n", r"<end_of_turn>\s*"),
)
"""how chat templates begin a message, with its role, and end it: regular expressions that JavaScript has, too"""
MODEL_ROLES = ("assistant", "model")


def pack(run: LoggedRun, number: int, size: float) -> Blocks:
    """The blocks of a run, in base64 at most ``size`` bytes; the index is always among them."""
    group, uids = run.episodes["group"].factorize()
    names = [str(uid) for uid in uids]
    ordered = order(run, group, len(names))
    with_turns = set(group[run.turns["at"].unique()].tolist())
    weights = weights_of(run, group, len(names))
    index = _index(run, number, group, names)
    left = size - on_page(len(index(numbers=[], texts=[], logged_numbers=len(with_turns), logged_texts=len(names))))
    # Numbers alone cannot be read as a conversation: a group gets both; the space that is left then goes to numbers.
    logged = [g for g in ordered if weights[g] > 0 and g in with_turns]
    built, without, left = chosen(logged, weights, left, lambda some: _both(run, group, some))
    rest = [g for g in ordered if g in with_turns and g not in built]
    turns = np.bincount(group[run.turns["at"].to_numpy()], minlength=len(names)).astype(float)
    alone, _, _ = chosen(rest, turns, left, lambda some: {g: (block,) for g, block in _numbers(run, group, some)})
    kept = {"numbers": sorted(built | alone), "texts": sorted(built), "logged_numbers": len(with_turns)}
    blocks = {f"run-{number}": index(**kept, logged_texts=len(logged) - without)}
    blocks |= {f"numbers-{number}-{g}": (built | alone)[g][0] for g in kept["numbers"]}
    return blocks | {f"texts-{number}-{g}": built[g][1] for g in kept["texts"]}


def _both(run: LoggedRun, group: np.ndarray, some: set[int]) -> Built:
    """Numbers and texts of the groups that have texts."""
    texts = dict(_texts(run, group, some))
    return {g: (block, texts[g]) for g, block in _numbers(run, group, set(texts))}


def pictures_in(images: Any) -> list[str]:
    """The names of pictures in a cell of ``turns.images``; what has not their form is left out."""
    return [name for name in images.split() if PICTURE.fullmatch(name)] if isinstance(images, str) else []


def _pictures(run: LoggedRun, step: int, names: set[str]) -> dict[str, bytes]:
    """The PNG files of a partition by name, of ``names`` alone."""
    if not names:
        return {}
    table = read(run.folder, "pictures", [step])
    return {name: png for name, png in zip(table["picture"], table["png"], strict=True) if name in names}


def _encoded(names: Sequence[str], pictures: Mapping[str, bytes]) -> dict[str, str]:
    """Name -> base64, of a group's pictures in the order of its turns, until the group has enough of them."""
    kept: dict[str, str] = {}
    left = GROUP_BYTES
    for name in dict.fromkeys(names):
        if name in pictures and (left := left - len(pictures[name])) >= 0:
            kept[name] = b64encode(pictures[name]).decode()
    return kept


def squeeze(value: Any) -> bytes:
    """JSON, compressed; equal values give equal bytes."""
    return gzip.compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), 6, mtime=0)


def _index(run: LoggedRun, number: int, group: np.ndarray, names: list[str]) -> Callable[..., bytes]:
    """Builds the block of the index from the groups that have numbers and texts here, and their counts in the log."""
    episodes, turns = run.episodes, run.turns
    count = np.bincount(turns["at"].to_numpy(), minlength=len(episodes))
    values: dict[str, dict[str, Any]] = {}
    binary: list[bytes] = []

    def column(name: str, array: np.ndarray, **more: Any) -> None:
        raw = array.tobytes()
        at = sum(map(len, binary))
        values[name] = {"type": array.dtype.name, "at": at, "length": len(array), **more}
        binary.append(raw + bytes(-len(raw) % 4))

    column("reason", turns["reason"].to_numpy(np.uint8))
    column("valid", flag(turns["valid"]).astype(np.uint8))
    column("shared", (~run.own).astype(np.uint8))
    for name in run.parts:
        short, scale = _short(turns[name].to_numpy(np.float64))
        column(name, short, scale=scale)
    named = episodes["task"].map({task: task_name(task) for task in episodes["task"].dropna().unique()})
    header = {
        "name": run.name,
        "number": number,
        "about": run.about,
        "headline": headline(run),
        "notes": run.notes,
        "comments": read_notes(run.folder),
        "templates": TEMPLATES,
        "thoughts": [(marks.begin, marks.end, marks.alone) for marks in FAMILIES],
        "charts": charts(run),
        "health": findings(run),
        "reasons": REASONS,
        "parts": run.parts,
        "meanings": _meanings(run),
        "full": full_credit(run),
        "groups": names,
        "counts": count.tolist(),
        "whole": run.whole.astype(int).tolist(),
        "group": group.tolist(),
        "episodes": {
            name: _plain(named if name == "task" else episodes[name], name in REPEATING) for name in OF_EPISODE
        },
        "turns": values,
    }

    def block(**kept: Any) -> bytes:
        head = json.dumps(header | kept, separators=(",", ":"), allow_nan=False).encode()
        head += b" " * (-len(head) % 4)
        return gzip.compress(len(head).to_bytes(4, "little") + head + b"".join(binary), 6, mtime=0)

    return block


def full_credit(run: LoggedRun) -> float:
    """The absolute credit from which on colours are full: the 98th percentile."""
    sizes = np.abs(run.turns["advantage"].to_numpy(np.float64)[run.own])
    sizes = sizes[np.isfinite(sizes)]
    return float(f"{(np.quantile(sizes, 0.98) if len(sizes) else 0.0) or sizes.max(initial=0.0):.5g}") or 1.0


def task_name(task: str) -> str:
    """A readable name of a task: an environment's description becomes its name and arguments, without the seed."""
    try:
        description = json.loads(task)
    except (ValueError, RecursionError):
        return task
    if not (isinstance(description, dict) and isinstance(description.get("env_id"), str)):
        return task
    kwargs = description.get("kwargs")
    values = [f"{key} {value}" for key, value in kwargs.items()] if isinstance(kwargs, dict) else []
    return ", ".join([re.sub(r"-v\d+$", "", description["env_id"].rpartition("/")[2]), *values])


def _meanings(run: LoggedRun) -> dict[str, str]:
    """Column of credit (part, level, size of a group) -> its meaning in a sentence, where it is known."""
    method = str(run.about.get("method", ""))
    named = [name for name in run.turns.columns if name.startswith(("part.", "level.", "size."))]
    meanings = {name: describe_part(name.partition(".")[2], method) for name in named}
    return {name: meaning for name, meaning in meanings.items() if meaning}


def _short(values: np.ndarray) -> tuple[np.ndarray, float]:
    finite = np.isfinite(values)
    scale = float(np.abs(values[finite]).max(initial=0.0)) / 32767 or 1.0
    return np.where(finite, np.rint(np.where(finite, values, 0.0) / scale), MISSING).astype("<i2"), scale


def _plain(column: pd.Series, repeating: bool = False) -> Any:
    """A column for JSON: null for a missing value, ``{values, codes}`` for texts that repeat."""
    if repeating:
        codes, values = column.factorize()
        return {"values": [str(value) for value in values], "codes": codes.tolist()}
    return _listed(rounded(column.to_numpy()))


def rounded(values: np.ndarray) -> np.ndarray:
    """32-bit numbers, rounded to their 7 digits; JSON would write 17."""
    if values.dtype != np.float32:
        return values
    size = np.abs(values, dtype=np.float64)
    there = np.isfinite(size) & (size > 1e-30)
    unit = 10.0 ** (6 - np.floor(np.log10(size, where=there, out=np.zeros_like(size))))
    return np.where(there, np.round(values * unit) / unit, values)


def _listed(values: np.ndarray) -> list[Any]:
    """A list for JSON: null for a number that is not finite, a text for an integer that JavaScript would round."""
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        numbers = values.tolist()
        return numbers if finite.all() else [v if ok else None for v, ok in zip(numbers, finite.tolist(), strict=True)]
    if values.dtype.kind == "b" or (values.dtype.kind in "iu" and np.all(np.abs(values) < 2**53)):
        return values.tolist()
    return [value if value is None or isinstance(value, bool | str) else str(value) for value in values.tolist()]


def _numbers(run: LoggedRun, group: np.ndarray, wanted: set[int]) -> Iterator[tuple[int, bytes]]:
    turns = run.turns
    names = [name for name in turns.columns if name not in NOT_SHOWN and turns[name].notna().any()]
    numbers = {name: rounded(turns[name].to_numpy()) for name in names if name not in REPEATING}
    texts = {name: turns[name].to_numpy(object) for name in names if name in REPEATING}
    for g, rows in _ranges(group[turns["at"].to_numpy()]):
        if g not in wanted:
            continue
        columns: dict[str, Any] = {name: _listed(values[rows]) for name, values in numbers.items()}
        columns |= {name: _interned(values[rows].tolist()) for name, values in texts.items()}
        yield g, squeeze({"columns": columns})


def _texts(run: LoggedRun, group: np.ndarray, wanted: set[int]) -> Iterator[tuple[int, bytes]]:
    """A block per group whose texts the log still has; read by partition, since all texts may be gigabytes."""
    ours = np.isin(group, list(wanted))
    at = dict(zip(run.episodes["episode"], range(len(group)), strict=True))
    turns = run.turns
    row = {key: i for i, key in enumerate(zip(turns["at"].tolist(), turns["turn"].tolist(), strict=True))}
    of_turn = group[turns["at"].to_numpy()]
    rows_of = dict(_ranges(of_turn))
    unfinished: dict[int, dict[int, tuple[Any, ...]]] = defaultdict(dict)  # group -> turn -> its texts
    of_tokens = _tokens(run, np.flatnonzero(np.isin(of_turn, list(wanted))))
    last = run.episodes["step"].groupby(group).max()
    names_of = {g: [name for cell in turns["images"].iloc[rows_of[g]] for name in pictures_in(cell)] for g in wanted}
    pictures: dict[str, bytes] = {}
    for step in sorted(int(step) for step in run.episodes["step"][ours].unique()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a group without texts says so itself
            table = read(run.folder, "texts", [step])
            names = {name for g in names_of if last[g] >= step for name in names_of[g]}
            pictures = {name: png for name, png in pictures.items() if name in names} | _pictures(run, step, names)
        names = ("episode", "turn", "token_lengths", "prompt_tail", "response", "observation", "opponents")
        for episode, turn, lengths, *texts in zip(*(table[name].tolist() for name in names), strict=True):
            here = row.get((at.get(episode, -1), turn))
            if here is not None and int(of_turn[here]) in wanted:
                unfinished[int(of_turn[here])][here] = tuple(texts)
                if here in of_tokens and lengths is not None and _fits(lengths, of_tokens[here], texts[1]):
                    of_tokens[here]["lengths"] = lengths.tolist()
        for g in [g for g in unfinished if last[g] <= step]:
            by_turn = unfinished.pop(g)
            turn_texts = [by_turn.get(i, (None,) * 4) for i in rows_of[g].tolist()]
            interned = _interned([text for texts in turn_texts for text in texts])  # in order: repeats lie close
            codes = interned["codes"]
            names = ("prompt", "response", "observation", "opponents")
            tokens = {n: of_tokens.get(i) for n, i in enumerate(rows_of[g].tolist())}
            tokens = {n: numbers for n, numbers in tokens.items() if numbers and "lengths" in numbers}
            columns = {name: codes[i::4] for i, name in enumerate(names)}
            drawn = _encoded(names_of[g], pictures)
            yield g, squeeze({"values": interned["values"], "tokens": tokens, "pictures": drawn, **columns})


def _tokens(run: LoggedRun, rows: np.ndarray) -> dict[int, dict[str, Any]]:
    """Row of a turn -> gap and advantage of each of its tokens, for those of ``rows`` whose tokens were logged."""
    turns, names = run.turns.iloc[rows], run.episodes["episode"].to_numpy()
    trainer = turns["trained_by"].where(turns["trained_by"].notna(), names[turns["at"]])
    wanted: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, *key in zip(rows.tolist(), trainer, turns["turn"], turns["train_step"], strict=True):
        wanted[tuple(key)].append(i)
    numbers_of_turn: dict[int, dict[str, Any]] = {}
    for step in sorted(turns["train_step"].dropna().astype(int).unique().tolist()):
        table = read(run.folder, "tokens", [step])
        columns = (table[name] for name in ("episode", "turn", "train_step", "gap", "advantage"))
        for episode, turn, train_step, *lists in zip(*columns, strict=True):
            numbers = {
                name: _listed(values.astype(np.float64).round(4))
                for name, values in zip(("gap", "advantage"), lists, strict=True)
                if values is not None
            }
            numbers_of_turn |= {i: dict(numbers) for i in wanted.get((episode, turn, train_step), ())}
    return numbers_of_turn


def _fits(lengths: np.ndarray, tokens: dict[str, Any], response: str | None) -> bool:
    """Whether the tokens of the rollout are the tokens that the trainer has numbers for."""
    return len(lengths) == len(tokens["gap"]) and lengths.sum() == len(response or "")


def _ranges(of_turn: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    order = np.argsort(of_turn, kind="stable")
    bounds = np.flatnonzero(np.diff(of_turn[order])) + 1
    for rows in np.split(order, bounds):
        if len(rows):
            yield int(of_turn[rows[0]]), rows


def _interned(texts: list[Any]) -> dict[str, Any]:
    """Distinct texts in the order of their first occurrence, and a code per text; -1: no text."""
    code_of: dict[str, int] = {}
    codes = [code_of.setdefault(text, len(code_of)) if isinstance(text, str) else -1 for text in texts]
    return {"values": list(code_of), "codes": codes}


BATCH = 8
"""fewest groups that are built before their sizes are checked"""

Built = dict[int, tuple[bytes, ...]]


def chosen(
    ordered: Sequence[int], weights: np.ndarray, left: float, build: Callable[[set[int]], Built]
) -> tuple[Built, int, float]:
    """Group -> blocks, for the groups that fit, in order; the number of groups without blocks; and the bytes left.

    The number of groups to build is estimated from ``weights``; too low an estimate is followed by another batch.
    """
    kept: Built = {}
    without, done, ratio = 0, 0, math.inf  # bytes per weight, which the first batch measures
    while done < len(ordered) and left > 0:
        sizes = np.cumsum(weights[ordered[done:]]) * ratio
        some = ordered[done : done + max(BATCH, int(np.searchsorted(sizes, left)) + 1)]
        built = build(set(some))
        fitting, left = _fitting({g: built[g] for g in some if g in built}, left)
        kept |= {g: built[g] for g in some if g in fitting}
        without, done = without + len(some) - len(built), done + len(some)
        if built and not fitting:
            break
        actual = sum(on_page(len(block)) for several in built.values() for block in several)
        ratio = actual / weights[some].sum() or ratio
    return kept, without, left


def order(run: LoggedRun, group: np.ndarray, count: int) -> list[int]:
    """Groups, most informative first: one of each step, then the others; within both, newest steps first.

    Groups with mixed outcomes or failures come before the rest; the order of equal groups is random.
    """
    drawn = list(range(count))
    random.Random(0).shuffle(drawn)
    won, failed = flag(run.episodes["success"]), run.episodes["failed"].notna().to_numpy()
    members = np.bincount(group, minlength=count)
    wins, bad = (np.bincount(group, weights=flags, minlength=count) for flags in (won, failed))
    telling = ((wins > 0) & (wins < members)) | (bad > 0)
    step = run.episodes["global_step"].fillna(-1).groupby(group).max().to_numpy()
    best = sorted(drawn, key=lambda g: (not telling[g], -step[g]))
    first = set({step[g]: g for g in reversed(best)}.values())
    return sorted(best, key=lambda g: g not in first)


def _fitting(blocks: Mapping[int, Sequence[bytes]], left: float) -> tuple[set[int], float]:
    """The groups whose blocks all fit into the bytes that earlier groups leave; and the bytes left at the end."""
    chosen = set()
    for g, several in blocks.items():
        if (need := sum(on_page(len(block)) for block in several)) <= left:
            chosen.add(g)
            left -= need
    return chosen, left


def weights_of(run: LoggedRun, group: np.ndarray, count: int) -> np.ndarray:
    """Bytes of each group's texts on disk, estimated from its share of a step's turns; 0 if a step has no texts."""
    on_disk: dict[int, int] = defaultdict(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading the log has warned already
        for part in parts(run.folder, "texts"):
            on_disk[part.step] += part.path.stat().st_size
    at = run.turns["at"].to_numpy()
    step = run.episodes["step"].to_numpy()[at]
    steps, place, turns = np.unique(step, return_inverse=True, return_counts=True)
    of_turn = np.array([on_disk[int(s)] for s in steps]) / turns
    return np.bincount(group[at], weights=of_turn[place], minlength=count)


def on_page(size: int) -> int:
    return (size + 2) // 3 * 4 + 60  # base64 and its element


def chat(prompt: str) -> list[dict[str, str]] | None:
    """The messages in a prompt by its chat template's markup; None where that does not account for every character.

    What begins the model's turn at the end is left out.
    """
    for begin, end in TEMPLATES:
        messages, at = [], 0
        while (start := re.compile(begin).match(prompt, at)) and (close := re.compile(end).search(prompt, start.end())):
            messages.append({"role": start[1], "content": prompt[start.end() : close.start()]})
            at = close.end()
        last = re.compile(begin).match(prompt, at)
        if messages and (at == len(prompt) or (last and last[1] in MODEL_ROLES)):
            return messages
    return None
