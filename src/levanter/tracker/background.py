"""`BackgroundTracker`: hands every call to a thread, so that a slow service never delays a step.

Calls keep their order. When the queue is full, the caller waits (and logs it once): no metrics are dropped. A service
that fails, or that accepts no call for as long as the end of a run would wait for it, is given up with a message:
tracking ends, the run continues.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from levanter.tracker.base import Metrics, Tracker, as_plain, detached

logger = logging.getLogger(__name__)


class BackgroundTracker(Tracker):
    """Runs another tracker in a thread.

    Args:
        tracker: the tracker that does the work.
        max_queue_size: how many calls may wait.
        finish_timeout: how many seconds to wait for the service: `finish`, and any call that finds the queue full.
    """

    def __init__(self, tracker: Tracker, *, max_queue_size: int, finish_timeout: float):
        self.name = tracker.name
        self.tracker = tracker
        self._finish_timeout = finish_timeout
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(max_queue_size)
        self._broken = False
        self._finished = False
        self._warned = False
        # A daemon: a service that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()
        # If a script ends right after its last metric, the queue is drained first. Hooks run in the reverse
        # order of their registration, so this one comes before the service's own, which was registered before.
        atexit.register(self.finish)

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        # Values are copied to the host here: device arrays may be donated before the thread reads them.
        plain = as_plain(hparams)
        self._put(lambda: self.tracker.log_hyperparameters(plain))

    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        plain = detached(metrics)
        self._put(lambda: self.tracker.log(plain, step=step, commit=commit))

    def log_summary(self, metrics: Metrics) -> None:
        plain = as_plain(metrics)
        self._put(lambda: self.tracker.log_summary(plain))

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        self._put(lambda: self.tracker.log_artifact(path, name=name, type=type))

    def finish(self) -> None:
        if self._finished:
            return
        # An explicit `finish` replaces the one at exit; without this the hook would keep the tracker alive.
        atexit.unregister(self.finish)
        deadline = time.monotonic() + self._finish_timeout
        # Queued before the flag is set, because `_put` takes nothing after it.
        # The `None` behind it ends the thread.
        self._put(self.tracker.finish)
        self._finished = True
        try:
            self._calls.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return  # `_put` has logged that the service was given up
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "tracker %s: not finished after %g s; queued calls are lost", self.name, self._finish_timeout
            )

    def _put(self, call: Callable[[], None]) -> None:
        if self._broken or self._finished:
            return
        if self._calls.full() and not self._warned:
            logger.warning("tracker %s: %d calls are queued; the run waits for it", self.name, self._calls.qsize())
            self._warned = True
        try:
            # Blocks while the queue is full: metrics are delayed rather than dropped.
            self._calls.put(call, timeout=self._finish_timeout)
        except queue.Full:
            self._broken = True
            logger.warning(
                "tracker %s: has accepted no call for %g s; nothing more is tracked there",
                self.name,
                self._finish_timeout,
            )

    def _work(self) -> None:
        # A broken tracker still empties the queue, so that no caller waits for space in it.
        while (call := self._calls.get()) is not None:
            if self._broken:
                continue
            try:
                call()
            except Exception:
                self._broken = True
                logger.exception("tracker %s failed; nothing more is tracked there", self.name)
