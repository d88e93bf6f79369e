"""The browser helper sees what it is there to see: errors, requests, input, color scheme, missing scripts."""

import http.server
import threading
from pathlib import Path

import pytest
from helpers.browser import Browser, BrowserError, needs_chromium
from helpers.browser import browser as browser

pytestmark = needs_chromium

PAGE = """<!doctype html><meta charset="utf-8"><title>Größe &lt;1&gt;</title>
<style>p { color: rgb(1, 2, 3) } @media (prefers-color-scheme: dark) { p { color: rgb(4, 5, 6) } }</style>
<p id="where">here</p><button id="go">go</button><noscript><b>no scripts</b></noscript>
<script>
go.onclick = () => { where.textContent = 'clicked' };
where.onmouseover = () => { where.textContent = 'hovered' };
addEventListener('keydown', e => { go.textContent = e.key });
</script>"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a page ü.html"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_mouse_keys_and_text(browser: Browser, file: Path):
    page = browser.open(file)
    assert page.evaluate("document.title") == "Größe <1>"
    page.hover("#where")
    assert page.text("#where") == "hovered"
    page.click("#go")
    assert page.text("#where") == "clicked"
    page.press("ArrowRight")
    assert page.text("#go") == "ArrowRight"
    assert page.count("b") == 0
    page.check()
    page.close()


def test_color_scheme_scripts_and_screenshot(browser: Browser, file: Path, tmp_path: Path):
    color = "getComputedStyle(document.querySelector('#where')).color"
    assert browser.open(file).evaluate(color) == "rgb(1, 2, 3)"
    dark = browser.open(file, scheme="dark", width=300, height=200)
    assert dark.evaluate(color) == "rgb(4, 5, 6)"
    shot = dark.screenshot(tmp_path / "shot.png").read_bytes()
    assert shot[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(shot[16:20], "big"), int.from_bytes(shot[20:24], "big")) == (300, 200)
    without = browser.open(file, javascript="off")
    assert "no scripts" in without.text()


def test_it_notices_errors_and_requests(browser: Browser, tmp_path: Path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, format, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/x.png"
        bad = tmp_path / "bad.html"
        bad.write_text(f"<img src='{address}'><script>console.error('oh'); undefined_name()</script>")
        page = browser.open(bad)
        with pytest.raises(AssertionError, match="complained"):
            page.check()
        server.shutdown()
    assert page.requests == [address]
    assert any("oh" in e for e in page.errors) and any("undefined_name" in e for e in page.errors)
    with pytest.raises(BrowserError, match="thrown on purpose"):
        page.evaluate("(() => { throw new Error('thrown on purpose') })()")
    with pytest.raises(BrowserError, match="no element #absent"):
        page.click("#absent")
