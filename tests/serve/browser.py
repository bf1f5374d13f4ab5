"""A page in headless Chromium, driven over DevTools' pipe: it may wait, be asked, change its size. Used by tests only.

`tests/report/chromium.py` draws a file once; a page that lives, and fetches, needs a browser that stays.
"""

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.report.chromium import BINARY

_FLAGS = (
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
)
_PATIENCE_S = 120.0


class Browser:
    """One page. Times out, with the page's console in the error, rather than wait for ever."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._unread = b""
        self._number = 0
        self._session = ""
        self.console: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._from_browser, 1 << 20)
            assert part, "the browser is gone"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.console.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(parameters["exceptionDetails"]))

    def open(self, url: str, *, width: int = 1280, height: int = 1000, dark: bool = False) -> None:
        """Go to `url` in a window of this size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def ask(self, expression: str) -> Any:
        """What JavaScript makes of `expression`; a promise is awaited."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Ask until the answer is true in JavaScript's sense."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (value := self.ask(f"(() => {{ return {expression}; }})()")):
            assert time.monotonic() < deadline, f"never: {expression}; console: {self.console}"
            time.sleep(0.05)
        return value

    def close(self) -> None:
        """End the browser with all its processes; nothing more can be asked."""
        self._session = ""
        self._call("Browser.close")

    def photograph(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A started browser whose profile is in `folder`."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4.
    shell = f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}'
    arguments = [str(BINARY), *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
    with subprocess.Popen(
        ["/bin/bash", "-c", shell, *arguments],
        pass_fds=(command_read, answer_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(command_read)
        os.close(answer_write)
        try:
            opened = Browser(command_write, answer_read)
            yield opened
            opened.close()
            process.wait(_PATIENCE_S)
        finally:
            process.kill()
            os.close(command_write)
            os.close(answer_read)
