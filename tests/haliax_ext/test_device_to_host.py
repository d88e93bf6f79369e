"""Arrays come to the hosts piece by piece: every element once, bit by bit, and no device holds more than a piece."""

import math

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_ext.device_to_host import gather_to_host, plan_host_gather
from haliax_ext.leaf_layout import box_size, to_slices
from haliax_ext.program import Program
from haliax_ext.reshard import TRANSIENT_LIMIT

SIZES = (("data", 4), ("model", 2))
CASES = {
    "rows and columns cut": ((64, 96), PartitionSpec("model", "data"), ((0, 64), (0, 96))),
    "rows that only pad": ((64, 96), PartitionSpec("model", "data"), ((0, 61), (0, 96))),
    "both mesh axes on one": ((7, 160), PartitionSpec(None, ("data", "model")), ((0, 7), (0, 160))),
    "nothing cut": ((37, 50), PartitionSpec(), ((0, 37), (0, 50))),
    "one layer of a stack": ((5, 24, 40), PartitionSpec(None, "data", "model"), ((3, 4), (0, 24), (0, 40))),
    "one layer of a stack that is cut": ((8, 24, 40), PartitionSpec("data", None, "model"), ((5, 6), (0, 24), (0, 40))),
    "one expert, both axes": ((16, 24, 40), PartitionSpec(("data", "model")), ((11, 12), (0, 24), (0, 40))),
    "one axis": ((1024,), PartitionSpec("data"), ((0, 1000),)),
}


def mesh_of(devices) -> Mesh:
    return Mesh(np.asarray(devices).reshape(4, 2), ("data", "model"))


def bits(shape, dtype) -> np.ndarray:
    """Every pattern of bits, numbers that are none among them."""
    drawn = np.random.default_rng(0).integers(0, 256, (math.prod(shape) * np.dtype(dtype).itemsize,), np.uint8)
    return drawn.view(dtype).reshape(shape)


def same_bits(a, b) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


class Heard:
    """Runs Programs and remembers their names, and the most that any device held of what they gave."""

    def __init__(self):
        self.names, self.most = [], 0

    def jit(self, program: Program, mesh: Mesh):
        run = program.jit(mesh)

        def call(array, where):
            self.names.append(program.name)
            before = {id(x) for x in jax.live_arrays()}
            found = run(array, where)
            self.most = max(
                self.most, *(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                             for x in jax.live_arrays() if id(x) not in before)
            )  # fmt: skip
            return found

        return call


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("limit", [16 << 10, 1 << 30])
@pytest.mark.parametrize("name", CASES)
def test_every_element_once_bit_by_bit(devices, name, limit, gathered):
    shape, spec, box = CASES[name]
    values = bits(shape, ml_dtypes.bfloat16)
    array = jax.device_put(values, NamedSharding(mesh_of(devices), spec))
    heard, times = Heard(), np.zeros(shape, int)
    for part, found in gather_to_host(array, box, jit=heard.jit, limit=limit, gathered=gathered):
        times[to_slices(part)] += 1
        assert same_bits(found, values[to_slices(part)])
    assert (times[to_slices(box)] == 1).all() and times.sum() == box_size(box)
    # What was planned is what ran.
    taking, _, _ = plan_host_gather(
        box, shape=shape, dtype=values.dtype, cuts=tuple(_axes(spec, n) for n in range(len(shape))), sizes=SIZES,
        gathered=gathered, limit=limit,
    )  # fmt: skip
    assert set(heard.names) == {program.name for program in taking.programs}
    assert len(heard.names) == len(list(taking.pieces()))
    assert limit < 1 << 30 or len(heard.names) == 1
    assert heard.most <= taking.transient_bytes <= max(limit, smallest(taking))


def _axes(spec: PartitionSpec, n: int) -> tuple[str, ...]:
    entry = spec[n] if n < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def smallest(taking) -> int:
    """A tile of the result for each shard that is gathered: less than that no piece can be."""
    return 64 << 10 if taking.gathered else 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8, np.bool_])
def test_dtypes_of_what_one_shard_owns(devices, dtype):
    shape, spec, box = CASES["one layer of a stack that is cut"]
    values = bits(shape, np.uint8) % 2 == 0 if dtype == np.bool_ else bits(shape, dtype)
    array = jax.device_put(values, NamedSharding(mesh_of(devices), spec))
    for part, found in gather_to_host(array, box, gathered=True):
        assert found.dtype == dtype and same_bits(found, values[to_slices(part)])


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", ["rows and columns cut", "one expert, both axes"])
def test_an_executable_takes_no_more_than_planned(devices, name, gathered):
    shape, spec, box = CASES[name]
    shape, box = tuple(4 * n for n in shape), tuple((4 * a, 4 * b) for a, b in box)
    if name == "one expert, both axes":
        box = ((11, 12), *box[1:])
    taking, _, _ = plan_host_gather(
        box, shape=shape, dtype=np.dtype(np.float32), cuts=tuple(_axes(spec, n) for n in range(len(shape))),
        sizes=SIZES, gathered=gathered, limit=100 << 10,
    )  # fmt: skip
    assert taking.transient_bytes <= 100 << 10
    for program in taking.programs:
        memory = program.lower(mesh_of(devices)).compile().memory_analysis()
        assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= taking.transient_bytes


# Vocabulary, width, bytes of an element, chips along the width and along the vocabulary.
EMBEDDINGS = {
    "gemma 3 27b, v5e-256, f32": (262_208, 5_376, 4, 256, 1),
    "gemma 3 27b, v5e-256, two axes": (262_208, 5_376, 4, 64, 4),
    "llama 3.1 405b, v5p-1024": (128_256, 16_384, 4, 512, 1),
    "llama 3.1 405b, one chip": (128_256, 16_384, 2, 1, 1),
    "gpt-2": (50_257, 768, 4, 8, 1),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("gathered", [False, True])
def test_no_array_is_too_large_for_the_budget(name, gathered):
    rows, width, itemsize, data, model = EMBEDDINGS[name]
    taking, _, _ = plan_host_gather(
        ((0, rows), (0, width)), shape=(rows, width), dtype=np.dtype(f"f{itemsize}"), cuts=(("model",), ("data",)),
        sizes=(("data", data), ("model", model)), gathered=gathered,
    )  # fmt: skip
    assert taking.transient_bytes <= TRANSIENT_LIMIT
    # Few sizes, so few Programs; and no more pieces than room asks for.
    assert len(taking.programs) <= 2
    given = math.prod(taking.local) * itemsize * (data * model if gathered else 1)
    assert len(list(taking.pieces())) <= 1 + 12 * given / TRANSIENT_LIMIT
    once = sum(math.prod(n) for _, n in taking.pieces())
    assert once == math.prod(taking.local) == rows * width // (data * model)


def test_pieces_cover_what_a_device_gives():
    taking, starts, owners = plan_host_gather(
        ((5, 6), (0, 24), (0, 40)), shape=(8, 24, 40), dtype=np.dtype(np.float32),
        cuts=(("data",), (), ("model",)), sizes=SIZES, gathered=True, limit=60_000,
    )  # fmt: skip
    # By hand: layer 5 is the second of the third of four shards of two.
    assert (starts, owners, taking.owned) == ((1, 0, 0), (2, 0, 0), (True, False, False))
    assert taking.local == (1, 24, 20)
    found = np.zeros(taking.local, int)
    for at, n in taking.pieces():
        found[tuple(slice(a, a + b) for a, b in zip(at, n, strict=True))] += 1
    assert (found == 1).all()
    assert len({n for _, n in taking.pieces()}) == len(taking.programs) <= 4
