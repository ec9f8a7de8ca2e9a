"""Headless Chromium for tests, driven over its DevTools protocol: no driver program and no other package."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "no Chromium here (on Debian: apt-get install chromium)"
# What JavaScript calls the keys that have no character.
_CODES = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Escape": 27, "Tab": 9}


class Page:
    """One tab. `errors` collects what the console and uncaught exceptions say, frames included."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address, max_size=None, open_timeout=30)
        self._number = 0
        self._frames: dict[str, int] = {}  # frame -> its JavaScript context
        self._loaded = False
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": arguments}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._take(message)

    def open(self, url: str) -> None:
        """Load a page and wait for its load event."""
        self._loaded = False
        self.send("Page.navigate", url=url)
        self.wait_for(lambda: self._loaded)

    def wait_for(self, condition: Any, seconds: float = 30.0) -> None:
        """Poll a Python condition, taking events meanwhile."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError("the page did not get there")
            try:
                self._take(json.loads(self._socket.recv(timeout=0.05)))
            except TimeoutError:
                continue

    def run(self, script: str, inside_frame: bool = False) -> Any:
        """The value of a JavaScript expression, in the page or in its last frame."""
        context = {"contextId": list(self._frames.values())[-1]} if inside_frame else {}
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, **context)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"].get("description", "script failed"))
        return done["result"].get("value")

    def press(self, key: str) -> None:
        """Press one key where the focus is."""
        text = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": _CODES[key]}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Size of the window, and the colour scheme that the user asks for."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)

    def screenshot(self, path: Path) -> None:
        """A PNG of the window."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def _take(self, message: dict[str, Any]) -> None:
        event, facts = message.get("method"), message.get("params", {})
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.executionContextCreated":
            context = facts["context"]
            self._frames[context["auxData"]["frameId"]] = context["id"]
        elif event == "Runtime.exceptionThrown":
            self.errors.append(facts["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif event == "Runtime.consoleAPICalled" and facts["type"] == "error":
            self.errors.append(" ".join(str(each.get("value")) for each in facts["args"]))
        elif event == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.errors.append(facts["entry"]["text"])


@contextmanager
def browser() -> Iterator[Page]:
    """A Chromium of its own with one tab, gone afterwards."""
    assert CHROMIUM is not None, NO_CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        # Frames stay in the page's process, so that one connection reaches them.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        options += [
            "--disable-features=IsolateSandboxedIframes,site-per-process",
            "--disable-site-isolation-trials",
        ]
        command = [CHROMIUM, *options, f"--user-data-dir={home}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield Page(_address(Path(home), process))
        finally:
            process.terminate()
            process.wait(timeout=20)


def _address(home: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the tab listens: Chromium writes its port into its profile."""
    file = home / "DevToolsActivePort"
    end = time.monotonic() + 60
    while not (file.is_file() and file.read_text().strip()):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("Chromium did not start")
        time.sleep(0.05)
    port = file.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
        tabs = json.loads(answer.read())
    return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
