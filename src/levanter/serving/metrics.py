"""`ServerEvent`: what happens in a server, for whoever counts. No event holds text of a prompt or of an answer.

Observers are called on the event loop, in the order of what happens; times are seconds of `time.monotonic`.

What a server counts, as text that Prometheus reads.

`Metrics` is an observer of `serving.events`; what the engine does at the moment is asked when somebody reads. No label
comes from a client: there are as many lines after a year as at the beginning. The format is Prometheus's text
exposition, version 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from levanter.serving.errors import RejectReason

EndReason: TypeAlias = Literal["stop", "length", "cancelled", "failed"]
"""Why a choice ended: as the answer says, because its client left or was cut off, or because it could not go on."""


@dataclass(frozen=True, kw_only=True)
class RequestAdmitted:
    """A request is in the queue.

    Attributes:
        request: its id.
        route: the path that it came by.
        prompt_tokens: of its prompt.
        choices: that it has.
        at: when.
    """

    request: str
    route: str
    prompt_tokens: int
    choices: int
    at: float


@dataclass(frozen=True, kw_only=True)
class TokensSampled:
    """A choice has more tokens.

    Attributes:
        request, choice: whose.
        tokens: how many more.
        first: whether these are its first ones.
        since: seconds since its tokens before, or since it was admitted.
        at: when they were read from the devices.
    """

    request: str
    choice: int
    tokens: int
    first: bool
    since: float
    at: float


@dataclass(frozen=True, kw_only=True)
class ChoiceEnded:
    """A choice has ended.

    Attributes:
        request, choice: which.
        reason: why.
        tokens: that it has.
        since: seconds since it was admitted.
        at: when.
    """

    request: str
    choice: int
    reason: EndReason
    tokens: int
    since: float
    at: float


@dataclass(frozen=True, kw_only=True)
class RequestRejected:
    """A request was refused.

    Attributes:
        route: the path that it came by.
        reason: why.
        status: of the answer.
    """

    route: str
    reason: RejectReason
    status: int


ServerEvent: TypeAlias = RequestAdmitted | TokensSampled | ChoiceEnded | RequestRejected
Observer: TypeAlias = Callable[[ServerEvent], None]
"""Is told what happens, on the event loop: it must not wait for anything."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What the engine is doing, as of its last step.

    Attributes:
        rows: rows that there are.
        running: rows that run.
        waiting: choices that wait for one, and prompts that wait to be scored.
        waiting_tokens: of their prompts.
        drain_seconds: in which all of these and those that run are likely to be done.
        pages: of the cache, over all shards.
        pages_free: of these, how many nobody holds; pages that are kept for prompts that begin alike are free.
        computed_tokens: of prompts, computed so far; those of rows that gave way count each time.
        shared_tokens: of prompts, that nobody had to compute, since another row had.
    """

    rows: int
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    drain_seconds: float = 0.0
    pages: int = 0
    pages_free: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "levanter_"
FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0, 600.0)
"""Seconds up to a first token, waiting included."""
NEXT_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds between two tokens."""
REQUEST_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0, 600.0, 1800.0)
"""Seconds of a whole choice."""
TOKEN_COUNT_BOUNDS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
"""Tokens of a prompt or of a choice."""


@dataclass
class HistogramBuckets:
    """How many values there were up to each of a few bounds.

    Attributes:
        bounds: upper ends, each included, ascending.
        counts: values in each bucket; the last is for what is beyond all bounds.
        total: of the values.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What does not change while a server runs.

    Attributes:
        version: of this project.
        model: what the model is called.
        devices: how many devices there are.
    """

    version: str
    model: str
    devices: int


class Metrics:
    """Counts what happens.

    Args:
        facts: of the server.
        load: what the engine is doing.
        compiles: how many computations were compiled since the server was ready; there should be none.
    """

    def __init__(self, facts: ServerInfo, *, load: Callable[[], EngineLoad], compiles: Callable[[], int] = lambda: 0):
        self.facts, self._load, self._compiles = facts, load, compiles
        self.requests = self.choices = self.prompt_tokens = self.tokens = 0
        self.ended: dict[str, int] = dict.fromkeys(get_args(EndReason), 0)
        self.rejected: dict[str, int] = dict.fromkeys(get_args(RejectReason), 0)
        self.first_token, self.next_token = HistogramBuckets(FIRST_TOKEN_BOUNDS), HistogramBuckets(NEXT_TOKEN_BOUNDS)
        self.whole, self.prompts, self.texts = (
            HistogramBuckets(REQUEST_BOUNDS),
            HistogramBuckets(TOKEN_COUNT_BOUNDS),
            HistogramBuckets(TOKEN_COUNT_BOUNDS),
        )

    def __call__(self, event: ServerEvent) -> None:
        """Counts one thing that happened."""
        if isinstance(event, TokensSampled):
            self.tokens += event.tokens
            if event.first:
                self.first_token.add(event.since)
            else:
                # Tokens of one call arrive together; each had its share of the time since the last ones.
                self.next_token.add(event.since / event.tokens, event.tokens)
        elif isinstance(event, RequestAdmitted):
            self.requests += 1
            self.choices += event.choices
            self.prompt_tokens += event.prompt_tokens
            self.prompts.add(event.prompt_tokens)
        elif isinstance(event, ChoiceEnded):
            self.ended[event.reason] += 1
            self.whole.add(event.since)
            self.texts.add(event.tokens)
        elif isinstance(event, RequestRejected):
            self.rejected[event.reason] += 1

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        return "".join(line + "\n" for family in self._families() for line in family)

    def _families(self) -> Iterator[Iterator[str]]:
        load = self._load()
        facts = {"version": self.facts.version, "model": self.facts.model}
        yield _family("info", "gauge", "What is served.", [(facts, 1)])
        yield _metric("devices", "gauge", "Devices of the mesh.", self.facts.devices)
        yield _metric("rows", "gauge", "Rows that may run at once.", load.rows)
        yield _metric("rows_running", "gauge", "Rows that run.", load.running)
        yield _metric("choices_waiting", "gauge", "Choices that wait for a row.", load.waiting)
        yield _metric("prompt_tokens_waiting", "gauge", "Tokens of prompts that wait.", load.waiting_tokens)
        yield _metric("cache_pages", "gauge", "Pages of the cache of keys and values.", load.pages)
        yield _metric("cache_pages_free", "gauge", "Pages that no row holds.", load.pages_free)
        yield _metric("requests_total", "counter", "Requests that were begun.", self.requests)
        yield _metric("choices_total", "counter", "Choices of these requests.", self.choices)
        yield _metric("prompt_tokens_total", "counter", "Tokens of their prompts.", self.prompt_tokens)
        computed = "Tokens of prompts that were computed, those of rows that gave way each time."
        yield _metric("prompt_tokens_computed_total", "counter", computed, load.computed_tokens)
        shared = "Tokens of prompts that another row had computed before."
        yield _metric("prompt_tokens_shared_total", "counter", shared, load.shared_tokens)
        yield _metric("tokens_total", "counter", "Tokens that were sampled.", self.tokens)
        yield _by_reason("choices_ended_total", "Choices that have ended, by reason.", self.ended)
        yield _by_reason("requests_rejected_total", "Requests that were not begun, by reason.", self.rejected)
        compiled = "Computations that were compiled after the server was ready; any is an error of ours."
        yield _metric("compiles_after_ready_total", "counter", compiled, self._compiles())
        first = "Seconds from a request to the first token of a choice, waiting included."
        yield _histogram("first_token_seconds", first, self.first_token)
        yield _histogram("next_token_seconds", "Seconds between a token of a choice and the next.", self.next_token)
        yield _histogram("choice_seconds", "Seconds from a request to the end of a choice.", self.whole)
        yield _histogram("request_prompt_tokens", "Tokens of a request's prompt.", self.prompts)
        yield _histogram("choice_tokens", "Tokens of a choice.", self.texts)


def _metric(name: str, kind: str, about: str, value: float) -> Iterator[str]:
    return _family(name, kind, about, [({}, value)])


def _by_reason(name: str, about: str, values: Mapping[str, int]) -> Iterator[str]:
    return _family(name, "counter", about, [({"reason": reason}, value) for reason, value in values.items()])


def _family(name: str, kind: str, about: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield from _head(name, kind, about)
    for labels, value in samples:
        yield f"{PREFIX}{name}{_labels(labels)} {_number(value)}"


def _histogram(name: str, about: str, values: HistogramBuckets) -> Iterator[str]:
    yield from _head(name, "histogram", about)
    below = 0
    for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
        below += count
        yield f"{PREFIX}{name}_bucket{_labels({'le': _number(bound)})} {below}"
    yield f"{PREFIX}{name}_sum {_number(values.total)}"
    yield f"{PREFIX}{name}_count {below}"


def _head(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {about}"
    yield f"# TYPE {PREFIX}{name} {kind}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
