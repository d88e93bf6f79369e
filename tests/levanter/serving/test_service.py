"""A service when its clients leave, read slowly or ask too much, when it is told to end, and when its engine fails."""

import asyncio
import json
import random
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from helpers.compilations import compilations, hlo_name
from helpers.served import loaded

from levanter.commands.serve.serve import make_application
from levanter.inference import engine as engine_module
from levanter.inference.engine import Engine
from levanter.inference.requests import ChoiceId
from levanter.serving import responses, service
from levanter.serving.engine_thread import Drain, Inbox, TokenDelta
from levanter.serving.metrics import ChoiceEnded, RequestAdmitted, RequestRejected, TokensSampled

LONG = {"prompt": [5, 6, 7], "max_tokens": 50, "ignore_eos": True, "seed": 1}
PATIENCE = 200.0
"""Seconds after which a test is taken to hang."""


class Gate:
    """Lets calls of an engine through one by one, counts them, or fails in their place.

    Attributes:
        asked: calls that came to it, the one that waits here included; while one waits, the engine reads no letter.
        count: calls that were let through.
    """

    def __init__(self, engine: Engine):
        self.asked, self.count, self.error = 0, 0, None
        self._allowed = threading.Semaphore(0)
        self._open = False
        self._own = engine.device
        engine.device = self  # type: ignore[assignment]

    @property
    def programs(self):
        return self._own.programs

    def allow(self, count: int) -> None:
        self._allowed.release(count)

    def open(self) -> None:
        self._open = True
        self._allowed.release()

    def prefill(self, *given):
        return self._call(self._own.prefill, *given)

    def decode(self, *given):
        return self._call(self._own.decode, *given)

    def _call(self, call: Callable, *given):
        self.asked += 1
        if not self._open:
            assert self._allowed.acquire(timeout=PATIENCE)
        if self.error is not None:
            raise self.error
        self.count += 1
        return call(*given)


@asynccontextmanager
async def asked(model, **keys):
    """A client of a service in this process, the service, its engine's gate and what it observed."""
    made = model.service()
    gate, events = Gate(made._engine_thread._engine), []
    made.observers.append(events.append)
    if "max_queued_tokens" in keys:
        made._inbox.max_queued_tokens = keys["max_queued_tokens"]
    application = make_application(model.plan, made)
    transport = httpx.ASGITransport(application)
    async with (
        made.running(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client,
    ):
        try:
            yield client, made, gate, events
        finally:
            gate.open()


async def until(holds: Callable[[], bool]) -> None:
    """Waits for something that other tasks and threads bring about."""
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.001)


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def all_free(made) -> bool:
    load = made.load
    return load.running == 0 and load.waiting == 0 and load.pages_free == load.pages


class Client:
    """A client that is not httpx: it reads when it likes, and leaves when it likes."""

    def __init__(self, body: bytes, path: str = "/v1/completions"):
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
            "http_version": "1.1",
        }
        self._body: bytes | None = body
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.got: list[bytes] = []
        self.statuses: list[int] = []

    async def receive(self):
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
        self.got.append(message.get("body", b""))


def body(**more) -> bytes:
    return json.dumps({**LONG, **more}).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_has_no_row_two_steps_later(model, stream):
    async def run() -> None:
        async with asked(model) as (_, made, gate, events):
            client = Client(body(stream=stream))
            application = make_application(model.plan, made)
            answered = asyncio.create_task(application(client.scope, client.receive, client.send))
            gate.allow(6)
            await until(lambda: len(of(events, TokensSampled)) >= 2 and gate.count == 6)
            client.left.set()
            await answered
            (ended,) = of(events, ChoiceEnded)
            assert ended.reason == "cancelled" and ended.tokens >= 2
            gate.open()
            await until(lambda: all_free(made))
            assert gate.count <= 8

    asyncio.run(run())


def test_who_reads_slowly_is_cut_off_and_others_are_not(model, monkeypatch):
    async def run() -> None:
        async with asked(model) as (http, made, gate, events):
            gate.open()
            slow = Client(body(stream=True))
            slow.reads.clear()
            application = make_application(model.plan, made)
            answered = asyncio.create_task(application(slow.scope, slow.receive, slow.send))
            other = await http.post("/v1/completions", json=LONG)
            assert other.json()["choices"][0]["finish_reason"] == "length"
            await answered
            assert slow.got == []
            assert sorted(event.reason for event in of(events, ChoiceEnded)) in (
                ["cancelled", "length"],
                ["length", "length"],
            )
            await until(lambda: all_free(made))

    with monkeypatch.context() as patched:
        patched.setattr(service, "MAX_UNREAD_BYTES", 600)
        asyncio.run(run())
    monkeypatch.setattr(responses, "READ_SECONDS", 0.01)
    asyncio.run(run())


def test_a_step_is_sent_before_the_engine_goes_on(model, monkeypatch):
    """Whoever waits for a token has it when the engine's thread is let go; a loop that stands still keeps it no longer
    than agreed."""

    async def run() -> None:
        made, got, order = model.service(), [], []
        made._loop = asyncio.get_running_loop()
        of = ChoiceId("a", 0)
        ticket = service.PendingRequest([], route="", cancel=lambda _: None, streamed=True)
        ticket._open.add(of)
        made._pending["a"] = ticket

        async def client() -> None:
            async for pieces in ticket.deliveries():
                got.extend(piece.text for piece in pieces)
                order.append(got[-1])

        def engine() -> None:
            for n in range(50):
                made._deliver([TokenDelta(of=of, text=str(n), reason="stop" if n == 49 else None, at=0.0)])
                order.append("engine")

        reads = asyncio.create_task(client())
        await asyncio.sleep(0)
        await asyncio.to_thread(engine)
        await reads
        assert got == [str(n) for n in range(50)]
        assert order == [each for n in range(50) for each in (str(n), "engine")]
        monkeypatch.setattr(service, "MAX_DELIVERY_SECONDS", 0.01)
        # Nobody reads what is handed over while this thread, the loop's own, stands here.
        made._deliver([])
        await made.off_loop(lambda: None)

    asyncio.run(run())


def test_a_full_queue_sends_away(model):
    async def run() -> None:
        async with asked(model, max_queued_tokens=9) as (http, made, gate, events):
            first = asyncio.create_task(http.post("/v1/completions", json={**LONG, "n": 3}))
            await until(lambda: len(of(events, RequestAdmitted)) == 1)
            # The engine is in its first call, after which it says anew how long all of it takes.
            made._engine_thread.load = replace(made.load, drain_seconds=40.0)
            full = await http.post("/v1/completions", json={**LONG, "prompt": [5] * 4})
            # Of nine tokens that wait, four have to go.
            assert full.status_code == 429 and full.headers["retry-after"] == "18"
            assert full.json()["error"]["code"] == "queue_full"
            assert of(events, RequestRejected)[0].reason == "queue_full"
            gate.open()
            assert len((await first).json()["choices"]) == 3
            fine = await http.post("/v1/completions", json={**LONG, "prompt": [5] * 4})
            assert fine.status_code == 200
            await until(lambda: all_free(made) and made.load.waiting_tokens == 0)

    asyncio.run(run())


def test_told_to_end_it_finishes_what_it_has_and_takes_nothing_more(model):
    async def run() -> None:
        async with asked(model) as (http, made, gate, events):
            short = asyncio.create_task(http.post("/v1/completions", json={**LONG, "max_tokens": 3}))
            endless = asyncio.create_task(http.post("/v1/completions", json={**LONG, "prompt": [9, 8]}))
            await until(lambda: len(of(events, RequestAdmitted)) == 2)
            waits = asyncio.create_task(made.drain(PATIENCE))
            await until(lambda: made.state == "draining")
            assert (await http.get("/ready")).status_code == 503 and (await http.get("/health")).status_code == 200
            late = await http.post("/v1/completions", json=LONG)
            assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
            gate.allow(12)
            assert (await short).json()["usage"]["completion_tokens"] == 3
            assert not endless.done()
            waits.cancel()
            # The engine stands at the gate, where it hears nothing, until it has been told to end what it has.
            await until(lambda: gate.asked == 13)
            again = asyncio.create_task(made.drain(0))
            await until(lambda: any(isinstance(each, Drain) for each in made._inbox._messages))
            gate.open()
            answer = (await endless).json()
            assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] < 50
            await again
            assert all_free(made)

    asyncio.run(run())


def test_an_engine_that_fails_fails_every_request_by_name(model):
    async def run() -> None:
        async with asked(model) as (http, made, gate, events):
            streamed = asyncio.create_task(http.post("/v1/completions", json={**LONG, "stream": True}))
            whole = asyncio.create_task(http.post("/v1/completions", json=LONG))
            await until(lambda: len(of(events, RequestAdmitted)) == 2)
            gate.error = RuntimeError("the device is gone")
            gate.open()
            assert "the engine failed: the device is gone" in (await streamed).text
            answer = await whole
            assert answer.status_code == 500 and "the device is gone" in answer.json()["error"]["message"]
            assert [event.reason for event in of(events, ChoiceEnded)] == ["failed", "failed"]
            await until(lambda: not made.healthy)
            assert (await http.get("/health")).status_code == 503
            assert (await http.post("/v1/completions", json=LONG)).status_code == 503
            assert made.error is gate.error

    asyncio.run(run())


def test_a_row_whose_numbers_are_lost_ends_alone(model, monkeypatch):
    lost = threading.Event()

    def fetched(drawn):
        found = engine.fetched(drawn)
        if not lost.is_set() or found.ok.ndim < 2:
            return found
        ok = found.ok.copy()
        ok[:, 0] = False
        return replace(found, ok=ok)

    engine = SimpleNamespace(fetched=engine_module.fetch)
    monkeypatch.setattr(engine_module, "fetch", fetched)

    async def run() -> None:
        async with asked(model) as (http, made, gate, events):
            first = asyncio.create_task(http.post("/v1/completions", json={**LONG, "stream": True}))
            await until(lambda: len(of(events, RequestAdmitted)) == 1)
            gate.allow(4)
            await until(lambda: len(of(events, TokensSampled)) >= 1)
            other = asyncio.create_task(http.post("/v1/completions", json={**LONG, "seed": 9}))
            await until(lambda: len(of(events, RequestAdmitted)) == 2)
            # Both have a row, the first one's the first, before numbers of the first row are lost.
            gate.allow(12)
            second = of(events, RequestAdmitted)[1].request
            await until(lambda: any(each.request == second for each in of(events, TokensSampled)))
            assert of(events, ChoiceEnded) == []
            lost.set()
            gate.open()
            text = (await first).text
            assert "the model's activations are not finite" in text and text.endswith("data: [DONE]\n\n")
            lost.clear()
            answer = (await other).json()["choices"]
            assert answer == (await http.post("/v1/completions", json={**LONG, "seed": 9})).json()["choices"]
            assert sorted(event.reason for event in of(events, ChoiceEnded)) == ["failed", "length", "length"]
            await until(lambda: all_free(made))

    asyncio.run(run())


def test_a_body_that_is_too_large_is_not_read(model):
    async def run() -> None:
        async with asked(model) as (http, _, _, events):
            large = await http.post("/v1/completions", content=b" " * (33 << 20))
            assert large.status_code == 413 and "32 MiB" in large.json()["error"]["message"]

            async def pieces():
                for _ in range(33):
                    yield b" " * (1 << 20)

            assert (await http.post("/v1/completions", content=pieces())).status_code == 413
            assert [event.reason for event in of(events, RequestRejected)] == ["too_large", "too_large"]

    asyncio.run(run())


def test_nothing_compiles_behind_ready(model):
    async def run() -> None:
        async with asked(model) as (http, _, gate, _):
            gate.open()
            plain = {"prompt": "the cat sat on the mat", "max_tokens": 5}
            for more in (
                {},
                {"n": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "logit_bias": {"7": 3}},
                {"echo": True, "logprobs": 2, "presence_penalty": 1, "repetition_penalty": 1.2},
                {"regex": "[ab]{4}", "stop": ["b"]},
                {"prompt": [[1, 2], list(range(3, 40))], "stream": True},
            ):
                answer = await http.post("/v1/completions", json={**plain, **more})
                assert answer.status_code == 200, answer.text

    with compilations() as found:
        asyncio.run(run())
    assert found == []


def test_what_is_planned_is_what_compiles(model, tmp_path):
    """Every Program of the plan before the first request, and nothing else of any size; here with pages."""
    paged = {"max_rows": 2, "allocation": "paged", "page_size": 8}
    with (
        compilations() as found,
        loaded(model.plan.work.server.hf_checkpoint, tmp_path, inference=paged) as own,
    ):
        count = len(found)

        async def run() -> None:
            async with asked(own) as (http, made, gate, _):
                gate.open()
                prompt = list(range(3, 30))
                first = await http.post("/v1/completions", json={**LONG, "prompt": prompt, "n": 2})
                again = await http.post("/v1/completions", json={**LONG, "prompt": prompt, "n": 2})
                assert first.json()["choices"] == again.json()["choices"]
                # The second choice began with the first one's pages, and so did both of the second request.
                assert made.load.shared_tokens == 3 * 24
                assert made.load.computed_tokens == 4 * 27 - 3 * 24
                await until(lambda: all_free(made))

        asyncio.run(run())
        assert len(found) == count
    planned = {hlo_name(program.name) for program in own.plan.programs}
    assert {each.name for each in found if each.largest > 64} <= planned
    assert {hlo_name(program.name) for program in own.plan.computing} <= {each.name for each in found}


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_whatever_clients_do_every_choice_ends_once_and_every_page_comes_back(model, count):
    """A fifth leaves, a tenth is broken, a twentieth too long, and the queue is full most of the time."""

    def told(n: int, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return rng.choice([b"{", b"\xff", b'{"prompt": "a", "tempature": 1}', b'{"prompt": [[], 1]}', b"null"])
        more = {"prompt": [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))], "seed": n, "n": rng.randint(1, 3)}
        more |= {"max_tokens": 500 if rng.random() < 0.05 else rng.randint(1, 30), "stream": rng.random() < 0.5}
        if rng.random() < 0.2:
            more |= {"echo": True, "logprobs": 1}
        return body(**more)

    async def run() -> None:
        async with asked(model, max_queued_tokens=200) as (_, made, gate, events):
            application = make_application(model.plan, made)
            running = asyncio.Semaphore(24)

            async def one(n: int) -> Client:
                rng = random.Random(n)
                async with running:
                    client = Client(told(n, rng))
                    answered = asyncio.create_task(application(client.scope, client.receive, client.send))
                    if rng.random() < 0.2:
                        seen = rng.randint(0, 4)
                        await until(lambda: answered.done() or len(client.got) >= seen)
                        client.left.set()
                    await answered
                    return client

            def nothing_left() -> bool:
                waiting = (
                    made.load.waiting_tokens or made._inbox._messages or made._pending or made._engine_thread._texts
                )
                return all_free(made) and not waiting

            everybody = asyncio.gather(*(one(n) for n in range(count)))
            await until(lambda: any(each.reason == "queue_full" for each in of(events, RequestRejected)))
            gate.open()
            clients = await everybody
            # Who left last may have done so before the engine read what was asked.
            await until(nothing_left)
            choices = [(each.request, n) for each in of(events, RequestAdmitted) for n in range(each.choices)]
            assert sorted(choices) == sorted((each.request, each.choice) for each in of(events, ChoiceEnded))
            # Who leaves is cancelled, unless the last token was faster: either is right, and a machine decides which.
            # That leaving cancels has a test of its own. No text ends by itself: `ignore_eos` is asked for.
            ended = {each.reason for each in of(events, ChoiceEnded)}
            assert {"length"} <= ended <= {"length", "cancelled"}
            reasons = {each.reason for each in of(events, RequestRejected)}
            assert {"invalid", "too_long", "queue_full"} <= reasons
            assert all(client.left.is_set() or client.statuses for client in clients)
            assert {status for client in clients for status in client.statuses} <= {200, 400, 429}

    asyncio.run(run())


def test_a_message_that_arrives_before_the_end_is_not_lost():
    """The thread may see the end first: requests that it has not read are then ended with an error."""
    inbox = Inbox(max_queued_tokens=10)
    inbox.post(Drain())
    inbox.close()
    assert inbox.take(wait=True) is None
    assert len(inbox.close_and_flush()) == 1
