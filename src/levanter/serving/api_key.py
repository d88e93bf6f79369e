"""Loading and checking the API key that requests carry.

The key is compared as a digest and in constant time, so that response times reveal neither its length nor a correct
prefix. Neither logs nor error messages contain it.
"""

import hashlib
import hmac
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from levanter.io import open_read

ENVIRONMENT = "env:"
"""Prefix of `api_key` where the key is in an environment variable."""
MIN_CHARACTERS = 8
"""Length of a key: a shorter one is a mistake, or guessed at once."""
MAX_FILE_BYTES = 4096
"""Size of a key file: a longer file is another file."""


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
            raise ApiKeyError(f"api_key: {where}: there is no environment variable {name}")
        return ApiKey.of(_checked(environment[name], where))
    try:
        with open_read(where) as file:
            # One byte more than the limit shows that the file is too long, whatever its size.
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ApiKeyError(f"api_key: {where}: no such file") from None
    except OSError as error:
        raise ApiKeyError(f"api_key: {where}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ApiKeyError(f"api_key: {where}: more than {MAX_FILE_BYTES:,} bytes; a key is one short line")
    try:
        return ApiKey.of(_checked(content.decode("ascii"), where))
    except UnicodeDecodeError:
        raise ApiKeyError(f"api_key: {where}: not plain ASCII, which a header could not carry") from None


def _checked(text: str, where: str) -> str:
    # Editors and `echo` end a file with a line break.
    key = text.strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ApiKeyError(f"api_key: {where}: a key is one line of printable ASCII without spaces")
    if len(key) < MIN_CHARACTERS:
        raise ApiKeyError(f"api_key: {where}: {len(key)} characters; a key has {MIN_CHARACTERS} at least")
    return key
