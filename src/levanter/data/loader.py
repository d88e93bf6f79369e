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
    """The batches of steps `first` to `stop`, each with its step; a background thread prepares the next `ahead`.

    Args:
        data: the rows.
        first: the first step, 0, or the step at which a run resumes.
        stop: the step after the last.
        rows: step → the range (start, stop) of rows of its global batch to make; all by default.
        ahead: the number of batches prepared in advance.

    Raises:
        DataError: raised at the step whose batch could not be made, not before.
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
        # The queue keeps the order, so the consumer gets all earlier batches before the error.
        except BaseException as error:  # noqa: BLE001 - it is raised again where the batch is asked for
            put(error)

    # One thread, because batches must come in order.
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
        # Also when the consumer abandons the generator: no thread may read files that the caller closes next.
        thread.join()
