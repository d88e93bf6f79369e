"""Loading and checking the API key that requests carry.

The key is compared as a digest and in constant time, so that response times reveal neither its length nor a correct
prefix. Neither logs nor error messages contain it.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from levanter.io import open_read

ENVIRONMENT = "env:"
"""Prefix of `api_key` where the key is in an environment variable."""
MIN_CHARACTERS = 8
"""Length of a key: a shorter one is a mistake, or guessed at once."""
MAX_FILE_BYTES = 4096
"""Size of a key file: a longer file is another file."""


_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_FILE_NAME = re.compile(r"(?:.*/)?[\w.-]{1,40}\.(?:key|txt|secret|token|pem|env)|/.{1,200}|[a-z0-9]+://.{1,200}")


def shown_source(where: str) -> str:
    """The source of a key in a message: shortened where it may be the key itself, written in the wrong place."""
    if where.startswith(ENVIRONMENT):
        return where if _VARIABLE.fullmatch(where.removeprefix(ENVIRONMENT)) else f"{ENVIRONMENT}…"
    return where if _FILE_NAME.fullmatch(where) else f"a value of {len(where)} characters"


class ApiKeyError(ValueError):
    """The configured file or environment variable has no usable key."""


@dataclass(frozen=True)
class ApiKey:
    """A key that is never printed.

    Attributes:
        digest: SHA-256 of the key.
    """

    digest: bytes = field(repr=False)

    @staticmethod
    def of(text: str) -> "ApiKey":
        """The key with these characters."""
        # Environment variables may hold bytes that are not UTF-8; Python represents them as surrogates.
        return ApiKey(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest())

    def is_in(self, headers: Collection[tuple[bytes, bytes]]) -> bool | None:
        """Whether a request carries the key; None if it has no `Authorization` header.

        Args:
            headers: of the request, names in lower case. A request with several keys is not accepted.
        """
        values = [value for name, value in headers if name == b"authorization"]
        if not values:
            return None
        scheme, _, key = values[0].partition(b" ")
        # Both digests have 32 bytes, so `compare_digest` takes the same time for every key.
        # The comparison runs for every scheme, so that a wrong scheme takes as long as a wrong key.
        matches = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self.digest)
        return matches and scheme.lower() == b"bearer" and len(values) == 1


def read_key(where: str, environment: Mapping[str, str] = os.environ) -> ApiKey:
    """Reads the key.

    Args:
        where: a file, local or a URL, or `env:NAME` for an environment variable.
        environment: the variables.

    Raises:
        ApiKeyError: the file or variable is missing, or its content cannot be a key.
    """
    if where.startswith(ENVIRONMENT):
        name = where.removeprefix(ENVIRONMENT)
        if name not in environment:
            # Somebody may have written the key itself there, which must not get into a log.
            shown = f" {name}" if _VARIABLE.fullmatch(name) else ", and what is written there is not the name of one"
            raise ApiKeyError(f"api_key: {ENVIRONMENT}…: there is no environment variable{shown}")
        return ApiKey.of(_checked(environment[name], where))
    try:
        with open_read(where, once=True) as file:
            # One byte more than the limit shows that the file is too long, whatever its size.
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ApiKeyError(
            f"api_key: {shown_source(where)}: no such file\n"
            "  → the key itself is in a file or in an environment variable: api_key: FILE, or api_key: env:NAME"
        ) from None
    except (OSError, ValueError) as error:
        # `OSError` itself would show the file name.
        problem = (error.strerror if isinstance(error, OSError) else None) or "cannot be read"
        raise ApiKeyError(f"api_key: {shown_source(where)}: {problem}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ApiKeyError(
            f"api_key: {shown_source(where)}: more than {MAX_FILE_BYTES:,} bytes; a key is one short line"
        )
    try:
        return ApiKey.of(_checked(content.decode("ascii"), where))
    except UnicodeDecodeError:
        raise ApiKeyError(f"api_key: {shown_source(where)}: not plain ASCII, which a header could not carry") from None


def _checked(text: str, where: str) -> str:
    # Editors and `echo` end a file with a line break.
    key = text.strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ApiKeyError(f"api_key: {shown_source(where)}: a key is one line of printable ASCII without spaces")
    if len(key) < MIN_CHARACTERS:
        raise ApiKeyError(f"api_key: {shown_source(where)}: {len(key)} characters; a key has {MIN_CHARACTERS} at least")
    return key
