"""An episode as a chat, its export, and the headline of a run, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic_run
from typer.testing import CliRunner
from written_page import Written, write

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.view.headline import headline

SYSTEM, TASK = "You are *the* agent.", "Bring the **cup** <b>now</b>"
PROMPT = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{TASK}<|im_end|>\n<|im_start|>assistant\n"
RESPONSE = "<think>It is **there**.</think>\n# Plan\n**Go** with `walk()` 2*3*4\n```py\n**kept** <b>x</b>\n```\n```open"
CALLS = '{"calls": [{"name": "walk", "arguments": {"to": "<b>sink</b>"}}]}'


def replace_column(folder: Path, table: str, name: str, value: Callable[[str | None], str | None]) -> None:
    for path in folder.glob(f"{table}/*/*.parquet"):
        rows = pq.ParquetFile(path).read()
        column = pa.array([value(text) for text in rows[name].to_pylist()], pa.string())
        pq.write_table(rows.set_column(rows.schema.get_field_index(name), name, column), path)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Prompts with a chat template's markup, Markdown in the responses, calls of tools."""
    folder = tmp_path_factory.mktemp("chats")
    log = synthetic_run.write(folder / "run", episodes=40, steps=1, validate=False)
    replace_column(log, "texts", "prompt_tail", lambda _: PROMPT)
    replace_column(log, "texts", "response", lambda _: RESPONSE)
    replace_column(log, "turns", "action", lambda action: CALLS if action == "look" else action)
    return write(folder, folder / "run")


def test_an_episode_is_a_chat(browser, chats):
    turns = chats.run.turns
    at = int(turns["at"][turns["action"] == CALLS].iloc[0])
    browser.open(chats.address, f"#/episode/{chats.run.episodes['episode'][at]}")
    label = "(e) => e.querySelector('h3, summary').firstChild.data"
    roles = f"return [...document.querySelectorAll('.turn div.prompt:not(.said) > *')].map({label})"
    assert browser.run(roles) == ["system", "user", "prompt with its special tokens"]
    assert browser.texts(".turn .system .passage") == [SYSTEM]
    assert browser.texts(".turn .prompt > .said .passage") == [TASK]
    assert browser.texts(".turn .prompt > details:last-child .passage") == [PROMPT]
    assert browser.run("return document.querySelectorAll('.turn details[open]').length") == 0, "they are folded"
    # every character stays where it was
    first = "[...document.querySelector('.response').querySelectorAll('.passage')].map((e) => e.textContent).join('')"
    assert browser.run(f"return {first}") == RESPONSE
    assert browser.text(".response .thoughts .passage") == "<think>It is **there**.</think>\n"
    styled = "[...document.querySelector('.response').querySelectorAll('strong, code')]"
    assert browser.run(f"return {styled}.map((e) => [e.localName, e.textContent])") == [
        ["strong", "# Plan"], ["strong", "**Go**"], ["code", "`walk()`"], ["code", "```py\n**kept** <b>x</b>\n```"],
    ]  # fmt: skip
    number = int((turns["action"][turns["at"] == at] == CALLS).sum())
    assert browser.texts(".calls b") == ["walk"] * number
    assert '"to": "<b>sink</b>"' in browser.text(".calls .passage")
    answers = browser.texts(".observation h3")
    assert sum(answer.startswith("tool results") for answer in answers) == number < len(answers)
    # what is copied is what the log has
    browser.run(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (text) => { window.copied = text }}})"
    )
    browser.run("document.querySelector('.response .copy').click()")
    assert browser.until("return window.copied") == RESPONSE


def test_the_page_exports_what_the_command_does(browser, chats, tmp_path):
    words = ["view", str(chats.run.folder), "--export", str(tmp_path / "out.jsonl"), "--filter", "outcome=solved"]
    CliRunner().invoke(app, words, catch_exceptions=False)
    expected = {
        record["episode"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    browser.open(chats.address, "#/episodes?outcome=solved")
    browser.run(
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.exported = text }); return '#' }"
    )
    browser.run("HTMLAnchorElement.prototype.click = () => {}; document.querySelector('[name=export]').click()")
    records = [json.loads(line) for line in browser.until("return window.exported").splitlines()]
    assert {record["episode"] for record in records} == set(expected)
    for record in records:
        other = expected[record["episode"]]
        for mine, its in ((record, other), *zip(record.pop("turns"), other.pop("turns"), strict=True)):
            names = mine.keys() & its.keys()
            assert len(names) > 12
            assert {name: mine[name] for name in names} == {name: its[name] for name in names}


def test_the_headline_and_honest_axes(browser, tmp_path):
    synthetic_run.write(tmp_path / "run", episodes=60, steps=6)
    page = write(tmp_path, tmp_path / "run")
    browser.open(page.address)
    assert browser.text("main .lead") == headline(page.run)
    ends = "return [...document.querySelectorAll('.plot')].map((e) => [e.drawn.scales.y.min, e.drawn.scales.y.max])"
    by_title = dict(zip(browser.texts(".chart h3"), browser.run(ends), strict=True))
    assert by_title["Successshare of episodes"] == [0, 1]
    assert all(low <= 0 < high for low, high in by_title.values())
