"""A Jinja sandbox for chat templates with limits on memory and time.

Jinja's own sandbox hides Python's internals from a template. It does not prevent `"a" * 10**12`, a list that doubles
itself, or nested loops. Here every operation whose result may be larger than its operands is checked before it is
executed, every text is bounded (`levanter.base.input_limits`), and a template that still runs after its time is
stopped.
"""

import contextlib
import ctypes
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from levanter.base.input_limits import TEMPLATE_CHARACTERS, TEMPLATE_ITEMS, TEMPLATE_SECONDS

_LARGEST_POWER = 10_000
"""Bits of a number that a template may raise to."""
_WIDTH = re.compile(r"\d{7,}|\*")


class TookTooLong(Exception):
    """The code in a `time_limit` ran longer than the limit."""


class _Watch:
    """Raises `TookTooLong` in threads whose time is up, from one watcher thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> None:
        with self._lock:
            self._until[threading.get_ident()] = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="time limits", daemon=True)
                self._thread.start()

    def end(self) -> None:
        # A thread that died, as after a fork, is replaced.
        with self._lock:
            self._until.pop(threading.get_ident(), None)

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            # The thread may have been interrupted already: then its entry is gone.
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, until in self._until.items() if until < now]:
                    # Once only: a second asynchronous exception would hit the handler of the first.
                    del self._until[thread]
                    # Raises in the other thread at its next bytecode instruction. Signals would reach only the main
                    # thread.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))


_watch = _Watch()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupts Python code that runs longer; a single call into C is not interrupted, so bound its operands.

    Raises:
        TookTooLong: it does.
    """
    _watch.begin(seconds)
    try:
        yield
    finally:
        _watch.end()


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on the values that templates produce."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, extensions: Sequence[str | type[Extension]] = ()):
        # The whitespace settings and the two globals below are those of transformers, for which templates are written.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        # Jinja's own `tojson` escapes HTML characters, which would change the text that the model reads.
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        # `lipsum` generates text of any length, and no chat template needs it.
        self.globals.pop("lipsum", None)

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Joins the output of the compiled template."""
        # Checked piece by piece: a loop that writes forever is stopped at the limit, not when memory is full.
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            _require(size, "its text has")
            kept.append(piece)
        return "".join(kept)

    def joined(self, *values: object) -> str:
        """`a ~ b`."""
        return self.concat(map(str, values))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Concatenations(self).visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Executes a binary operation, unless its result would be out of bounds."""
        if operator == "**":
            if not isinstance(left, int | float) or not isinstance(right, int | float):
                raise SecurityError("a power of something that is not a number")
            # An estimate of the bits of the result, before it is computed.
            if abs(right) * math.log2(abs(left) + 2) > _LARGEST_POWER:
                raise SecurityError(f"a number of more than {_LARGEST_POWER:,} bits")
        elif operator == "*":
            # Either operand may be the sequence: `3 * "a"` and `"a" * 3`.
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str | list | tuple):
                    _require_size(value, len(value) * times)
                if isinstance(value, int) and value.bit_length() > _LARGEST_POWER:
                    raise SecurityError(f"a number of more than {_LARGEST_POWER:,} bits")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _require_size(left, len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            # A format string such as `%1000000d` makes a long text out of a number.
            _check_format(left)
            _require(len(left) + _characters(right), "a text has")
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:
        """Executes a call, unless its result would be out of bounds."""
        # Jinja wraps `str.format` in a function of its own.
        # Methods of text (`replace`, `center`, `join`) are bound to their text, which is their first argument here.
        receiver = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(receiver, str):
            _check(getattr(__obj, "__name__", ""), (receiver, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Concatenations(NodeTransformer):
    """Replaces each `~` by a call of `Sandbox.joined`, because Jinja does not let a sandbox intercept `~`."""

    def __init__(self, environment: Sandbox):
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[assignment]
        call = nodes.Call(nodes.EnvironmentAttribute("joined"), list(node.nodes), [], None, None)
        return call.set_lineno(node.lineno).set_environment(self._environment)


def run(render: Callable[[], str]) -> str:
    """Renders a template within its time limit.

    Raises:
        TemplateError: it takes too long, recurses too deeply, or produces too much.
    """
    try:
        with time_limit(TEMPLATE_SECONDS):
            return render()
    except TookTooLong:
        raise SecurityError(f"it takes more than {TEMPLATE_SECONDS:g} s for one conversation") from None
    except RecursionError:
        raise SecurityError("it recurses endlessly") from None
    except (OverflowError, MemoryError) as error:
        raise SecurityError(f"it produces something too large ({error})") from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """A value as JSON: the filter `tojson`, with the parameters that transformers gives it."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces, size = [], 0
    # In pieces: a value that refers to one list many times, or a long separator, may be far larger as text.
    for piece in encoder.iterencode(value):
        size += len(piece)
        _require(size, "a value has, as JSON,")
        pieces.append(piece)
    return "".join(pieces)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _bounded(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Wraps a filter with a check of its arguments."""

    def checked(*args: object, **kwargs: object) -> object:
        _check(name, args, kwargs)
        return function(*args, **kwargs)

    # Jinja reads these attributes to decide what a filter is called with; a wrapper without them would break such
    # filters.
    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(checked, mark, getattr(function, mark))
    return checked


def _check(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Refuses a call of a filter or a method of text whose result could be out of bounds."""
    arguments = [*args, *kwargs.values()]
    # A large number as an argument is a width, a count or a repetition.
    for value in arguments:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > TEMPLATE_ITEMS:
            raise SecurityError(f"{name}: {value:.3g} is more than {TEMPLATE_ITEMS:,}, the limit for a template")
    texts = [value for value in arguments if isinstance(value, str)]
    if name in ("format", "format_map") and texts:
        _check_format(texts[0])
    largest = max([0, *(value for value in arguments if isinstance(value, int))])
    for value in arguments:
        if isinstance(value, list | tuple):
            # `join`: the separator may stand between all items.
            longest = max(map(len, texts), default=0)
            _require(_characters(value) + longest * len(value), "a text has")
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[0], texts[1], texts[2]
        # An empty `old` matches before every character and at the end.
        times = text.count(old) if old else len(text) + 1
        _require(len(text) + times * max(0, len(new) - len(old)), "a text has")
    # Each line or tab may grow by the width, or by the text that is inserted; 8 is the default width of a tab.
    elif name in ("indent", "expandtabs", "wordwrap", "urlize") and texts:
        most = max([largest, *map(len, texts[1:])], default=0) or 8
        lines = texts[0].count("\n") + texts[0].count("\t") + 1
        _require(len(texts[0]) + lines * most, "a text has")
    # The separator may stand between all characters, or a table entry may replace each of them; the product bounds
    # both.
    elif len(texts) > 1 and name in ("join", "translate"):
        _require(math.prod(len(text) + 1 for text in texts), "a text has")


def _check_format(text: str) -> None:
    if _WIDTH.search(text):
        raise SecurityError("a width in a format is longer than a template's text may be")


def _characters(value: object) -> int:
    """An upper bound of the characters of a value as text, texts in lists included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple):
        # 24 characters suffice for any number as text.
        return sum(len(item) if isinstance(item, str) else 24 for item in value)
    return 24


def _require_size(value: str | list | tuple, size: int) -> None:
    if isinstance(value, str):
        _require(size, "a text has")
    elif size > TEMPLATE_ITEMS:
        raise SecurityError(f"a list of more than {TEMPLATE_ITEMS:,} items, the limit for a template")


def _require(size: int, what: str) -> None:
    if size > TEMPLATE_CHARACTERS:
        raise SecurityError(f"{what} more than {TEMPLATE_CHARACTERS:,} characters, the limit for a template")
