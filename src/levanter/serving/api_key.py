"""The key that requests carry: where it comes from.

It is compared in constant time, as a digest, so that neither its length nor how much of it was right can be told from
how long the answer takes. It is in no log and no message.
"""

import hashlib
import hmac
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from levanter.io import open_read

ENVIRONMENT = "env:"
"""What `api_key` begins with where the key is in an environment variable."""
MIN_CHARACTERS = 8
"""Of a key: a shorter one is a mistake, or guessed at once."""
MAX_FILE_BYTES = 4096
"""Of a key's file: what is longer is another file."""


class ApiKeyError(ValueError):
    """There is no usable key where one was said to be."""


@dataclass(frozen=True)
class ApiKey:
    """A key that is never shown.

    Attributes:
        digest: of the key.
    """

    digest: bytes = field(repr=False)

    @staticmethod
    def of(text: str) -> "ApiKey":
        """The key with these characters."""
        return ApiKey(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest())

    def is_in(self, headers: Collection[tuple[bytes, bytes]]) -> bool | None:
        """Whether a request carries the key; None where it carries none.

        Args:
            headers: of the request, names in lower case. A request with several keys carries none of ours.
        """
        given = [value for name, value in headers if name == b"authorization"]
        if not given:
            return None
        scheme, _, key = given[0].partition(b" ")
        told = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self.digest)
        return told and scheme.lower() == b"bearer" and len(given) == 1


def read_key(where: str, environment: Mapping[str, str] = os.environ) -> ApiKey:
    """Reads the key.

    Args:
        where: a file, local or a URL, or `env:NAME` for an environment variable.
        environment: the variables.

    Raises:
        NoKeyError: there is none, or what is there cannot be a key.
    """
    if where.startswith(ENVIRONMENT):
        name = where.removeprefix(ENVIRONMENT)
        if name not in environment:
            raise ApiKeyError(f"api_key: {where}: there is no environment variable {name}")
        return ApiKey.of(_checked(environment[name], where))
    try:
        with open_read(where) as file:
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
    key = text.strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ApiKeyError(f"api_key: {where}: a key is one line of printable ASCII without spaces")
    if len(key) < MIN_CHARACTERS:
        raise ApiKeyError(f"api_key: {where}: {len(key)} characters; a key has {MIN_CHARACTERS} at least")
    return key
