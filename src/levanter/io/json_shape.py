"""`JsonShape`: what a JSON text consists of, counted before a value is made of it.

Python's JSON reader holds the interpreter until a text is read: a list of eight million empty lists in 24 MB took 15 s,
in which no other thread ran. Counting takes some milliseconds a megabyte, in NumPy, which lets other threads run.
"""

from dataclasses import dataclass

import numpy as np

from levanter.base.input_limits import JSON_DEPTH

SMALL_BYTES = 1 << 16
"""Size of a text whose shape is not measured: it is read within milliseconds, whatever it consists of."""
WINDOW_BYTES = 1 << 19
"""Bytes that are counted at a time."""


@dataclass(frozen=True, kw_only=True)
class JsonShape:
    """The parts of a JSON text. Exact for a text that is JSON, but that empty lists and objects count as numbers too.

    Attributes:
        numbers: its numbers.
        others: its other values and its names: strings, lists, objects, literals.
        longest_string: bytes between the quotes of its longest string.
        depth: lists and objects inside one another.
    """

    numbers: int
    others: int
    longest_string: int
    depth: int


@dataclass
class _Scan:
    """Counts so far, and the state at the end of the last window.

    Attributes:
        quotes, opens, literals, separators, colons: outside of strings; quotes are those around them.
        position: bytes before the window.
        in_string: whether the window begins inside a string, whose quote is at `string_start`.
        backslashes: length of the run of backslashes before the window.
        level: depth before the window.
    """

    quotes: int = 0
    opens: int = 0
    literals: int = 0
    separators: int = 0
    colons: int = 0
    longest_string: int = 0
    depth: int = 0
    position: int = 0
    in_string: bool = False
    string_start: int = 0
    backslashes: int = 0
    level: int = 0

    def add(self, window: np.ndarray) -> None:
        """Counts one more window, uint8 `[bytes]`."""
        quotes = self._find_quotes(window)
        self.quotes += len(quotes)
        outside = self._outside(window, quotes)
        self._measure_strings(quotes)
        # A window in the middle of a long string has nothing else to count.
        if outside is not None:
            self._count(window, outside)
        self.position += len(window)

    def _outside(self, window: np.ndarray, quotes: np.ndarray) -> np.ndarray | None:
        """Whether each byte is outside of strings; None if all are inside."""
        if not len(quotes):
            return None if self.in_string else np.ones(len(window), np.bool_)
        parity = np.zeros(len(window), np.bool_)
        parity[quotes] = True
        # Outside after an even number of quotes; that the quotes themselves may count as outside changes no count.
        return ~(np.logical_xor.accumulate(parity) ^ self.in_string)

    def _count(self, window: np.ndarray, outside: np.ndarray) -> None:
        def positions(character: str) -> np.ndarray:
            return np.flatnonzero((window == ord(character)) & outside)

        def count(character: str) -> int:
            return int(np.count_nonzero((window == ord(character)) & outside))

        self.separators += count(",")
        self.colons += count(":")
        # Of `true`, `false` and `null` each has one letter that the others do not have.
        self.literals += count("t") + count("f") + count("n")
        opens = np.concatenate((positions("["), positions("{")))
        closes = np.concatenate((positions("]"), positions("}")))
        self.opens += len(opens)
        if len(opens) or len(closes):
            at = np.concatenate((opens, closes))
            steps = np.concatenate((np.ones(len(opens), np.int64), np.full(len(closes), -1, np.int64)))
            levels = self.level + np.cumsum(steps[np.argsort(at)])
            self.depth, self.level = max(self.depth, int(levels.max())), int(levels[-1])

    def _find_quotes(self, window: np.ndarray) -> np.ndarray:
        """The indices of quotes that are not escaped."""
        quotes, slashes = np.flatnonzero(window == ord('"')), window == ord("\\")
        if not self.backslashes and not slashes.any():
            return quotes
        # The run of backslashes before each byte: the distance from the last byte that is none.
        last_other = np.maximum.accumulate(np.where(slashes, -1, np.arange(len(window))))
        before = last_other[quotes - 1]
        runs = quotes - 1 - before
        # A run that reaches the beginning of the window continues that of the window before.
        reaches = before < 0
        runs[reaches] = quotes[reaches] + self.backslashes
        runs[quotes == 0] = self.backslashes
        end = int(last_other[-1])
        self.backslashes = len(window) - 1 - end if end >= 0 else self.backslashes + len(window)
        # An odd number of backslashes escapes the quote; an even one is pairs, each of which is one backslash.
        return quotes[runs % 2 == 0]

    def _measure_strings(self, quotes: np.ndarray) -> None:
        ends = quotes + self.position
        if self.in_string:
            ends = np.concatenate(([self.string_start], ends))
        pairs = len(ends) // 2
        lengths = ends[1 : 2 * pairs : 2] - ends[0 : 2 * pairs : 2] - 1
        self.longest_string = max(self.longest_string, int(lengths.max(initial=0)))
        self.in_string = len(ends) % 2 == 1
        if self.in_string:
            self.string_start = int(ends[-1])


@dataclass(frozen=True, kw_only=True)
class JsonLimits:
    """The largest JSON text that is read.

    Attributes:
        numbers: most numbers.
        others: most other values and names.
        string_bytes: most bytes of a string, as it is written (a character may be written with six).
        depth: most lists and objects inside one another.
    """

    numbers: int
    others: int
    string_bytes: int
    depth: int = JSON_DEPTH

    def exceeded_by(self, shape: JsonShape) -> str | None:
        """What a text has too much of; None if it is within the limits."""
        for value, most, what in (
            (shape.depth, self.depth, "lists and objects inside one another"),
            (shape.others, self.others, "strings, lists, objects and literals"),
            (shape.numbers, self.numbers, "numbers"),
        ):
            if value > most:
                return f"more than {most:,} {what}, the limit for a request"
        if shape.longest_string > self.string_bytes:
            return f"a string of more than {self.string_bytes:,} bytes, the limit for a text in a request"
        return None


def json_shape(raw: bytes, limits: JsonLimits | None = None) -> JsonShape:
    """Counts the parts of a JSON text.

    Args:
        raw: the text in UTF-8.
        limits: counting stops, with what was counted, where one of these is exceeded.
    """
    scan, data = _Scan(), np.frombuffer(raw, np.uint8)
    for start in range(0, len(data), WINDOW_BYTES):
        scan.add(data[start : start + WINDOW_BYTES])
        if limits is not None and limits.exceeded_by(_result(scan)) is not None:
            break
    return _result(scan)


def _result(scan: _Scan) -> JsonShape:
    # A string without an end reaches the end of the text.
    unclosed = scan.position - 1 - scan.string_start if scan.in_string else 0
    strings = -(-scan.quotes // 2)
    # Every value but the first stands behind a comma or the beginning of a list or an object; names are strings that
    # are no values.
    values = 1 + scan.separators + scan.opens
    return JsonShape(
        numbers=max(0, values + scan.colons - strings - scan.opens - scan.literals),
        others=strings + scan.opens + scan.literals,
        longest_string=max(scan.longest_string, unclosed),
        depth=scan.depth,
    )
