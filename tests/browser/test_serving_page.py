"""The page of a server in a real browser: it types, streams, stops and reloads, and asks its own server alone."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from helpers.browser import CONTRAST, Browser, Page, needs_chromium
from helpers.browser import browser as browser
from helpers.compile_once import compile_once
from helpers.served import Listening, listening, loaded, model_folder

from levanter.serving.metrics import ChoiceEnded, ServerEvent
from levanter.serving.ui import render_page as the_page

pytestmark = needs_chromium

WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
KEYS = {"inference": {"max_seq_len": 1024}, "sampling": {"max_tokens": 24}}
IDLE = "document.querySelector('#stop').disabled && document.querySelectorAll('.assistant').length === "


@dataclass
class Held:
    """A server whose engine stops after so many steps, until it is let go on.

    Attributes:
        steps: that were taken; the engine's thread alone counts them.
        last: of them, the one before which it stops.
    """

    server: Listening
    plan: str
    steps: int = 0
    last: int = 1 << 30
    go_on: threading.Event = field(default_factory=threading.Event)
    ended: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)

    def hold_after(self, steps: int) -> None:
        self.go_on.clear()
        self.last = self.steps + steps

    def let_go(self) -> None:
        self.last = 1 << 30
        self.go_on.set()

    def next_end(self) -> str:
        """Why the next choice ended; waits for that."""
        return self.ended.get(timeout=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory, devices):
    where = tmp_path_factory.mktemp("served")
    with compile_once(), loaded(model_folder(where / "tiny"), where, **KEYS) as found:
        yield found


@pytest.fixture
def held(model) -> Iterator[Held]:
    with listening(model) as server:
        found, engine = Held(server, model.plan.report()), server.service._engine_thread._engine
        own = engine.step

        def step():
            found.steps += 1
            if found.steps > found.last:
                found.go_on.wait()
            return own()

        def heard(event: ServerEvent) -> None:
            if isinstance(event, ChoiceEnded):
                found.ended.put(event.reason)

        engine.step = step
        server.service.observers.append(heard)
        yield found
        found.let_go()


def opened(browser: Browser, held: Held, **options) -> Page:
    page = browser.open(f"{held.server.url}/", **options)
    page.wait_for("document.querySelector('#state').textContent.startsWith('ready')")
    page.evaluate("document.querySelector('#temperature').value = 0")
    return page


def answers(page: Page) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('.assistant')].map(box => [...box.querySelectorAll('.token')].map("
        "each => each.textContent).join(''))"
    )


def test_typed_streamed_and_looked_at_by_keyboard_alone(browser: Browser, held: Held):
    page = opened(browser, held)
    assert page.evaluate("document.activeElement.id") == "text"
    for key in "hello":
        page.press(key)
    page.press("Enter")
    page.wait_for(f"{IDLE} 1")
    (answer,) = answers(page)
    assert answer and page.text(".user").endswith("hello")
    assert "tokens, the first after" in page.text("#rate")
    # Backwards to the answer, and along its tokens.
    for _ in range(50):
        if page.evaluate("document.activeElement.classList.contains('assistant')"):
            break
        page.press("Shift+Tab")
    page.press("ArrowRight")
    first = page.text("#about")
    page.press("ArrowRight")
    second = page.text("#about")
    assert "%" in first and "else" in first and second != first
    assert page.count(".at") == 1
    # The second question goes on from the first.
    page.evaluate("document.querySelector('#text').focus()")
    page.type("and then?")
    page.press("Enter")
    page.wait_for(f"{IDLE} 2")
    page.check()
    page.close()


def test_a_stream_is_stopped_and_its_row_is_free(browser: Browser, held: Held):
    page = opened(browser, held)
    page.evaluate("document.querySelector('#max_tokens').value = 200")
    held.hold_after(40)
    page.type("go on")
    page.click("#send")
    page.wait_for("document.querySelectorAll('.assistant .token').length > 0")
    assert page.evaluate("document.querySelector('#send').disabled")
    page.press("Escape")
    page.wait_for("document.querySelector('#rate').textContent.endsWith('stopped here')")
    assert held.next_end() == "cancelled"
    held.let_go()
    page.wait_for("document.querySelector('#rows_text').textContent.startsWith('0 of')")
    # Another answer, by the mouse.
    page.click("#again")
    page.wait_for(f"{IDLE} 1")
    assert held.next_end() in ("length", "stop")
    page.check()
    page.close()


def test_a_reload_keeps_the_conversation_and_ends_what_was_being_answered(browser: Browser, held: Held):
    page = opened(browser, held)
    page.type("one")
    page.press("Enter")
    page.wait_for(f"{IDLE} 1")
    before = answers(page)
    assert held.next_end() in ("length", "stop")
    page.evaluate("document.querySelector('#max_tokens').value = 200")
    held.hold_after(40)
    page.type("two")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('.assistant').length === 2")
    page.reload()
    assert held.next_end() == "cancelled"
    held.let_go()
    page.wait_for("document.querySelector('#state').textContent.startsWith('ready')")
    assert answers(page) == before and page.count(".user") == 2
    page.wait_for("document.querySelector('#rows_text').textContent.startsWith('0 of')")
    page.click("#clear")
    assert page.count(".message") == 0
    page.reload()
    assert page.count(".message") == 0
    page.check()
    page.close()


def test_text_is_continued_and_what_is_wrong_is_said(browser: Browser, held: Held):
    page = opened(browser, held)
    page.evaluate("document.querySelector('#mode').value = 'text'")
    page.evaluate("document.querySelector('#max_tokens').value = 4")
    page.evaluate("document.querySelector('#temperature').value = 0")
    page.type("Once")
    page.press("Enter")
    page.wait_for(f"{IDLE} 1")
    page.evaluate("document.querySelector('#max_tokens').value = 100000")
    page.type("more")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('.error').length === 1")
    assert "100000" in page.text(".error")
    page.evaluate("new Promise(done => setTimeout(done, 10))")  # what it has said by now is heard
    page.errors = [each for each in page.errors if "400" not in each]  # the browser's own line about the answer
    page.check()
    page.close()


HOSTILE = "<img src=x onerror=alert(1)><script>document.title='owned'</script>&lt;b&gt;"


def test_markup_is_text(browser: Browser, held: Held):
    page = opened(browser, held)
    title = page.evaluate("document.title")
    page.type(HOSTILE)
    page.press("Enter")
    page.wait_for(f"{IDLE} 1")
    # What the model writes goes the same way: a stored answer, drawn anew.
    page.evaluate(
        "keep('messages', [{role: 'assistant', content: 'x', pieces: [{text: HOSTILE, tokens: [{text: HOSTILE, "
        "logprob: -1, top: [[HOSTILE, -2]]}]}]}])".replace("HOSTILE", repr(HOSTILE))
    )
    page.reload()
    assert answers(page) == [HOSTILE]
    page.hover(".token")
    assert HOSTILE.replace('"', '\\"') in page.text("#about")
    assert page.count("#log img") == page.count("#log script") == 0
    assert page.evaluate("document.title") == title
    page.check()
    page.close()


def test_the_plan_and_what_runs_are_beside_it(browser: Browser, held: Held):
    page = opened(browser, held)
    page.click("#planned summary")
    page.wait_for("document.querySelector('#plan').textContent.includes('decode')")
    assert page.evaluate("document.querySelector('#plan').textContent") == held.plan
    assert "of 4 run" in page.text("#rows_text") and "held" in page.text("#pages_text")
    page.check()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_readable_on_any_screen(browser: Browser, held: Held, scheme, width):
    page = opened(browser, held, scheme=scheme, width=width)
    page.type("a" * 200 + " " + "word " * 40)
    page.press("Enter")
    page.wait_for("document.querySelectorAll('.message').length > 1 && document.querySelector('#stop').disabled")
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert not page.evaluate(WIDER), f"scrolls sideways at {width}"
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, f"{scheme}: contrast {ratio:.2f} at {where}"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length).map(e => e.id)"
    )
    assert unnamed == []
    page.close()


def test_the_policy_allows_what_the_page_has_and_nothing_else():
    text, headers = the_page()
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text
    assert "http://" not in text and "https://" not in text and " style=" not in text and " onclick" not in text
