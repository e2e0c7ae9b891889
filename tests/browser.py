"""A headless Chromium, driven through the pipe of its devtools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """One tab; `errors` are exceptions and errors of its console."""

    def __init__(self, write: BinaryIO, read: BinaryIO):
        self._write, self._read = write, read
        self._number = 0
        self._session: str | None = None
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while (answer := self._next()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read.fileno(), 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"]))
        return message

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Returns when the page has drawn everything."""
        self.size(width, height)
        self.color_scheme(dark)
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.evaluate(
            "new Promise(done => { const look = () => document.documentElement?.dataset.ready ? "
            "done() : setTimeout(look, 20); look(); })"
        )

    def size(self, width: int, height: int = 900) -> None:
        more = {"deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **more)

    def color_scheme(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def wheel(self, x: float, y: float, by: float) -> None:
        place = {"x": x, "y": y, "deltaX": 0, "deltaY": by}
        self.call("Input.dispatchMouseEvent", type="mouseWheel", **place)

    def screenshot(self, file: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        if whole:
            high = self.evaluate("document.documentElement.scrollHeight")
            wide = self.evaluate("innerWidth")
            clip = {"x": 0, "y": 0, "width": wide, "height": min(high, 12_000), "scale": 1}
            taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
            data = taken["data"]
        file.write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Page]:
    assert CHROMIUM is not None
    to_it, from_us = os.pipe()
    to_us, from_it = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={profile}", "--no-first-run", "--disable-dev-shm-usage"]
        command = ["bash", "-c", f'exec "$@" 3<&{to_it} 4>&{from_it}', "bash", CHROMIUM, *flags]
        with subprocess.Popen(
            command, pass_fds=(to_it, from_it), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            os.close(to_it)
            os.close(from_it)
            with os.fdopen(from_us, "wb") as write, os.fdopen(to_us, "rb") as read:
                try:
                    yield Page(write, read)
                finally:
                    process.terminate()
                    process.wait(timeout=60)
