"""The tables of the trajectory log: their files, keys and columns, as `turnkey list columns` prints them.

::

    <log>/run.json                     version of this schema, method, parameters, configuration, what each part means
    <log>/segments/<segment>.json      one per start of the trainer: when, versions, resumed from which step
    <log>/<table>/step=000012/<segment>-<process>-<n>.parquet

A file is written under a name with a dot and then renamed: what stands there is whole. ``step`` is the step whose
weights the rollout began with in ``episodes``, ``turns`` and ``texts``, and the step that trained in the others: the
two differ under asynchronous trainers, so tables are joined on keys and never on ``step``.

What an estimator reads of a turn has 64 bits, as it does there. To an estimator the returns 1.1 + 5 * 0.1 and 16 * 0.1
are equal; sums of rewards of 32 bits differ by 7e-9, which is a spread next to an epsilon of 1e-6.

Names from before version 2 of the log are translated: old logs, metrics, evaluations and launch lines still work. A run
that was resumed after an update has files of both versions, so the columns of each file tell its version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa


SCHEMA_VERSION = 2
PICTURE = re.compile(r"(\d{1,5})x(\d{1,5})-([0-9a-f]{16})")
"""the name of a picture in the log: width, height and digest"""
STEP = re.compile(r"step=(\d+)")
"""a partition's folder"""
COMPONENT = "composed_return."
"""prefix, in metrics and results, of the sum of a component of ``turnkey.rewards`` over an episode"""


LISTS = {"floats": "float", "ints": "int32"}
"""types of columns that hold a list per row: the type of its entries"""


class Column(NamedTuple):
    """A column: its type by pyarrow's name, or one of ``LISTS``, and what it holds. A name in ``.*`` is a family's."""

    name: str
    type: str
    meaning: str


class Table(NamedTuple):
    """A table: its key, its columns, and whether the rollout processes, the trainer or the actor's ranks write it."""

    writer: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]


def _columns(text: str) -> tuple[Column, ...]:
    lines = [line.split(None, 2) for line in text.strip().splitlines()]
    return tuple(Column(name, kind, meaning) for name, kind, meaning in lines)


TABLES = {
    "episodes": Table(
        "rollout",
        ("episode",),
        _columns("""
            episode           string   <uid>_<session>; of a branch, a dot and its number follow
            group             string   uid: the episodes that are compared
            branch            int32    number in its rollout; 0 or null: the original episode
            parent            string   episode that a branch forked from; null: no branch
            split             string   of the data row: train, val, ...
            validation        bool     played to validate, not to train
            global_step       int32    trainer's step when it began
            task              string   as in the data row
            env               string   gymnasium id of the environment
            kwargs            string   arguments of the environment, JSON
            seed              int64    of the task
            package           string   the environment's package and version
            weights_min       int32    oldest version of the weights that wrote a turn; null: unknown
            weights_max       int32    newest version
            host              string   where the rollout ran
            started           double   Unix time in seconds
            seconds_model     float    waiting for the model
            seconds_env       float    in calls of the environment
            seconds_waiting   float    for a place to run the environment
            turns             int32    number of steps
            env_return        float    sum of the environment's rewards
            composed_return   float    sum of the composed rewards, verl's score; null: failed
            success           bool     solved the task; null: failed
            truncated         bool     cut by a limit
            failed            string   reason of the failure; null: not failed
            failed_kind       string   kind of the failure
            other_calls       string   requests to turnkey.agent.models, JSON; null: none
        """),
    ),
    "turns": Table(
        "rollout",
        ("episode", "turn"),
        _columns("""
            episode           string   episode of the turn
            turn              int32    0, 1, 2, ...
            row               int32    its training row: <uid>_<session>_<row>
            turn_in_row       int32    place in its row
            trained_by        string   episode that trains a turn of several branches; null: this one
            anchor            string   key of the state in which the action was taken
            next_anchor       string   key of the state it led to, if known
            action            string   the parsed action; null: none
            valid             bool     the action is valid
            parse_note        string   why the parser rejected the response
            penalty           double   subtracted from the advantage
            reward            double   the environment's
            composed_reward   double   sum of turnkey.rewards, which the estimator reads; null: failed
            composed_reward.* double   value of each component of turnkey.rewards, by label
            extra             string   further columns for methods, JSON; null: none
            terminated        bool     the environment ended after it
            truncated         bool     a limit ended the episode after it
            weights           int32    newest version of the weights that wrote it
            prompt_tokens     int32    in the prompt
            prompt_cut        bool     the prompt was shortened to fit
            response_tokens   int32    in the response
            images            string   pictures that the state before it added, <width>x<height>-<digest> each
            started           double   Unix time of the request; null: an older log
            seconds_model     float    waiting for the model
            seconds_env       float    in the environment's step
        """),
    ),
    "texts": Table(
        "rollout",
        ("episode", "turn"),
        _columns("""
            episode           string   episode of the turn
            turn              int32    0, 1, 2, ...
            prompt_tail       string   last 2,000 characters of the prompt, of a role's first turn all
            response          string   of the model
            token_lengths     ints     characters that each token adds; null: no teacher, or unknown
            observation       string   the environment's answer
            task_text         string   the task in words, of turn 0
            first_observation string   what the agent saw in turn 0 or after another role, or a summary request
            opponents         string   turns of other roles until the next one, JSON; null: the policy plays all
        """),
    ),
    "pictures": Table(
        "rollout",
        ("picture",),
        _columns("""
            picture           string   <width>x<height>-<digest of the pixels>
            png               binary   once for each process and step in which it was shown
        """),
    ),
    "credit": Table(
        "trainer",
        ("episode", "turn", "train_step"),
        _columns("""
            episode           string   episode of the turn
            turn              int32    0, 1, 2, ...
            train_step        int32    step that trained it
            row_id            int32    place of its row in the trainer's batch
            turn_in_row       int32    place in its row
            advantage         float    credit; of verl's estimators the mean over tokens
            part.*            float    terms of the advantage, by name
            level.*           float    further quantities of the method, by name
            group.*           int32    number of its comparison group at this level; -1: none
            size.*            int32    turns in that group
            value             float    critic's value before the turn; null: no critic
            value_target      float    target of the critic; null: none
            kl                float    KL penalty, subtracted from the reward; null: none
            progress_advantage float  mean of old_log_probs minus ref_log_prob over its tokens; null: no reference
        """),
    ),
    "tokens": Table(
        "trainer",
        ("episode", "turn", "train_step"),
        _columns("""
            episode           string   episode of the turn
            turn              int32    0, 1, 2, ...
            train_step        int32    step that trained it
            gap               floats   per token: log-probability under the teacher's prompt minus the policy's
            advantage         floats   per token, before any rejection; null: that of the turn
        """),
    ),
    "updates": Table(
        "actor",
        ("train_step", "row_id", "turn_in_row", "epoch"),
        _columns("""
            train_step        int32    step that trained it
            row_id            int32    place of its row in the trainer's batch
            turn_in_row       int32    place in its row
            epoch             int32    pass over the batch: 0, 1, ...
            ratio             float    mean of the turn's importance ratios
            ratio_max         float    their maximum
            clip_share        float    share of its tokens that were clipped; null: not reported by the loss
            entropy           float    mean over its tokens; before the update if the loss computes none
        """),
    ),
    "steps": Table(
        "trainer",
        ("train_step", "name"),
        _columns("""
            train_step        int32    step of the metric
            name              string   metric, as in verl's loggers
            value             double   its value
        """),
    ),
}


@cache
def holds_integers(column: str) -> bool:
    """Whether ``column`` of any table holds integers; ``group.step`` is one of ``group.*``."""
    names = (column, re.sub(r"\..*", ".*", column))
    return any(
        entry.name in names and entry.type.startswith("int") for table in TABLES.values() for entry in table.columns
    )


def families(table: str) -> tuple[str, ...]:
    """Prefixes, with the dot, of the columns of ``table`` that a run names: ``part.`` and so on."""
    return tuple(column.name[:-1] for column in TABLES[table].columns if column.name.endswith(".*"))


def schema(table: str, further: tuple[str, ...] = ()) -> pa.Schema:
    """The schema of the files of ``table``; ``further`` are its columns out of families, as ``part.episode_level``."""
    import pyarrow as pa

    fields = []
    for column in TABLES[table].columns:
        if not column.name.endswith(".*"):
            of_list = LISTS.get(column.type)
            kind = pa.type_for_alias(of_list or column.type)
            fields.append(pa.field(column.name, pa.list_(kind) if of_list else kind))
            continue
        members = sorted(name for name in further if name.startswith(column.name[:-1]))
        fields += [pa.field(name, pa.type_for_alias(column.type)) for name in members]
    if unknown := [name for name in further if not name.startswith(families(table))]:
        raise ValueError(f"{table}: {unknown[0]!r} is in none of the families {families(table)}")
    return pa.schema(fields)


# --- former names -----------------------------------------------------------------------------------------------------

COLUMNS: dict[str, dict[str, str]] = {
    "episodes": {"return": "env_return", "score": "composed_return"},
    "turns": {
        "state_key": "anchor",
        "next_key": "next_anchor",
        "env_reward": "reward",
        "reward": "composed_reward",  # version 2 has this name, too, for another quantity
        "reward.": "composed_reward.",
    },
    "credit": {"return": "value_target"},
}
"""table -> column of version 1, or with a dot at its end the prefix of a family -> column of version 2"""
_SAMPLE = {"return": "env_return", "score": "composed_return"}
_METRICS = {"episode/return/mean": "episode/composed_return/mean", "groups/score/mean": "groups/composed_return/mean"}
_VALIDATED = re.compile(r"(?P<source>val-\w+/.+)/(?P<name>episode_return|reward/[^@]+)(?P<mean>/\w+@\d+.*)")


def current_value(name: str) -> str:
    """The current name of a metric in ``algorithm.filter_groups.metric``, a name in ``reward_extra_info``."""
    if name.startswith("reward/"):
        return f"composed_return.{name.removeprefix('reward/')}"
    return "env_return" if name == "episode_return" else name


def current_columns(table: str, rows: pa.Table) -> pa.Table:
    """A file of ``table`` with the columns of version 2; one of version 2 is returned as it is."""
    if table == "steps" and "name" in rows.column_names:
        import pyarrow as pa

        names = pa.array([name and current_metric(name) for name in rows["name"].to_pylist()], pa.string())
        return rows.set_column(rows.column_names.index("name"), "name", names)
    former = COLUMNS.get(table, {})
    kept = {column.name for column in TABLES[table].columns}
    if not any(name in former and name not in kept for name in rows.column_names):
        return rows
    return rows.rename_columns([_renamed(name, former) for name in rows.column_names])


def _renamed(name: str, former: Mapping[str, str]) -> str:
    family, dot, member = name.partition(".")
    return former.get(f"{family}.", f"{family}.") + member if dot else former.get(name, name)


@cache
def current_metric(name: str) -> str:
    """A metric of verl's loggers by its current name."""
    if name.startswith("episode/reward/"):
        return f"episode/{current_value(name.removeprefix('episode/'))}/mean"
    if match := _VALIDATED.fullmatch(name):
        return f"{match['source']}/{current_value(match['name'])}{match['mean']}"
    return _METRICS.get(name, name)


def current_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A finished sample of ``turnkey eval``, or its result, by its current names."""
    renamed = {_SAMPLE.get(name, name): value for name, value in sample.items() if name != "rewards"}
    return renamed | {f"{COMPONENT}{label}": value for label, value in (sample.get("rewards") or {}).items()}
