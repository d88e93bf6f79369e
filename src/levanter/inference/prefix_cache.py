"""Prefixes in common: full pages named by what they and all pages before them hold.

The name of a page is a hash of the name of the page before it and of its own tokens, so equal names mean equal tokens
from the first one on, and with them equal keys and values. Only full pages have names; the rest of a prompt is computed
again.
"""

import hashlib
from array import array
from collections.abc import Sequence

from levanter.inference.page_allocator import PagePool

NAME_BYTES = 16
"""Of a name. Two different prefixes get the same one with probability 2⁻¹²⁸ each time."""


def page_names(tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """The names of the full pages of a sequence.

    Args:
        tokens: from the first one on.
        page_size: tokens in a page.
        known: names of the first pages, where they are known already.
    """
    names = list(known)
    for page in range(len(names), len(tokens) // page_size):
        own = array("q", tokens[page * page_size : (page + 1) * page_size]).tobytes()
        before = names[-1] if names else b""
        names.append(hashlib.blake2b(before + own, digest_size=NAME_BYTES).digest())
    return tuple(names)


def known_pages(pool: PagePool, names: Sequence[bytes]) -> tuple[int, ...]:
    """The pages of the longest prefix that the pool has."""
    pages = []
    for name in names:
        page = pool.find(name)
        if page is None:
            break
        pages.append(page)
    return tuple(pages)
