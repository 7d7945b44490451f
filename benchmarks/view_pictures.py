"""The pictures of docs/viewer.md, of a trained run.

::

    python examples/quickstart/run.py --model tiny --seed 0 --steps 20 --validate-every 5 --out RUN
    python benchmarks/view_pictures.py RUN
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests/contract"))

from browser import Browser, pictures  # noqa: E402

from verl_turnkey.plugins.view.join import load  # noqa: E402
from verl_turnkey.plugins.view.page import blocks, html  # noqa: E402


def main(folder: Path) -> None:
    run = load(folder)
    with tempfile.TemporaryDirectory() as name:
        page = Path(name, "page.html")
        page.write_text(html(blocks([run]), live=False), encoding="utf-8")
        browser = Browser()
        try:
            for path in pictures(browser, page.as_uri(), run, ROOT / "docs"):
                print(path.relative_to(ROOT))
        finally:
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
