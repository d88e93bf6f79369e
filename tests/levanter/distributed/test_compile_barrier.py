"""A program that runs together: compiled first, then met, then run, and all of that once."""

import haliax as hax
import jax
import numpy as np
import pytest

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.distributed import compile_barrier

pytestmark = pytest.mark.quick

COMPILED = "/jax/core/compile/backend_compile_duration"
Batch = hax.Axis("batch", 8)


@pytest.fixture
def happened(monkeypatch):
    """What happens, in order: a compilation, a meeting, a run."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs) -> None:
        del duration_secs, kwargs
        if event == COMPILED:
            found.append("compiled")

    jax.monitoring.register_event_duration_secs_listener(listen)
    monkeypatch.setattr(compile_barrier, "barrier", found.append)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compiles_then_meets_then_runs(devices, happened):
    mesh = MeshSpec.of(data=8).build(devices)
    compute = AxisMapping({"batch": "data"})
    value = hax.NamedArray(jax.ShapeDtypeStruct((8,), np.float32), (Batch,))  # pyright: ignore

    def step(state, scale):
        jax.debug.callback(lambda: happened.append("ran"))
        return state * scale, hax.sum(state)

    program = Program(
        name="step",
        function=step,
        inputs=(
            Input(name="state", value=value, placement=compute),
            Input(name="scale", value=jax.ShapeDtypeStruct((), np.float32), placement=AxisMapping()),
        ),
        mappings=Mappings(compute=compute),
        donate=("state",),
    )
    values = np.arange(8, dtype=np.float32)
    state = hax.NamedArray(jax.device_put(values, jax.NamedSharding(mesh, jax.P("data"))), (Batch,))
    happened.clear()
    for n in range(3):
        # A wrapper of its own each time, as whoever pauses a run makes one for each pause.
        before, (state, total) = state, compile_barrier.jit_together(program, mesh)(state, np.float32(2))
        assert float(total.array) == 28 * 2**n and before.array.is_deleted()
    np.testing.assert_array_equal(state.array, 8 * values)
    jax.effects_barrier()
    assert happened == ["compiled", "the first step", "ran", "ran", "ran"]


def test_another_mesh_is_another_program(devices, happened):
    value = hax.NamedArray(jax.ShapeDtypeStruct((8,), np.float32), (Batch,))  # pyright: ignore
    program = Program(name="double", function=lambda x: x * 2, inputs=(Input(name="x", value=value, placement=None),))
    for mesh in (MeshSpec.of(data=8).build(devices), MeshSpec.of(data=4, model=2).build(devices)):
        x = hax.NamedArray(jax.device_put(np.ones(8, np.float32), jax.NamedSharding(mesh, jax.P("data"))), (Batch,))
        for _ in range(2):
            np.testing.assert_array_equal(compile_barrier.jit_together(program, mesh)(x).array, 2 * np.ones(8))
    assert happened.count("the first double") == happened.count("compiled") == 2


def test_what_compiles_for_long_is_said(happened, caplog, monkeypatch):
    monkeypatch.setattr(compile_barrier, "LOG_AFTER_SECONDS", 0.05)
    with caplog.at_level("INFO"), compile_barrier._log_compilation("train_step"):
        assert not caplog.messages
        while not caplog.messages:
            pass
        assert caplog.messages == ["compiling train_step"]
    assert caplog.messages[1].startswith("compiled train_step in 0:0")
    monkeypatch.setattr(compile_barrier, "LOG_AFTER_SECONDS", 30.0)
    with caplog.at_level("INFO"), compile_barrier._log_compilation("score"):
        pass
    assert len(caplog.messages) == 2
