"""The tables of a log: read, also while a run writes them or after it was killed, and joined for a page.

Joined are episodes, and their turns with credit and update, or why they have none. Rollout processes, the trainer and
the actor's ranks each write their own tables. Turns are joined with credit on episode and turn, and with updates
through the row that held them. ``step`` is never a key: an asynchronous trainer trains an episode in another step than
the one that played it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl_turnkey.plugins.log.bounds import Shares, chosen
from verl_turnkey.plugins.log.schema import STEP, TABLES, current_columns, families, schema
from verl_turnkey.plugins.log.writer import SEGMENT, read_segments

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


REASONS = (
    "",
    "the episode failed",
    "validation is not trained on",
    "not trained yet",
    "the group was not trained: lost, replaced or filtered out",
    "the episode is not in the trainer's batch",
    "the turn is not in the trainer's batch",
)
"""Why a turn has no credit; the first is for a turn with credit, which may be 0."""
JOINED = ("episodes", "turns", "credit", "updates", "steps")
"""tables of :func:`load`"""
HAS_CREDIT, FAILED, VALIDATION, NOT_YET, GROUP_LOST, EPISODE_LOST, TURN_LOST = range(len(REASONS))


class NoLog(ValueError):
    """A folder holds no trajectory log."""


@dataclass(frozen=True)
class LoggedRun:
    """A log in memory, without its texts.

    ``episodes`` is sorted by step, group and key; ``turns`` likewise, with ``at`` (row in ``episodes``), the columns of
    credit and updates, and ``reason`` (a place in ``REASONS``).
    """

    name: str
    folder: Path
    about: dict[str, Any]
    episodes: pd.DataFrame
    turns: pd.DataFrame
    steps: pd.DataFrame
    shares: dict[str, Shares] = field(default_factory=dict)
    """segment ("" for any other) -> shares of groups that it logged; the rest of the groups has failed episodes only"""
    notes: list[str] = field(default_factory=list)
    """warnings of reading the log"""

    @property
    def whole(self) -> np.ndarray:
        """Which episodes belong to logged groups: of other groups only failures are known, so no rate includes them."""
        episodes, others = self.episodes, self.shares.get("", Shares())
        keys = [*zip(episodes["group"], episodes["segment"], flag(episodes["validation"]), strict=True)]
        of = {key: chosen(str(key[0]), self.shares.get(key[1], others)[int(key[2])]) for key in set(keys)}
        return np.array([of[key] for key in keys], bool)

    @property
    def parts(self) -> list[str]:
        """Columns of credit that add up, the sum first."""
        return ["advantage", *(name for name in self.turns.columns if name.startswith("part."))]

    @property
    def first_ways(self) -> np.ndarray:
        """Which episodes are not branches: counts and rates are over these, as in the trainer's metrics."""
        return ~(self.episodes["branch"] > 0).to_numpy(bool)

    @property
    def own(self) -> np.ndarray:
        """Which turns are trained by their own episode: a turn that branches share counts once."""
        return self.turns["trained_by"].isna().to_numpy()


def find_log(folder: Path) -> Path:
    """The log in the folder of a run; the folder itself if it is a log.

    Raises:
        NoLog: ``folder`` is neither.
    """
    for place in (folder / "turnkey_log", folder):
        if (place / "episodes").is_dir():
            return place
    if not folder.is_dir():
        raise NoLog(f"{folder}: expected the folder of a run, or its turnkey_log folder; there is no such folder")
    raise NoLog(
        f"{folder}: no trajectory log, expected turnkey_log/episodes/ in it. A run writes one with "
        "turnkey.log.trajectories=FOLDER in its launch line"
    )


def load(folder: Path) -> LoggedRun:
    """Read and join the log of a run.

    Raises:
        NoLog: the folder holds none, or one without a finished episode.
    """
    log = find_log(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tables = {name: read(log, name) for name in JOINED}
    if not len(tables["episodes"]):
        raise NoLog(f"{log}: no episode is written yet; files follow at most five minutes after the first episodes end")
    return joined(log, tables, list(dict.fromkeys(str(warning.message) for warning in caught)))


def joined(log: Path, tables: Mapping[str, pd.DataFrame], notes: Sequence[str] = ()) -> LoggedRun:
    """The run with these rows of the tables ``JOINED``, as :func:`read` and :func:`frame` give them."""
    episodes, turns, credit, updates, steps = (
        tables[name].drop_duplicates(list(TABLES[name].key), keep="last", ignore_index=True) for name in JOINED
    )
    episodes = episodes.sort_values(["global_step", "group", "episode"], kind="stable", ignore_index=True)
    # A launch folder is named after the experiment; "turnkey_log" would be the same name for every run.
    name = log.resolve().parent.name if log.name == "turnkey_log" else log.resolve().name
    about = _about(log)
    shares = {name: share for name, info in {**read_segments(log), "": about}.items() if (share := _shares(info))}
    turns = join(episodes, turns, credit, updates, _staleness(about))
    return LoggedRun(name, log, about, episodes, turns, steps, shares, [*notes])


def join(
    episodes: pd.DataFrame, turns: pd.DataFrame, credit: pd.DataFrame, updates: pd.DataFrame, staleness: float = 0
) -> pd.DataFrame:
    """Turns left join credit left join updates, in the order of ``episodes``, with ``at`` and ``reason``.

    A turn that several steps trained has the credit of the last; a turn that branches share, that of the episode that
    trains it. Over several passes: mean ratio and clip share, largest ratio, and the entropy of the first pass.

    Args:
        staleness: most steps that an episode may wait to be trained, or more if one in the log has waited longer.
    """
    at = dict(zip(episodes["episode"], range(len(episodes)), strict=True))
    # The segment of a row is irrelevant here, and the step has another meaning in each table.
    turns, credit = (frame.drop(columns=["step", "segment"], errors="ignore") for frame in (turns, credit))
    table = turns.assign(at=turns["episode"].map(at)).dropna(subset="at")
    table = table.astype({"at": np.int64}).sort_values(["at", "turn"], kind="stable")
    last = credit.sort_values("train_step", kind="stable").drop_duplicates(["episode", "turn"], keep="last")
    last = last.rename(columns={"turn_in_row": "trained_turn", "episode": "trainer"})
    table["trainer"] = table["trained_by"].where(table["trained_by"].notna(), table["episode"])
    table = table.merge(last, on=["trainer", "turn"], how="left")
    where = ["train_step", "row_id", "turn_in_row"]
    passes = updates.sort_values([*where, "epoch"], kind="stable").groupby(where, sort=False)
    update = passes.agg(
        ratio=("ratio", "mean"), ratio_max=("ratio_max", "max"), clip_share=("clip_share", "mean"),
        entropy=("entropy", "first"),
    ).reset_index()  # fmt: skip
    update = update.rename(columns={"turn_in_row": "trained_turn"})
    table = table.merge(update, on=["train_step", "row_id", "trained_turn"], how="left")
    trained_at = table["trainer"].map(at).fillna(table["at"]).astype(np.int64)
    reason = _reasons(episodes, table.assign(at=trained_at), staleness)
    return table.assign(reason=reason).drop(columns="trainer").reset_index(drop=True)


def _reasons(episodes: pd.DataFrame, turns: pd.DataFrame, staleness: float) -> np.ndarray:
    trained = turns["advantage"].notna().to_numpy()
    at = turns["at"].to_numpy()
    of_episode = np.zeros(len(episodes), bool)
    np.logical_or.at(of_episode, at, trained)
    of_group = episodes["group"].map(episodes["group"][of_episode].value_counts()).notna().to_numpy()
    step = episodes["global_step"].fillna(-1).to_numpy()
    trained_at = turns["train_step"].to_numpy(np.float64)[trained]
    newest = trained_at.max(initial=-1)
    waits = (trained_at - step[at[trained]]).max(initial=staleness)
    reason = np.select(
        [
            episodes["failed"].notna().to_numpy(),
            flag(episodes["validation"]),
            of_episode,
            of_group,
            step + waits > newest,  # the next batch may hold it
        ],
        [FAILED, VALIDATION, TURN_LOST, EPISODE_LOST, NOT_YET],
        GROUP_LOST,
    )
    return np.where(trained, HAS_CREDIT, reason[at]).astype(np.uint8)


def flag(column: pd.Series) -> np.ndarray:
    """A column of booleans; null is False."""
    return column.map(lambda value: value is True or value == True).to_numpy(bool)  # noqa: E712 - numpy's own True


def _staleness(about: dict[str, Any]) -> float:
    """Most steps that an episode may wait for its update: 0 under a synchronous trainer."""
    node: Any = about.get("config")
    for key in ("trainer", "v1"):
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict) or not str(node.get("trainer_mode")).endswith("async"):
        return 0
    sampler = node.get("sampler")
    most = sampler.get("max_off_policy_threshold") if isinstance(sampler, dict) else None
    return most if isinstance(most, int) else np.inf  # null: no limit


def _shares(info: dict[str, Any]) -> Shares | None:
    """The shares in ``run.json`` or in the file of a segment."""
    share = info.get("share")
    validation = info.get("validation_share", share)
    if not isinstance(share, int | float) or not isinstance(validation, int | float):
        return None
    return Shares(float(share), float(validation))


def _about(log: Path) -> dict[str, Any]:
    """The content of ``run.json``; empty where it is absent or damaged: the tables hold most of the log."""
    try:
        info = json.loads((log / "run.json").read_text(encoding="utf-8"), parse_constant=str)
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


class Part(NamedTuple):
    """A file of a table."""

    path: Path
    step: int
    segment: str


def read(folder: str | Path, table: str, steps: Collection[int] | None = None) -> pd.DataFrame:
    """The rows of a table, with the further columns ``step`` and ``segment``; columns that no file has are null.

    Columns and metrics of a log of version 1 get their names of version 2.

    Steps that a later start of the trainer did again replace those of earlier starts. A warning names the replaced
    steps, and every file that cannot be read or does not belong to the log.

    Args:
        folder: ``<run>/turnkey_log``; no rows if it lacks the table.
        table: a name in :data:`~verl_turnkey.plugins.log.schema.TABLES`.
        steps: read only these partitions.
    """
    folder = Path(folder)
    rows = frame(table, [rows for part in parts(folder, table, steps) if (rows := _rows(part, table)) is not None])
    if "episode" in TABLES[table].key and TABLES[table].writer == "rollout" and rows["segment"].nunique() > 1:
        # An asynchronous trainer that resumes plays its unfinished groups again, under the same keys.
        latest = rows.groupby("episode")["segment"].transform("max")
        rows = rows[rows["segment"] == latest].reset_index(drop=True)
    return rows


def frame(table: str, parts: Sequence[pa.Table]) -> pd.DataFrame:
    """The rows of these :func:`placed` parts of ``table``; columns that none has are null."""
    import pyarrow as pa

    names = dict.fromkeys(n for rows in parts for n in rows.column_names if n.startswith(families(table)))
    fields = schema(table, tuple(names)).append(pa.field("step", pa.int32())).append(pa.field("segment", pa.string()))
    return pa.concat_tables([fields.empty_table(), *parts], promote_options="default").to_pandas()


def parts(folder: Path, table: str, steps: Collection[int] | None = None) -> list[Part]:
    """The current files of ``table``, earlier steps and starts first; warns about the others."""
    if table not in TABLES:
        raise ValueError(f"the trajectory log has no table {table!r}; it has {', '.join(TABLES)}")
    foreign: list[Path] = []
    readable = sorted(_files(folder / table, steps, foreign), key=lambda part: (part.step, part.segment, part.path))
    if foreign:
        _warn(f"left out, not a file of the trajectory log: {_names(foreign)}")
    resumed = {segment: facts.get("resumed_from") for segment, facts in read_segments(folder).items()}
    there = {(part.step, part.segment) for part in readable}
    current = [part for part in readable if not _replaced(part, resumed, there)]
    if len(current) < len(readable):
        redone = sorted({part.step for part in set(readable) - set(current)})
        _warn(f"{table}: a later start of the trainer did steps {redone[0]} to {redone[-1]} again: its rows count")
    return current


def _files(folder: Path, steps: Collection[int] | None, foreign: list[Path]) -> Iterator[Part]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        step = STEP.fullmatch(path.name)
        if step is None or not path.is_dir():
            foreign.append(path)
        elif steps is None or int(step[1]) in steps:
            for file in path.iterdir():
                segment = file.name.partition("-")[0]
                if file.suffix == ".parquet" and SEGMENT.fullmatch(segment):
                    yield Part(file, int(step[1]), segment)
                elif not file.name.startswith("."):  # else it is being written
                    foreign.append(file)


def _replaced(part: Part, resumed: dict[str, Any], there: set[tuple[int, str]]) -> bool:
    """Whether a later start did the step of ``part`` again: any step after the one that it resumed from.

    The step that a start resumes from may have a validation of both. If that step is unknown, the start has done the
    steps that it has rows of.
    """
    for segment in {*resumed, *(segment for _, segment in there)}:
        if segment > part.segment:
            begun = resumed.get(segment)
            if part.step > begun if isinstance(begun, int) else (part.step, segment) in there:
                return True
    return False


def _rows(part: Part, table: str) -> pa.Table | None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(part.path) as file:  # read_table would make a column of the folder's name
            rows = current_columns(table, file.read())
        fields = schema(table, tuple(name for name in rows.column_names if name.startswith(families(table))))
        columns = {n: rows[n].cast(fields.field(n).type) if n in fields.names else rows[n] for n in rows.column_names}
    except (OSError, pa.ArrowException) as error:
        _warn(f"left out, it cannot be read: {part.path}: {error}")
        return None
    return placed(pa.table(columns), part.step, part.segment)


def placed(rows: pa.Table, step: int, segment: str) -> pa.Table:
    """Rows with the partition and the start of the trainer that their file's path says."""
    import pyarrow as pa

    columns = {name: rows[name] for name in rows.column_names}
    columns["step"] = pa.repeat(pa.scalar(step, pa.int32()), len(rows))
    return pa.table(columns | {"segment": pa.repeat(pa.scalar(segment), len(rows))})


def _names(paths: list[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + more


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
