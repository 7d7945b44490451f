"""Chromium without a window: on a page that ``turnkey view`` wrote, or on one of the site."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

SECONDS = 60


class Browser:
    def __init__(self, waits: bool = True) -> None:
        """``waits``: a command waits until the page is read to its end."""
        options = ChromeOptions()
        options.page_load_strategy = "normal" if waits else "none"
        for switch in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "force-device-scale-factor=1"):
            options.add_argument(f"--{switch}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
        assert all(programs.values()), f"expected Debian's chromium and chromium-driver, found {programs}"
        options.binary_location = programs["chromium"]
        self.driver = Chrome(options=options, service=ChromeService(programs["chromedriver"]))
        self.size(1280)

    def close(self) -> None:
        self.driver.quit()

    def size(self, width: int, height: int = 1000) -> None:
        """Of what the page sees, which a window below 500 pixels cannot have."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, address: str, fragment: str = "") -> None:
        """Load a page anew; empties the console."""
        self.driver.get("about:blank")
        self.console()
        self.driver.get(address + fragment)
        self.until("return document.documentElement?.dataset.ready")

    def go(self, fragment: str) -> None:
        """To another place of the page that is open."""
        self.run("location.hash = arguments[0]", fragment)
        self.until("return document.getElementById('main').dataset.shown === location.hash")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        return WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: self.run(script, *arguments), script)

    def settled(self, look: Callable[[], Any], expected: Any) -> None:
        WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: look() == expected, f"{look()} is not {expected}")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.switch_to.active_element.send_keys(getattr(Keys, key, key))

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def choose(self, name: str, value: str) -> None:
        """Set a control as a user does."""
        self.run(
            "const e = document.querySelector(`[name=${arguments[0]}]`); e.value = arguments[1];"
            "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, { bubbles: true }))",
            name,
            value,
        )

    def console(self) -> list[str]:
        """What was written since it was asked for last."""
        return [entry["message"] for entry in self.driver.get_log("browser")]
