"""The kinds of text: words, numbers, punctuation, white space. Names are upstream's, so that reports compare.

A text is cut into *segments*, each of one kind: an address (`https://…`), white space, a number with its dots and
dashes, a word with its apostrophes and hyphens, or anything else.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

_URL = re.compile(r"(?:https?://|www\.)\S+")
_CONNECTORS = "'\u2019-.,:/"
# Of a text in which letters are a, digits 0 and white space a space.
_SHADOW = re.compile(
    r"(?P<space> +)|(?P<number>0+(?:[.,:/-]0+)*)|(?P<word>[a_]+(?:['\u2019-][a_]+)*)|(?P<other>[^a0 ]+)"
)
_MAY_BE_URL = frozenset("hw")


class _Shadows(dict[int, str]):
    """Characters → their class, looked up once each."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        category = unicodedata.category(character)
        if character.isspace():
            found = " "
        elif category[0] in "LM":
            found = "a"
        elif category[0] == "N":
            found = "0"
        else:
            found = character if character in _CONNECTORS or character == "_" else "!"
        self[point] = found
        return found


_SHADOWS = _Shadows()


def segments(text: str) -> Iterator[tuple[int, int, str]]:
    """A text's segments in order, as (first character, end, kind); together they are the text."""
    shadow = text.translate(_SHADOWS)
    at = 0
    while at < len(text):
        if text[at] in _MAY_BE_URL and (address := _URL.match(text, at)):
            yield at, address.end(), "text/url"
            at = address.end()
            continue
        found = _SHADOW.match(shadow, at)
        assert found is not None, shadow[at : at + 8]
        end = found.end()
        yield at, end, _kind(text[at:end], found.lastgroup or "")
        at = end


@lru_cache(maxsize=1 << 16)
def _kind(segment: str, group: str) -> str:
    if group == "space":
        return f"whitespace/{_space(segment)}"
    if group == "number":
        return "text/number"
    if group == "word":
        return "text/word" if segment.isascii() else "text/non_ascii_word"
    return "text/punctuation" if segment.isascii() else "text/non_ascii"


def _space(segment: str) -> str:
    if "\t" in segment or "\r" in segment:
        return "tab_or_cr"
    if set(segment) == {" "}:
        return "single_space" if len(segment) == 1 else "multi_space"
    if set(segment) == {"\n"}:
        return "newline" if len(segment) == 1 else "multi_newline"
    return "mixed"
