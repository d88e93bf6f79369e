"""Standard output whose reader has gone: `python -m levanter.main.train_lm --help | head`."""

import os
import select
import sys
from typing import IO


def output_is_lost(error: BaseException | None = None) -> bool:
    """Writes out what is still held back; whether some of what was printed is not read by anybody.

    What is printed afterwards, Python's own last flush too, then goes nowhere instead of failing.

    Args:
        error: what printing ended with, if it did: the stream that it was raised by may hold nothing back any more.
    """
    lost = False
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue  # a program may be started without one
        try:
            stream.flush()
            gone = isinstance(error, BrokenPipeError) and _has_no_reader(stream)
        except BrokenPipeError:
            gone = True
        if gone:
            lost = True
            _silence(stream)
    return lost


def _has_no_reader(stream: IO[str]) -> bool:
    try:
        number = stream.fileno()
    except OSError:
        return False  # a stream in memory
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _silence(stream: IO[str]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
