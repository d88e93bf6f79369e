"""How many compile workers a machine has room for."""

import pytest

from levanter.plan import compile_pool

pytestmark = pytest.mark.quick

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "cores", "programs", "expected"),
    [(20, 2, 5, 2), (20, 16, 5, 4), (9, 16, 5, 1), (1, 16, 5, 1), (200, 16, 3, 3), (None, 2, 9, 2)],
)
def test_how_many_workers_there_is_room_for(monkeypatch, free, cores, programs, expected):
    monkeypatch.setattr(compile_pool, "free_memory", lambda: None if free is None else free * GIB)
    monkeypatch.setattr(compile_pool.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert compile_pool.num_workers(programs) == expected
