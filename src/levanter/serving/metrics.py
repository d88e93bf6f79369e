"""Server events, and the metrics that are computed from them, as text that Prometheus reads.

`ServerEvent` values report what happens in a server to observers. No event contains text of a prompt or of a response.
Observers are called on the event loop, in the order of the events; times are seconds of `time.monotonic`.

`Metrics` is such an observer; it reads the load of the engine when the metrics are read. No label comes from a client,
so the number of lines does not grow while a server runs. The format is Prometheus's text exposition, version 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats/).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from levanter.serving.errors import RejectReason

EndReason: TypeAlias = Literal["stop", "length", "cancelled", "failed"]
"""Why a choice ended: as in the response, because its client disconnected or was cut off, or because of an error."""


@dataclass(frozen=True, kw_only=True)
class RequestAdmitted:
    """A request was put into the queue.

    Attributes:
        request: its id.
        route: the path of its route.
        prompt_tokens: length of its prompt.
        choices: number of its choices.
        at: the time.
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
        request, choice: the choice.
        tokens: number of new tokens.
        first: whether these are its first ones.
        since: seconds since its previous tokens, or since it was admitted.
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
        request, choice: the choice.
        reason: why it ended.
        tokens: number of its tokens.
        since: seconds since it was admitted.
        at: the time.
    """

    request: str
    choice: int
    reason: EndReason
    tokens: int
    since: float
    at: float


UNROUTED = "other"
"""The route of requests to unknown paths: clients choose paths, which would be an unbounded number of routes."""
PATHS = frozenset(
    {
        *("/", "/health", "/ready", "/metrics", "/status", "/plan", "/openapi.json", "/v1/models", "/v1/tokens"),
        *("/tokenize", "/detokenize", "/tokenizer_info", "/v1/chat/completions", "/v1/completions"),
    }
)
"""The paths of routes without parameters. A request may be rejected before it has a route."""


def route_of_path(path: str) -> str:
    """The route of a request that no route has seen yet: its path, if it is one of `PATHS`."""
    return path if path in PATHS else UNROUTED


@dataclass(frozen=True, kw_only=True)
class RequestRejected:
    """A request was rejected.

    Attributes:
        route: the path of its route.
        reason: why.
        status: HTTP status of the response.
    """

    route: str
    reason: RejectReason
    status: int


ServerEvent: TypeAlias = RequestAdmitted | TokensSampled | ChoiceEnded | RequestRejected
Observer: TypeAlias = Callable[[ServerEvent], None]
"""Receives events on the event loop, and therefore must not block."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """The load of the engine after its last step.

    Attributes:
        slots: sequences that can be decoded at once.
        running: slots in use.
        waiting: choices that wait for a slot, and prompts that wait to be scored.
        waiting_tokens: tokens of their prompts.
        drain_seconds: estimated time until these and the running choices are done.
        pages: pages of the KV cache, over all shards.
        pages_free: pages that no sequence holds; pages that are kept for prefix reuse count as free.
        computed_tokens: prompt tokens that were computed so far; those of preempted sequences count each time.
        shared_tokens: prompt tokens that were reused from the cache of another sequence.
    """

    slots: int
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    drain_seconds: float = 0.0
    pages: int = 0
    pages_free: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0


SMOOTHING = 0.1
"""Weight of the last step in the moving averages of `ThroughputEstimate`."""


@dataclass(frozen=True, kw_only=True)
class ThroughputEstimate:
    """Moving averages of step times, from which `Retry-After` is computed; 0 before the first step.

    Attributes:
        token_seconds: time of a step in which every running slot gets its next tokens.
        prompt_seconds: time to compute one token of a prompt.
    """

    token_seconds: float = 0.0
    prompt_seconds: float = 0.0

    def after(self, seconds: float, *, rows: int, prompt_tokens: int) -> "ThroughputEstimate":
        """The estimate after another step.

        Args:
            seconds: time of the step.
            rows: slots that got tokens.
            prompt_tokens: prompt tokens that were computed.
        """
        # Only steps without a prefill call measure decoding alone.
        if rows and not prompt_tokens:
            return replace(self, token_seconds=_smooth(self.token_seconds, seconds))
        if prompt_tokens:
            # The decode call of a step takes as long with a prefill call as without; the rest is the prefill's.
            prefill_seconds = max(0.0, seconds - (self.token_seconds if rows else 0.0))
            return replace(self, prompt_seconds=_smooth(self.prompt_seconds, prefill_seconds / prompt_tokens))
        return self

    def drained_in(self, *, rows: int, remaining: int, prompt_tokens: int) -> float:
        """Seconds until all known requests are done, if every slot runs all the time.

        Args:
            rows: number of slots.
            remaining: tokens that running and waiting choices may still get.
            prompt_tokens: tokens of the prompts that wait.
        """
        return remaining / rows * self.token_seconds + prompt_tokens * self.prompt_seconds


def _smooth(before: float, now: float) -> float:
    # The first measurement is taken as it is, instead of averaging it with 0.
    return now if not before else (1 - SMOOTHING) * before + SMOOTHING * now


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "levanter_"
FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0, 600.0)
"""Seconds to the first token, time in the queue included."""
NEXT_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds between two tokens."""
REQUEST_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0, 600.0, 1800.0)
"""Seconds from a request to the end of a choice."""
TOKEN_COUNT_BOUNDS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
"""Tokens of a prompt or of a choice."""


@dataclass
class HistogramBuckets:
    """A histogram: how many values lie between consecutive bounds.

    Attributes:
        bounds: upper bounds, inclusive, ascending.
        counts: values in each bucket; the last one is for values above all bounds.
        total: sum of the values.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        # One bucket more than bounds, for values above all of them.
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        # The bucket of the first bound that is not below the value.
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Constants of a running server.

    Attributes:
        version: version of this project.
        model: name of the model.
        devices: number of devices.
    """

    version: str
    model: str
    devices: int


class Metrics:
    """Counters and histograms of a server.

    Args:
        facts: constants of the server.
        load: gives the load of the engine.
        compiles: gives how many computations were compiled since the server was ready; there should be none.
    """

    def __init__(self, facts: ServerInfo, *, load: Callable[[], EngineLoad], compiles: Callable[[], int] = lambda: 0):
        self.facts, self._load, self._compiles = facts, load, compiles
        self.requests = self.choices = self.prompt_tokens = self.tokens = 0
        # All reasons exist from the beginning: a counter that appears later looks to Prometheus as if it had not grown.
        self.ended: dict[str, int] = dict.fromkeys(get_args(EndReason), 0)
        self.rejected: dict[str, int] = dict.fromkeys(get_args(RejectReason), 0)
        self.first_token, self.next_token = HistogramBuckets(FIRST_TOKEN_BOUNDS), HistogramBuckets(NEXT_TOKEN_BOUNDS)
        self.request_seconds, self.prompt_lengths, self.choice_lengths = (
            HistogramBuckets(REQUEST_BOUNDS),
            HistogramBuckets(TOKEN_COUNT_BOUNDS),
            HistogramBuckets(TOKEN_COUNT_BOUNDS),
        )

    def __call__(self, event: ServerEvent) -> None:
        """Counts an event."""
        # Tokens are by far the most frequent event, so they are compared first.
        if isinstance(event, TokensSampled):
            self.tokens += event.tokens
            if event.first:
                self.first_token.add(event.since)
            else:
                # Tokens of one call arrive together: the time since the previous ones is divided among them.
                self.next_token.add(event.since / event.tokens, event.tokens)
        elif isinstance(event, RequestAdmitted):
            self.requests += 1
            self.choices += event.choices
            self.prompt_tokens += event.prompt_tokens
            self.prompt_lengths.add(event.prompt_tokens)
        elif isinstance(event, ChoiceEnded):
            self.ended[event.reason] += 1
            self.request_seconds.add(event.since)
            self.choice_lengths.add(event.tokens)
        elif isinstance(event, RequestRejected):
            self.rejected[event.reason] += 1

    def text(self) -> str:
        """All metrics in Prometheus's text format."""
        return "".join(line + "\n" for family in self._families() for line in family)

    def _families(self) -> Iterator[Iterator[str]]:
        # Read once, so that all lines of a response are of one step.
        load = self._load()
        facts = {"version": self.facts.version, "model": self.facts.model}
        # Prometheus's convention for constants: labels of a gauge with value 1.
        yield _family("info", "gauge", "The version and the model.", [(facts, 1)])
        yield _metric("devices", "gauge", "Devices of the mesh.", self.facts.devices)
        yield _metric("slots", "gauge", "Sequences that can be decoded at once.", load.slots)
        yield _metric("slots_running", "gauge", "Slots in use.", load.running)
        yield _metric("requests_waiting", "gauge", "Choices that wait for a slot.", load.waiting)
        yield _metric("prompt_tokens_waiting", "gauge", "Tokens of prompts that wait.", load.waiting_tokens)
        yield _metric("cache_pages", "gauge", "Pages of the KV cache.", load.pages)
        yield _metric("cache_pages_free", "gauge", "Pages that no sequence holds.", load.pages_free)
        yield _metric("requests_total", "counter", "Requests that were admitted.", self.requests)
        yield _metric("choices_total", "counter", "Choices of these requests.", self.choices)
        yield _metric("prompt_tokens_total", "counter", "Tokens of their prompts.", self.prompt_tokens)
        computed = "Prompt tokens that were computed; those of preempted sequences count each time."
        yield _metric("prompt_tokens_computed_total", "counter", computed, load.computed_tokens)
        shared = "Prompt tokens that were reused from the cache of another sequence."
        yield _metric("prefix_cache_hit_tokens_total", "counter", shared, load.shared_tokens)
        yield _metric("tokens_total", "counter", "Tokens that were sampled.", self.tokens)
        yield _by_reason("choices_ended_total", "Choices that have ended, by reason.", self.ended)
        yield _by_reason("requests_rejected_total", "Requests that were rejected, by reason.", self.rejected)
        compiled = "Computations that were compiled after the server was ready; any is a bug of the server."
        yield _metric("compiles_after_ready_total", "counter", compiled, self._compiles())
        first = "Seconds from a request to the first token of a choice, time in the queue included."
        yield _histogram("first_token_seconds", first, self.first_token)
        yield _histogram("next_token_seconds", "Seconds between a token of a choice and the next.", self.next_token)
        yield _histogram("request_seconds", "Seconds from a request to the end of a choice.", self.request_seconds)
        yield _histogram("request_prompt_tokens", "Tokens of a request's prompt.", self.prompt_lengths)
        yield _histogram("choice_tokens", "Tokens of a choice.", self.choice_lengths)


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
    # Prometheus's buckets are cumulative: each counts all values up to its bound.
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
    # Backslashes first, or those of the other escapes would be escaped again.
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    # `repr` is the shortest text that reads back as the same number; `inf` has another name in this format.
    return "+Inf" if value == float("inf") else repr(value)
