"""A real browser without a window, driven by as little of the WebDriver protocol as tests need."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests._pool import find_free_port

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # what the protocol calls a reference to one
LIMIT_S = 20


def installed() -> tuple[str, str] | None:
    """Return the paths of a browser and of its driver."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One window of a given width."""

    def __init__(self, base: str, width: int, height: int, browser: str) -> None:
        self._base = base
        arguments = [
            *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
            *("--hide-scrollbars", "--no-first-run", f"--window-size={width},{height}"),
        ]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": browser, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"
        # A window is never narrower than 500 points; what a page sees can be.
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S * 3) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from error

    def open(self, url: str) -> None:
        self._send("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a function's body returns."""
        body = {"script": script, "args": list(arguments)}
        return self._send("POST", f"{self._session}/execute/sync", body)

    def find(self, selector: str) -> str:
        body = {"using": "css selector", "value": selector}
        found: dict[str, str] = self._send("POST", f"{self._session}/element", body)
        return found[ELEMENT]

    def click(self, selector: str) -> None:
        """Click as a mouse does. A theme that scrolls smoothly would still be on its way."""
        self.run(
            "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})",
            {ELEMENT: self.find(selector)},
        )
        self._send("POST", f"{self._session}/element/{self.find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        path = f"{self._session}/element/{self.find(selector)}/value"
        self._send("POST", path, {"text": text})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        body = {"cmd": command, "params": parameters}
        return self._send("POST", f"{self._session}/goog/cdp/execute", body)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", f"{self._session}/screenshot")))

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Return what was noted since the last call: `browser` (the console), or `performance`."""
        found: list[dict[str, Any]] = self._send("POST", f"{self._session}/se/log", {"type": kind})
        return found

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self._send("DELETE", self._session)


def wait_for(told: Callable[[], Any], what: str) -> Any:
    """Return the first true answer."""
    give_up = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up:
        answer = told()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"waited {LIMIT_S} s for {what}")


@contextlib.contextmanager
def driver() -> Iterator[Callable[[int, int], Browser]]:
    """Run the driver; yield what opens windows, which are closed at the end."""
    found = installed()
    assert found is not None
    port = find_free_port()
    process = subprocess.Popen(
        [found[1], f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"no_proxy": "127.0.0.1"},
    )
    base = f"http://127.0.0.1:{port}"
    windows: list[Browser] = []

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"{base}/status", timeout=LIMIT_S) as answer:
                return bool(json.load(answer)["value"]["ready"])
        except OSError:
            return False

    def open_window(width: int, height: int) -> Browser:
        windows.append(Browser(base, width, height, found[0]))
        return windows[-1]

    try:
        wait_for(is_ready, "the browser's driver")
        yield open_window
    finally:
        for window in windows:
            with contextlib.suppress(OSError, RuntimeError):
                window.close()
        process.terminate()
        process.wait(LIMIT_S)
