"""MiniWoB++ as text, in a real Chromium: one browser for most of the module."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from verl_turnkey.envs import EpisodeOverError, make
from verl_turnkey.envs.adapters.miniwob import START, MiniWoBText, Page
from verl_turnkey.envs.errors import MissingPackageError

PLAYED = [
    *("click-test-2", "login-user", "choose-list", "enter-text-dynamic", "click-checkboxes"),
    *("click-button-sequence", "click-scroll-list", "enter-time", "use-autocomplete"),
]
LARGE_LETTERS = "document.getElementById('area').style.fontSize = '40px';"
CLICK, LOGIN, LIST, ENTER, CHECK, SEQUENCE, SCROLL, TIME, SUGGESTION = range(len(PLAYED))


@pytest.fixture(scope="module")
def env():
    env = MiniWoBText(PLAYED, max_steps=12)
    yield env
    env.close()


def number(observation: str, wanted: str) -> str:
    """The number of the element whose line holds ``wanted``."""
    return next(line for line in observation.split("\n") if wanted in line and line[0] == "[").partition("]")[0][1:]


def click_test(task: str, page: str) -> list[str]:
    return [f"click {number(page, 'ONE')}"]


def login(task: str, page: str) -> list[str]:
    user, password = re.findall(r'"(.*?)"', task)
    fields = number(page, "text username"), number(page, "password password")
    return [f"type {fields[0]} {user}", f"TYPE [{fields[1]}] {password}", f"click {number(page, 'Login')}"]


def choose(task: str, page: str) -> list[str]:
    option = re.fullmatch("Select (.*) from the list and click Submit.", task)[1]
    return [f"select {number(page, 'select')} {option.upper()}", f"click {number(page, 'Submit')}"]


def enter(task: str, page: str) -> list[str]:
    field, text = number(page, "input"), re.findall(r'"(.*?)"', task)[0]
    return [f"type {field} something else", f"type {field} {text}", f"click {number(page, 'Submit')}"]


def check_boxes(task: str, page: str) -> list[str]:
    wanted = re.fullmatch("Select (.*) and click Submit.", task)[1].split(", ")
    lines = page.split("\n")
    boxes = [lines[k - 1].partition("]")[0][1:] for k, line in enumerate(lines) if line.strip('"') in wanted]
    return [*(f"click {box}" for box in boxes), f"click {number(page, 'Submit')}"]


def sequence(task: str, page: str) -> list[str]:
    return [f"click {number(page, 'ONE')}", f"click {number(page, 'TWO')}"]


def choose_several(task: str, page: str) -> list[str]:
    wanted = re.fullmatch("Select (.*) from the scroll list and click Submit.", task)[1].split(", ")
    return [*(f"select {number(page, 'select')} {name}" for name in wanted), f"click {number(page, 'Submit')}"]


def enter_time(task: str, page: str) -> list[str]:
    return [f"type {number(page, 'time')} {re.search(r'[0-9:]+ .M', task)[0]}", f"click {number(page, 'Submit')}"]


PLANS: list[Callable[[str, str], list[str]]] = [
    *(click_test, login, choose, enter, check_boxes, sequence, choose_several, enter_time),
]


@pytest.mark.parametrize("round", range(2))
@pytest.mark.parametrize("task", range(len(PLANS)))
def test_pages_are_solved_by_words(env, task, round):
    page, info = env.reset(seed=task + round * len(PLAYED))
    plan = PLANS[task](info["task"], page)
    answers = [env.step(action) for action in plan]
    assert [answer[1] for answer in answers] == [0.0] * (len(plan) - 1) + [1.0]
    assert answers[-1][2:4] == (True, False)
    assert answers[-1][4]["success"]
    assert not any(answer[4]["invalid"] for answer in answers)


def test_suggestions_are_there_at_once(env):
    page, info = env.reset(seed=SUGGESTION)
    begins, *ends = re.findall(r'"(.*?)"', info["task"])
    page, *_ = env.step(f"type {number(page, 'tags')} {begins}")
    offered = re.findall(rf'\[(\d+)\] div "({begins}.*?)"', page)
    chosen = next(position for position, name in offered if name.endswith(ends[0] if ends else ""))
    page, *_ = env.step(f"click {chosen}")
    assert env.step(f"click {number(page, 'Submit')}")[1] == 1.0


def test_a_wrong_click_fails(env):
    page, _ = env.reset(seed=CLICK)
    _, reward, terminated, truncated, info = env.step(f"click {number(page, 'TWO')}")
    assert (reward, terminated, truncated, info["success"]) == (-1.0, True, False, False)
    with pytest.raises(EpisodeOverError, match="call reset first"):
        env.step("click 1")


def test_a_part_of_the_boxes_pays_a_part_and_is_no_success(env):
    page, info = env.reset(seed=CHECK + len(PLAYED))
    *boxes, submit = check_boxes(info["task"], page)
    count = page.count("checkbox")
    for action in boxes[:-1]:
        assert env.step(action)[1] == 0.0
    _, reward, terminated, _, info = env.step(submit)
    assert (reward, terminated, info["success"]) == (pytest.approx((count - 2) / count), True, False)


def test_a_page_in_words(env):
    page, info = env.reset(seed=LOGIN)
    assert info["task"].startswith("Enter the username")
    assert page == (
        '[1] label "Username"\n[2] input text username = ""\n'
        '[3] label "Password"\n[4] input password password = ""\n[5] button "Login"'
    )
    page, *_ = env.step("type 2 ann")
    assert '[2] input text username = "ann" (focused)' in page
    page, *_ = env.step("press Backspace")
    assert '"an"' in page


def test_seeds_reproduce_whatever_was_played_before_and_global_randomness_is_left_alone(env):
    def play(env: MiniWoBText, seed: int) -> list[tuple]:
        choices = random.Random(seed)
        page, info = env.reset(seed=seed)
        seen: list[tuple] = [(page, info["task"], info["state_key"])]
        for _ in range(4):
            numbers = re.findall(r"^\[(\d+)\]", page, re.MULTILINE)
            page, reward, terminated, truncated, info = env.step(f"click {choices.choice(numbers)}")
            seen.append((page, reward, terminated, info["state_key"]))
            if terminated or truncated:
                break
        return seen

    state = random.getstate()
    seeds = [LOGIN, CHECK, SEQUENCE, LIST]
    first = [play(env, seed) for seed in seeds]
    other = MiniWoBText(PLAYED, max_steps=12)
    try:
        assert [play(other, seed) for seed in reversed(seeds)] == first[::-1]
    finally:
        other.close()
    assert env.reset(seed=LOGIN + len(PLAYED))[1]["task"] != first[0][0][1]
    assert random.getstate() == state


def test_a_page_is_the_same_whatever_the_fonts(monkeypatch):
    env = MiniWoBText("click-link")
    try:
        page, info = env.reset(seed=1)
        monkeypatch.setattr("verl_turnkey.envs.adapters.miniwob.START", START + LARGE_LETTERS)
        larger, larger_info = env.reset(seed=1)
        height = env.driver.execute_script("return document.getElementById('area').scrollHeight;")
    finally:
        env.close()
    assert height > 500, "more lines than the page has room for"
    assert (larger, larger_info) == (page, info)


def test_state_key_repeats_exactly_where_the_page_does(env):
    page, info = env.reset(seed=CHECK)
    start = info["state_key"]
    box = number(page, "checkbox")
    on, off, again = (env.step(f"click {box}")[4]["state_key"] for _ in range(3))
    assert len({start, on, off}) == 3  # a box that was clicked on and off has been clicked
    assert again == on


def test_the_state_of_a_sequence_is_in_the_key(env):
    page, info = env.reset(seed=SEQUENCE)
    page, _, terminated, _, after = env.step(f"click {number(page, 'ONE')}")
    assert not terminated
    assert after["state_key"] != info["state_key"]
    assert "(clicked)" in page


@pytest.mark.parametrize(
    "action",
    [
        *("", "fly", "click", "click 99", "click -1", "type 99 x", "select 5 x", "press F99", "hover 1"),
        *("type 2 \x00", "type 2 " + "x" * 100_000, "click \u0661"),
    ],
    ids=range(12),
)
def test_what_makes_no_sense_changes_nothing_but_counts(env, action):
    page, info = env.reset(seed=LOGIN)
    after = env.step(action)
    assert after[:4] == (page, 0.0, False, False)
    assert after[4]["invalid"]
    assert after[4]["state_key"] == info["state_key"]
    for _ in range(10):
        assert not env.step("fly")[3]
    assert env.step("fly")[2:4] == (False, True)


def test_unicode_can_be_typed(env):
    env.reset(seed=LOGIN)
    page, *_, info = env.step('type 2 žluť "☃"😀')
    assert '= "žluť "☃"😀"' in page
    assert not info["invalid"]


def test_without_a_time_limit_thinking_costs_nothing_and_with_one_it_fails():
    slow = MiniWoBText("click-test-2", time_limit=0.3)
    try:
        slow.reset(seed=0)
        time.sleep(0.6)
        _, reward, terminated, truncated, info = slow.step("click 1")
    finally:
        slow.close()
    assert (reward, terminated, truncated, info["success"]) == (-1.0, True, False, False)


def test_rewards(env):
    timed = MiniWoBText("click-test-2", reward="time")
    success = MiniWoBText("click-test-2", reward="success")
    try:
        page, _ = timed.reset(seed=0)
        _, reward, *_, info = timed.step(f"click {number(page, 'ONE')}")
        assert 0 < reward < 1
        assert info["success"]
        success.reset(seed=0)
        _, reward, terminated, *_ = success.step(f"click {number(page, 'TWO')}")
        assert (reward, terminated) == (0.0, True)
    finally:
        timed.close()
        success.close()


def family(root: int) -> set[int]:
    """The process ``root`` and all below it, zombies included."""
    return {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}


def gone(pids: set[int]) -> bool:
    """Whether they end within a minute. What waits for process 1 to collect it has ended."""

    def ended(pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
        except psutil.NoSuchProcess:
            return True

    for _ in range(600):
        if all(map(ended, pids)):
            return True
        time.sleep(0.1)
    return False


def test_close_ends_all_processes_and_a_dead_browser_is_replaced():
    env = MiniWoBText()
    first = env.reset(seed=0)
    driver = env.driver.service.process.pid
    processes = family(driver)
    assert len(processes) > 3
    for pid in processes - {driver}:
        with contextlib.suppress(ProcessLookupError):  # ended with another
            os.kill(pid, signal.SIGKILL)
    assert env.reset(seed=0) == first
    assert gone(processes)
    processes = family(env.driver.service.process.pid)
    env.close()
    env.close()
    assert gone(processes)
    with pytest.raises(EpisodeOverError):
        env.step("click 1")


def test_a_missing_browser_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match="apt-get install chromium chromium-driver"):
        make("turnkey/MiniWoB-v0")
    monkeypatch.undo()
    monkeypatch.setenv("MINIWOB_CHROME_BINARY", str(tmp_path / "chrome"))
    with pytest.raises(MissingPackageError, match=r"none at .*chrome"):
        make("turnkey/MiniWoB-v0")


BOX = {"left": 0, "top": 0, "width": 10, "height": 10}


def lines(*children: dict[str, Any]) -> list[str]:
    """What a page says whose body has these elements."""
    number = itertools.count(2)
    elements = [{"tag": "DIV", "ref": next(number), "text": "", "children": [], **BOX, **child} for child in children]
    return Page.read({"dom": {"tag": "BODY", "ref": 1, "children": elements, **BOX}, "lists": {}}).lines


@pytest.mark.parametrize(
    ("background", "of", "line"),
    [
        ("rgb(255, 0, 0)", {"classes": "cell"}, "[1] div cell rgb(255, 0, 0)"),
        ("rgba(255, 0, 0, 1)", {"classes": "cell"}, "[1] div cell rgb(255, 0, 0)"),
        ("rgba(0, 0, 0, 0)", {"classes": "cell"}, "[1] div cell"),
        ("rgb(255, 0, 0)", {"tag": "INPUT_text", "id": "name", "value": "ann"}, '[1] input text name = "ann"'),
        ("rgba(0, 0, 0, 0)", {"tag": "INPUT_text", "id": "name", "value": ""}, '[1] input text name = ""'),
        ("rgb(255, 0, 0)", {"tag": "BUTTON", "id": "go"}, "[1] button go"),
        ("rgba(0, 0, 0, 0)", {"tag": "BUTTON", "id": "go"}, "[1] button go"),
    ],
)
def test_a_colour_is_told_where_it_is_seen_and_means_something(background, of, line) -> None:
    assert lines({"bgColor": background, **of}) == [line]


def test_an_empty_element_is_an_ornament_unless_it_is_filled() -> None:
    assert lines({"bgColor": "rgba(0, 0, 0, 0)"}) == []
    assert lines({"bgColor": "rgb(0, 0, 255)"}) == ["[1] div rgb(0, 0, 255)"]
