"""A real browser without a screen, driven by its own protocol for developers."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.helpers import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--remote-debugging-port=0",
)


class Browser:
    """One page in a browser; `errors` are those that its console has had.

    Args:
        address: WebSocket of the page.
    """

    def __init__(self, address: str) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._session, self._socket = self._run(self._connect(address))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1280, theme: str = "light") -> None:
        """Shows a file in a window of this width, to a user of this theme."""
        self.errors.clear()
        self.requests.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for(f"location.href === {json.dumps(path.as_uri())}")
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What an expression is worth in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.value(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Presses a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, kind: str, x: float, y: float, held: bool = False) -> None:
        """Moves, presses or releases the mouse."""
        button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        place = {"x": x, "y": y, "buttons": int(held)}
        self.call("Input.dispatchMouseEvent", type=kind, **place, **button)

    def shoot(self, path: Path) -> None:
        """Takes a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={**size, "scale": 1},
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Lets go of the page."""
        self._run(self._session.close())
        self._loop.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the protocol, and notes what happens meanwhile."""
        return self._run(self._call(method, parameters))

    async def _connect(
        self, address: str
    ) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        return session, await session.ws_connect(address, max_msg_size=0)

    async def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        number = next(self._numbers)
        sent = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(sent)
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE_S)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and told["type"] in (
            "error",
            "warning",
        ):
            self.errors.append(json.dumps(told["args"])[:500])
        elif method == "Log.entryAdded":
            self.errors.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in an empty folder."""
    assert CHROMIUM is not None
    profile = folder / "profile"
    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        page = Browser(_address(profile / "DevToolsActivePort", process))
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _address(told: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        lines = told.read_text().split() if told.exists() else []
        if len(lines) == 2:
            return asyncio.run(_page_of(int(lines[0])))
        time.sleep(0.05)
    raise RuntimeError(f"{CHROMIUM} did not open a port for its tools")


async def _page_of(port: int) -> str:
    address = f"http://localhost:{port}/json/list"
    async with aiohttp.ClientSession() as session, session.get(address) as answer:
        pages = await answer.json(content_type=None)
    return next(one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page")
