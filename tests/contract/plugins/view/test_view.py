"""The page of ``turnkey view`` in a real browser."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic_run
from browser import SECONDS, Browser
from written_page import Written, write

from verl_turnkey.plugins.log.schema import schema
from verl_turnkey.plugins.view.join import REASONS, LoggedRun

PAGES = ("run", "episodes", "group", "compare")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("page")
    for name, seed, skill in (("first", 0, 0.42), ("second", 1, 0.3)):
        synthetic_run.write(folder / name, episodes=200, turns=16, steps=6, seed=seed, skill=skill)
    return write(folder, folder / "first", folder / "second")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """2,000 episodes of 50 turns."""
    folder = tmp_path_factory.mktemp("large")
    synthetic_run.write(folder / "run", episodes=2000, turns=50, steps=4, skill=0.2, validate=False)
    return write(folder, folder / "run", max_mb="8")


def outcomes(browser: Browser) -> list[str]:
    return browser.texts(".rows .outcome")


def counted(browser: Browser) -> int:
    return int(browser.text(".counted b").replace(",", ""))


def winner(run: LoggedRun) -> tuple[int, str]:
    """An episode with credit whose group has winners and losers."""
    episodes = run.episodes
    mixed = episodes.groupby("group")["success"].transform(lambda won: 0 < won.eq(True).mean() < 1)
    [at, *_] = episodes.index[mixed & episodes["success"].eq(True) & ~episodes["validation"].astype(bool)]
    return int(at), episodes["episode"][at]


def test_the_table_is_there_while_the_browser_reads_on(page: Written) -> None:
    """Of a large page most is numbers and texts of groups: the index and the scripts stand before them."""
    text = Path(unquote(urlsplit(page.address).path)).read_bytes()
    cut = text.index(b"</script>", text.index(b'<script type="module"')) + 100
    rest = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text[:cut])
            self.wfile.flush()
            assert rest.wait(SECONDS)
            self.wfile.write(text[cut:])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser(waits=False)
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/", "#/episodes")
            assert browser.run("return document.readyState") == "loading"
            assert counted(browser) == len(page.run.episodes)
            browser.run("document.querySelector('.rows tbody a').click()")  # its texts are not there yet
            rest.set()
            browser.until("return document.querySelector('.turns')")
            assert browser.console() == []
        finally:
            rest.set()
            browser.close()
            server.shutdown()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_every_page_at_every_width_in_both_themes(browser, page, width, theme):
    _, key = winner(page.run)
    group = page.run.episodes.set_index("episode")["group"][key]
    browser.size(width)
    browser.open(page.address, f"#/run?theme={theme}")
    assert browser.run("return document.documentElement.dataset.theme") == theme
    for where in (*PAGES, f"episode/{key}", f"group/{group}", f"beside/{quote(f'{key} {key}')}"):
        browser.go(f"#/{where}?theme={theme}")
        assert browser.text("h1")
        assert browser.run("return document.documentElement.scrollWidth") <= width, where
        assert browser.run("return document.querySelector('main').getBoundingClientRect().height") > 100


def test_the_page_of_a_run(browser, page):
    browser.open(page.address)
    charts = browser.texts(".chart h3")
    assert [title for title in charts if title.startswith(("Success", "Credit", "Entropy", "KL", "Clipped"))]
    assert len(charts) == 12
    assert browser.run("return document.querySelectorAll('.chart canvas').length") == 12
    assert browser.texts(".facts dd")[:2] == [f"{len(page.run.episodes):,}", f"{len(page.run.turns):,}"]
    failed = page.run.episodes["failed_kind"].value_counts()
    assert browser.texts("table.plain tr td.num, table.plain tbody td:nth-child(2)")[: len(failed)] == [
        str(n) for n in failed
    ]
    browser.run("document.querySelector('.picks').dispatchEvent(new MouseEvent('mousemove', {clientX: 0, clientY: 0}))")


def test_where_success_was_lost(browser, tmp_path):
    """The table of what changed, in order, and the step marked in the curves; a sound run has neither."""
    synthetic_run.write(tmp_path / "run", episodes=360, steps=12, lost=8)
    page = write(tmp_path, tmp_path / "run")
    browser.size(400)
    browser.open(page.address)
    assert "most of it at step 8" in browser.text(".health li")
    assert "8success" in browser.text(".evidence .fall")
    steps = [int(text) for text in browser.texts(".evidence td:first-child")]
    assert steps == sorted(steps)
    assert {"entropy", "turns that repeat an action without effect"} <= set(browser.texts(".evidence th[scope=row]"))
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    # the mark has a colour that nothing else in a chart has
    drawn = """const [r, g, b] = arguments[0], canvas = document.querySelector('.chart canvas');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        let n = 0;
        for (let i = 0; i < data.length; i += 4) n += data[i] === r && data[i + 1] === g && data[i + 2] === b;
        return n"""
    warn = browser.run("return getComputedStyle(document.querySelector('.health .mark')).backgroundColor")
    colour = [int(part) for part in re.findall(r"\d+", warn)]
    assert browser.run(drawn, colour) > 20
    browser.run("document.querySelector('.health .button').click()")
    browser.until("return document.querySelector('.rows')")
    assert set(outcomes(browser)) == {"✗ not solved"}
    assert "step=8" in browser.run("return location.hash")


def test_filter_and_sort(browser, page):
    episodes = page.run.episodes
    browser.open(page.address, "#/episodes")
    assert counted(browser) == len(episodes)
    assert len(browser.texts(".rows tbody .badge")) == 2 * len(outcomes(browser))  # those with credit stand first
    browser.choose("outcome", "solved")
    assert counted(browser) == episodes["success"].eq(True).sum()
    assert set(outcomes(browser)) == {"✓ solved"}
    browser.choose("step", "2")
    here = episodes[episodes["success"].eq(True) & (episodes["global_step"] == 2)]
    assert counted(browser) == len(here)
    assert "outcome=solved" in browser.run("return location.hash")
    browser.run("[...document.querySelectorAll('.sort')].find((e) => e.textContent.startsWith('turns')).click()")
    numbers = [int(text) for text in browser.texts(".rows tbody td:nth-child(5)") if text]
    assert numbers == sorted(numbers)
    assert browser.run("return document.querySelector('th[aria-sort=ascending]').textContent") == "turns ↑"
    limit = int(here["turns"].min())
    browser.choose("turns", str(limit))
    few = counted(browser)
    browser.choose("turns", f"-{limit}")
    assert 0 < few == counted(browser) == (here["turns"] == limit).sum() < len(here)
    browser.choose("turns", f"{limit + 1} - 99")
    assert few + counted(browser) == len(here)
    browser.choose("turns", "many")  # what is no range is no filter
    assert counted(browser) == len(here)
    browser.choose("q", "no such task")
    assert counted(browser) == 0
    # the address holds it all; this one is of an earlier version
    browser.open(page.address, "#/episodes?step=2&outcome=won&sort=-turns")
    assert counted(browser) == len(here)
    numbers = [int(text) for text in browser.texts(".rows tbody td:nth-child(5)") if text]
    assert numbers == sorted(numbers, reverse=True)


def test_the_histogram_filters_by_credit(browser, page):
    browser.open(page.address, "#/episodes")
    browser.run("""
        const svg = document.querySelector('.histogram svg'), box = svg.getBoundingClientRect();
        svg.setPointerCapture = () => {};
        for (const [kind, x] of [['pointerdown', 0.9], ['pointermove', 0.95], ['pointerup', 1]])
            svg.dispatchEvent(new PointerEvent(kind, {clientX: box.left + x * box.width, clientY: box.top + 5}));
    """)
    [low, _] = re.search(r"credit=([\d.]+)%2C(\S+)", browser.run("return location.hash")).groups()
    best = page.run.turns.groupby("at")["advantage"].max()
    assert counted(browser) == pytest.approx((best >= float(low)).sum(), abs=1)


def test_an_episode_opened_with_keys(browser, page):
    browser.open(page.address, "#/episodes?outcome=solved&split=training")
    browser.press("j", "j", "k", "ENTER")
    browser.until("return document.querySelector('.turns')")
    episodes = page.run.episodes
    key = episodes["episode"][episodes["success"].eq(True) & ~episodes["validation"].astype(bool)].iloc[0]
    assert browser.run("return location.hash") == f"#/episode/{key}"
    browser.press("n")
    browser.until("return !location.hash.includes(arguments[0])", key)
    browser.run("history.go(-2)")
    browser.until("return document.querySelector('.scroll')")
    assert "outcome=solved" in browser.run("return location.hash")


def test_turns_of_opponents_are_named(browser, tmp_path):
    """One before the first turn, one after each, and an invalid one; texts of theirs do nothing either."""
    folder = tmp_path / "run"
    synthetic_run.write(folder, episodes=20, turns=4, steps=1)
    turn = {"role": "second", "by": "random", "observation": "a board", "response": "<b>o</b>", "action": "o"}
    for file in (folder / "turnkey_log" / "texts").rglob("*.parquet"):
        table = pq.read_table(file)
        place = table.schema.get_field_index("opponents")
        turns = [
            json.dumps([{**turn, "before": True}, {**turn, "invalid": "no tag"}] if t == 0 else [turn])
            for t in table["turn"].to_pylist()
        ]
        pq.write_table(table.set_column(place, "opponents", pa.array(turns)), file)
    page = write(tmp_path, folder)
    key = page.run.episodes["episode"][0]
    browser.open(page.address, f"#/episode/{key}")
    titles = [text.splitlines()[0] for text in browser.texts(".turn .opponent h3")]
    named = "opponent second (random)"
    assert titles[:2] == [named, f"{named}, invalid: no tag"]
    assert titles[2:] == [named] * (int((page.run.turns["at"] == 0).sum()) - 1)
    assert "<b>o</b>" in browser.text(".turn .opponent")


def test_an_episode_shows_each_turn_with_its_credit_and_texts(browser, page):
    at, key = winner(page.run)
    turns = page.run.turns[page.run.turns["at"] == at]
    browser.open(page.address, f"#/episode/{key}")
    assert [text or "no action" for text in browser.texts(".turn .action bdi, .turn .action i")] == [
        action or "no action" for action in turns["action"]
    ]
    signed = [f"{value:+.2f}".replace("-", "−") for value in turns["advantage"]]
    badges = [text.split()[-1] for text in browser.texts(".turn > header .badge")]
    assert [float(a.replace("−", "-")) for a in badges] == pytest.approx(
        [float(b.replace("−", "-")) for b in signed], abs=0.011
    )
    for glyph, value in zip(browser.texts(".turn > header .badge span"), turns["advantage"], strict=True):
        assert glyph == "○" or glyph == ("▲" if value > 0 else "▼")
    assert all(name in browser.text(".turn .parts") for name in ("episode level", "step level", "penalty"))
    assert "Bring the" in browser.text(".turn .prompt")
    assert "<action>" in browser.text(".turns")
    assert browser.texts(".turn .cost span")[:2] == ["reward 0", "composed reward 0 = 0 chore + 0 env"]
    titles = browser.run(
        "return [...document.querySelectorAll('.facts div[title]')].map((e) => [e.innerText, e.title])"
    )
    assert [
        title for text, title in titles if "composed return" in text and "invalid action lowers the credit" in title
    ]
    browser.run("document.querySelector('.compared').open = true")
    browser.until("return document.querySelector('.compared td a')")
    # another part of the credit, in the address too
    browser.choose("part", "part.step_level")
    browser.until("return document.querySelector('.turn .badge') && location.hash.includes('part=part.step_level')")
    badges = [float(text.split()[-1].replace("−", "-")) for text in browser.texts(".turn > header .badge")]
    assert badges == pytest.approx(turns["part.step_level"].tolist(), abs=0.011)


GAPS = (2.0, 0.02, -2.0, -0.5)


def with_tokens(folder: Path) -> dict[tuple[str, int], list[str]]:
    """Tokens of three characters in a log, with gaps; the last turn of each episode has a token too few."""
    pieces = {}
    for path in folder.glob("texts/*/*.parquet"):
        rows = pq.ParquetFile(path).read()
        keys = [*zip(rows["episode"].to_pylist(), rows["turn"].to_pylist(), strict=True)]
        for key, text in zip(keys, rows["response"].to_pylist(), strict=True):
            pieces[key] = [text[i : i + 3] for i in range(0, len(text), 3)]
        lengths = pa.array([[len(piece) for piece in pieces[key]] for key in keys], pa.list_(pa.int32()))
        pq.write_table(rows.set_column(rows.schema.get_field_index("token_lengths"), "token_lengths", lengths), path)
    for path in folder.glob("credit/*/*.parquet"):
        rows = pq.ParquetFile(path).read(["episode", "turn", "train_step"])
        keys = [*zip(rows["episode"].to_pylist(), rows["turn"].to_pylist(), strict=True)]
        last = dict(sorted(keys))
        numbers = [len(pieces[key]) - (last[key[0]] == key[1]) for key in keys]
        gaps = [[GAPS[i % len(GAPS)] for i in range(number)] for number in numbers]
        columns = [(name, rows[name]) for name in rows.column_names]
        columns += [("gap", gaps), ("advantage", [[0.25 * gap for gap in row] for row in gaps])]
        where = folder / "tokens" / path.parent.name
        where.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(dict(columns), schema=schema("tokens")), where / path.name)
    return pieces


def contrast(browser: Browser, element: str) -> float:
    """Of the text of a span with a half-transparent background, over the turn's."""
    style = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
    colours = []
    for where, name in ((element, "color"), (".turn", "background-color"), (element, "background-color")):
        colour = browser.run(style, where, name)
        numbers = [float(number) for number in re.findall(r"[\d.]+", colour)]
        colours.append([value / (1 if colour.startswith("color") else 255) for value in numbers[:3]] + numbers[3:])
    text, below, (*tint, share) = colours
    behind = [share * t + (1 - share) * b for t, b in zip(tint, below, strict=True)]

    def light(colour: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(text), light(behind)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_response_is_shaded_by_what_a_teacher_says_of_its_tokens(browser, tmp_path, theme):
    folder = synthetic_run.write(tmp_path / "run", episodes=120, turns=12, steps=1, more=lambda: "<b>🙂 ")
    pieces = with_tokens(folder)
    page = write(tmp_path, tmp_path / "run")
    at, key = winner(page.run)
    browser.open(page.address, f"#/episode/{key}?theme={theme}")
    turns = int(page.run.episodes["turns"][at])
    spans = "[...document.querySelectorAll('.turn')[arguments[0]].querySelectorAll('.response bdi > .token')]"
    for turn in range(turns - 1):
        tokens = browser.run(f"return {spans}.map((e) => [e.textContent, e.className, e.title])", turn)
        assert [text for text, _, _ in tokens] == pieces[key, turn]
        levels = [name.removeprefix("token tone ") for _, name, _ in tokens]
        assert levels[:4] == ["plus3", "zero0", "minus3", "minus2"]
        assert tokens[2][2] == "gap −2.00, credit −0.50"
    assert browser.run(f"return {spans}.length", turns - 1) == 0, "its tokens are not those of the text"
    assert "".join(pieces[key, turns - 1]) in browser.run("return document.querySelector('.turns').textContent")
    assert "likelier" in browser.text(".response .hint")
    lines = browser.run(f"return {spans}.slice(0, 3).map((e) => getComputedStyle(e).borderBottomStyle)", 0)
    assert (lines[0], lines[2]) == ("solid", "dotted"), "not by colour alone"
    for level in ("plus3", "minus3"):
        assert contrast(browser, f".token.{level}") > 4.5


def test_a_turn_without_credit_says_why(browser, page):
    run = page.run
    for reason in ("the episode failed", "validation is not trained on"):
        at = int(run.turns["at"][run.turns["reason"] == REASONS.index(reason)].iloc[0])
        browser.open(page.address, f"#/episode/{run.episodes['episode'][at]}")
        assert set(browser.texts(".turn .why")) == {reason}
        assert "◌" in browser.text(".turnstrip")


def test_the_buttons_of_turns_have_names(browser, page):
    _, key = winner(page.run)
    browser.open(page.address, f"#/episode/{key}")
    names = "return [...document.querySelectorAll('.turnstrip button')].map((e) => e.getAttribute('aria-label'))"
    badges = [text.split()[-1] for text in browser.texts(".turn > header .badge")]
    assert browser.run(names) == [f"turn {turn}, credit {credit}" for turn, credit in enumerate(badges)]
    failed = int(page.run.turns["at"][page.run.turns["reason"] == REASONS.index("the episode failed")].iloc[0])
    browser.go(f"#/episode/{page.run.episodes['episode'][failed]}")
    assert browser.run(names)[0] == "turn 0, no credit"


def test_credit_of_any_size_fits_its_column(browser, tmp_path):
    folder = synthetic_run.write(tmp_path / "run", episodes=20, steps=1)
    sizes = {
        "advantage": (-0.0046, "−0.0046"), "part.episode_level": (4.6e-10, "+4.6e-10"),
        "part.step_level": (-99_999.0, "−99,999"), "part.penalty": (-123_456.0, "−1.23e5"),
    }  # fmt: skip
    for path in folder.glob("credit/*/*.parquet"):
        rows = pq.ParquetFile(path).read()
        for name, (value, _) in sizes.items():
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(at, rows.schema.field(at), pa.array([value] * len(rows), pa.float32()))
        pq.write_table(rows, path)
    page = write(tmp_path, tmp_path / "run")
    for name, (_, text) in sizes.items():
        browser.open(page.address, f"#/episodes?part={name}")
        assert {badge.split()[-1] for badge in browser.texts(".rows .badge")} == {text}
        over = "e.getBoundingClientRect().right - e.parentElement.getBoundingClientRect().right"
        assert browser.run(f"return Math.max(...[...document.querySelectorAll('.rows .badge')].map((e) => {over}))") < 0


def test_a_run_in_which_every_episode_was_lost(browser, tmp_path):
    """Next to no turn has credit: the pages have a scale nevertheless."""
    folder = synthetic_run.write(tmp_path / "run", episodes=20, steps=1)
    for path in folder.glob("credit/*/*.parquet"):
        rows = pq.ParquetFile(path).read()
        credit = pa.array([-0.1, *[0.0] * (len(rows) - 1)], pa.float32())
        pq.write_table(rows.set_column(rows.schema.get_field_index("advantage"), "advantage", credit), path)
    page = write(tmp_path, tmp_path / "run")
    group = page.run.episodes["group"][page.run.turns["at"][page.run.turns["advantage"] == 0].iloc[0]]
    for where in ("episodes", "group/" + group, "episode/" + page.run.episodes["episode"].iloc[0]):
        browser.open(page.address, f"#/{where}")
        assert "undefined" not in browser.text("main")
        assert "○" in browser.text("main")
    browser.open(page.address, f"#/group/{group}")
    lines = browser.run("return [...document.querySelectorAll('.edge path')].map((e) => e.getAttribute('class'))")
    assert "line0" in lines
    assert set(lines) <= {"line0", "line-1", "line-2", "line-3"}


def test_rules_say_that_they_have_nothing_to_look_at(browser, page, tmp_path):
    folder = synthetic_run.write(tmp_path / "run", episodes=20, steps=1)
    for path in folder.glob("episodes/*/*.parquet"):
        rows = pq.ParquetFile(path).read()
        at = rows.schema.get_field_index("validation")
        pq.write_table(rows.set_column(at, rows.schema.field(at), pa.array([True] * len(rows))), path)
    nothing = "Rules look at training episodes, and there are none here."
    browser.open(write(tmp_path, tmp_path / "run").address)
    assert nothing in browser.text("main")
    browser.open(page.address)
    assert nothing not in browser.text("main")


def test_the_graph_of_a_group(browser, page):
    at, _ = winner(page.run)
    group = page.run.episodes["group"][at]
    members = page.run.episodes.index[page.run.episodes["group"] == group]
    turns = page.run.turns[page.run.turns["at"].isin(members)]
    browser.open(page.address, f"#/group/{group}?visits=1")
    states = browser.run("return document.querySelectorAll('.node.state').length")
    assert states == turns["anchor"].nunique()
    assert browser.run("return document.querySelectorAll('.node.solved, .node.unsolved').length") == 2
    assert browser.run("return document.querySelectorAll('.node.fork').length") > 0
    # in words: the difference that makes a fork, the best action first
    shares = [[int(share) for share in re.findall(r"(\d+) % solved", fork)] for fork in browser.texts(".forks li")]
    assert shares
    assert all(best - worst >= 25 for best, worst in shares)
    boxes = browser.run(
        "return [...document.querySelectorAll('.node rect')].map((e) => ['x', 'y', 'width', 'height']"
        ".map((name) => Number(e.getAttribute(name))))"
    )
    for i, (x, y, width, height) in enumerate(boxes):
        for u, v, wide, high in boxes[:i]:
            assert x + width <= u or u + wide <= x or y + height <= v or v + high <= y, "two states overlap"
    # the table tells the same: every turn once, with its mean credit
    browser.run("document.querySelector('.as-table').open = true")
    cells = "[...row.cells].map((cell) => cell.textContent)"
    rows = browser.run(f"return [...document.querySelectorAll('table.edges tbody tr')].map((row) => {cells})")
    assert sum(int(row[3]) for row in rows) == len(turns)
    start = turns[turns["turn"] == 0]
    action, number = start["action"].value_counts().index[0], int(start["action"].value_counts().iloc[0])
    assert any(row[1] == action and int(row[3]) >= number for row in rows)
    browser.run("document.querySelector('table.edges button').click()")
    assert browser.texts(".chosen-turns td a")
    browser.run("document.querySelector('[name=forks]').click()")
    assert browser.run("return document.querySelectorAll('.node').length") <= len(boxes)
    assert "forks=1" in browser.run("return location.hash")


def test_two_steps_compared_on_the_same_tasks(browser, page):
    episodes = page.run.episodes
    browser.open(page.address, "#/compare?a=0.3.v&b=0.6.v")
    tasks = episodes[episodes["validation"].astype(bool)]
    won = tasks["success"].eq(True).groupby([tasks["seed"], tasks["global_step"]]).mean().unstack() >= 0.5
    numbers = [int(text.split()[0]) for text in browser.texts(".tile")]
    a, b = won[3], won[6]
    assert numbers == [(a & b).sum(), (a & ~b).sum(), (~a & b).sum(), (~a & ~b).sum()]
    browser.go("#/compare?a=0.1.t&b=0.2.t")
    assert "No task was played on both sides" in browser.text(".notes")


def test_two_runs_compared(browser, page):
    browser.open(page.address, "#/compare")
    assert "8 common tasks" in browser.text(".lead")
    assert browser.run("return document.querySelectorAll('.chart').length") >= 8
    assert "data.seed" in browser.text("main")
    browser.go("#/run?run=1")
    assert browser.text("h1") == "second"


def test_search_in_all_texts(browser, page):
    browser.open(page.address, "#/episodes")
    browser.choose("texts", "2 OF 2 CHORES")
    browser.run("document.querySelector('[name=texts]').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))")
    browser.until("return document.querySelector('.over .hint').textContent.startsWith('found')")
    assert counted(browser) == 0
    browser.choose("texts", "1 of 2 CHORES are done")
    browser.run("document.querySelector('[name=texts]').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))")
    browser.settled(lambda: counted(browser) > 0, True)
    assert counted(browser) < len(page.run.episodes)


def test_hostile_texts_are_shown_and_do_nothing(browser, tmp_path):
    synthetic_run.write(tmp_path / "<b>run", episodes=60, turns=16, steps=3, hostile=True)
    page = write(tmp_path, tmp_path / "<b>run")
    episodes = page.run.episodes
    hostile = episodes[episodes["task"].str.contains("<script>", regex=False)]
    group = hostile["group"].iloc[0]
    browser.open(page.address)
    assert browser.text("h1") == "<b>run"
    for where in (*PAGES, f"group/{group}", *(f"episode/{key}" for key in hostile["episode"][:3])):
        browser.go(f"#/{where}")
    assert browser.run("return window.broken") is None
    assert browser.run("return document.querySelectorAll('main img, main script, main iframe, main b > *').length") == 0
    text = browser.text("main")
    assert "</script><img src=x onerror='window.broken = 1'>" in text
    assert "␛[31mred" in text
    assert "nul ␀" in text
    assert "⟦RLO⟧gnp.exe⟦PDF⟧" in text
    assert "\\ud800 alone" in text
    assert "show all 1,000," in text
    assert len(text) < 900_000
    assert browser.run("return document.documentElement.scrollWidth") <= 1280


def test_what_a_text_could_inject_is_blocked(chromium, page):
    """Not that anything makes HTML of texts: the policy stops it if one day something does."""
    chromium.open(page.address)
    inject = "try { document.body.innerHTML = '<img src=x onerror=\"window.broken = 1\">'; return 'done' }"
    assert "TrustedHTML" in chromium.run(inject + " catch (error) { return String(error) }")
    script = "const s = document.createElement('script'); s.append('window.broken = 1'); document.body.append(s)"
    chromium.run(f"try {{ {script} }} catch (error) {{}}")
    chromium.run("const s = document.createElement('style'); s.append('h1 {color: red}'); document.head.append(s)")
    fetched = "return fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => String(error))"
    assert "TypeError" in chromium.run(fetched)
    assert chromium.run("return window.broken") is None
    assert chromium.run("return getComputedStyle(document.querySelector('h1')).color") != "rgb(255, 0, 0)"
    assert any("Content Security Policy" in line for line in chromium.console())


def test_a_hundred_thousand_turns(browser, large):
    """What bounds the time: few rows in the document, texts decoded when they are looked at. And the memory."""
    assert len(large.run.episodes) >= 2000
    assert len(large.run.turns) > 80_000
    browser.open(large.address, "#/episodes")
    assert "In this page: " in browser.text(".banner")
    assert re.search(r"texts of [1-9][\d,]+ of 2,0\d\d episodes \(more would exceed its size", browser.text(".banner"))
    assert counted(browser) == len(large.run.episodes)
    assert browser.run("return document.querySelectorAll('.rows tbody tr').length") < 80
    browser.run("document.querySelector('.scroll').scrollTop = 30000")
    browser.until(
        "return Number(document.querySelector('.rows tbody tr[aria-rowindex]').getAttribute('aria-rowindex')) > 700"
    )
    assert browser.run("return document.querySelectorAll('.rows tbody tr').length") < 80
    _, key = winner(large.run)
    browser.go(f"#/episode/{key}")
    assert browser.texts(".turn .action")
    browser.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    assert browser.run("return performance.memory.usedJSHeapSize") < 250e6


def test_states_with_keys_that_do_not_read_are_named_after_what_is_seen_there(browser, tmp_path):
    folder = synthetic_run.write(tmp_path / "run", episodes=20, turns=16, steps=1)
    for path in folder.glob("turns/*/*.parquet"):
        rows = pq.ParquetFile(path).read()
        keys = pa.array([hashlib.sha256(key.encode()).hexdigest() for key in rows["anchor"].to_pylist()])
        pq.write_table(rows.set_column(rows.schema.get_field_index("anchor"), "anchor", keys), path)
    page = write(tmp_path, tmp_path / "run")
    browser.open(page.address, "#/group?visits=1")
    names = browser.run(
        "return [...document.querySelectorAll('.node.state')].map((node) => "
        "[...node.querySelectorAll('.name')].map((line) => line.textContent).join(' '))"
    )
    assert names.count("start") == 1
    assert any(name.startswith("You walk to the") for name in names)
    assert any(name.startswith("You take the") for name in names)


def test_thumbnails_of_pictures_are_enlarged_on_a_click(browser, tmp_path):
    folder = tmp_path / "drawn"
    synthetic_run.write(folder, episodes=8, steps=1, turns=6)
    synthetic_run.draw(folder)
    written = write(tmp_path, folder)
    turns = written.run.turns[written.run.turns["at"] == 1]
    browser.open(written.address, f"#/episode/{written.run.episodes['episode'][1]}")
    browser.until(f"return document.querySelectorAll('.turn .picture img').length === {len(turns)}")
    titles = browser.run("return [...document.querySelectorAll('.picture')].map((each) => each.title)")
    assert titles == [f"picture 8x8 {name[4:10]}" for name in turns["images"]]
    sizes = "return [...document.querySelectorAll('.picture img')].map((each) => [each.naturalWidth, each.width])"
    browser.until(f"{sizes}.every(([natural]) => natural === 8)")
    small = browser.run(sizes)[0][1]
    browser.run("document.querySelector('.picture').click()")
    assert browser.run(sizes)[0][1] > 4 * small
    assert browser.run(sizes)[1][1] == small
    browser.run("document.querySelector('.picture').click()")
    assert browser.run(sizes)[0][1] == small
