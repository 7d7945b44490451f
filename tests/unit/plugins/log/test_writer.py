"""The tables' files are whole and have all columns; what the disk does neither stops the caller nor goes unsaid."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pyarrow import parquet

from verl_turnkey.advantage import Credit, StepBatch, compute_credit, make_record, make_step
from verl_turnkey.plugins.credit.metrics import episode_metrics, reward_metrics
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.credit.table import Numbers, credit_columns
from verl_turnkey.plugins.log.bounds import Shares, chosen, keep_texts, logged_shares
from verl_turnkey.plugins.log.masking import masked, masked_json
from verl_turnkey.plugins.log.schema import COLUMNS, SCHEMA_VERSION, TABLES
from verl_turnkey.plugins.log.writer import Tables
from verl_turnkey.plugins.rollout.trajectory_log import Logged, _Turn
from verl_turnkey.plugins.view.join import read

SECONDS = 30.0  # for what takes none
SEGMENT = "20260102T030405_00ff"


def tables(folder: Path, process: str = "test-1", **limits: float) -> Tables:
    return Tables(folder / "log", SEGMENT, process, **limits)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder / "log")) for path in (folder / "log").rglob("*") if path.is_file())


def turns(*numbers: int, episode: str = "u_0", **further) -> dict[str, list]:
    return {"episode": [episode] * len(numbers), "turn": list(numbers), **further}


def test_a_file_for_each_table_and_step(tmp_path: Path):
    writer = tables(tmp_path, "a host:7")
    for step in (1, 1, 2, 1):
        writer.put("turns", step, turns(0, 1))
    writer.put("texts", 1, turns(0, response=["go"]))
    assert writer.drain(SECONDS)
    name = f"{SEGMENT}-a_host_7"
    assert files(tmp_path) == [
        f"texts/step=000001/{name}-3.parquet",
        f"turns/step=000001/{name}-0.parquet",  # when step 2 began
        f"turns/step=000001/{name}-2.parquet",  # came after it
        f"turns/step=000002/{name}-1.parquet",
    ]
    assert (writer.written, writer.lost) == (9, 0)
    assert writer.seconds > 0
    for table in ("turns", "texts"):
        path = tmp_path / "log" / files(tmp_path)[0 if table == "texts" else 1]
        named = [column.name for column in TABLES[table].columns if not column.name.endswith("*")]
        assert parquet.read_schema(path).names == named
        assert parquet.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "log", tmp_path / "log" / "turns")}
    assert modes == {0o700}


@pytest.mark.parametrize("limits", [{"most_puts": 2}, {"seconds": 0.0}, {"most_bytes": 2400}], ids=str)
def test_what_writes_a_file_before_the_step_ends(tmp_path: Path, limits):
    writer = tables(tmp_path, **limits)
    for turn in range(8):
        writer.put("turns", 1, turns(turn, action=["x" * 600]))
        if "most_bytes" in limits:  # 600 characters and what Python needs for them are more than a quarter
            while writer.written <= turn:
                threading.Event().wait(0.001)
    while writer.written < 8:
        threading.Event().wait(0.001)
    assert len(files(tmp_path)) >= 4


def test_columns_of_families_come_with_the_rows(tmp_path: Path):
    writer = tables(tmp_path)
    writer.put("turns", 1, turns(0, **{"composed_reward.step": [0.5]}))
    writer.put("turns", 1, turns(1, **{"composed_reward.judge": [1.5]}))
    assert writer.drain(SECONDS)
    writer.put("turns", 2, turns(2))
    assert writer.drain(SECONDS)
    for path in (tmp_path / "log" / "turns").rglob("*.parquet"):
        names = [name.removeprefix("composed_reward") for name in parquet.read_schema(path).names]
        assert names[names.index("") :][:3] == ["", ".judge", ".step"]
    frame = read(tmp_path / "log", "turns")
    assert frame["composed_reward.judge"].tolist() == pytest.approx([np.nan, 1.5, np.nan], nan_ok=True)


def test_numpy_columns_and_texts_of_any_kind(tmp_path: Path):
    writer = tables(tmp_path)
    numbers = {"train_step": np.full(2, 3), "turn_in_row": np.array([0, 1]), "advantage": np.array([0.1, np.nan])}
    writer.put("credit", 3, turns(0, 1, **numbers, **{"part.step": np.array([1, 2], np.float32)}))
    writer.put("texts", 3, turns(0, 1, 2, response=["a\ud800b", None, "\0\x1b[31m‮"], observation=["é"] * 3))
    assert writer.drain(SECONDS)
    frame = pd.read_parquet(tmp_path / "log" / "credit")
    assert frame["advantage"].tolist() == pytest.approx([0.1, np.nan], nan_ok=True)
    assert frame["advantage"].dtype == np.float32
    assert frame["row_id"].isna().all()
    texts = pd.read_parquet(tmp_path / "log" / "texts")["response"].tolist()
    assert [texts[0], texts[2]] == ["a\\ud800b", "\0\x1b[31m‮"]
    assert pd.isna(texts[1])


def test_credit_computed_again_from_the_log_is_that_of_the_run(tmp_path: Path):
    """Three episodes win with 1.1 + 5 * 0.1, a fourth collects 16 * 0.1: equal returns, but for their rounding."""
    writer = tables(tmp_path)
    won, lost = [*[0.1] * 5, 1.1], [0.1] * 16
    steps: dict[str, list] = {name: [] for name in ("trajectory", "step", "reward", "penalty", "anchor")}
    for episode, rewards in zip("abcd", (won, won, won, lost), strict=True):
        number = len(rewards)
        penalties, anchors = [*[0.0] * (number - 1), 0.3], [f"{episode}{t}" for t in range(number)]
        numbers = {"composed_reward": rewards, "penalty": penalties}
        writer.put("turns", 1, turns(*range(number), episode=episode, anchor=anchors, **numbers))
        for column, values in zip(steps, ([episode] * number, range(number), rewards, penalties, anchors), strict=True):
            steps[column] += values
    assert writer.drain(SECONDS)
    columns = dict(zip(steps, ("episode", "turn", "composed_reward", "penalty", "anchor"), strict=True))
    logged = read(tmp_path / "log", "turns")
    again = {name: logged[column].tolist() for name, column in columns.items()}
    assert again == steps
    of_run, of_log = (compute_credit("gigpo", StepBatch(group=[0] * 34, **table)) for table in (steps, again))
    assert not of_run.parts["episode_level"].any()
    assert of_log.advantage.tolist() == of_run.advantage.tolist()


@pytest.mark.parametrize(
    ("table", "rows", "reason"),
    [
        ("turns", turns(0, turn_in_row=["x"]), "ValueError: turns.turn_in_row: Could not convert"),
        ("turns", turns(0, turn_in_row=[2**40]), "ValueError: turns.turn_in_row: "),
        ("turns", turns(0, 1, action=["x"]), "ArrowInvalid"),
        ("turns", turns(0, thought=["x"]), "ValueError: the table 'turns' has no column 'thought'"),
        ("thoughts", turns(0), "ValueError: there is no table 'thoughts'"),
    ],
)
def test_rows_that_do_not_fit_cost_themselves(tmp_path: Path, caplog, table, rows, reason):
    writer = tables(tmp_path)
    for _ in range(2):
        writer.put("turns", 1, turns(0))
        writer.put(table, 1, rows)
    assert writer.drain(SECONDS)
    assert (writer.written, writer.lost) == (2, 2 * len(rows["turn"]))
    [record] = caplog.records  # once
    assert record.getMessage().startswith(f"rows of turnkey.log.trajectories cannot be written: {reason}")


def test_rows_that_are_made_in_the_thread_are_written_all_or_none(tmp_path: Path, caplog):
    by = []

    def make(*extra):
        by.append(threading.current_thread().daemon)
        yield "turns", 1, turns(0, 1)
        yield "texts", 1, turns(0, 1, response=["a", "b"])
        yield from extra

    writer = tables(tmp_path)
    writer.put_later(make, 4, 1000)
    writer.put_later(lambda: make(("texts", 1, turns(2, response=[3]))), 5, 1000)
    assert writer.drain(SECONDS)
    assert by == [True, True]
    assert (writer.written, writer.lost) == (4, 5)
    assert [len(read(tmp_path / "log", table)) for table in ("turns", "texts")] == [2, 2]
    assert "texts.response: " in caplog.text


def test_a_disk_that_hangs_costs_what_there_is_no_room_for(tmp_path: Path, caplog, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    replace = os.replace

    def stalled(*paths):
        begun.set()
        assert go_on.wait(SECONDS)
        replace(*paths)

    monkeypatch.setattr(os, "replace", stalled)
    writer = tables(tmp_path, most_puts=1, most_bytes=10 << 20)
    writer.put("texts", 1, turns(0, response=["x" * (4 << 20)]))
    assert begun.wait(SECONDS)
    for turn in range(1, 6):
        writer.put("texts", 1, turns(turn, response=["x" * (4 << 20)]))
    assert not writer.drain(0.01)
    assert (writer.written, writer.lost) == (0, 4)
    [record] = caplog.records  # once, however many were lost
    lost = f"rows of turnkey.log.trajectories are not written on {socket.gethostname()} until this is over: "
    assert record.getMessage() == f"{lost}writing hangs, and 10 MB wait"
    go_on.set()
    assert writer.drain(SECONDS)
    assert read(tmp_path / "log", "texts")["turn"].tolist() == [0, 1]
    assert caplog.records[1].getMessage().endswith("are written again; 4 were lost, 4 in all")
    assert len(caplog.records) == 2
    writer.put("texts", 1, turns(9, response=["x" * (8 << 20)]))  # there is room again
    assert writer.drain(SECONDS)
    assert writer.written == 3


def test_a_folder_that_cannot_be_made_is_tried_again_and_nothing_makes_none(tmp_path: Path, caplog):
    writer = tables(tmp_path)
    writer.put("turns", 1, {})
    writer.put("turns", 1, turns())
    assert writer.drain(0.0)
    assert not (tmp_path / "log").exists()
    (tmp_path / "log").write_text("a file where a folder should be")
    for turn in range(2):
        writer.put("turns", 1, turns(turn))
        assert writer.drain(SECONDS)
    (tmp_path / "log").unlink()
    writer.put("turns", 1, turns(2))
    assert writer.drain(SECONDS)
    messages = [record.getMessage() for record in caplog.records]
    assert re.search("until this is over: (FileExists|NotADirectory)Error", messages[0])
    assert messages[1:] == ["rows of turnkey.log.trajectories are written again; 2 were lost, 2 in all"]
    assert read(tmp_path / "log", "turns")["turn"].tolist() == [2]


PROCESS = """
import resource, sys
from verl_turnkey.plugins.log.writer import Tables

def size(limit):  # a write beyond it is cut short, and the next one refused, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

tables = Tables(sys.argv[1], sys.argv[2], "p")
for turn, limit in enumerate([resource.RLIM_INFINITY, 150, 20, resource.RLIM_INFINITY]):
    size(limit)
    tables.put("turns", 1, {"episode": ["u_0"], "turn": [turn]})
    assert tables.drain(30)
    print(tables.written, tables.lost)
tables.put("turns", 1, {"episode": ["u_0"], "turn": [9]})  # written when the process ends
assert not {"verl", "torch", "ray"} & sys.modules.keys()
"""


def test_a_full_disk_leaves_no_half_file_and_a_process_that_ends_nothing_unwritten(tmp_path: Path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "log"), SEGMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0", "1", "1", "1", "2", "2", "2"]
    assert read(tmp_path / "log", "turns")["turn"].tolist() == [0, 3, 9]
    assert len(files(tmp_path)) == 3  # no unfinished one


def test_processes_of_one_name_do_not_replace_each_others_files(tmp_path: Path):
    for turn in range(2):
        writer = tables(tmp_path)
        writer.put("turns", 1, turns(turn))
        assert writer.drain(SECONDS)
    assert read(tmp_path / "log", "turns")["turn"].tolist() == [0, 1]


# --- Which groups are logged, and whose texts stay --------------------------------------------------------------------
GROUPS = [f"group {i}" for i in range(4000)]


def test_a_group_is_chosen_by_its_name_alone():
    assert all(chosen(group, 1.0) for group in GROUPS)
    assert not any(chosen(group, 0.0) for group in GROUPS)
    quarter = {group for group in GROUPS if chosen(group, 0.25)}
    assert 900 < len(quarter) < 1100
    assert quarter < {group for group in GROUPS if chosen(group, 0.5)}
    # sha256(b"a") begins with ca978112, which is 0.79137 of the way
    assert chosen("a", 0.7915)
    assert not chosen("a", 0.7913)
    assert chosen("\ud800", 1.0)


@pytest.mark.parametrize(
    ("share", "most", "groups", "n", "expected"),
    [
        (1.0, 256, 16, 8, 1.0),  # 128 episodes
        (1.0, 256, 128, 8, 0.25),
        (0.1, 256, 128, 8, 0.1),
        (0.5, None, 128, 8, 0.5),
        (1.0, 4, 10, 8, 0.1),  # a group is larger than the bound
    ],
)
def test_the_bound_of_a_step_and_of_a_validation_is_a_share(share, most, groups, n, expected):
    def shares(batch: int, tasks: int | None, n: int, of_validation: int) -> Shares:
        return logged_shares(
            {
                "data": {"train_batch_size": batch},
                "actor_rollout_ref": {"rollout": {"n": n, "val_kwargs": {"n": of_validation}}},
                "turnkey": {"log": {"share": share, "episodes_per_step": most, "validation_tasks": tasks}},
            }
        )

    assert shares(groups, 1, n, 1) == pytest.approx((expected, share))
    assert shares(1, groups, 1, n) == pytest.approx((share, expected))
    assert shares(groups, None, 1, n).validation == pytest.approx(expected), "not counted: as large as a step"


def test_texts_of_the_last_steps_and_of_some_stay(tmp_path: Path):
    for table in ("texts", "turns", "pictures"):
        for step in range(46):
            (tmp_path / table / f"step={step:06d}").mkdir(parents=True)
            (tmp_path / table / f"step={step:06d}" / "a.parquet").write_text("x")
    (tmp_path / "texts" / "notes.txt").write_text("x")
    assert keep_texts(tmp_path, 45) == [step for step in range(26) if step not in (0, 10, 20)]
    assert keep_texts(tmp_path, 45) == []
    assert keep_texts(tmp_path, 46) == [26]
    left = sorted(path.name for path in (tmp_path / "texts").iterdir())
    assert left == ["notes.txt", *(f"step={step:06d}" for step in (0, 10, 20, *range(27, 46)))]
    assert len(list((tmp_path / "turns").iterdir())) == 46
    assert len(list((tmp_path / "pictures").iterdir())) == len(left) - 1
    assert keep_texts(tmp_path, 45, last=3, every=7) == [10, 20, 27, *(s for s in range(29, 43) if s not in (35, 42))]
    assert keep_texts(tmp_path / "nothing", 9) == []


# --- What is left out of files that people share ----------------------------------------------------------------------
NAMES = """
token hf_token WANDB_API_KEY apikey password client-secret AWS_SECRET_ACCESS_KEY db_pwd PGPASSWORD auth_header
SENTRY_DSN basic_auth accessToken clientSecret dbPassword OPENAI_KEY AZURE_SAS authorization GITHUB_PAT SLACK_WEBHOOK
db.pass
"""


def test_what_is_kept():
    kept = {
        "max_token_len": 5, "tokenizer_path": "x", "stop_token_ids": [1], "loss_agg_mode": "token-mean",
        "weight_by": "token", "key": "state", "file": "a@b", "token": None, "prompt_key": "prompt", "author": "me",
        "url": "http://host/x?task=5&seed=2", "command": ["--tokenizer", "abc", "--max-tokens", "512", "-u", "me"],
        "at": "http://host:80/x@y", "text": "tokens=5 and path=/x --n 3", "run": "agents.py:play", 
        "own_token_len": "${.n}",
    }  # fmt: skip
    assert masked(kept) == kept


@pytest.mark.parametrize("name", NAMES.split())
def test_names_of_secrets(name):
    assert masked({name: "x", "n": 1}) == {name: "***", "n": 1}
    assert masked({name: {"inner": ["x", 2]}}) == {name: {"inner": ["***", 2]}}


AWS = f"AKIA{'A1' * 8}"
JWT = f"eyJ{'a1' * 6}.eyJ{'b2' * 6}.c"
FORMS: dict[str | tuple[str, ...], Any] = {
    "https://me:pw@host/x?api_key=1&a=2&sig=3#b": "https://***@host/x?api_key=***&a=2&sig=***#b",
    "postgres://me:p@ss@db/x": "postgres://***@db/x",
    "postgres://me:p/ss@db:5432/x": "postgres://***@db:5432/x",
    "Server=db;Password=abc;Database=x": "Server=db;Password=***;Database=x",
    "me:pw@proxy:3128": "***@proxy:3128",
    "https://hooks.slack.com/services/T0/B0/abc": "https://hooks.slack.com/***",
    "https://discord.com/api/webhooks/1/abc": "https://discord.com/api/webhooks/***",
    "agent --token=abc --n=3": "agent --token=*** --n=3",
    "agent --quiet API_KEY=abc --token abc x": "agent --quiet API_KEY=*** --token *** x",
    "curl -H 'Authorization: Bearer abc' u": "curl -H 'Authorization: ***' u",
    "got Bearer abcdefgh12 back": "got Bearer *** back",
    f"clone ghp_{'a1' * 10} and {AWS}": "clone *** and ***",
    f"{JWT} sk-{'a1' * 8} xoxb-1234567890-a": "*** *** ***",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx": "***\nx",
    ("run", "--token", "abc", "--api-key", "d", "--n", "3"): ["run", "--token", "***", "--api-key", "***", "--n", "3"],
    ("run", "--token=abc", "-u", "me:pw", "--x", "y"): ["run", "--token=***", "-u", "***", "--x", "y"],
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FORMS.items())
def test_forms_of_secrets(text, expected):
    assert masked({"note": text}) == {"note": expected}
    assert masked(text) == expected


def test_a_field_says_whether_it_is_a_secret():
    servers = {"pad": {"command": "serve", "env": {"LEVEL": "x"}}}
    node = {"agent": {"env": {"LEVEL": "x"}}, "mcp": {"servers": servers}, "mutual_information": {"tokens": "response"}}
    hidden = {**node, "agent": {"env": {"LEVEL": "***"}}}
    hidden["mcp"] = {"servers": {"pad": {"command": "serve", "env": {"LEVEL": "***"}}}}
    assert masked({"turnkey": node}) == {"turnkey": hidden}
    flat = {"turnkey.agent.env.LEVEL": "x", "turnkey.agent.env": {"LEVEL": "x"}, "turnkey.prm.head_bias": "x"}
    assert masked(flat) == {**flat, "turnkey.agent.env.LEVEL": "***", "turnkey.agent.env": {"LEVEL": "***"}}


def test_a_secret_is_hidden_wherever_it_stands(monkeypatch):
    """Beside its name, in the configuration or in the environment of this process."""
    value = {"api_key": "correct-horse-7", "kind": {"pass": "response"}, "run": ["play", "x=correct-horse-7"]}
    assert masked(value) == {"api_key": "***", "kind": {"pass": "***"}, "run": ["play", "x=***"]}
    monkeypatch.setenv("MY_PAT", "battery-staple-9")
    assert masked("failed: 401 for battery-staple-9, response") == "failed: 401 for ***, response"


def test_texts_that_hold_json():
    task = json.dumps({"env": "x", "kwargs": {"api_key": "sk", "level": 3}})
    assert json.loads(masked_json(task)) == {"env": "x", "kwargs": {"api_key": "***", "level": 3}}
    plain = '{"b": 1,  "a": [2]}'
    assert masked_json(plain) == plain
    assert masked_json("find http://a:b@c") == "find http://***@c"
    assert masked_json("7") == "7"


# --- One meaning per name: a reward and a return are called the same in record, log, metrics and product text ---------
ROOT = Path(__file__).parents[4]
# quantity -> where it is: a field of a record's step, columns of the log, a metric
MEASURED = {
    "reward": ("reward", {"turns"}, None),
    "composed_reward": ("composed_reward", {"turns"}, None),
    "env_return": (None, {"episodes"}, "episode/env_return/mean"),
    "composed_return": (None, {"episodes"}, "episode/composed_return/mean"),
    "value_target": (None, {"credit"}, None),
    "anchor": ("anchor", {"turns"}, None),
    "next_anchor": ("next_anchor", {"turns"}, None),
}
# An episode of two steps: each quantity has a value of its own.
RECORD = make_record(
    [
        make_step(step=0, reward=1.0, composed_reward=5.0, anchor="A", extra={"next_anchor": "B"}),
        make_step(step=1, reward=2.0, composed_reward=6.5, anchor="B", extra={"next_anchor": "C"}, terminated=True),
    ]
)
VALUES = {
    "reward": [1.0, 2.0],
    "composed_reward": [5.0, 6.5],
    "env_return": 3.0,
    "composed_return": 11.5,
    "value_target": [0.25, 0.75],
    "anchor": ["A", "B"],
    "next_anchor": ["B", "C"],
}


def logged() -> dict[str, dict[str, list]]:
    """The tables of the rollout and of the trainer that hold the episode."""
    episode = SimpleNamespace(
        branch=0, owners=(), begins=0, success=True, started=0.0, seconds_start=0.0, seconds_waiting=0.0,
        parts={"step": [5.0, 6.5]}, task="", other_calls=(),
    )  # fmt: skip
    columns = {"weights": None, "seconds_model": 0.0, "seconds_env": 0.0}
    turns = [_Turn(step, columns, (), False, None, "", None, "", None) for step in RECORD["steps"]]
    whole = Logged(
        episode=episode, turns=turns, rollout="g_0", group="g", global_step=1, split="train", validation=False,
        row_task=None, task=None, failed=None, rows={0: (0, 0), 1: (0, 1)}, decode=lambda ids: "",
    )  # fmt: skip
    tables = {name: columns for name, _, columns in whole.tables()}
    credit = Credit([0.0, 0.0], VALUES["value_target"], parts={})
    made = {"train_step": 1, "first_row": 0, "numbers": Numbers(), "chosen": [True, True]}
    return tables | {"credit": credit_columns(rows(), credit, **made)}


def rows():
    mask = torch.nested.as_nested_tensor([torch.tensor([1, 0, 1])], layout=torch.jagged)
    return read_rows(["g_0_0"], [{}], [{"turnkey": RECORD}], mask)


@pytest.mark.parametrize("quantity", MEASURED)
def test_a_quantity_is_in_its_tables_alone(quantity: str):
    held = {name for name, table in TABLES.items() if quantity in {column.name for column in table.columns}}
    assert held == MEASURED[quantity][1]
    tables, value = logged(), VALUES[quantity]
    for table in held:
        assert list(tables[table][quantity]) == (value if isinstance(value, list) else [value])


def test_components_are_beside_their_sum():
    assert logged()["turns"]["composed_reward.step"] == VALUES["composed_reward"]
    info = {"env_return": 3.0, "composed_return.step": 11.5}
    extra_fields = [{"turnkey": RECORD, "reward_extra_info": info}]
    assert reward_metrics(rows(), ["g_0_0"], extra_fields) == {"episode/composed_return.step/mean": 11.5}


def test_the_record_and_metrics_have_the_names_of_the_table():
    metrics = episode_metrics(rows())
    for quantity, (field, _, metric) in MEASURED.items():
        if field is not None:
            assert [{**step, **step["extra"]}[field] for step in RECORD["steps"]] == VALUES[quantity]
        if metric is not None:
            assert metrics[metric] == VALUES[quantity]
    unlike = re.compile(r"/(return|reward|score)(/|$)")
    assert not [name for name in metrics if unlike.search(name)], "a return has its kind in its name"


def test_a_former_column_is_gone_and_its_successor_is_there():
    assert SCHEMA_VERSION == 2
    for table, former in COLUMNS.items():
        kept = {column.name for column in TABLES[table].columns}
        for before, now in former.items():
            assert now in kept or f"{now}*" in kept
            assert before in kept if before == "reward" else before not in kept


@pytest.mark.parametrize(("room", "ends"), [("plugins", ("py", "js")), ("docs", ("md",)), ("recipe", ("yaml",))])
def test_no_former_name_is_left(room: str, ends: tuple[str, ...]):
    names = r"episode/return|episode/reward/|groups/score|episode_return|env_reward|next_key"
    columns = r'(?<!Literal)(?:\[|at\(|of\()"(?:state_key|return|score)"'
    former = re.compile(names if room == "docs" else f"{names}|{columns}")  # a page shows info["state_key"]
    files = [path for end in ends for path in (ROOT / room).rglob(f"*.{end}")]
    matches = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if "vendor" not in path.parts
        for match in former.finditer(path.read_text(encoding="utf-8").split("# --- former names ")[0])
    }
    assert len(files) > 20
    assert not matches
