"""Limits on clients: size, speed and rate of requests.

`serving.middleware` enforces those of bodies and rates, `serving.server` those of connections. This module imports
neither, so that a configuration is read without an HTTP server installed.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from levanter.config.validators import PositiveFloat, PositiveInt, Range, Ranged

RELEASE_BODY = "levanter.release_body"
"""Entry of the ASGI scope: a function that an application calls when it does not need the body any longer."""
BodyMib: TypeAlias = Annotated[float, Range(0, 32, above=True)]
Seconds: TypeAlias = Annotated[float, Range(0, 86_400, above=True)]


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Ranged):
    """Limits on the size, speed and rate of requests.

    Attributes:
        max_body_mib: largest body of a request, in MiB.
        max_bodies_mib: largest total of all bodies that are being read, in MiB.
        idle_seconds: seconds that a keep-alive connection may be idle.
        header_seconds: seconds in which a client must send the request head.
        body_seconds: seconds in which a client must send the body.
        write_seconds: seconds that a client may pause reading a response.
        max_connections: largest number of open connections; beyond it, the longest idle one is closed.
        requests_per_minute: largest rate of requests per client address; null for no limit.
    """

    range_prefix: ClassVar[str] = "limits."

    max_body_mib: BodyMib = 32.0
    max_bodies_mib: PositiveFloat = 256.0
    idle_seconds: Seconds = 75.0
    header_seconds: Seconds = 30.0
    body_seconds: Seconds = 60.0
    write_seconds: Seconds = 30.0
    max_connections: PositiveInt = 4096
    requests_per_minute: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Such a body could never be read: it would wait for room that there is not.
        if self.max_body_mib > self.max_bodies_mib:
            raise ValueError(
                f"max_body_mib: {self.max_body_mib:g} MiB for one request exceed max_bodies_mib, "
                f"{self.max_bodies_mib:g} MiB for all requests together"
            )
