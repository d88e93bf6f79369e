"""A process that computes rewards, so that a user's function cannot harm the run: started by `levanter.rewards.worker`.

    python -P worker_process.py REPLY_FD MEMORY_MIB

It is run as a file and imports nothing of this package: a worker starts in the time of Python itself. Standard input
carries requests, a line of JSON each: first what to load, then batches. Replies, too, are lines of JSON, on a
descriptor of their own, since standard output belongs to the user's code. When standard input closes, because the run
ended or was killed, the worker and its process group end.
"""

import importlib
import json
import math
import os
import queue
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Function = Callable[[list[dict[str, Any]]], Any]


def load(target: Mapping[str, Any]) -> Function:
    """The function that a request names: of a module, or the matching of a regular expression."""
    if "pattern" in target:
        return regex(target["pattern"], full=target["full"], column=target["column"])
    function = importlib.import_module(target["module"])
    # Methods and functions of classes have dots in their names.
    for name in target["function"].split("."):
        function = getattr(function, name)
    if not callable(function):
        raise TypeError(f"{target['module']}:{target['function']} is {type(function).__name__}, expected a function")
    return function


def regex(pattern: str, *, full: bool, column: str | None) -> Function:
    """1 where an answer matches, and the matched text is that of the column."""
    # Compiled once; the pattern is valid, which the configuration has checked.
    compiled = re.compile(pattern)
    match = compiled.fullmatch if full else compiled.search

    def value(sample: Mapping[str, Any]) -> float:
        result = match(sample["answer"])
        if result is None or column is None:
            return float(result is not None)
        if sample["row"].get(column) is None:
            raise ValueError(f"a prompt has no column {column!r}; its columns: {', '.join(sorted(sample['row']))}")
        return float(result[1 if compiled.groups else 0] == str(sample["row"][column]))

    return lambda samples: [value(sample) for sample in samples]


def checked(values: object, count: int) -> list[float]:
    """The values that a function returned, as floats.

    Raises:
        ValueError: it did not return one finite number for each answer.
    """
    # Iterating over these would give characters and keys.
    if isinstance(values, str | bytes | Mapping):
        raise ValueError(f"returned {type(values).__name__}, expected a list of {count} numbers")
    try:
        listed = list(values)  # type: ignore[call-overload]
    except TypeError:
        raise ValueError(f"returned {type(values).__name__}, expected a list of {count} numbers") from None
    if len(listed) != count:
        raise ValueError(f"returned {len(listed)} values for {count} answers")
    return [number(value, n) for n, value in enumerate(listed)]


def number(value: object, position: int) -> float:
    """One value as a float; NumPy's scalars, arrays of one number and their booleans included."""
    plain, item = value, getattr(value, "item", None)
    if not isinstance(value, bool | int | float) and callable(item):
        # NumPy, JAX and torch have `item`; it fails for arrays of several numbers.
        try:
            plain = item()
        except (ValueError, TypeError, RuntimeError):
            plain = None
    if not isinstance(plain, bool | int | float):
        raise ValueError(f"returned {value!r:.60} ({type(value).__name__}) for answer {position}, expected a number")
    if not math.isfinite(plain):
        raise ValueError(f"returned {plain} for answer {position}, expected a finite number")
    return float(plain)


def last_line(error: BaseException) -> str:
    """The error with the file and line in which it was raised."""
    # The innermost frame, which is usually the user's; a whole traceback would fill the log at every step.
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:500]}{where}"


def watch(requests: "queue.SimpleQueue[bytes | None]", descriptor: int) -> None:
    """Reads requests, and ends the process group when there will be no more, even while a function runs."""
    with os.fdopen(descriptor, "rb") as stream:
        # A thread, because the main one is in the user's function when the run is killed.
        for line in stream:
            requests.put(line)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serves requests until standard input closes."""
    replies, mib = int(sys.argv[1]), int(sys.argv[2])
    # Inherited by what the function starts; an allocation beyond it is a MemoryError of the function.
    resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Requests move to another descriptor: a function that reads standard input gets nothing.
    descriptor, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=watch, args=(requests, descriptor), daemon=True).start()
    process, function = os.getpid(), None
    while True:
        # Blocks without a bound: an idle worker waits for the next step, and ends with the run.
        request = json.loads(requests.get() or b"{}")
        try:
            if "load" in request:
                function = load(request["load"])
                reply: dict[str, Any] = {"loaded": True}
            else:
                assert function is not None
                # Counted before the call: the list is the function's, which may empty it.
                count = len(request["samples"])
                reply = {"values": checked(function(request["samples"]), count)}
        # Everything that a user's function may raise, exits included; a signal ends the process without a reply.
        except BaseException as error:  # noqa: BLE001
            reply = {"error": last_line(error)}
        # A child that the function forked and that returned from it must not answer in the worker's place.
        if os.getpid() != process:
            os._exit(0)
        # A pipe takes a part of a long reply at a time.
        data = json.dumps(reply).encode() + b"\n"
        while data:
            data = data[os.write(replies, data) :]


if __name__ == "__main__":
    main()
