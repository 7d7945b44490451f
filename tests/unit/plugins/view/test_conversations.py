"""Episodes on the terminal and as JSON lines."""

import base64
import gzip
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import synthetic_run
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.view import FILTERS
from verl_turnkey.plugins.rollout.trajectory_log import picture_name
from verl_turnkey.plugins.view import conversations, terminal
from verl_turnkey.plugins.view.conversations import extremes, last_step, matching, outcomes
from verl_turnkey.plugins.view.headline import headline
from verl_turnkey.plugins.view.join import LoggedRun, load, read
from verl_turnkey.plugins.view.pack import chat, pack
from verl_turnkey.plugins.view.traces import traces

COLOURS = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    synthetic_run.write(folder, episodes=90, steps=3)
    return folder


@pytest.fixture(scope="module")
def run(folder) -> LoggedRun:
    return load(folder)


def view(*words: object, fails: bool = False) -> str:
    done = CliRunner().invoke(app, ["view", *map(str, words)])
    assert (done.exit_code != 0) == fails, done.output
    return str(done.exception) if fails and not isinstance(done.exception, SystemExit) else done.output


def printed(run: LoggedRun, rows: np.ndarray, limit: int = 4) -> str:
    file = io.StringIO()
    terminal.show(run, rows, limit, Console(file=file, force_terminal=True, color_system="truecolor", width=100))
    return file.getvalue()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    synthetic_run.write(folder, episodes=16, steps=1, turns=6)
    synthetic_run.draw(folder)
    return folder


# --- on the terminal --------------------------------------------------------------------------------------------------


def test_the_best_and_the_worst_of_the_last_step_are_printed(folder, run):
    text = view(folder, "--text")
    assert text.splitlines()[0] == f"{run.name}: {headline(run)}"
    training = run.episodes[~run.episodes["validation"].astype(bool) & (run.episodes["global_step"] == 3)]
    assert text.splitlines()[1].startswith(f"4 of {len(training)} episodes")
    returns = training.set_index("episode")["composed_return"].fillna(-np.inf).sort_values()
    keys = re.findall(r"^(\S+)  step 3  ", text, re.MULTILINE)
    assert [returns[key] for key in keys] == [*returns.iloc[[-1, -2]], *returns.iloc[[1, 0]]]


def test_a_turn_has_what_was_seen_said_and_done_and_its_credit(run):
    [at] = extremes(run, last_step(run), 1)
    key = run.episodes["episode"][at]
    turns = run.turns[run.turns["at"] == at]
    texts = read(run.folder, "texts").set_index(["episode", "turn"])
    text = COLOURS.sub("", printed(run, np.array([at])))
    for turn in turns.to_dict("records"):
        logged = texts.loc[(key, turn["turn"])]
        block = text[text.index(f"turn {turn['turn']} ") :].partition("\nturn ")[0]
        assert f"{turn['advantage']:+.2f}" in block
        assert f"reward {turn['composed_reward']:g}" in block
        assert (f"action       {turn['action']}" if turn["valid"] else "action       none") in block
        assert f"environment  {logged['observation']}" in block
        assert (
            re.search(r"^thoughts +\S", block, re.MULTILINE) if turn["valid"] else "invalid: no <action> tag" in block
        )
        assert f"<action>{turn['action']}</action>" in block or not turn["valid"]
    assert texts.loc[(key, 0), "first_observation"] in text[: text.index("turn 0")]
    assert f"outcome      ✓ solved, after {len(turns)} turns, return" in text


@pytest.mark.parametrize(
    ("credit", "glyph"),
    [(1.0, "▲"), (0.4, "▲"), (0.05, "▲"), (0.01, "○"), (0.0, "○"), (-0.05, "▼"), (-5.0, "▼")],
)
def test_credit_is_a_colour_a_sign_and_a_number(run, credit, glyph):
    [talk] = conversations.conversations(run, extremes(run, last_step(run), 1))
    talk.turns[:] = [talk.turns[0] | {"advantage": credit}]
    [head] = [line for line in terminal.lines(talk, 1.0) if line.plain.startswith("turn 0")]
    assert f"{glyph} {credit:+.2f}" in head.plain
    [style] = [str(span.style) for span in head.spans if head.plain[span.start] == glyph] or [""]
    assert (terminal.PLUS in style, terminal.MINUS in style) == (glyph == "▲", glyph == "▼")


def test_a_turn_without_credit_says_why(folder, tmp_path):
    """A run that goes on: the last step is not trained yet."""
    log = shutil.copytree(folder, tmp_path / "run") / "turnkey_log"
    shutil.rmtree(log / "credit" / "step=000003")
    assert "◌ no credit: not trained yet" in view(tmp_path / "run", "--text")
    assert "◌ no credit: the episode failed" in view(tmp_path / "run", "--text", "--filter", "outcome=failed")


def test_without_a_terminal_there_are_no_colours_and_with_one_as_told(folder, run, monkeypatch):
    assert "\x1b" not in view(folder, "--text")
    assert "38;2;86;180;233" in printed(run, last_step(run))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[(?:[\d;]*;)?(?:3\d|4\d|9\d)", printed(run, last_step(run)))


def test_hostile_texts_are_shown_and_do_nothing(tmp_path):
    synthetic_run.write(tmp_path / "bad", episodes=30, steps=1, hostile=True)
    run = load(tmp_path / "bad")
    text = COLOURS.sub("", printed(run, np.arange(len(run.episodes)), limit=len(run.episodes)))
    assert {c for c in text if not c.isprintable()} == {"\n"}
    for symbol in ("␛[31mred", "nul ␀", "bell ␇", "⟦202e⟧gnp.exe", "⟦2066⟧", "⟦2028⟧", "<script>window.broken = 1"):
        assert symbol in text
    assert "[red]" in terminal.plain("[red]"), "no markup is read"
    alone = terminal.lines(next(conversations.conversations(run, [0])), 1.0, whole=True)
    assert "\x1b" not in "".join(line.plain for line in alone)


@pytest.mark.parametrize(
    ("text", "printed_text"),
    [
        ("a\r\nb\tc", "a\nb   c"),
        ("\x00\x1b[2J\x07\x7f\x9b", "␀␛[2J␇␡⟦9b⟧"),
        ("\u202e\u200b\ufeff", "⟦202e⟧⟦200b⟧⟦feff⟧"),
        ("a\u3000b\u00a0c", "a\u3000b\u00a0c"),
    ],
)
def test_what_is_not_printable_is_a_symbol(text, printed_text):
    assert terminal.plain(text) == printed_text


def test_a_log_without_texts_says_so(folder, tmp_path):
    shutil.rmtree(shutil.copytree(folder, tmp_path / "run") / "turnkey_log" / "texts")
    text = view(tmp_path / "run", "--text", "--export", tmp_path / "out.jsonl")
    assert terminal.NO_TEXTS in text
    number = len(load(tmp_path / "run").episodes)
    with_turns = sum(bool(json.loads(line)["turns"]) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert f"{with_turns} of them without messages" in text
    assert number >= with_turns


def test_an_episode_whose_turns_are_lost_says_so(folder, tmp_path):
    log = shutil.copytree(folder, tmp_path / "run") / "turnkey_log"
    [turns] = (log / "turns" / "step=000003").glob("*.parquet")
    turns.write_bytes(b"PAR1")
    options = "--filter", "step=3", "--limit", "1", "--filter", "outcome=solved"
    text = view(tmp_path / "run", "--text", *options)
    assert terminal.NO_TEXTS in text
    assert re.search(r"✓ solved, after [1-9]\d* turn", text)
    text = view(tmp_path / "run", "--export", tmp_path / "out.jsonl", *options)
    assert "1 of them without messages" in text
    assert "cannot be read" in text
    assert json.loads((tmp_path / "out.jsonl").read_text())["messages"] is None


# --- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "fits"),
    [
        ("step=2", "global_step == 2"),
        ("step=last", "global_step == 3"),
        ("split=validation", "validation"),
        ("split=training", "not validation"),
        ("outcome=solved", "success == True and failed.isna()"),
        ("outcome=unsolved", "success == False and failed.isna()"),
        ("outcome=failed", "failed.notna()"),
        ("kind=timeout", "failed_kind == 'timeout'"),
        ("turns=14", "turns == 14"),
        ("turns=5-9", "5 <= turns <= 9"),
        ("turns=10-", "turns >= 10"),
        ("turns=-9", "turns <= 9"),
        ("credit=1,", "best >= 1"),
        ("credit=,-1.5", "worst <= -1.5"),
        ("credit=0.5,0", "best >= 0.5 and worst <= 0"),
        ("q=BRING the Cup", "task.str.contains('Bring the cup')"),
    ],
)
def test_filters(run, condition, fits):
    by_episode = run.turns.groupby("at")["advantage"]
    table = run.episodes.assign(worst=by_episode.min(), best=by_episode.max()).astype({"validation": bool})
    expected = table.query(fits, engine="python").index.tolist()
    assert 0 < len(expected) < len(table)
    assert matching(run, [condition]).tolist() == expected
    group = table["group"][expected[0]]
    both = matching(run, [condition, f"q={group}"])
    assert both.tolist() == [at for at in expected if table["group"][at] == group]


def test_a_failure_without_a_kind_is_other(folder):
    run = load(folder)
    run.episodes["failed_kind"] = None
    assert matching(run, ["kind=other"]).tolist() == matching(run, ["outcome=failed"]).tolist() != []


def test_the_task_is_that_of_the_row_or_the_name_that_the_page_shows(folder):
    run = load(folder)
    task = run.episodes["task"][0]
    assert matching(run, [f"task={task}"]).tolist() == run.episodes.index[run.episodes["task"] == task].tolist()
    run.episodes["task"] = run.episodes["task"].where(run.episodes["task"] != task, '{"env_id": "a/Lake-v0"}')
    assert len(matching(run, ["task=Lake"])) == len(matching(run, ['task={"env_id": "a/Lake-v0"}'])) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--text", "--filter", "size=3"), "expected KEY=VALUE, where KEY is one of step, split, outcome"),
        (("--text", "--filter", "step"), "expected KEY=VALUE"),
        (("--text", "--filter", "step=two"), "expected step=a number, or last, got 'two'"),
        (("--text", "--filter", "outcome=won"), "expected outcome=solved, unsolved or failed, got 'won'"),
        (("--text", "--filter", "turns=-"), "expected turns=12, 10-20, 10- or -20, got '-'"),
        (("--text", "--filter", "credit=a"), "expected credit=LOW,HIGH"),
        (("--text", "--filter", "step=99"), "no episode fits --filter step=99"),
        (("--text", "--serve"), "leave out --out, --serve and --open"),
        (("--export", "x.jsonl", "--out", "page.html"), "leave out --out, --serve and --open"),
        (("--limit", "3"), "go with --text or --export"),
        (("--filter", "step=3"), "go with --text or --export"),
    ],
)
def test_wrong_options_are_refused(folder, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in re.sub(r"[\s│]+", " ", view(folder, *words, fails=True))
    assert list(tmp_path.iterdir()) == []


def test_the_command_names_the_filters_that_there_are():
    assert (*conversations.FILTERS,) == FILTERS


def test_an_empty_log_is_one_line(tmp_path):
    (tmp_path / "turnkey_log" / "episodes").mkdir(parents=True)
    for words in (("--text",), ("--export", tmp_path / "out.jsonl")):
        message = view(tmp_path, *words, fails=True)
        assert "no episode is written yet" in message
        assert "\n" not in message
    assert not (tmp_path / "out.jsonl").exists()


def test_nothing_is_written_into_the_run(folder, tmp_path):
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}

    before = state()
    view(folder, "--text", "--export", tmp_path / "out.jsonl")
    assert state() == before


# --- as JSON ----------------------------------------------------------------------------------------------------------


def test_an_exported_episode_is_what_the_log_has(folder, run, tmp_path):
    out = tmp_path / "new" / "out.jsonl"
    assert view(folder, folder, "--export", out) == f"{2 * len(run.episodes)} episodes in {out}\n"
    lines = out.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [record["episode"] for record in records] == 2 * run.episodes["episode"].tolist()
    texts = read(run.folder, "texts").set_index(["episode", "turn"]).sort_index()
    for at, record in enumerate(records[: len(run.episodes)]):
        logged = run.episodes.loc[at]
        assert record["outcome"] == outcomes(run)[at]
        for name in ("global_step", "seed", "env_return", "composed_return", "success"):
            assert record.get(name) == (None if logged[name] != logged[name] else logged[name])
        turns = run.turns[run.turns["at"] == at].to_dict("records")
        assert len(record["turns"]) == len(turns)
        for written, turn in zip(record["turns"], turns, strict=True):
            assert written.get("action") == (turn["action"] if turn["valid"] else None)
            assert written["composed_reward"] == turn["composed_reward"]
            assert written.get("advantage") == pytest.approx(turn["advantage"], rel=1e-6) or "no_credit" in written
            assert written.get("part.step_level", np.nan) == pytest.approx(
                turn["part.step_level"], rel=1e-6, nan_ok=True
            )
            assert type(written.get("train_step", 0)) is int
        if not turns:
            continue
        of_episode = texts.loc[record["episode"]]
        prompt, *others = record["messages"]
        assert prompt == {"role": "user", "content": of_episode["prompt_tail"][0]}
        assert [m["content"] for m in others[::2]] == of_episode["response"].tolist()
        assert [m["content"] for m in others[1::2]] == of_episode["observation"].tolist()
        assert [m["role"] for m in others] == ["assistant", "user"] * len(turns)


def test_the_filters_of_the_terminal_choose_what_is_exported(folder, run, tmp_path):
    out = tmp_path / "out.jsonl"
    view(folder, "--export", out, "--filter", "outcome=solved", "--filter", "split=training", "--limit", "3")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["outcome"], record["validation"]) for record in records] == [("solved", False)] * 3


def test_exported_texts_do_nothing_on_a_terminal(tmp_path):
    synthetic_run.write(tmp_path / "bad", episodes=30, steps=1, hostile=True)
    view(tmp_path / "bad", "--export", tmp_path / "out.jsonl")
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    assert {c for c in written if not c.isprintable()} == {"\n"}
    contents = [m["content"] for line in written.splitlines() for m in json.loads(line)["messages"]]
    for text in synthetic_run.HOSTILE:
        assert any(text.encode("utf-8", "backslashreplace").decode() in content for content in contents)


CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nGo.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = "<bos><start_of_turn>user\nGo.<end_of_turn>\n<start_of_turn>model\n"
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (CHATML, [SYSTEM, USER]),
        (CHATML + "<think>\n", [SYSTEM, USER]),
        (CHATML.removesuffix("<|im_start|>assistant\n"), [SYSTEM, USER]),
        (LLAMA, [SYSTEM, USER]),
        (GEMMA, [USER]),
        (CHATML.replace("<|im_start|>user\n", "in between <|im_start|>user\n"), None),
        (CHATML.replace("<|im_start|>assistant\n", "<|im_start|>user\nwithout an end"), None),
        (CHATML[20:], None),
        ("Go.", None),
        ("", None),
    ],
)
def test_messages_are_read_from_a_prompt_only_where_its_markup_accounts_for_all_of_it(prompt, expected):
    assert chat(prompt) == expected


@pytest.mark.parametrize(
    ("action", "role"), [('{"calls": [{"name": "walk", "arguments": {}}]}', "tool"), ("go", "user")]
)
def test_the_answer_to_a_tool_call_is_a_tools(action, role):
    turn = {"turn": 0, "prompt_tail": CHATML, "response": "r", "observation": "o", "action": action}
    talk = conversations.Conversation({"episode": "e"}, "solved", [turn])
    answers = [{"role": "assistant", "content": "r"}, {"role": role, "content": "o"}]
    assert conversations.messages(talk) == [SYSTEM, USER, *answers]


# --- the headline -----------------------------------------------------------------------------------------------------


def test_the_headline_is_validation_at_its_first_and_last_step(tmp_path):
    synthetic_run.write(tmp_path / "run", episodes=60, steps=6)
    run = load(tmp_path / "run")
    validation = run.episodes["validation"].astype(bool)
    rate = run.episodes[validation].groupby("global_step")["success"].mean()
    pattern = rf"{rate[3]:.2f} → {rate[6]:.2f} on 8 held-out tasks \[(0\.\d\d), (\d\.\d\d)\], steps 3 to 6"
    match = re.fullmatch(pattern, headline(run))
    assert match
    assert float(match[1]) <= rate[6] <= float(match[2])
    seeds = run.episodes["seed"].where(~validation, run.episodes["seed"][~validation].iloc[0])
    trained = load(tmp_path / "run")
    trained.episodes["seed"] = seeds
    trained.episodes["kwargs"] = trained.episodes["kwargs"][~validation].iloc[0]
    assert "on 1 validation task [" in headline(trained)


def test_the_headline_of_other_runs(tmp_path):
    synthetic_run.write(tmp_path / "a", episodes=30, steps=3)
    assert re.fullmatch(r"\d\.\d\d on 8 held-out tasks \[\S+ \S+\], step 3", headline(load(tmp_path / "a")))
    synthetic_run.write(tmp_path / "b", episodes=30, steps=2, validate=False)
    words = r"success in training \d\.\d\d → \d\.\d\d, steps 1 to 2; no validation is logged"
    assert re.fullmatch(words, headline(load(tmp_path / "b")))
    failed = load(tmp_path / "a")
    failed.episodes["failed"] = "lost"
    assert headline(failed).startswith("0.00 on 8 held-out tasks [0.00, ")


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_pictures_have_size_and_digest_in_every_form_of_an_episode(drawn, tmp_path):
    names = load(drawn).turns["images"].tolist()
    digests = {re.fullmatch(r"8x8-([0-9a-f]{16})", name)[1] for name in names[1:]}
    assert len(digests) > 4
    text = view(drawn, "--text", "--filter", "step=1", "--limit", 99)
    assert {*re.findall(r"\[picture 8x8 ([0-9a-f]{6})\]", text)} == {digest[:6] for digest in digests}
    assert "../../" not in text
    view(drawn, "--export", tmp_path / "talk.jsonl")
    turns = [turn for line in (tmp_path / "talk.jsonl").read_text().splitlines() for turn in json.loads(line)["turns"]]
    assert sorted(turn["images"] for turn in turns) == sorted(names)
    spans = [span for group in traces(load(drawn), np.arange(len(load(drawn).episodes))) for span in group]
    named = [span.attributes["turnkey.images"] for span in spans if "turnkey.images" in span.attributes]
    assert sorted(named) == sorted(names)


def test_a_page_holds_each_picture_of_a_group_once(drawn, tmp_path, monkeypatch):
    copy = shutil.copytree(drawn, tmp_path / "copy")
    run = load(copy)
    group = run.episodes["group"].factorize()[0]
    blocks = pack(run, 0, 1e9)
    for g in {*group.tolist()}:
        pictures = json.loads(gzip.decompress(blocks[f"texts-0-{g}"]))["pictures"]
        cells = run.turns["images"][group[run.turns["at"]] == g]
        assert {*pictures} == {cell.split(" ")[-1] for cell in cells}
        for name, data in pictures.items():
            image = Image.open(io.BytesIO(base64.b64decode(data)))
            assert (image.format, picture_name(image)) == ("PNG", name)
    monkeypatch.setattr("verl_turnkey.plugins.view.pack.GROUP_BYTES", 200)
    kept = json.loads(gzip.decompress(pack(run, 0, 1e9)["texts-0-0"]))["pictures"]
    assert 0 < sum(len(base64.b64decode(data)) for data in kept.values()) <= 200
    shutil.rmtree(copy / "turnkey_log" / "pictures")  # as after keep_texts
    assert json.loads(gzip.decompress(pack(run, 0, 1e9)["texts-0-0"]))["pictures"] == {}
