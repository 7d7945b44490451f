"""``turnkey view --serve``: who gets an answer, and that the page follows a run."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import synthetic_run
from browser import Browser
from torch.utils.tensorboard import SummaryWriter

from verl_turnkey.plugins.view.conversations import conversations
from verl_turnkey.plugins.view.join import find_log, load
from verl_turnkey.plugins.view.notes import read_notes
from verl_turnkey.plugins.view.page import Data, server
from verl_turnkey.plugins.view.runs import read
from verl_turnkey.plugins.view.terminal import lines


@pytest.fixture
def run(tmp_path: Path) -> Path:
    synthetic_run.write(tmp_path / "run", episodes=40, steps=2)
    return tmp_path / "run"


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    made, address = server(Data([run], rest=0))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield address
    made.shutdown()
    thread.join()
    made.server_close()


def ask(address: str, path: str = "", method: str = "GET", host: str | None = None) -> http.client.HTTPResponse:
    """``path`` behind the token; one that begins with a slash from the root."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    connection.request(
        method, path if path.startswith("/") else place.path + path, headers={"Host": host or place.netloc}
    )
    return connection.getresponse()


def grow(run: Path) -> None:
    """A further step, as a run writes it."""
    other = run.parent / "more"
    log = synthetic_run.write(other, episodes=60, steps=3, seed=5)
    for table in ("texts", "turns", "credit", "updates", "steps", "episodes"):
        (log / table / "step=000003").rename(find_log(run) / table / "step=000003")


def test_the_page_and_its_data(address):
    answer = ask(address)
    assert answer.status == 200
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    page = answer.read().decode()
    assert "connect-src 'self'" in page
    assert 'type="text/plain"' not in page
    version = ask(address, "version").read().decode()
    assert ask(address, f"data/run-0?version={version}").read()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get_is_answered(address, method):
    assert ask(address, method=method).status == 501


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/", None, 404),
        ("/wrong/version", None, 404),
        ("", "example.org", 403),
        ("", "127.0.0.1", 403),
        ("", "localhost:{port}", 200),
        ("data/page?version=old", None, 404),
        ("data/../../run.json", None, 404),
        ("run.json", None, 404),
        ("%2e%2e/%2e%2e/etc/passwd", None, 404),
        ("../../../etc/passwd", None, 404),
    ],
)
def test_who_asks_and_for_what(address, path, host, status):
    port = urlsplit(address).port
    answer = ask(address, path, host=host and host.format(port=port))
    assert answer.status == status
    assert status != 404 or answer.read() == b""


def send(address: str, path: str, body: bytes, **headers: str) -> http.client.HTTPResponse:
    place = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    path = path if path.startswith("/") else place.path + path
    connection.request("POST", path, body, {"Host": place.netloc, **headers})
    return connection.getresponse()


NOTE = b'{"episode": "e", "note": "look here"}'


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("notes/0", NOTE, {}, 200),
        ("notes/1", NOTE, {}, 501),
        ("notes/../0", NOTE, {}, 501),
        ("notes/0", NOTE, {"Host": "example.org"}, 403),
        ("/wrong/notes/0", NOTE, {}, 404),
        ("notes/0", b"{}", {}, 400),
        ("notes/0", b'{"episode": "e", "note": 3}', {}, 400),
        ("notes/0", b"\xff", {}, 400),
        ("notes/0", NOTE[:-2] + b"x" * 10_000 + b'"}', {}, 400),
        ("notes/0", NOTE, {"Content-Length": "900000"}, 413),
        ("notes/0", NOTE, {"Content-Length": "-1"}, 413),
        ("notes/0", NOTE, {"Content-Length": "9" * 5000}, 413),
        ("notes/0", b"[" * 3000, {}, 400),
    ],
)
def test_who_may_write_a_note(address, run, path, body, headers, status):
    assert send(address, path, body, **headers).status == status
    assert (find_log(run) / "notes.jsonl").exists() == (status == 200)


def test_a_note_is_a_line_beside_the_log_and_the_last_one_counts(address, run):
    key = load(run).episodes["episode"][0]
    for note in ("first", "<b>second</b>"):
        assert send(address, "notes/0", json.dumps({"episode": key, "note": note}).encode()).status == 200
    with (find_log(run) / "notes.jsonl").open("a") as file:
        file.write('{"half a li\n[3]\n\n')
    assert json.loads(ask(address, "notes/0").read()) == {"notes": {key: "<b>second</b>"}, "writable": True}
    [talk] = conversations(load(run), [0])
    assert talk.episode["note"] == "<b>second</b>"
    assert "note         <b>second</b>" in [line.plain for line in lines(talk, 1.0)]
    assert send(address, "notes/0", json.dumps({"episode": key, "note": ""}).encode()).status == 200
    assert json.loads(ask(address, "notes/0").read())["notes"] == {}
    written = (find_log(run) / "notes.jsonl").read_text().split("\n")
    rows = [json.loads(line) for line in list(filter(None, written))[:2]]
    assert [(row["episode"], row["note"], row["time"] > 1e9) for row in rows] == [
        (key, "first", True),
        (key, "<b>second</b>", True),
    ]


def test_a_reader_writes_a_note_in_the_browser(address, run):
    key = load(run).episodes["episode"][0]
    browser = Browser()
    try:
        browser.open(address, f"#/episode/{key}")
        browser.choose("note", "why <b>this</b>?")
        browser.run("document.querySelector('[name=save-note]').click()")
        browser.settled(lambda: browser.text(".note-box .hint"), "saved")
        browser.open(address, f"#/episode/{key}")
        assert browser.run("return document.querySelector('[name=note]').value") == "why <b>this</b>?"
        assert browser.run("return document.querySelector('.note-box').open")
        assert browser.console() == []
    finally:
        browser.close()
    assert read_notes(find_log(run)) == {key: "why <b>this</b>?"}


def test_where_the_folder_is_not_writable_notes_are_read(address, run, monkeypatch):
    """As for a user other than the superuser: the operating system refuses the file."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert json.loads(ask(address, "notes/0").read())["writable"] is False
    (find_log(run) / "notes.jsonl").mkdir()
    answer = send(address, "notes/0", NOTE)
    assert (answer.status, answer.read()) == (403, b"Is a directory")


def test_tokens_are_random(run):
    made, first = server(data := Data([run]))
    made.server_close()
    made, second = server(data)
    made.server_close()
    assert urlsplit(first).path != urlsplit(second).path
    assert len(urlsplit(first).path) > 30


def test_new_files_make_a_new_version_which_is_the_only_one(run):
    data = Data([run], rest=0)
    before = data.now()
    assert data.now() is before
    grow(run)
    after = data.now()
    assert after.version != before.version
    assert data.block("run-0", before.version) is None
    assert data.block("run-0", after.version) == after.blocks["run-0"] != before.blocks["run-0"]


def test_a_log_that_cannot_be_read_any_more_leaves_what_was_read(run):
    data = Data([run], rest=0)
    before = data.now()
    find_log(run).rename(run / "elsewhere")
    with pytest.warns(UserWarning, match="no trajectory log"):
        assert data.now() is before
    (run / "elsewhere").rename(run / "turnkey_log")
    grow(run)
    assert data.now().version != before.version


def test_between_two_looks_nothing_is_read(run):
    data = Data([run], rest=3600)
    before = data.now()
    grow(run)
    assert data.now() is before


def test_who_reads_an_old_version_reads_on(address, run):
    """Blocks of what the page opened are gone: it reads anew and shows what was asked for."""
    browser = Browser()
    try:
        browser.open(address, "#/episodes")
        key = load(run).episodes["episode"].iloc[0]
        browser.run("window.setTimeout = () => {}")  # no more looks at the server than those that are asked for
        grow(run)
        assert ask(address, "version").read()
        browser.go(f"#/episode/{key}")
        assert browser.texts(".turn .action")
        browser.go("#/episodes")
        assert "3" in browser.texts("[name=step] option")
        assert all("404" in line for line in browser.console())
    finally:
        browser.close()


def test_a_page_follows_its_run(address, run):
    browser = Browser()
    try:
        browser.open(address, "#/episodes?sort=-global_step")
        assert browser.text(".rows tbody td") == "2"
        grow(run)
        browser.until("return document.querySelector('.rows tbody td').textContent === '3'")
        assert browser.run("return location.hash") == "#/episodes?sort=-global_step"
        assert browser.console() == []
    finally:
        browser.close()


# --- event files as verl's tensorboard logger writes them -------------------------------------------------------------


NAME = "val-core/doorkey/acc/mean@1"


def test_event_files(tmp_path):
    for first, last in ((1, 4), (3, 5)):  # the second start goes on from step 3
        with SummaryWriter(str(tmp_path / "tb" / str(first))) as writer:
            for step in range(first, last):
                writer.add_scalar(NAME, step / 8, step)
    steps, values = read(tmp_path).curve(NAME)
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3, 4], [0.125, 0.25, 0.375, 0.5])
