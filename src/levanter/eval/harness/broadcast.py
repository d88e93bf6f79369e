"""Messages from process 0 to the other processes of a harness run: tables, requests for text, and the end of the run.

Batches need no messages: a table contains all of them. An exception on process 0 is sent like everything else, so that
no process waits for a request that never comes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from levanter.base.exit_codes import BAD_INPUT, INTERNAL_ERROR
from levanter.distributed.broadcast import broadcast, receive_broadcast
from levanter.eval.harness.request_table import Table
from levanter.eval.harness.scoring import Scorer

_TOPIC = "the harness"


class Process0Error(ValueError):
    """Process 0 failed; this process reports its message and exits with its code."""

    def __init__(self, message: str, exit_code: int):
        self.exit_code = exit_code
        super().__init__(message)


def send_table(table: Table) -> None:
    """Has the other processes execute a table, which this process executes as well."""
    broadcast(_TOPIC, {"what": "table", "table": table.message()})


def send_generation() -> None:
    """Has the other processes follow the engine until it is released."""
    broadcast(_TOPIC, {"what": "texts"})


@contextmanager
def lead_processes() -> Iterator[None]:
    """Surrounds the work of process 0; at its end the other processes are released, or receive the error."""
    try:
        yield
    except Exception as error:
        # All processes exit with the same code, as a launcher may report that of any of them.
        code = getattr(error, "exit_code", BAD_INPUT if isinstance(error, (ValueError, OSError)) else INTERNAL_ERROR)
        broadcast(_TOPIC, {"what": "failed", "said": str(error), "code": code})
        raise
    broadcast(_TOPIC, {"what": "done"})


def follow_process_0(scorer: Scorer, follow_engine: Callable[[], object]) -> int:
    """Executes the tables that process 0 sends, until it reports the end of the run.

    Args:
        scorer: the model on its devices.
        follow_engine: executes the engine's calls until process 0 releases it.

    Returns:
        The number of tables.

    Raises:
        Process0Error: process 0 failed.
        PeerLostError: the connection to process 0 is lost.
    """
    count = 0
    while (message := receive_broadcast(_TOPIC))["what"] != "done":
        if message["what"] == "failed":
            # Raised here as well, so that this process does not wait for a table that never comes.
            raise Process0Error(message["said"], message["code"])
        if message["what"] == "texts":
            follow_engine()
        else:
            # The results are dropped: only process 0 knows which query a target belongs to.
            scorer.run(Table.from_message(message["table"]))
            count += 1
    return count
