"""What process 0 tells the others: messages of JSON, in frames that the connections of a run carry.

Process 0 does not wait for the others; they wait for it, and learn within the heartbeat if it is gone.
"""

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from levanter.distributed.barrier import current_peers

FRAME = 48 * 1024
"""Characters of a frame; a message that is longer goes in several."""
MORE, LAST = "+", "."
"""How a frame begins that others follow, and one that ends a message."""
WAIT_SECONDS = 30 * 24 * 3600.0
"""How long a process waits for process 0 to say something. If that is lost, it is noticed otherwise."""
Told = Callable[[str], object]
"""Gives a frame to all other processes."""
Heard = Callable[[], str]
"""The next frame of process 0; waits for it."""


def tell(message: Mapping[str, Any], told: Told) -> None:
    """Gives the others a message, in as many frames as it takes."""
    packed = base64.b64encode(zlib.compress(json.dumps(message).encode(), 1)).decode()
    cuts = [packed[at : at + FRAME] for at in range(0, len(packed), FRAME)]
    for n, piece in enumerate(cuts):
        told((LAST if n == len(cuts) - 1 else MORE) + piece)


def hear(heard: Heard) -> Mapping[str, Any]:
    """The next message of process 0."""
    packed = ""
    while True:
        frame = heard()
        packed += frame[1:]
        if frame[0] == LAST:
            return json.loads(zlib.decompress(base64.b64decode(packed)))


def tell_all(topic: str, message: Mapping[str, Any]) -> None:
    """Gives the other processes of this run a message; nothing where process 0 is alone."""
    peers = current_peers()
    if peers is not None:
        tell(message, lambda frame: peers.follow(topic, lambda: frame))


def hear_next(topic: str) -> Mapping[str, Any]:
    """The next message of process 0 on a topic, in another process.

    Raises:
        PeerLostError: process 0 is gone.
    """
    peers = current_peers()
    assert peers is not None and peers.process != 0, "process 0 tells, and does not hear"
    return hear(lambda: peers.follow(topic, lambda: "", seconds=WAIT_SECONDS))
