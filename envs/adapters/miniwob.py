"""MiniWoB++: small web pages in a real, headless Chromium, as a list of numbered elements and actions in words.

Shi et al. 2017, "World of Bits"; Liu et al. 2018, "Reinforcement learning on web interfaces using workflow-guided
exploration". Pages and rewards are the package's own; this file opens the pages and describes them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import miniwob
from miniwob.constants import DEFAULT_ALLOWED_KEYS
from miniwob.dom import DOMElement
from miniwob.selenium_actions import execute_press_key, execute_type_text
from miniwob.selenium_instance import DEFAULT_BASE_URL
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait
from urllib3.exceptions import HTTPError

from verl_turnkey.envs.base import StepResult, TextEnv, check, check_name, digest, is_number
from verl_turnkey.envs.errors import MissingPackageError, UnknownEnvironmentError

WHOLE = ("select", "button", "a")  # numbered even with elements inside
SHAPES = ("circle", "line", "path", "polygon", "rect", "canvas")
HANDLES = ("ui-resizable", "ui-helper")  # of jQuery UI, without meaning for the task


@dataclass(frozen=True)
class Page:
    """What a page shows: its lines, which element a number stands for, and the options of its drop-down lists."""

    lines: list[str]
    refs: dict[str, int]
    options: dict[int, list[str]]
    marks: list[tuple[Any, ...]]
    """everything that belongs to the page's state"""

    @classmethod
    def read(cls, seen: dict[str, Any]) -> Page:
        page = cls([], {}, {int(ref): choices["options"] for ref, choices in seen["lists"].items()}, [])
        root = DOMElement(seen["dom"])
        for element in root.subtree_elements:
            choices = seen["lists"].get(str(element.ref))
            state = (element.tag, element.text, element.value, element.classes, element.bg_color)
            page.marks.append((*state, element.tampered, element.focused, choices and choices["chosen"]))
            if element.tag == "t":
                page.lines.append(f'"{element.text}"')
            elif element.tag in WHOLE or (element.is_leaf and not _ornament(element)):
                number = str(len(page.refs) + 1)
                page.refs[number] = element.ref
                page.lines.append(f"[{number}] {_describe(element, choices)}")
        return page


def _ornament(element: DOMElement) -> bool:
    """Whether an element shows nothing: it is empty and has no name, or is one of jQuery UI's."""
    if element.text or element.value is not None or element.tag in SHAPES or _colour(element):
        return False
    return not _name(element) or element.id == "area" or any(word in element.classes for word in HANDLES)


def _describe(element: DOMElement, choices: dict[str, Any] | None) -> str:
    """Kind, text or name, what is in it, and marks: ``input text username = "ann" (focused)``."""
    parts = [element.tag.replace("_", " ")]
    inside = element.text or " ".join(child.text for child in element.subtree_elements if child.text)
    if inside and element.value is None and not choices:
        parts.append(f'"{inside}"')
    else:
        parts += [_name(element), _colour(element)]
    if isinstance(element.value, bool):
        parts.append("(checked)" if element.value else "(not checked)")
    elif element.value is not None:
        parts.append(f'= "{element.value}"')
    if choices:
        parts.append(f'= "{", ".join(choices["chosen"])}" of: {", ".join(choices["options"])}')
    parts += ["(focused)"] * bool(element.focused and element.tag != "body") + ["(clicked)"] * bool(element.tampered)
    return " ".join(part for part in parts if part)


def _name(element: DOMElement) -> str:
    return element.id or ("" if element.classes == "SVG_CLASS" else element.classes)


def _colour(element: DOMElement) -> str:
    """The background colour of an element without a value, which some tasks ask for; empty without one."""
    *colour, alpha = element.bg_color
    filled = alpha > 0 and element.value is None and element.tag not in WHOLE
    return f"rgb({', '.join(str(round(255 * part)) for part in colour)})" if filled else ""


gymnasium.register_envs(miniwob)
# Without the package's flight tasks, which need an HTTP server and another way of reading their pages.
TASKS = sorted(
    name.removeprefix("miniwob/").removesuffix("-v1")
    for name in gymnasium.registry
    if name.startswith("miniwob/") and "/flight." not in name
)
REWARDS = ("raw", "time", "success")
MAX_TEXT = 1000
NEVER = 2**31 - 1  # milliseconds (24 days): the longest that a timer of JavaScript can wait
_named = {key.replace("<", "").replace(">", ""): key for key in DEFAULT_ALLOWED_KEYS}
KEYS = {**{name.lower(): key for name, key in _named.items()}, **_named}

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--lang=en-US",
        "--window-size=500,320",
    ),
    # No network traffic of the browser's own; the pipe ends it with its driver.
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic", "--disable-extensions", "--disable-default-apps", "--remote-debugging-pipe"),
)
START = """
const [seed, limit] = arguments;
if (limit !== null) core.EPISODE_MAX_TIME = limit;
// The page's own code splits a text where its lines wrap, and that depends on the fonts of the machine.
Range.prototype.getClientRects = function () { return [this.getBoundingClientRect()]; };
// Animations and delayed suggestions would make the observation depend on time.
if (window.jQuery) jQuery.fx.off = true;
Math.seedrandom(seed);
core.startEpisodeReal();
if (window.jQuery && jQuery.ui && jQuery.ui.autocomplete)
  jQuery(".ui-autocomplete-input").autocomplete("option", "delay", 0);
"""
LOOK = """
const done = arguments[arguments.length - 1];
requestAnimationFrame(() => setTimeout(() => {
  const dom = core.getDOMInfo(), lists = {};
  for (const [ref, element] of Object.entries(core.previousDOMInfo))
    if (element instanceof HTMLSelectElement)
      lists[ref] = {
        chosen: Array.from(element.selectedOptions, option => option.text.trim()),
        options: Array.from(element.options, option => option.text.trim()),
      };
  const task = core.getUtterance();
  done({dom: dom, lists: lists, task: task.utterance || task, over: WOB_DONE_GLOBAL, reason: WOB_REWARD_REASON,
        raw: WOB_RAW_REWARD_GLOBAL, scaled: WOB_REWARD_GLOBAL});
}, 0));
"""
CLICK = "return core.elementClick(arguments[0]);"
# Clicks, selects the text of the focused field, so that typing replaces it, and returns the kind of the field.
FOCUS = """
if (core.elementClick(arguments[0]) !== true) return null;
const field = document.activeElement;
if (field.select) field.select();
return field.type || "none";
"""
CHOOSE = """
const [ref, index] = arguments, list = core.previousDOMInfo[ref];
if (list.multiple) list.options[index].selected = !list.options[index].selected;
else list.selectedIndex = index;
for (const kind of ["input", "change"]) list.dispatchEvent(new Event(kind, {bubbles: true}));
return true;
"""


class MiniWoBText(TextEnv):
    """A page of MiniWoB++ as numbered elements.

    Actions: ``click N``, ``type N text`` (replaces what is in the field), ``select N option`` (of a list) and
    ``press KEY`` (``Enter``, ``Backspace``, ``Tab``, ``ArrowDown``, ``C-a``, ...), where N is the number of an element
    in the last observation. Tasks that need the mouse at a point of a picture cannot be solved with them.

    Args:
        task: name of a task (``click-test-2``), or several of them: ``seed % count``.
        reward: given at the end. ``raw``: the page's, -1 to 1, whatever the time. ``time``: a positive one falls with
            the seconds that have passed, as in the papers, so equal actions do not give equal rewards.
            ``success``: 1.0 for a solved task, else 0.0.
        time_limit: seconds after which the page fails the episode, the model's time included; None: never, except
            that ``reward: time`` keeps the page's own limit, mostly 10 seconds.
        max_steps: steps before truncation.

    ``$MINIWOB_CHROME_BINARY`` and ``$MINIWOB_CHROMEDRIVER`` name the browser and its driver when they are not on the
    PATH. ``success`` means a raw reward of 1. ``state_key`` is a hash of the task and of text, value, marks and focus
    of all elements. Each observation numbers its elements from 1, so that equal pages give equal texts.
    """

    metadata = {**TextEnv.metadata, "memory_mb": 500}  # noqa: RUF012 - gymnasium's own attribute

    def __init__(
        self,
        task: str | Sequence[str] = "click-test-2",
        reward: str = "raw",
        time_limit: float | None = None,
        max_steps: int | None = 10,
    ) -> None:
        super().__init__(max_steps)
        self._tasks = [task] if isinstance(task, str) else task
        several = isinstance(self._tasks, Sequence) and len(self._tasks) > 0
        check(several, "task", "the name of a task, or several of them", task)
        for name in self._tasks:
            check_name(name, TASKS, "MiniWoB++ has no task", "It has", UnknownEnvironmentError)
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        possible = time_limit is None or (is_number(time_limit) and 0 < time_limit * 1000 <= NEVER)
        check(possible, "time_limit", "a positive number of seconds, or null", time_limit)
        self._reward = reward
        self._limit_ms = None if time_limit is None else int(time_limit * 1000)
        if time_limit is None and reward != "time":
            self._limit_ms = NEVER
        self._programs = _programs()
        self._driver: Chrome | None = None
        self._page = Page([], {}, {}, [])
        self._name = ""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self._name = self._tasks[seed % len(self._tasks)]
        try:
            self._open_page(seed)
        except (WebDriverException, HTTPError):  # browser or driver may have died since the last episode
            self.close()
            self._open_page(seed)
        seen = self._look()
        return self._now(seen), seen["task"]

    def act(self, action: str) -> StepResult:
        verb, _, rest = action.strip().partition(" ")
        number, _, text = rest.strip().partition(" ")
        done = self._apply(verb.lower(), number.strip("[]"), text.strip())
        return self._now(self._look()) if done else self.refused()

    def close(self) -> None:
        """End the browser. A further reset starts a new one."""
        driver, self._driver, self._running = self._driver, None, False
        if driver is not None:
            with contextlib.suppress(Exception):  # it may be gone already
                driver.quit()

    @property
    def driver(self) -> Chrome:
        """Selenium's driver of the browser, from the first reset until ``close``."""
        assert self._driver is not None, "reset comes first"
        return self._driver

    def _open_page(self, seed: int) -> None:
        if self._driver is None:
            self._driver = _start(*self._programs)
        self._driver.get(f"{DEFAULT_BASE_URL}{self._name}.html")  # loaded anew: pages keep data between episodes
        self._driver.execute_script(START, seed, self._limit_ms)
        WebDriverWait(self._driver, 5, 0.05).until(lambda driver: driver.execute_script("return WOB_TASK_READY;"))

    def _apply(self, verb: str, target: str, text: str) -> bool:
        """Carry out an action; False when the page does not allow it."""
        if verb == "press":
            if target not in KEYS and target.lower() not in KEYS:
                return False
            execute_press_key(KEYS.get(target) or KEYS[target.lower()], self.driver)
            return True
        ref = self._page.refs.get(target)
        if ref is None:
            return False
        if verb == "click":
            return self.driver.execute_script(CLICK, ref) is True
        if verb == "type" and text.isprintable() and len(text) <= MAX_TEXT:
            kind = self.driver.execute_script(FOCUS, ref)
            if kind is None:
                return False
            if kind == "time" and text.lower().endswith("m"):  # the hour in two digits, and no space
                text = text.replace(" ", "").rjust(len("00:00AM"), "0")
            execute_type_text(text, self.driver)
            return True
        options = [option.lower() for option in self._page.options.get(ref, ())]
        if verb == "select" and text.lower() in options:
            return self.driver.execute_script(CHOOSE, ref, options.index(text.lower())) is True
        return False

    def _look(self) -> dict[str, Any]:
        return self.driver.execute_async_script(LOOK)

    def _now(self, seen: dict[str, Any]) -> StepResult:
        self._page = page = Page.read(seen)
        terminated, raw = bool(seen["over"]), float(seen["raw"])
        success = terminated and raw == 1
        rewards = {"raw": raw, "time": float(seen["scaled"]), "success": float(success)}
        end = f"The page has ended the episode: {seen['reason'] or 'no reason is given'}."
        return StepResult(
            observation=end if terminated else "\n".join(page.lines) or "The page shows nothing that can be read.",
            state_key=digest(self._name, seen["task"], page.marks, terminated and raw),
            reward=rewards[self._reward] if terminated else 0.0,
            success=success,
            terminated=terminated,
        )


def _programs() -> tuple[str, str]:
    """Paths of the browser and of its driver."""
    browser = os.environ.get("MINIWOB_CHROME_BINARY") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = os.environ.get("MINIWOB_CHROMEDRIVER") or shutil.which("chromedriver")
    for what, path in (("Chromium", browser), ("chromedriver", driver)):
        if path is None or not os.access(path, os.X_OK):
            raise MissingPackageError(
                f"MiniWoB++ needs {what}, and there is none {f'at {path}' if path else 'on the PATH'}: apt-get install "
                "chromium chromium-driver, or set MINIWOB_CHROME_BINARY and MINIWOB_CHROMEDRIVER",
                name=what,
            )
    return str(browser), str(driver)


def _start(browser: str, driver: str) -> Chrome:
    options = ChromeOptions()
    options.binary_location = browser
    options.unhandled_prompt_behavior = "accept"
    options.ignore_local_proxy_environment_variables()  # a proxy cannot reach the driver
    for flag in FLAGS:
        options.add_argument(flag)
    # With both paths given Selenium neither searches for programs nor downloads them.
    return Chrome(options=options, service=Service(driver))
