"""Size and speed of the page of ``turnkey view``, in Chromium without a window.

::

    python benchmarks/view_page.py [--episodes 2000] [--turns 50] [--words 100]

An invented run (tests/unit/synthetic_run.py), with ``--words`` random words more in each response.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests/unit"), str(ROOT / "tests/contract")]

import numpy as np  # noqa: E402
import synthetic_run  # noqa: E402
from browser import Browser  # noqa: E402

from verl_turnkey.plugins.view.join import load  # noqa: E402
from verl_turnkey.plugins.view.page import blocks, html  # noqa: E402

OPENED = 9
LOOK = """const done = arguments[arguments.length - 1], begun = performance.now();
const frame = () => (%s) ? done(performance.now() - begun) : requestAnimationFrame(frame); %s; frame()"""


def timed(browser: Browser, action: str, until: str) -> float:
    """Milliseconds from an action to the first frame in which something holds."""
    return browser.driver.execute_async_script(LOOK % (until, action))


def main(episodes: int, turns: int, words: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        vocabulary = ["".join(rng.choice(list("abcdefghijklmnop"), size=rng.integers(2, 10))) for _ in range(20_000)]

        def more() -> str:
            return " ".join(vocabulary[i] for i in np.minimum(rng.zipf(1.3, words), 19_999))

        options = {"episodes": episodes, "turns": turns, "steps": 4, "skill": 0.2, "validate": False}
        synthetic_run.write(folder / "run", **options, more=more)
        begun = time.perf_counter()
        run = load(folder / "run")
        read = time.perf_counter() - begun
        (folder / "page.html").write_text(text := html(blocks([run], 200), live=False), encoding="utf-8")
        print(f"{len(run.episodes)} episodes, {len(run.turns)} turns, {words} words more in each response")
        print(f"page {len(text) / 1e6:.1f} MB; read {read:.1f} s, packed {time.perf_counter() - begun - read:.1f} s")
        browser = Browser()
        try:
            browser.driver.set_script_timeout(120)
            measure(browser, (folder / "page.html").as_uri())
        finally:
            browser.close()


def measure(browser: Browser, address: str) -> None:
    browser.open(address, "#/episodes")
    paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN"
    print(f"first paint {browser.run(paint):.0f} ms")
    print(f"table usable {browser.run('return performance.getEntriesByName(`usable`)[0].startTime'):.0f} ms")
    rows = "document.querySelector('.counted b')"
    sort = "[...document.querySelectorAll('.sort')].find((e) => e.textContent.startsWith('best')).click()"
    print(f"sort {timed(browser, sort, 'document.querySelector(`th[aria-sort=ascending]`)'):.0f} ms")
    choose = (
        "const e = document.querySelector('[name=outcome]'); e.value = 'lost'; e.dispatchEvent(new Event('change'))"
    )
    print(f"filter {timed(browser, f'const n = {rows}.textContent; {choose}', f'{rows}.textContent !== n'):.0f} ms")
    opened = []
    for row in range(OPENED):  # of different groups, whose data is decoded anew
        browser.go("#/episodes")
        click = f"document.querySelectorAll('.rows tbody a')[{3 * row}].click()"
        opened.append(timed(browser, click, "document.querySelector('.turns')"))
    print(f"episode opened {statistics.median(opened):.0f} ms ({min(opened):.0f} to {max(opened):.0f}, {OPENED} times)")
    opened = timed(browser, "document.querySelector('.besides a').click()", "document.querySelector('.graph')")
    print(f"graph opened {opened:.0f} ms")
    browser.go("#/episodes")
    search = "const e = document.querySelector('[name=texts]'); e.value = 'qqqq'; " + (
        "e.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))"
    )
    counted = "document.querySelector('.over .hint').textContent.startsWith('found')"
    print(f"all texts searched {timed(browser, search, counted):.0f} ms")
    browser.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    print(f"heap {browser.run('return performance.memory.usedJSHeapSize') / 1e6:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("episodes", 2000), ("turns", 50), ("words", 100)):
        parser.add_argument(f"--{option}", type=int, default=default)
    main(**vars(parser.parse_args()))
