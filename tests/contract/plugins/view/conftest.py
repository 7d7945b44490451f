from collections.abc import Iterator

import pytest
from browser import Browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.size(1280)
    yield chromium
    assert chromium.console() == []
