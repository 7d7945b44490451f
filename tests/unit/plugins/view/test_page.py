"""The file that ``turnkey view`` writes: what is in it, what is not, and how large it is."""

import base64
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import synthetic_run
from typer.testing import CliRunner

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.view import notes, pack, page
from verl_turnkey.plugins.view.join import load
from verl_turnkey.plugins.view.pack import task_name
from verl_turnkey.plugins.view.page import ASSETS

OWN = sorted(path for path in ASSETS.iterdir() if path.is_file())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    synthetic_run.write(folder, episodes=90, steps=3)
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("<script>run")
    synthetic_run.write(folder, episodes=30, steps=1, hostile=True)
    return folder


def index(data: dict[str, bytes], name: str = "run-0") -> dict:
    raw = gzip.decompress(data[name])
    size = int.from_bytes(raw[:4], "little")
    assert size % 4 == 0, "the page reads what follows as numbers of four bytes, in place"
    return json.loads(raw[4 : 4 + size])


def texts_of(data: dict[str, bytes]) -> float:
    """What the texts take of a page."""
    return 4 / 3 * sum(len(block) for name, block in data.items() if name.startswith("texts"))


def test_no_text_of_a_run_is_in_the_html(hostile):
    data = page.blocks([load(hostile)], 60)
    text = page.html(data, live=False)
    blocks = dict(re.findall(r'<script type="text/plain" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>', text))
    assert {name: base64.b64decode(block) for name, block in blocks.items()} == data
    frame = re.sub(r'<script type="text/plain".*\n', "", text)
    assert frame == page.html({}, live=False)
    assert list(blocks)[:2] == ["page", "run-0"]
    first, last = text.index('id="run-0"'), text.index(f'id="{list(blocks)[2]}"')
    assert first < text.index('<script type="module" async>') < last, "the index, then what shows it, then the rest"
    assert not re.search(r"https?://(?!www\.w3\.org/(2000/svg|1999/xlink))", re.sub(r"<script>.*", "", text))


@pytest.mark.parametrize(("largest", "full"), [(0.1, 0.1), (0.0, 1.0)])
def test_where_hardly_a_turn_has_credit_there_is_still_a_scale(run, largest, full):
    loaded = load(run)
    loaded.turns.loc[loaded.turns["advantage"].notna(), "advantage"] = np.float32(0.0)
    loaded.turns.loc[loaded.turns["advantage"].first_valid_index(), "advantage"] = np.float32(-largest)
    assert index(page.blocks([loaded], 60))["full"] == pytest.approx(full)


def test_hostile_texts_arrive_as_they_were_written(hostile):
    data = page.blocks([load(hostile)], 60)
    first = index(data)["texts"][0]
    texts = "".join(json.loads(gzip.decompress(data[f"texts-0-{first}"]))["values"])
    for text in synthetic_run.HOSTILE:
        assert text.encode("utf-8", "backslashreplace").decode() in texts


def test_the_policy_names_each_script_and_style(run):
    text = page.html({}, live=False)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert text.index("Content-Security-Policy") < text.index("<style")
    for rule, tag in (
        ("script-src", r"<script(?: type=\"module\" async)?>(.*?)</script>"),
        ("style-src", r"<style>(.*?)</style>"),
    ):
        sources = [hashlib.sha256(source.encode()).digest() for source in re.findall(tag, text, re.DOTALL)]
        assert rules[rule].split() == [f"'sha256-{base64.b64encode(source).decode()}'" for source in sources]
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["trusted-types"] == "'none'"
    assert "connect-src" not in rules
    assert "connect-src 'self'" in page.html({}, live=True)


@pytest.mark.parametrize("path", [path for path in OWN if path.suffix == ".js"], ids=lambda path: path.name)
def test_our_scripts_make_no_html_out_of_text(path: Path):
    source = path.read_text(encoding="utf-8")
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|DOMParser|createContext"
    )
    assert not re.findall(ways, source)
    assert "createElement" not in source or path.name == "dom.js"
    assert len(source.splitlines()) <= 300
    for line in source.splitlines():
        if line.startswith("import"):
            assert page.IMPORT.fullmatch(line), f"the joining does not understand {line}"
        assert not re.match(r"export (?!(async )?(function|class|const) )", line), line


def test_modules_come_after_what_they_import():
    script = page.bundle()
    for path in OWN:
        if path.suffix == ".js":
            needed = [name for _, name in page.IMPORT.findall(path.read_text(encoding="utf-8"))]
            at = script.index(f"const ${path.stem} = ")
            assert all(script.index(f"const ${name} = ") < at for name in needed)


def test_what_exceeds_the_size_is_left_out_by_whole_groups_and_said(run):
    loaded = load(run)
    whole = page.blocks([loaded], 60)
    size = len(page.html(whole, live=False))
    everything = index(whole)
    assert len(everything["texts"]) == len(everything["numbers"]) == len(everything["groups"])
    megabytes = (size - 0.7 * texts_of(whole)) / 1e6
    smaller = page.blocks([loaded], megabytes)
    assert len(page.html(smaller, live=False)) <= megabytes * 1e6
    contents = index(smaller)
    assert 0 < len(contents["texts"]) < len(contents["groups"])
    assert contents["logged_texts"] == len(contents["groups"])
    assert {name for name in smaller if name.startswith("texts")} == {f"texts-0-{g}" for g in contents["texts"]}
    assert contents["episodes"] == everything["episodes"]
    assert smaller == page.blocks([loaded], megabytes)


def test_groups_that_do_not_fit_are_not_built(tmp_path, monkeypatch):
    """Beyond what fits a few batches are built, to guess by and because a guess was high, and not all."""
    synthetic_run.write(tmp_path, episodes=1200, turns=4, steps=3)
    loaded, squeeze, built = load(tmp_path), pack.squeeze, []
    monkeypatch.setattr(pack, "squeeze", lambda value: built.append(0) or squeeze(value))
    whole = page.blocks([loaded], 60)
    everything = len(built)
    built.clear()
    contents = index(page.blocks([loaded], (len(page.html(whole, live=False)) - 0.8 * texts_of(whole)) / 1e6))
    kept = len(contents["texts"]) + len(contents["numbers"])
    assert kept > 0
    assert len(built) <= kept + 6 * pack.BATCH < everything


def test_a_group_has_numbers_and_texts_or_neither_until_the_rest_is_for_numbers(run):
    """Numbers of all groups would leave no conversation to read."""
    loaded = load(run)
    whole = page.blocks([loaded], 60)
    contents = index(page.blocks([loaded], (len(page.html(whole, live=False)) - texts_of(whole)) / 1e6))
    texts, numbers = set(contents["texts"]), set(contents["numbers"])
    assert len(texts) >= 0.2 * len(contents["groups"])
    assert texts <= numbers < set(range(len(contents["groups"])))
    assert (contents["logged_numbers"], contents["logged_texts"]) == (len(contents["groups"]), len(contents["groups"]))


def test_groups_of_which_the_log_has_no_texts_have_numbers(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(folder / "turnkey_log" / "texts" / "step=000001")
    contents = index(page.blocks([load(folder)], 60))
    assert len(contents["numbers"]) == contents["logged_numbers"] == len(contents["groups"])
    assert 0 < len(contents["texts"]) == contents["logged_texts"] < len(contents["groups"])


def test_of_each_step_a_group_stays_then_mixed_outcomes_and_the_newest(tmp_path):
    synthetic_run.write(tmp_path / "run", episodes=300, turns=8, steps=5, skill=0.6, validate=False)
    loaded = load(tmp_path / "run")
    group, names = loaded.episodes["group"].factorize()
    order = pack.order(loaded, group, len(names))
    assert sorted(order) == list(range(len(names)))
    won = loaded.episodes["success"].eq(True).groupby(group).mean()
    failed = loaded.episodes["failed"].notna().groupby(group).any()
    telling = {g for g in won.index if 0 < won[g] < 1 or failed[g]}
    step = loaded.episodes["global_step"].groupby(group).first()
    first, rest = order[:5], order[5:]
    assert {int(step[g]) for g in first} == {1, 2, 3, 4, 5}
    assert set(rest) & telling
    assert set(rest) - telling
    assert rest == sorted(rest, key=lambda g: (g not in telling, -step[g]))


def test_without_a_limit_nothing_is_left_out(run):
    contents = index(page.blocks([load(run)]))
    assert contents["numbers"] == contents["texts"] == list(range(len(contents["groups"])))


def test_the_credit_of_all_turns_is_in_the_index(run):
    loaded = load(run)
    data = page.blocks([loaded], 60)
    raw, contents = gzip.decompress(data["run-0"]), index(data)
    start = 4 + int.from_bytes(raw[:4], "little")
    column = contents["turns"]["advantage"]
    values = np.frombuffer(raw, "<i2", column["length"], start + column["at"])
    true = loaded.turns["advantage"].to_numpy()
    assert ((values == -32768) == np.isnan(true)).all()
    there = ~np.isnan(true)
    assert 0 < there.sum() < len(there)
    assert values[there] * column["scale"] == pytest.approx(true[there], abs=column["scale"])


def test_a_log_of_the_rollout_alone_makes_a_page(tmp_path):
    """A run that died before its first update; and an episode without a turn."""
    log = synthetic_run.write(tmp_path / "run", episodes=20, steps=1)
    for table in ("credit", "updates", "steps", "texts"):
        shutil.rmtree(log / table)
    [turns] = log.glob("turns/*/*.parquet")
    rows = pq.read_table(turns)
    pq.write_table(rows.filter(pc.not_equal(rows["episode"], rows["episode"][0])), turns)
    data = page.blocks([load(tmp_path / "run")], 60)
    contents = index(data)
    assert contents["texts"] == []
    assert contents["counts"].count(0) == 1
    assert contents["parts"] == ["advantage"]
    assert [chart["title"] for chart in contents["charts"]] == [
        "Success", "Env return", "Length", "Invalid actions", "Repetition", "Groups without signal",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ('{"env_id": "turnkey/MiniGrid-v0", "kwargs": {"level": "Empty"}, "seed": 11}', "MiniGrid, level Empty"),
        ('{"env_id": "FrozenLake-v0", "kwargs": {}}', "FrozenLake"),
        ('{"env_id": 3}', '{"env_id": 3}'),
        ("put a heated potato on the table", "put a heated potato on the table"),
        ("[1]", "[1]"),
        ("[" * 3000, "[" * 3000),
    ],
)
def test_a_task_has_the_name_of_its_environment_or_its_own(task, name):
    assert task_name(task) == name


def test_a_note_is_written_whole_and_a_damaged_line_is_left_out(tmp_path, monkeypatch):
    (tmp_path / notes.FILE).write_text("[" * 3000)
    sent = b'{"episode": "e", "note": "n"}'
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:9]))
        with pytest.raises(OSError, match="No space left"):
            notes.write_note(tmp_path, sent)
    notes.write_note(tmp_path, sent)
    assert notes.read_notes(tmp_path) == {"e": "n"}
    with pytest.raises(ValueError, match="expected"):
        notes.write_note(tmp_path, b"[" * 3000)


def test_numbers_keep_the_digits_they_have(run):
    loaded = load(run)
    data = page.blocks([loaded], 60)
    first = json.loads(gzip.decompress(data["numbers-0-0"]))["columns"]
    rows = loaded.turns[loaded.turns["at"].isin(np.flatnonzero(np.array(index(data)["group"]) == 0))]
    for name in ("advantage", "ratio", "kl", "seconds_model", "reward"):
        written = np.array([np.nan if value is None else value for value in first[name]], np.float32)
        np.testing.assert_allclose(written, rows[name].to_numpy(np.float32), rtol=6e-7, atol=0)
    assert not {"step_x", "segment_x", "segment", "step", "at"} & set(first)


def test_vendored_files_are_the_published_ones():
    vendor = ASSETS / "vendor"
    listed = {"VENDORED.json"}
    for library in json.loads((vendor / "VENDORED.json").read_text(encoding="utf-8")):
        for name, file in library["files"].items():
            assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == file["sha256"], name
            listed.add(name)
        for name in library["license_files"]:
            assert "Permission is hereby granted" in (vendor / name).read_text(encoding="utf-8")
            listed.add(name)
    assert listed == {path.name for path in vendor.iterdir()}


def test_the_command(run, hostile, tmp_path, monkeypatch):
    out = tmp_path / "new" / "page.html"
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["view", str(run), str(hostile), "--out", "new/page.html"], catch_exceptions=False)
    assert done.exit_code == 0
    assert re.search(rf"\d+ episodes in {out.resolve()} \(\d\.\d MB\)", done.output)
    assert 'id="run-1"' in out.read_text(encoding="utf-8")


def test_the_command_without_a_log(tmp_path):
    done = CliRunner().invoke(app, ["view", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert "turnkey.log.trajectories=FOLDER" in str(done.exception)
    assert not (tmp_path / "page.html").exists()


# --- A laptop has the log of a run and no verl: the page is made without it, and without Ray and torch ----------------
COMMAND = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("verl", "ray", "torch", "vllm", "transformers", "tensordict"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from verl_turnkey.plugins.cli.main import main
main()
"""


def test_the_page_is_made_without_verl_ray_and_torch(tmp_path: Path) -> None:
    synthetic_run.write(tmp_path / "run", episodes=40, steps=2)
    command = [sys.executable, "-c", COMMAND, "view", str(tmp_path / "run"), "--out", str(tmp_path / "view.html")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "<html" in (tmp_path / "view.html").read_text()


def test_a_command_that_needs_an_absent_package_says_which_and_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, "list", "losses"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "turnkey: No module named 'torch': install the package that provides it\n"
