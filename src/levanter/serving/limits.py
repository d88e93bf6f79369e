"""Bounds of what clients may send: how much, how slowly and how often.

`serving.whole_body` and `serving.rate` are the doors in front of the application that keep to them; connections are
bounded by `serving.connections`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from levanter.config.validators import PositiveFloat, PositiveInt, Range, Ranged

BodyMib: TypeAlias = Annotated[float, Range(0, 32, above=True)]
Seconds: TypeAlias = Annotated[float, Range(0, 86_400, above=True)]


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Ranged):
    """What clients may send, and how slowly.

    Attributes:
        max_body_mib: of a request.
        max_bodies_mib: of all requests whose bodies are being read at the same time.
        idle_seconds: how long a connection is kept behind an answer.
        header_seconds: how long a client may take for the head of a request.
        body_seconds: how long it may take for the body.
        write_seconds: how long it may take before it reads anything of an answer that waits for it.
        max_connections: open at the same time; where more come, the one that is idle for longest is closed.
        requests_per_minute: of one client address; null for any number.
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
        if self.max_body_mib > self.max_bodies_mib:
            raise ValueError(
                f"max_body_mib: {self.max_body_mib:g} MiB of a request are more than all requests may have together, "
                f"max_bodies_mib: {self.max_bodies_mib:g}"
            )
