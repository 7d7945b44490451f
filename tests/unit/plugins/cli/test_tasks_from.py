"""``turnkey tasks --from``: rows of a file, or of a data set, become tasks."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import MissingPackageError, UnknownEnvironmentError
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.task_rows import arguments_of, read_rows, task_rows

QUIZ = """
import gymnasium
from verl_turnkey.envs import StepResult, TextEnv

class Quiz(TextEnv):
    def __init__(self, question: str = "?", level: int = 1):
        super().__init__(1)
        assert isinstance(level, int)
        self.question = question

    def begin(self, seed):
        return StepResult(self.question, self.question), "Answer."

    def act(self, action):
        return StepResult("Thanks.", "end", terminated=True)

gymnasium.register("my/Quiz-v0", entry_point=Quiz)
"""
ROWS = [
    {"question": "2 + 2?", "level": 1, "answers": ["4", "four"], "id": "a"},
    {"question": "Capital of France?", "level": 2, "answers": ["Paris"], "id": "b"},
    {"question": "Not available?", "level": None, "answers": ["NA"], "id": "c"},
    {"question": "H2O?", "level": 3, "answers": ["water"], "id": "d"},
]

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    Path("quiz.py").write_text(QUIZ)

    def tasks(*words: str) -> str:
        line = ["tasks", "out", "--env", "my/Quiz-v0", "--module", "quiz.py", *words]
        return CliRunner().invoke(app, line, catch_exceptions=False).output

    yield tasks
    gymnasium.registry.pop("my/Quiz-v0", None)


def written(split: str = "train") -> dict[str, dict[str, Any]]:
    """Question -> the row."""
    rows = pd.read_parquet(f"out/{split}.parquet").to_dict("records")
    return {Task.from_json(row["turnkey_task"]).kwargs["question"]: row for row in rows}


def write(name: str, rows: list[dict[str, Any]] = ROWS) -> str:
    if name.endswith("jsonl"):
        Path(name).write_text("\n".join(map(json.dumps, rows)) + "\n")
    elif name.endswith("json"):
        Path(name).write_text(json.dumps(rows))
    elif name.endswith("parquet"):
        pd.DataFrame(rows).convert_dtypes().to_parquet(name)
    else:
        frame = pd.DataFrame([{**row, "answers": json.dumps(row["answers"])} for row in rows]).astype(object)
        frame.to_csv(name, index=False, sep="\t" if name.endswith("tsv") else ",")
    return name


@pytest.mark.parametrize("name", ["q.jsonl", "q.json", "q.csv", "q.tsv", "q.parquet"])
def test_columns_are_taken_by_their_names(run, name):
    output = run("--from", write(name))
    assert "question -> question, level -> level, answers -> answer, question -> prompt; not used: id" in output
    assert "3 tasks in out/train.parquet" in output
    rows = written() | written("val")
    truths = {question: row["reward_model"]["ground_truth"].tolist() for question, row in rows.items()}
    assert truths == {row["question"]: row["answers"] for row in ROWS}
    kwargs = {question: Task.from_json(row["turnkey_task"]).kwargs for question, row in rows.items()}
    assert kwargs["H2O?"] == {"question": "H2O?", "level": 3}
    assert kwargs["Not available?"] == {"question": "Not available?"}
    assert rows["H2O?"]["prompt"][0]["content"] == "H2O?"
    assert rows["H2O?"]["data_source"] == "Quiz-v0"


def test_only_cells_of_tables_of_text_are_read_as_json(run):
    """An interval stays one text, and zero is an answer."""
    rows = [{"question": f"Where?\u2028{n}", "answer": "[0, 1]"} for n in range(2)]
    rows += [{"question": f"{n}?", "answer": {"ground_truth": 0}} for n in range(2)]
    Path("q.jsonl").write_text("\ufeff" + "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    run("--from", "q.jsonl", "--val", "1")
    everything = pd.concat([pd.read_parquet(f"out/{split}.parquet") for split in ("train", "val")])
    assert sorted(model["ground_truth"] for model in everything["reward_model"]) == ["0", "0", "[0, 1]", "[0, 1]"]


TYPED = """
from __future__ import annotations
from typing import TYPE_CHECKING, Any, Literal, Optional
import gymnasium
import numpy as np
if TYPE_CHECKING:
    from nowhere import Absent

class Typed(gymnasium.Env):
    def __init__(
        self, text: str = "", whole: int = 1, part: float = 0.5, flag: bool = False, some: Optional[int] = None,
        either: int | str = 1, level: Literal[1, 2, "007"] = 1, names: list[str] = (), sizes: list[int] = (),
        both: str | list[str] = "", wide: np.int64 = 1, free: Any = None, absent: Absent = None, plain=None,
        by_default=5, by_text="x",
    ): ...

gymnasium.register("my/Typed-v0", entry_point=Typed)
"""
CELLS = [
    *(("text", text, text) for text in ("007", "3.10", "1e3", "true", "[0, 1]", "NA", " 1", "1_000", "0x10")),
    *(("whole", text, 12) for text in ("12", "0012", "12.0", "1.2e1")),
    ("whole", "9007199254740993", 9007199254740993),
    *(("part", "3.10", 3.1), ("flag", "True", True), ("flag", "0", False), ("some", "7", 7), ("some", "", None)),
    *(("either", "007", "007"), ("level", "2", 2), ("level", "007", "007")),
    *(("names", '["3.10", 3.10]', ["3.10", "3.10"]), ("names", "[3.10", "[3.10"), ("sizes", "[3, 4]", [3, 4])),
    *(("both", '["a"]', ["a"]), ("both", "007", "007"), ("wide", "7", 7)),
    *(("free", "007", "007"), ("free", '{"a": 1}', {"a": 1}), ("absent", "1e3", "1e3"), ("plain", "3.10", "3.10")),
    *(("by_default", "7", 7), ("by_text", "007", "007")),
    *(("seed", "12", 12), ("answer", "3.10", "3.10"), ("answer", "[3.10, 007]", "[3.10, 007]"), ("answer", "0", "0")),
    *(("answer", '[3.10, "NA"]', ["3.10", "NA"]), ("answer", '{"text": ["1e3"]}', ["1e3"]), ("hint", "007", "007")),
    *(("prompt", "[1, 2]", "[1, 2]"), ("prompt", '[{"role": "user"}]', [{"role": "user"}])),
]


@pytest.fixture
def typed(tmp_path, monkeypatch) -> Iterator[dict[str, Any]]:
    """The annotations of an environment with one argument of each kind."""
    monkeypatch.chdir(tmp_path)
    Path("typed.py").write_text(TYPED)
    import_modules(["typed.py"])
    yield arguments_of("my/Typed-v0")
    gymnasium.registry.pop("my/Typed-v0", None)


@pytest.mark.parametrize(
    ("suffix", "column", "cell", "value"),
    [*(("csv", *case) for case in CELLS), *((suffix, *case) for suffix in ("tsv", "hub") for case in CELLS[4:12])],
)
def test_a_cell_is_text_unless_the_argument_says_a_number(typed, suffix, column, cell, value):
    name, separator = ("hub/train.csv", ",") if suffix == "hub" else (f"q.{suffix}", "\t" if suffix == "tsv" else ",")
    Path("hub").mkdir()
    with Path(name).open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([[column, "more"], [cell, "x"]])
    [task] = task_rows("hub@train" if suffix == "hub" else name, typed, {})[0]
    came = task.kwargs.get(column) if column in typed else getattr(task, column)
    assert json.dumps(came) == json.dumps(value)


def test_a_text_of_a_data_set_of_json_stays_one(typed):
    Path("hub").mkdir()
    write("hub/train.jsonl", [{"text": "2020-01-02", "answer": "007", "part": 3.10}])
    [task] = task_rows("hub@train", typed, {})[0]
    assert (task.kwargs, task.answer) == ({"text": "2020-01-02", "part": 3.1}, "007")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.csv", "question;answer\nA?;a\n", "has one column, 'question;answer'.*probably by semicolons"),
        ("q.csv", "question\tanswer\nA?\ta\n", "probably by tabs"),
        ("q.tsv", "question,answer\nA?,a\n", "probably by commas"),
        ("q.csv", "question|answer\nA?|a\n", "probably by bars"),
        ("q.csv", "text,text\na,b\n", "two columns 'text'"),
        ("q.csv", "text,whole\na,1\nb,2,3\n", "line 3 has 3 columns, and the first line 2"),
        ("q.csv", 'text,whole\n"a,1\nb,2\n', "line 3: unexpected end of data"),
        ("q.tsv", 'text\twhole\n"a" b\t1\n', "a cell that begins with a quote ends with one"),
        ("q.csv", "text,whole\na,1\nb,three\n", "q.csv, row 1, column 'whole': expected an integer, got 'three'"),
        ("q.csv", "flag,x\nyes,1\n", "row 0, column 'flag': expected true or false, got 'yes'"),
        ("q.csv", "seed,x\n1.5,1\n", "row 0, column 'seed': expected an integer, got '1.5'"),
        ("q.csv", "frage,antwort\na,1\n", "tasks use none of its columns .frage, antwort.*--columns"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(typed, name, text, message):
    Path(name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        task_rows(name, typed, {})


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_tables_are_read_by_their_byte_order_mark(typed, encoding):
    """Excel's text files begin with one; line ends in cells stay."""
    Path("q.tsv").write_bytes('text\twhole\r\n"Tür\r\nzu"\t007\r\n\r\nauf\r\n'.encode(encoding))
    tasks, _ = task_rows("q.tsv", typed, {})
    assert [task.kwargs for task in tasks] == [{"text": "Tür\r\nzu", "whole": 7}, {"text": "auf"}]


def test_columns_are_chosen_by_options_and_nested_ones_are_named_with_dots(run):
    texts = (("2 + 2?", "4", 7, "count"), ("3?", "3", 8, ""))
    rows = [{"q": q, "gold": {"text": [gold]}, "s": seed, "tip": tip} for q, gold, seed, tip in texts]
    columns = {"question": "q", "prompt": "q", "answer": "gold", "seed": "s", "hint": "tip"}
    run("--from", write("q.jsonl", rows), "--columns", json.dumps(columns), "--val-from", write("v.jsonl", rows[1:]))
    row = written()["2 + 2?"]
    assert row["reward_model"]["ground_truth"].tolist() == ["4"]
    assert (Task.from_json(row["turnkey_task"]).seed, row["turnkey_hint"]) == (7, "count")
    rows = [{"ask": {"text": f"{n}?"}, "answer": n} for n in range(3)]
    run("--from", write("q.jsonl", rows), "--columns", '{"question": "ask.text"}', "--val", "1")
    assert {*written(), *written("val")} == {"0?", "1?", "2?"}
    assert next(iter(written().values()))["reward_model"]["ground_truth"] in ("0", "1", "2")


def test_equal_rows_are_never_in_both(run):
    rows = [{"question": f"{n % 20}?"} for n in range(60)]
    run("--from", write("q.jsonl", rows), "--val", "5", "--train", "10", "--seed", "3")
    assert (len(written()), len(written("val"))) == (10, 5)
    assert not {*written()} & {*written("val")}
    first = {*written("val")}
    run("--from", write("q.jsonl", rows), "--val", "5", "--train", "10", "--seed", "3")
    assert {*written("val")} == first
    run("--from", "q.jsonl", "--val-from", write("v.jsonl", rows[:3]))
    assert (len(written()), len(written("val"))) == (17, 3)


def test_a_data_set_of_the_library_is_read_by_name_and_split(run, monkeypatch):
    Path("mine").mkdir()
    write("mine/train.jsonl", [{"question": f"{n}?", "answer": str(n)} for n in range(4)])
    write("mine/test.jsonl", [{"question": "9?", "answer": "9"}])
    run("--from", "mine@train", "--val-from", "mine@test")
    assert (len(written()), {*written("val")}) == (4, {"9?"})
    with pytest.raises(ConfigError, match="choose a split, mine@train or mine@test"):
        read_rows("mine")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="pip install datasets"):
        read_rows("rajpurkar/squad@train")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--from", "absent.csv"], ConfigError, "absent.csv: there is no such file"),
        (["--from", "quiz.py"], ConfigError, "expected a file that ends with .jsonl"),
        (["--from", "absent.txt"], ConfigError, "absent.txt: expected a file that ends with .jsonl"),
        (["--from", "bad.jsonl"], ConfigError, "bad.jsonl cannot be read as .jsonl"),
        (["--from", "q.jsonl", "--columns", '{"answr": "id"}'], ConfigError, "nobody reads 'answr'; did you mean"),
        (["--from", "q.jsonl", "--columns", '{"answer": "gold"}'], ConfigError, "q.jsonl has no column 'gold'"),
        (["--from", "q.jsonl", "--val", "9"], ConfigError, "--val 9: 4 rows are left for it, without duplicates"),
        (
            ["--from", "q.jsonl", "--val", "4"],
            ConfigError,
            "training: 0 rows are left for it, without duplicates and the 4",
        ),
        (["--seed", "-1"], ValueError, "the seed of the tasks must be 0 or more, got -1"),
        (["--from", "q.jsonl", "--columns", '{"answer": 3}'], ConfigError, "the name of a column for 'answer', got 3"),
        (["--from", "q.jsonl", "--env", "my/Quizz-v0"], UnknownEnvironmentError, "did you mean 'my/Quiz-v0'"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_is_written(run, words, error, message):
    write("q.jsonl")
    Path("bad.jsonl").write_text("{")
    with pytest.raises(error, match=message.replace("(", r"\(")):
        run(*words)
    assert "go with --from" in run("--columns", '{"answer": "a"}')
    assert not Path("out").exists()
