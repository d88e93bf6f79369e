"""Rewards that are computed in a process of their own, with bounds on time and memory.

A *worker* (`rewards.worker_process`) loads one function and applies it to batches of answers. Whatever the function
does (hang, leak, fork, print, exit), the run goes on: the worker is killed at its bound with everything that it
started, and the next batch gets a new one.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from levanter.rewards import worker_process
from levanter.rewards.choice import RewardError, RewardInput, as_fields

START_SECONDS = 120.0
"""For starting a process and importing a module, which may import a whole framework."""
OUTPUT_BYTES = 2000
"""Of what the function prints that is shown with an error."""
REPLY_BYTES = 1 << 28
MARK = "LEVANTER_REWARD_WORKER"
"""In the environment of a worker and of everything that it starts, by which that is recognized."""


class FunctionReward:
    """A `Reward` whose values come from a worker.

    Args:
        target: what the worker loads; see `worker_process.load`.
        seconds: bound of the time for a batch.
        memory_mib: bound of the address space of the worker.
    """

    def __init__(self, target: Mapping[str, Any], *, seconds: float, memory_mib: int):
        self._target, self._seconds, self._memory_mib = dict(target), seconds, memory_mib
        self._worker: _Worker | None = None

    def score(self, samples: Sequence[RewardInput]) -> Sequence[float]:
        """See `Reward.score`."""
        request = {"samples": [as_fields(sample) for sample in samples]}
        try:
            if self._worker is None:
                self._worker = _Worker(self._memory_mib)
                self._worker.call({"load": self._target}, START_SECONDS)
            return self._worker.call(request, self._seconds)["values"]
        except BaseException:
            # Not only after a RewardError: Ctrl-C during a batch leaves no process either.
            self.close()
            raise

    def close(self) -> None:
        """Kills the worker and what it started; the next batch would start a new one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


class _Worker:
    """One worker process and the pipes to it."""

    def __init__(self, memory_mib: int):
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._replies, reply_end = os.pipe()
        self._output, self._pending = b"", b""
        # An empty entry of `sys.path` is the working folder. JAX in a reward must not open the run's accelerator.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = dict(os.environ) | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", MARK: self._mark}
        # `-P`: the folder of the script would be first in the import path, where `numbers` is not the standard one.
        command = [sys.executable, "-P", worker_process.__file__, str(reply_end), str(memory_mib)]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(reply_end,),
            start_new_session=True,
        )
        os.close(reply_end)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._printed = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._requests, self._printed, self._replies):
            # So that none of the three can hold up the others, or the clock.
            os.set_blocking(descriptor, False)

    def call(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a request and waits for its reply, reading what the function prints meanwhile.

        Raises:
            RewardError: the function raised, the time is over, or the worker died.
        """
        # A value that JSON does not have (a date of a Parquet file) arrives as its text.
        data = memoryview(json.dumps(request, default=str).encode() + b"\n")
        end, self._output = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_WRITE)
            selector.register(self._printed, selectors.EVENT_READ)
            selector.register(self._replies, selectors.EVENT_READ)
            while True:
                # Pipes are no sign of life: what the function started may hold them open. So the process is polled.
                events = {key.fd for key, _ in selector.select(timeout=0.1)}
                if self._requests in events:
                    data = data[self._write(data) :]
                    if not data:
                        selector.unregister(self._requests)
                if self._printed in events and not self._read_output():
                    selector.unregister(self._printed)
                reply = self._read_reply() if self._replies in events else None
                if reply is not None:
                    if "error" in reply:
                        raise RewardError(f"the function failed: {reply['error']}{self._shown()}")
                    return reply
                if self._process.poll() is not None:
                    raise RewardError(f"the worker {_ending(self._process.returncode)}{self._shown()}")
                if time.monotonic() > end:
                    raise RewardError(f"no values after {seconds:g} s, the limit; the worker was killed{self._shown()}")

    def _write(self, data: memoryview) -> int:
        # A dead worker closes the pipe; `call` reports how it died.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            return os.write(self._requests, data[: 1 << 16])
        return 0

    def _read_output(self) -> bool:
        """Reads what was printed, keeps the end of it, and returns whether more may come."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._printed, 1 << 16)
            self._output = (self._output + data)[-OUTPUT_BYTES:]
            return bool(data)
        return True

    def _read_reply(self) -> dict[str, Any] | None:
        with contextlib.suppress(BlockingIOError):
            self._pending += os.read(self._replies, 1 << 20)
        if len(self._pending) > REPLY_BYTES:
            raise RewardError(f"a reply of more than {REPLY_BYTES:,} bytes")
        # A long reply arrives in pieces.
        if b"\n" not in self._pending:
            return None
        line, self._pending = self._pending.split(b"\n", 1)
        try:
            return json.loads(line)
        except ValueError:
            raise RewardError("the function wrote to a descriptor that is not its own") from None

    def _shown(self) -> str:
        """The end of what the function printed, for a message."""
        lines = self._output.decode(errors="replace").strip().splitlines()[-5:]
        return "".join(f"\n  printed: {line[:200]}" for line in lines)

    def kill(self) -> None:
        """Kills the process group and whatever left it."""
        # SIGKILL at once: a function may ignore SIGTERM, and nothing in a worker is worth saving.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # A process that was started as a daemon is in another group. Killing may race with a fork: again until none.
        for _ in range(20):
            others = _marked(self._mark)
            for pid in others:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not others:
                break
            time.sleep(0.01)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        os.close(self._replies)


def _marked(mark: str) -> list[int]:
    """Processes that were started by a worker; none where there is no /proc."""
    wanted, pids = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        # Of other users, or ended meanwhile.
        with contextlib.suppress(OSError):
            is_zombie = b") Z " in (entry / "stat").read_bytes()
            if wanted in (entry / "environ").read_bytes() and not is_zombie:
                pids.append(int(entry.name))
    return pids


def _ending(code: int) -> str:
    """How a process ended."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
