"""The real TPU compiler against the accelerator table: devices, places, memory, refusals."""

from pathlib import Path

import pytest

from haliax_ext.meshspec import MeshSpec
from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, Refused, compile_programs
from levanter.plan.device_order import pod_coordinates

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        not __import__("importlib.util").util.find_spec("libtpu"), reason="libtpu is not installed (the `plan` extra)"
    ),
]
PROGRAMS = Path(__file__).parent / "described_programs.py"


def compile_for(target: str, function: str, **mesh: int):
    return compile_programs(f"{PROGRAMS}:{function}", {"mesh": mesh}, target=target)


@pytest.mark.parametrize(
    ("target", "mesh"),
    [
        ("v4-16", {"data": 4, "model": 2}),
        ("v5p-8", {"data": 2, "model": 2}),
        ("v5e-8", {"data": 4, "model": 2}),
        ("v6e-8", {"data": 2, "model": 4}),
        ("tpu7x-16", {"data": 4, "model": 4}),
    ],
)
def test_a_program_that_fits_and_one_that_does_not(target, mesh):
    small, huge = compile_for(target, "small_and_huge", **mesh)
    pod = parse_accelerator(target)
    assert isinstance(small, Compiled)
    weights = 2 * 3 * 1024 * 2048 * 2 // pod.devices
    rows = 64 // mesh["data"] * 1024 * 2
    assert small.memory.argument == pytest.approx(weights + rows, rel=0.03)
    assert small.figures is not None and small.figures.has_cycles and small.figures.unknown == ()
    assert {over for _, over, _ in small.figures.collective_bytes()} >= {"data", "model"}
    # Where JAX would place this mesh is known without libtpu.
    assert small.coordinates == pod_coordinates(MeshSpec.of(**mesh), pod)
    # The compiler states what a device has, to a hundredth of a GiB.
    assert isinstance(huge, Refused)
    assert huge.refusal.available == pytest.approx(pod.hbm_bytes, abs=0.006 * (1 << 30))
    assert huge.refusal.needed > huge.refusal.available


def test_two_slices():
    mesh = {"slices": 2, "data": 2, "model": 2}
    (small,) = compile_for("2xv6e-4", "small", **mesh)
    assert isinstance(small, Compiled) and small.figures is not None
    spec = MeshSpec(axes=tuple(mesh.items()), dcn=("slices",))
    assert small.coordinates == pod_coordinates(spec, parse_accelerator("2xv6e-4"))
    gradients = 3 * 2 * (1024 * 2048 // 4) * 2
    assert small.figures.collective_bytes()["all-reduce", "slices", "dcn"] == gradients + 512
