"""What process 0 tells the others of a harness: tables, texts to come, and that it is done or failed.

Nothing is said for a batch: whoever has the table knows all of them. An exception on process 0 is told like everything
else, so nobody waits for a request that never comes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from levanter.base.exit_codes import BAD_INPUT, INTERNAL_ERROR
from levanter.distributed.broadcast import hear_next, tell_all
from levanter.eval.harness.request_table import Table
from levanter.eval.harness.scoring import Scorer

_TOPIC = "the harness"


class FailedElsewhereError(ValueError):
    """Process 0 failed; this process says and ends as it does."""

    def __init__(self, said: str, exit_code: int):
        self.exit_code = exit_code
        super().__init__(said)


def tell_table(table: Table) -> None:
    """Lets the other processes compute a table, which this one has to compute too."""
    tell_all(_TOPIC, {"what": "table", "table": table.message()})


def tell_texts() -> None:
    """Lets the other processes follow the engine, until it is let go."""
    tell_all(_TOPIC, {"what": "texts"})


@contextmanager
def leading() -> Iterator[None]:
    """Surrounds all that process 0 asks of the model; behind it the others are let go, or told what went wrong."""
    try:
        yield
    except Exception as error:
        code = getattr(error, "exit_code", BAD_INPUT if isinstance(error, (ValueError, OSError)) else INTERNAL_ERROR)
        tell_all(_TOPIC, {"what": "failed", "said": str(error), "code": code})
        raise
    tell_all(_TOPIC, {"what": "done"})


def follow(scorer: Scorer, texts: Callable[[], object]) -> int:
    """Computes what process 0 tells, until it tells no more.

    Args:
        scorer: this process's part of the model.
        texts: follows the engine until it is let go.

    Returns:
        How many tables there were.

    Raises:
        FailedElsewhereError: process 0 failed.
        PeerLostError: it is gone.
    """
    count = 0
    while (told := hear_next(_TOPIC))["what"] != "done":
        if told["what"] == "failed":
            raise FailedElsewhereError(told["said"], told["code"])
        if told["what"] == "texts":
            texts()
        else:
            scorer.run(Table.of_message(told["table"]))
            count += 1
    return count
