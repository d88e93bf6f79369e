"""A real browser for tests of our HTML pages: Chromium, driven over a pipe by the DevTools protocol.

    @needs_chromium
    def test_page(tmp_path, browser):               # `from helpers.browser import browser, needs_chromium`
        page = browser.open(file, width=1200, height=800)
        assert page.evaluate("document.title") == "…"
        page.press("ArrowRight"); page.click("#tab-2"); page.hover("svg rect")
        page.check()                                # no console errors, no exceptions, no request but for itself

Nothing beyond the standard library and a `chromium` (or Chrome) on the path is needed; without one the tests that use
it are skipped. A page that is opened with `javascript="off"` shows what a reader without scripts gets.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
# Chromium talks on descriptors 3 and 4; subprocess cannot put ours there.
_LAUNCH = "import os,sys;os.dup2(int(sys.argv[1]),3);os.dup2(int(sys.argv[2]),4);os.execv(sys.argv[3],sys.argv[3:])"
_TIMEOUT = 200.0
# Contrast of text against what is behind it, by the formula of WCAG 2.1; the smallest of all elements with text.
CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = (color, under) => {
    canvas.fillStyle = `rgb(${under})`; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = c => c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const behind = e => {
    const chain = []; for (let at = e; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
    return chain.reduce((under, color) => rgb(color, under), [255, 255, 255]);
  };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.offsetHeight || e.closest('script')) continue;
    const under = behind(e), a = light(rgb(getComputedStyle(e).color, under)), b = light(under);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 40)];
  }
  return worst;
})()
"""


def chromium() -> str | None:
    """The path of a Chromium or Chrome, `None` if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    chromium() is None, reason=f"no browser: none of {', '.join(_NAMES)} is on the path (Debian: apt install chromium)"
)


class BrowserError(RuntimeError):
    """The browser did not do what it was told; the message is its own."""


@dataclass
class Page:
    """One open page.

    Attributes:
        url: what was opened.
        errors: what its console and its scripts complained about.
        requests: every address it asked for beyond itself and inline data.
        javascript: whether its scripts run.
    """

    browser: "Browser"
    session: str
    url: str
    javascript: Literal["on", "off"] = "on"
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    loaded: bool = False

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression (a promise is awaited)."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(_exception(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until a JavaScript expression is true: what follows from an event comes a moment after it."""
        deadline = time.monotonic() + _TIMEOUT
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise BrowserError(f"waited {_TIMEOUT:.0f} s for {expression}")
            time.sleep(0.01)

    def text(self, selector: str = "body") -> str:
        """The text of an element as it is shown, which leaves out what is hidden."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector: str) -> int:
        """How many elements match."""
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str) -> None:
        """Clicks on the middle of an element, with the mouse."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Moves the mouse over the middle of an element."""
        x, y = self._middle(selector)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Presses a key by its DOM name: `Tab`, `Shift+Tab`, `Enter`, `ArrowRight`, `Escape`, `a`."""
        shift, key = key.startswith("Shift+"), key.removeprefix("Shift+")
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        stroke: dict[str, Any] = {
            "key": key,
            "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper())),
            "modifiers": 8 * shift,
        }
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self._call("Input.dispatchKeyEvent", **stroke, **down)
        self._call("Input.dispatchKeyEvent", **stroke, type="keyUp")

    def type(self, text: str) -> None:
        """Writes into what has the focus."""
        self._call("Input.insertText", text=text)

    def reload(self) -> None:
        """Loads the page anew."""
        self.loaded = False
        self._call("Page.reload")
        self.browser.wait_until_loaded(self)

    def screenshot(self, path: Path, *, extent: Literal["view", "page"] = "view") -> Path:
        """Writes a PNG of what is in view, or of the whole page."""
        taken = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=extent == "page")
        path.write_bytes(base64.b64decode(taken["data"]))
        return path

    def check(self) -> None:
        """Fails if the page complained about anything or asked for anything beyond itself."""
        # Whatever it had to say before an answer comes has been read by then; without scripts no promise is kept.
        self.evaluate("new Promise(done => setTimeout(done, 10))" if self.javascript == "on" else "1")
        assert not self.errors, f"{self.url} complained: {self.errors}"
        assert not self.requests, f"{self.url} asked for {self.requests}"

    def close(self) -> None:
        """Closes it."""
        self._call("Page.close")

    def _middle(self, selector: str) -> tuple[float, float]:
        box = self.evaluate(
            f"(e => {{ if (!e) return null; e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.x + b.width / 2, b.y + b.height / 2] }})(document.querySelector({json.dumps(selector)}))"
        )
        if box is None:
            raise BrowserError(f"{self.url} has no element {selector}")
        return box[0], box[1]

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, parameters, session=self.session)

    def on_event(self, method: str, event: Mapping[str, Any]) -> None:
        """Notes what the page does by itself."""
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(_exception(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert", "warning"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.errors.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = event["request"]["url"]
            own = ("data:", "blob:", *([self.url] if self.url.startswith("http:") else []))
            if url.split("#")[0] != self.url and not url.startswith(own):
                self.requests.append(url)


@dataclass
class Browser:
    """A running Chromium; `running()` makes one."""

    send_fd: int
    receive_fd: int
    process: subprocess.Popen[bytes]
    pages: dict[str, Page] = field(default_factory=dict)
    pending: bytes = b""
    calls: int = 0

    def open(
        self,
        page: Path | str,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
        javascript: Literal["on", "off"] = "on",
        media: Literal["screen", "print"] = "screen",
    ) -> Page:
        """Opens a file, an address of a server of this machine, or HTML given as text, and waits until it is loaded.

        A page of a server may ask that server.
        """
        is_address = isinstance(page, str) and page.startswith("http://127.0.0.1:")
        url = page.resolve().as_uri() if isinstance(page, Path) else page if is_address else "about:blank"
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        opened = self.pages[session] = Page(self, session, url, javascript)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", {}, session=session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size, session=session)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", {"media": media, "features": features}, session=session)
        self.call("Emulation.setScriptExecutionDisabled", {"value": javascript == "off"}, session=session)
        if isinstance(page, Path) or is_address:
            went = self.call("Page.navigate", {"url": url}, session=session)
            if went.get("errorText"):
                raise BrowserError(f"{url}: {went['errorText']}")
            self.wait_until_loaded(opened)
        else:
            frame = self.call("Page.getFrameTree", {}, session=session)["frameTree"]["frame"]["id"]
            self.call("Page.setDocumentContent", {"frameId": frame, "html": page}, session=session)
        return opened

    def wait_until_loaded(self, page: Page) -> None:
        """Waits for the end of what a page loads."""
        self._until(lambda: page.loaded, f"{page.url} to load")

    def call(self, method: str, parameters: Mapping[str, Any], *, session: str | None = None) -> dict[str, Any]:
        """One command of the protocol and its answer."""
        self.calls += 1
        message: dict[str, Any] = {"id": self.calls, "method": method, "params": dict(parameters)}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.send_fd, data) :]
        answer: list[dict[str, Any]] = []
        self._until(lambda: bool(answer), method, answer_to=self.calls, answer=answer)
        if "error" in answer[0]:
            raise BrowserError(f"{method}: {answer[0]['error']['message']}")
        return answer[0]["result"]

    def _until(self, done: Any, what: str, *, answer_to: int = -1, answer: list[dict[str, Any]] | None = None) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while not done():
            if b"\0" not in self.pending:
                ready, _, _ = select.select([self.receive_fd], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise BrowserError(f"waited {_TIMEOUT:.0f} s for {what}")
                chunk = os.read(self.receive_fd, 1 << 20)
                if not chunk:
                    raise BrowserError(f"the browser ended (exit status {self.process.poll()}) before {what}")
                self.pending += chunk
                continue
            line, _, self.pending = self.pending.partition(b"\0")
            message = json.loads(line)
            if message.get("id") == answer_to and answer is not None:
                answer.append(message)
            elif (page := self.pages.get(message.get("sessionId", ""))) is not None and "method" in message:
                page.on_event(message["method"], message["params"])


@contextmanager
def running() -> Iterator[Browser]:
    """A Chromium of our own with an empty profile, ended afterwards with all it started."""
    path = chromium()
    assert path is not None, "guard the test with needs_chromium"
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        flags = [*_FLAGS, f"--user-data-dir={profile}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, str(their_in), str(their_out), path, *flags, "about:blank"],
            pass_fds=(their_in, their_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(their_in)
        os.close(their_out)
        started = Browser(our_out, our_in, process)
        try:
            yield started
            started.call("Browser.close", {})
            process.wait(timeout=_TIMEOUT)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(our_in)
            os.close(our_out)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a module; import it by name."""
    with running() as started:
        yield started


def _exception(details: Mapping[str, Any]) -> str:
    thrown = details.get("exception", {})
    return str(thrown.get("description") or thrown.get("value") or details.get("text"))
