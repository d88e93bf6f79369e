"""What process 0 tells the others: tables, that it is done, or what went wrong, whatever it is."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from levanter.eval.harness import broadcast
from levanter.eval.harness.broadcast import Process0Error, follow_process_0, lead_processes, send_generation, send_table
from levanter.eval.harness.encoding import HarnessError, Query
from levanter.eval.harness.packing import row_shapes
from levanter.eval.harness.request_table import Table
from levanter.runplan import NonFiniteResultError

pytestmark = pytest.mark.quick


@pytest.fixture
def told(monkeypatch):
    """Messages on their way, as JSON."""
    waiting: list[str] = []
    monkeypatch.setattr(broadcast, "broadcast", lambda topic, message: waiting.append(json.dumps(message)))
    monkeypatch.setattr(broadcast, "receive_broadcast", lambda topic: json.loads(waiting.pop(0)))
    return waiting


def table() -> Table:
    asked = [Query(inputs=np.arange(3, 9, dtype=np.int32), targets=np.asarray([4], np.int32))]
    return Table.from_queries(asked, row_shapes(64, tokens=64, ways=1), lambda shape: shape.length)


def followed(done: list):
    scorer = SimpleNamespace(run=lambda table: done.append(table.digest))
    return follow_process_0(scorer, lambda: done.append("texts"))  # pyright: ignore[reportArgumentType]


def test_others_compute_the_same_in_the_same_order(told):
    mine = table()
    with lead_processes():
        send_table(mine)
        send_generation()
        send_table(mine)
    done: list[str] = []
    assert followed(done) == 2 and done == [mine.digest, "texts", mine.digest] and not told


@pytest.mark.parametrize(
    ("error", "code"),
    [(HarnessError("a task failed"), 2), (NonFiniteResultError("not finite"), 1), (RuntimeError("a bug"), 1)],
)
def test_a_failure_is_told_with_its_code(told, error: Exception, code: int):
    def fails() -> None:
        with lead_processes():
            send_table(table())
            raise error

    with pytest.raises(type(error)):
        fails()
    with pytest.raises(Process0Error) as heard:
        followed([])
    assert str(heard.value) == str(error) and heard.value.exit_code == code
