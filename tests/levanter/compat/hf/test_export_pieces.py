"""An export that comes from devices piece by piece: the bytes of one that never was on a device, for every family."""

import math

import jax
import numpy as np
import pytest
from helpers.family_arrays import SPEC, on_devices, planned
from helpers.family_models import ESSENTIAL

from haliax_ext.device_to_host import gather_to_host
from haliax_ext.program import Program
from haliax_ext.saving import gather_tensors, saving_programs

LIMIT = 32 << 10
"""Less than most tensors of these models take."""


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("family", [name if name in ("llama", "qwen3_moe", "gpt_neox") else
                                    pytest.param(name, marks=pytest.mark.slow) for name in ESSENTIAL])  # fmt: skip
def test_bytes_of_every_tensor(devices, family):
    plan, sharding, values = planned(family)
    expected = {tensor.name: whole for tensor, whole in gather_tensors(plan.tensors, values)}
    mesh = SPEC.build(devices)
    arrays, ran = on_devices(sharding, values, mesh), []

    def jit(program: Program, mesh):
        ran.append(program.name)
        return program.jit(mesh)

    for tensor, whole in gather_tensors(plan.tensors, arrays, jit=jit, limit=LIMIT):
        assert same(whole, expected.pop(tensor.name)), tensor.name
    assert not expected
    programs = saving_programs(plan.tensors, sharding, hosts=1, limit=LIMIT)
    assert {program.name for program in programs} == set(ran)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ESSENTIAL)])
def test_as_from_other_processes_every_element_is_brought_once(devices, family):
    """The gathers of a run of several processes, on the devices of one."""
    plan, sharding, values = planned(family)
    expected = {tensor.name: whole for tensor, whole in gather_tensors(plan.tensors, values)}
    arrays, ran = on_devices(sharding, values, SPEC.build(devices)), {}

    def jit(program: Program, mesh):
        run = program.jit(mesh)

        def call(array, where):
            ran[program.name] = program
            found = run(array, where)
            brought[0] += found.size
            return found

        return call

    for tensor in plan.tensors:
        brought, whole = [0], np.empty(tensor.shape, tensor.dtype)
        for piece in tensor.pieces:
            cut = any(sharding.spec(piece.target))
            for box, found in gather_to_host(arrays[piece.target], piece.box, jit=jit, limit=LIMIT, gathered=cut):
                piece.write(found, whole, box)
        assert same(whole, expected[tensor.name]), tensor.name
        # Rows that only pad, and replicas that give alike, come too.
        replicas = 1 if any(cut for piece in tensor.pieces for cut in sharding.spec(piece.target)) else SPEC.size
        assert math.prod(tensor.shape) <= brought[0] <= max(replicas, 1.1) * math.prod(tensor.shape)
    programs = saving_programs(plan.tensors, sharding, hosts=2, limit=LIMIT)
    assert {program.name for program in programs} == set(ran)
    jax.clear_caches()
