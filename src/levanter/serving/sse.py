"""Server-sent events: a stream of JSON objects that ends with `[DONE]`."""

from collections.abc import Mapping

from levanter.base.json_types import Json
from levanter.serving.errors import json_bytes

DONE = b"data: [DONE]\n\n"
"""What ends a stream."""
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Of a stream: nobody on the way keeps it back."""
MEDIA_TYPE = "text/event-stream; charset=utf-8"


def event(value: Mapping[str, Json]) -> bytes:
    """An object as an event."""
    return b"data: " + json_bytes(value) + b"\n\n"
