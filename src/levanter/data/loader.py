"""Prefetches training batches in a background thread."""

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import suppress

from levanter.data.rows import TrainRows
from levanter.data.train_dataset import TrainingData


def batches(
    data: TrainingData,
    *,
    first: int,
    stop: int,
    rows: Callable[[int], tuple[int, int]] | None = None,
    ahead: int = 2,
) -> Generator[tuple[int, TrainRows], None, None]:
    """The batches of steps `first` to `stop`, each with its step; the next `ahead` are made in the background.

    Args:
        data: the rows.
        first: the first step, of a run that begins or resumes.
        stop: the step behind the last.
        rows: step → the rows of its global batch to make, first and behind the last; all of them by default.
        ahead: batches kept ready.

    Raises:
        DataError: where the batch is asked for whose making failed.
    """
    ready: queue.Queue[tuple[int, TrainRows] | BaseException] = queue.Queue(maxsize=max(ahead, 1))
    stopped = threading.Event()

    def put(item: tuple[int, TrainRows] | BaseException) -> bool:
        # With a timeout: a consumer that stops early must not leave the thread blocked in a full queue.
        while not stopped.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def make() -> None:
        try:
            for step in range(first, stop):
                if not put((step, data.rows(step) if rows is None else data.rows(step, *rows(step)))):
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised again where the batch is asked for
            put(error)

    thread = threading.Thread(target=make, name="make-batches", daemon=True)
    thread.start()
    try:
        for _ in range(first, stop):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
