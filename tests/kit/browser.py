"""A headless Chromium, driven over a pipe by Chrome's DevTools protocol: no package is needed.

Owns the process and the protocol. It must not know what a page shows: those of plans and the manual
are opened with it. Every wait has a limit and none is a sleep: what happens in the browser comes
through the pipe, or is asked for inside it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
LIMIT_S = 60.0
SWITCHES = (
    "--headless",
    "--no-sandbox",  # for root, as in a container; what is opened are our own files
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",  # a container's may be too small
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Return the browser of ``$CHROMIUM``, else the first of the usual names that is here."""
    names = (os.environ.get("CHROMIUM", ""), *NAMES)
    return next((path for name in names if name and (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser refused a command, threw, ended, or took longer than a command may."""


class Browser:
    """One browser with one page. Use it in a ``with``.

    ``problems``: errors and warnings of the console, and requests of what is neither a file nor
    below ``home``, an address.
    """

    def __init__(self, program: str, home: str = "file:") -> None:
        self.home = home
        self.problems: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="fsdp2-pages-")
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._received = b""
        self._pid, self._read, self._write = _start(program, self._folder)
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._write)  # the browser ends with its pipe
        os.killpg(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)

    # The protocol.

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to the page and return its result."""
        return self._send(method, params, self._session)

    def wait_for(self, event: str) -> dict[str, Any]:
        """Return the next event of a name that nobody has taken."""
        until = time.monotonic() + LIMIT_S
        while True:
            for at, known in enumerate(self._events):
                if known["method"] == event:
                    return dict(self._events.pop(at)["params"])
            self._take(self._receive(until))

    def _send(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + LIMIT_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                break
            self._take(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise BrowserError(f"no answer within {LIMIT_S:.0f} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise BrowserError("the browser has ended")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def _take(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            thrown = params["exceptionDetails"]
            self.problems.append(
                f"{thrown['text']} {thrown.get('exception', {}).get('description', '')}"
            )
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            words = [str(one.get("value", one.get("description"))) for one in params["args"]]
            self.problems.append(" ".join(words))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.loadingFailed":
            self.problems.append(f"failed request: {params['errorText']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith((self.home, "file:", "data:", "about:")):
                self.problems.append(f"request of {url}")
        self._events.append(event)

    # The page.

    def open(self, place: Path | str) -> None:
        """Open a file from disk, or an address, and wait until it has been drawn."""
        self._events.clear()
        url = place.resolve().as_uri() if isinstance(place, Path) else place
        self.send("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")
        with contextlib.suppress(BrowserError):  # a page may lead on to another at once
            self.settle()

    def run(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is waited for."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            thrown = found["exceptionDetails"]
            raise BrowserError(str(thrown.get("exception", {}).get("description", thrown)))
        return found["result"].get("value")

    def wait_until(self, expression: str) -> Any:
        """Return the first true value of an expression, looked at once a frame, on any page."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            with contextlib.suppress(BrowserError):  # the page may go away under the question
                found = self.run(expression)
                if found:
                    return found
                self.settle()
        raise BrowserError(f"within {LIMIT_S:.0f} s this never held: {expression}")

    def settle(self) -> None:
        """Wait until two frames were drawn: what a change leads to is on the screen."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def see(self, width: int, height: int, *, is_dark: bool = False, scale: float = 1) -> None:
        """Set the size of the window in CSS pixels, and the colours that the reader asks for."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def move(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        """Send an event of the mouse at a place in the window."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float, count: int = 1) -> None:
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.move(x, y, kind, button="left", clickCount=count)
        self.settle()

    def click_on(self, selector: str) -> None:
        """Bring an element to the middle of the window, and click there."""
        x, y = self.run(
            f"(() => {{ const found = document.querySelector({selector!r});"
            " found.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const {x, y, width, height} = found.getBoundingClientRect();"
            " return [x + width / 2, y + height / 2]; })()"
        )
        self.click(x, y)

    def type(self, selector: str, text: str) -> None:
        """Write into a field, and press return."""
        self.click_on(selector)
        self.send("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
            self.send("Input.dispatchKeyEvent", type=kind, text="\r", **key)

    def read_clipboard(self) -> str:
        """Return what was copied, and empty the clipboard."""
        allowed = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        self._send("Browser.grantPermissions", {"permissions": allowed})
        self.send("Page.bringToFront")
        found = self.wait_until("navigator.clipboard.readText()")
        self.run("navigator.clipboard.writeText('')")
        return str(found)

    def drag(self, places: Sequence[tuple[float, float]]) -> None:
        """Press at the first place, go through the others, and let go at the last."""
        self.move(*places[0])
        self.move(*places[0], "mousePressed", button="left", clickCount=1)
        for place in places[1:]:
            self.move(*place, button="left", buttons=1)
        self.move(*places[-1], "mouseReleased", button="left", clickCount=1)
        self.settle()

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def picture(self, **clip: float) -> bytes:
        """Return a PNG of the window, or of a part of the page (x, y, width, height)."""
        more: dict[str, Any] = {}
        if clip:
            more = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True}
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", **more)["data"])

    def paper(self) -> bytes:
        """Return a PDF of the page."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])


def _start(program: str, folder: str) -> tuple[int, int, int]:
    """Start a browser that reads commands from descriptor 3 and writes to 4, in its own group."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # Away from 3 and 4 first, so that putting one there does not close the other.
    theirs = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (command_read, answer_write)]
    actions = [(os.POSIX_SPAWN_DUP2, theirs[0], 3), (os.POSIX_SPAWN_DUP2, theirs[1], 4)]
    log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT, 0o600)
    actions += [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    arguments = [program, *SWITCHES, f"--user-data-dir={folder}/user"]
    pid = os.posix_spawn(program, arguments, dict(os.environ), file_actions=actions, setpgroup=0)
    for one in (command_read, answer_write, log, *theirs):
        os.close(one)
    return pid, answer_read, command_write
