"""The site of docs/, built and opened in a real browser: its width, its search, its sidebar."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Browser

ROOT = Path(__file__).parents[3]
TABLES = """
    const column = document.querySelector('article').getBoundingClientRect().right + 1;
    const scrolls = (e) => e.scrollWidth > e.clientWidth + 1;
    const boxes = (e) => [e, e.closest('.md-typeset__scrollwrap')];
    return [...document.querySelectorAll('article table')]
        .filter((e) => e.getBoundingClientRect().right > column || boxes(e).some(scrolls))
        .map((e) => e.rows[0].innerText)
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line of the test's output."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Of a server: a browser searches no page that it read from a file."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


def _open(browser: Browser, page: Path) -> None:
    """The theme's script puts every table into a box that scrolls; wait for it."""
    browser.driver.get(page.as_uri())
    wrapped = "e => e.closest('.md-typeset__scrollwrap')"
    browser.until(f"return [...document.querySelectorAll('article table')].every({wrapped})")


def test_every_page_fits_a_window_of_1280_pixels(browser: Browser, site: Path) -> None:
    wide = {}
    pages = sorted(site.rglob("index.html"))
    for page in pages:
        _open(browser, page)
        tables = browser.run(TABLES)
        if tables or browser.run("return document.documentElement.scrollWidth > innerWidth"):
            wide[str(page.parent.relative_to(site))] = tables
    assert len(pages) > 50
    assert wide == {}


def test_a_table_that_is_too_wide_is_noticed(browser: Browser, site: Path) -> None:
    _open(browser, site / "methods/index.html")
    browser.run("document.querySelector('article table td').style.minWidth = '70rem'")
    assert browser.run(TABLES) == ["your task\tmethod"]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("not learning", "/operations/#it-runs-but-is-not-learning"),
        ("flat curve", "/operations/#it-runs-but-is-not-learning"),
        ("dataset", "/own-data/"),
        ("resume", "/operations/#resuming"),
        ("gigpo", "/methods/gigpo/"),
    ],
)
def test_search_finds_what_users_ask(browser: Browser, address: str, words: str, page: str) -> None:
    browser.driver.get(address + "/install/")
    browser.until("return document.querySelector('.md-search__input')")
    browser.run("document.querySelector('label[for=__search]').click()")
    browser.run(
        "const e = document.querySelector('.md-search__input'); e.focus(); e.value = arguments[0];"
        "e.dispatchEvent(new KeyboardEvent('keyup', { bubbles: true }))",
        words,
    )
    browser.until("return document.querySelector('.md-search-result__link')")
    pages = browser.run(
        "return [...document.querySelectorAll('.md-search-result__item')].slice(0, 3)"
        ".map((e) => [...e.querySelectorAll('a')].map((a) => a.href))"
    )
    links = [link.removeprefix(address) for links in pages for link in links]
    targets = {
        path.partition("?")[0] + (f"#{anchor}" if anchor else "")
        for path, _, anchor in (link.partition("#") for link in links)
    }
    assert page in targets


def test_the_sidebar_groups_methods_by_tier(browser: Browser, site: Path) -> None:
    """The group of the open page is open, the others are closed."""
    browser.size(1280)
    browser.driver.get((site / "methods/gigpo/index.html").as_uri())
    titles = browser.run(
        "return [...document.querySelectorAll('.md-sidebar--primary a.md-nav__link')]"
        ".filter((e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true })"
        " && e.getBoundingClientRect().height > 0 && e.offsetParent && e.closest('nav').clientHeight > 0)"
        ".map((e) => e.textContent.trim())"
    )
    assert {"gigpo", "grpo_steps", "turn_gae"} <= set(titles)
    assert not {"hae", "maxrl", "Installation"} & set(titles)
