"""Plain text of at most `WIDTH` columns: aligned tables, bars of block characters, wrapped paragraphs."""

import re
from collections.abc import Sequence
from typing import Literal

from levanter.html.format import columns, visible

WIDTH = 110
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# Words for wrapping; a number and its unit are one word, so that no line ends between them.
_WORD = re.compile(r" *[^ ]*\d (?:GiB|MiB|KiB|B|GB/s|days|h|min|s|ms|µs|%)(?=[ ,;:.)]|$)[,;:.)]*| *[^ ]+")
Align = Literal["left", "right"]


def table(
    rows: Sequence[Sequence[str]],
    *,
    align: Sequence[Align],
    header: Sequence[str] = (),
    indent: int = 2,
    gap: int = 2,
) -> list[str]:
    """Aligned rows; the widest left-aligned column is cut where the line would exceed `WIDTH`."""
    if not rows:
        return []
    cells = [[visible(cell).replace("\n", " ") for cell in row] for row in ([header, *rows] if header else rows)]
    # Widths are in terminal columns: some characters take two, and combining ones none.
    widths = [max(columns(row[n]) for row in cells) for n in range(len(align))]
    excess = indent + sum(widths) + gap * (len(widths) - 1) - WIDTH
    if excess > 0:
        widest = max((n for n, side in enumerate(align) if side == "left"), key=lambda n: widths[n], default=None)
        if widest is not None:
            widths[widest] = max(8, widths[widest] - excess)
    lines = []
    for row in cells:
        padded = [_pad(cut(cell, width), width, side) for cell, width, side in zip(row, widths, align, strict=True)]
        lines.append((" " * indent + (" " * gap).join(padded)).rstrip())
    return lines


def cut(text: str, width: int) -> str:
    """The text in at most `width` columns, cut at the front, because paths differ at their ends."""
    if columns(text) <= width:
        return text
    suffix = text
    while columns(suffix) > width - 1:
        suffix = suffix[1:]
    return "…" + suffix


def _pad(text: str, width: int, side: Align) -> str:
    spaces = " " * max(0, width - columns(text))
    return text + spaces if side == "left" else spaces + text


def paragraph(text: str, *, indent: int = 2, hanging: int = 2, mark: str = "") -> list[str]:
    """Text wrapped to the width; its line breaks stay, and so does the indentation of each line.

    Args:
        text: the text.
        indent: of every line.
        hanging: of continuation lines, in addition to `indent`.
        mark: before the first line, such as `• `.
    """
    lines: list[str] = []
    for number, line in enumerate(visible(text).split("\n")):
        first = " " * indent + (mark if number == 0 else " " * len(mark))
        inner = len(line) - len(line.lstrip())
        later = " " * (indent + max(hanging, len(mark)) + inner)
        lines += _wrapped(line.strip(), first + " " * inner, later)
    return lines


def _wrapped(text: str, first: str, later: str) -> list[str]:
    """Wraps words into lines; a word that is longer than a line is broken."""
    lines, line, empty = [], first, True
    # Runs of spaces inside a line stay, so that columns inside a text keep their alignment.
    for word in _WORD.findall(text):
        if not empty and columns(line) + columns(word) > WIDTH:
            lines.append(line)
            line, empty = later, True
        rest = word.lstrip(" ") if empty and line == later else word
        while columns(line) + columns(rest) > WIDTH:
            available = WIDTH - columns(line)
            # The longest prefix that fits, and at least one character, or the loop would not end.
            length = next(n for n in range(len(rest), 0, -1) if columns(rest[:n]) <= available or n == 1)
            lines.append(line + rest[:length])
            line, rest = later, rest[length:]
        line, empty = line + rest, False
    return [*lines, line] if not empty else lines


def bar(begin: float, length: float, *, width: int, mark: float | None = None) -> str:
    """A piece of a bar on a scale from 0 to 1, drawn to an eighth of a column.

    Args:
        begin: where the piece starts.
        length: its length; any positive length shows at least an eighth of a column.
        width: columns of the whole scale.
        mark: a position on the scale that is marked with a line where the piece does not cover it.
    """
    # Both ends in eighths of a column.
    first, last = round(begin * width * 8), round((begin + length) * width * 8)
    if length > 0:
        last = max(last, first + 1)
        # A sliver at the very end is moved back into the bar.
        overhang = max(0, last - width * 8)
        first, last = first - overhang, last - overhang
    cells = [" "] * width
    for column in range(width):
        filled_to = min(last - 8 * column, 8)
        filled_from = max(first - 8 * column, 0)
        if filled_to <= filled_from:
            continue
        # Block characters fill from the left, except the right half `▐`; other pieces that begin inside a column are
        # drawn from its left edge.
        cells[column] = "▐" if filled_from >= 4 and filled_to == 8 else _EIGHTHS[filled_to]
    if mark is not None:
        column = min(width - 1, max(0, round(mark * width) - 1))
        if cells[column] == " ":
            cells[column] = "┊"
    return "".join(cells)
