"""Messages from process 0 to all others: JSON, cut into frames that the connections of a run carry.

Process 0 does not wait for the others; they wait for it, and learn within the heartbeat timeout if it is gone.
"""

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from levanter.distributed.agreement import current_peers

FRAME = 48 * 1024
"""Characters of a frame; a message that is longer goes in several."""
MORE, LAST = "+", "."
"""The first character of a frame that others follow, and of the frame that ends a message."""
WAIT_SECONDS = 30 * 24 * 3600.0
"""Seconds that a process waits for a message of process 0. A lost process 0 is noticed by its heartbeat."""
SendFrame = Callable[[str], object]
"""Sends a frame to all other processes."""
ReceiveFrame = Callable[[], str]
"""Waits for the next frame of process 0."""


def send_message(message: Mapping[str, Any], send_frame: SendFrame) -> None:
    """Sends the others a message, in as many frames as it takes."""
    # Fast compression: token ids and settings are repetitive, and every process waits for the message.
    packed = base64.b64encode(zlib.compress(json.dumps(message).encode(), 1)).decode()
    cuts = [packed[at : at + FRAME] for at in range(0, len(packed), FRAME)]
    for n, piece in enumerate(cuts):
        send_frame((LAST if n == len(cuts) - 1 else MORE) + piece)


def receive_message(receive_frame: ReceiveFrame) -> Mapping[str, Any]:
    """The next message of process 0."""
    packed = ""
    while True:
        frame = receive_frame()
        packed += frame[1:]
        if frame[0] == LAST:
            return json.loads(zlib.decompress(base64.b64decode(packed)))


def broadcast(topic: str, message: Mapping[str, Any]) -> None:
    """Sends the other processes of this run a message; does nothing where process 0 is alone."""
    peers = current_peers()
    if peers is not None:
        # Each frame is a decision of process 0 on this topic; the others take them in the same order.
        send_message(message, lambda frame: peers.follow(topic, lambda: frame))


def receive_broadcast(topic: str) -> Mapping[str, Any]:
    """The next message of process 0 on a topic, in another process.

    Raises:
        PeerLostError: process 0 is gone.
    """
    peers = current_peers()
    assert peers is not None and peers.process != 0, "process 0 sends broadcasts and does not receive them"
    return receive_message(lambda: peers.follow(topic, lambda: "", seconds=WAIT_SECONDS))
