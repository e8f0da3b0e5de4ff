"""A headless Chromium driven over a pipe (Chrome DevTools Protocol), with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Chromium", "chromium_path"]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def chromium_path() -> str | None:
    """The browser to use: `MESHWRIGHT_CHROMIUM`, or the first that is installed."""
    named = os.environ.get("MESHWRIGHT_CHROMIUM")
    if named:
        return named
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. `errors`: exceptions and error messages of the page's console; `requests`: addresses that it asked for."""

    def __init__(self, path: str, *, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._session = ""
        self._rest = b""
        self._profile = tempfile.mkdtemp(prefix="meshwright-chromium-")
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()

        def descriptors() -> None:  # the browser reads from 3 and writes to 4
            spare_in, spare_out = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(spare_in, 3)
            os.dup2(spare_out, 4)

        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"], preexec_fn=descriptors, close_fds=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    # ---- protocol ----------------------------------------------------------------------------------------------------
    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command. Raises: RuntimeError for an error answer, TimeoutError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + self.timeout_s
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message')}")
                return answer["result"]

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"the browser said nothing for {self.timeout_s:g} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, p = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = p["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details.get("text"))))
        elif method == "Runtime.consoleAPICalled" and p.get("type") in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in p.get("args", ())))
        elif method == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
            self.errors.append(p["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(p["request"]["url"])

    # ---- the page ----------------------------------------------------------------------------------------------------
    def size(self, width: int, height: int, *, scale: float = 1.0, mobile: bool = False, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, path: Path, *, ready: str = "document.documentElement?.dataset.ready === 'yes'") -> None:
        """Load a file and wait until `ready` is true. Raises: TimeoutError."""
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait(ready)

    def wait(self, condition: str) -> None:
        until = time.monotonic() + self.timeout_s
        while not self.value(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"not true after {self.timeout_s:g} s: {condition}; console: {self.errors[:3]}")
            time.sleep(0.01)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page, promises awaited. Raises: RuntimeError when it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", {}).get("description", found["exceptionDetails"])))
        return found["result"].get("value")

    def press(self, key: str, *, text: str = "") -> None:
        """A key as a person presses it, to whatever has the focus."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        number = codes.get(key, ord(key[0].upper()) if key else 0)
        common = {"key": key, "windowsVirtualKeyCode": number, "code": key}
        typed = text or ("\r" if key == "Enter" else key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": typed} if typed else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def settle(self) -> None:
        """Wait until what was asked for is drawn and the table has followed."""
        self.value("new Promise((done) => setTimeout(() => requestAnimationFrame(() => done(true)), 200))")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser and remove its profile."""
        if self._process.poll() is None:
            try:
                self._session = ""
                self.timeout_s = 3.0
                self.call("Browser.close")
            except (OSError, RuntimeError, TimeoutError):
                pass
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)
                self._process.wait()
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
