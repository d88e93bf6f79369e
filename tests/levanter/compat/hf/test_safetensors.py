"""SafetensorsSource against the safetensors library, slice by slice."""

import collections
import re
from concurrent.futures import ThreadPoolExecutor

import fsspec
import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from haliax_ext.sources import TensorSource
from levanter.compat.hf import strided_reads
from levanter.compat.hf.errors import CorruptFileError, MissingCheckpointFileError
from levanter.compat.hf.readers import LocalFile, RemoteFile
from levanter.compat.hf.safetensors import SafetensorsSource
from levanter.io.ranges import LibraryFile, RangeError, RangeFetcher, ReplacedError

pytestmark = pytest.mark.quick

DTYPES = [
    np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32, np.uint64, np.bool_,
]  # fmt: skip


def some_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {np.dtype(dtype).name: (rng.normal(size=(5, 6)) * 3).astype(dtype) for dtype in DTYPES}
    return made | {
        "wide": rng.normal(size=(40, 3000)).astype(ml_dtypes.bfloat16),
        "deep": rng.normal(size=(3, 4, 5, 6)).astype(np.float32),
        "vector": rng.normal(size=(700,)).astype(np.float16),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.int8),
    }


def load_file(path) -> dict[str, np.ndarray]:
    """What the safetensors library finds in a file, with the dtypes that were written."""
    written = some_tensors()
    return {
        name: np.frombuffer(found["data"], written[name].dtype).reshape(found["shape"])
        for name, found in deserialize(path.read_bytes())
    }


def random_index(rng, shape):
    index = []
    for size in shape:
        start = int(rng.integers(0, size + 1))
        index.append(slice(start, int(rng.integers(start, size + 1))))
    return tuple(index)


def whole(array):
    return tuple(slice(0, size) for size in array.shape)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    save_file(some_tensors(), path, metadata={"format": "pt"})
    return path


def test_every_dtype_reads_as_the_library_reads_it(file):
    source, oracle = SafetensorsSource.from_files(file), load_file(file)
    assert isinstance(source, TensorSource)
    assert source.metadata == {"format": "pt"}
    assert source.tensors.keys() == oracle.keys()
    for name, expected in oracle.items():
        info = source.tensors[name]
        assert (info.shape, info.dtype, info.nbytes) == (expected.shape, expected.dtype, expected.nbytes)
        found = source.read(name, whole(expected))
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["wide", "deep", "vector", "scalar", "empty", "float8_e4m3fn"])
def test_random_slices_and_exact_byte_accounting(file, name):
    source, expected = SafetensorsSource.from_files(file), load_file(file)[name]
    rng = np.random.default_rng(1)
    for _ in range(60):
        index = random_index(rng, expected.shape)
        before = source.bytes_read
        found = source.read(name, index)
        assert found.tobytes() == expected[index].tobytes() and found.shape == expected[index].shape
        ranges = source.byte_ranges(name, index)
        assert source.bytes_read - before == ranges.nbytes == sum(r.nbytes for r in ranges)


def test_byte_ranges_point_at_the_bytes_of_the_file(file):
    source, expected = SafetensorsSource.from_files(file), load_file(file)["wide"]
    index = (slice(3, 9), slice(100, 2500))
    content = file.read_bytes()
    joined = b"".join(content[r.start : r.stop] for r in source.byte_ranges("wide", index))
    assert joined == expected[index].tobytes()
    assert {r.file for r in source.byte_ranges("wide", index)} == {str(file)}


def test_reads_in_place_whatever_the_layout_of_the_target(file, monkeypatch):
    monkeypatch.setattr(strided_reads, "COPY_BUFFER_BYTES", 1000)
    source, oracle = SafetensorsSource.from_files(file), load_file(file)
    wide, deep = oracle["wide"], oracle["deep"]
    stacked = np.zeros((2, *wide.shape), wide.dtype)
    assert source.read("wide", whole(wide), stacked[1]) is not None
    assert np.array_equal(stacked[1], wide) and not stacked[0].any()
    turned = np.zeros(wide.shape[::-1], wide.dtype).T  # column-major
    source.read("wide", whole(wide), turned)
    assert np.array_equal(turned, wide)
    spaced = np.zeros((3, 8, 5, 6), deep.dtype)[:, ::2]
    source.read("deep", whole(deep), spaced)
    assert np.array_equal(spaced, deep)
    part = np.zeros((3, 4, 5, 3), deep.dtype)  # gaps in the file, through a small buffer
    source.read("deep", (*whole(deep)[:3], slice(1, 4)), part)
    assert np.array_equal(part, deep[..., 1:4])


def test_a_contiguous_slice_goes_straight_into_the_target(file, monkeypatch):
    source, wide = SafetensorsSource.from_files(file), load_file(file)["wide"]
    seen = []
    original = LocalFile.read_into

    def spy(self, start, buffer):
        seen.append(np.frombuffer(buffer, np.uint8).ctypes.data)
        original(self, start, buffer)

    monkeypatch.setattr(LocalFile, "read_into", spy)
    out = np.empty((7, 3000), wide.dtype)
    source.read("wide", (slice(2, 9), slice(0, 3000)), out)
    assert seen == [out.ctypes.data]
    assert np.array_equal(out, wide[2:9])


def test_many_threads_read_one_source(file):
    source, oracle = SafetensorsSource.from_files(file), load_file(file)
    rng = np.random.default_rng(2)
    wanted = [(name, random_index(rng, oracle[name].shape)) for name in ["wide", "deep", "vector"] * 40]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda item: source.read(*item), wanted))
    for (name, index), array in zip(wanted, found, strict=True):
        assert array.tobytes() == oracle[name][index].tobytes()
    assert source.bytes_read == sum(source.byte_ranges(name, index).nbytes for name, index in wanted)


def test_several_files_in_the_order_of_their_names(tmp_path):
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "2.safetensors")
    save_file({"z": np.ones(2, np.float32), "a": np.zeros(3, np.float32)}, tmp_path / "1.safetensors")
    source = SafetensorsSource.from_files(tmp_path / "2.safetensors", tmp_path / "1.safetensors")
    order = sorted(
        source.tensors, key=lambda name: [(r.file, r.start) for r in source.byte_ranges(name, (slice(0, 2),))]
    )
    assert list(source.tensors) == order and order[-1] == "b"
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "1.safetensors")
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    with pytest.raises(CorruptFileError) as caught:
        SafetensorsSource.from_files(one, two)
    assert str(caught.value) == f"{one}, {two}: tensor 'b' is both in {one} and in {two}"


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(1000, dtype=np.float32)}, path)
    source = SafetensorsSource.from_files(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 400)
    with pytest.raises(CorruptFileError) as caught:
        source.read("a", (slice(0, 1000),))
    assert str(caught.value) == f"{path}: the file ends at byte {size - 400}, inside a range to byte {size}"
    path.unlink()
    with pytest.raises(MissingCheckpointFileError, match="there is no such file"):
        source.read("a", (slice(0, 1000),))


class Flaky:
    """A file system on which the first tries of every range fail, and which counts.

    Tries are counted by range: reads run in parallel, and a count over all of them could fail one range for ever.
    """

    def __init__(self, content: bytes, failures: int):
        self.content, self.failures, self.tries = content, failures, collections.Counter()

    @property
    def calls(self):
        return self.tries.total()

    def info(self, path):
        return {"size": len(self.content)}

    def cat_file(self, path, start, end):
        self.tries[start, end] += 1
        if self.tries[start, end] <= self.failures:
            raise ConnectionResetError("connection reset by peer")
        return self.content[start:end]


def remote_file(filesystem, path: str, name: str, *, delays: tuple[float, ...] = (0, 0, 0), **options) -> RemoteFile:
    return RemoteFile(LibraryFile(filesystem, path, name), RangeFetcher(delays=delays), **options)


def test_remote_reads_are_tried_again_after_transient_failures(file):
    oracle = load_file(file)["wide"]
    remote = Flaky(file.read_bytes(), failures=2)
    source = SafetensorsSource({"m": remote_file(remote, "m", "store://m", max_gap=0)})
    index = (slice(0, 40), slice(10, 2000))
    assert source.read("wide", index).tobytes() == oracle[index].tobytes()
    assert remote.calls > 40
    assert source.remote is not None and source.remote.tally.retried == remote.calls - source.remote.tally.ranges


def test_a_remote_that_stays_broken_names_the_file(file):
    remote = Flaky(file.read_bytes(), failures=100)
    size = min(file.stat().st_size, 64 << 10)
    with pytest.raises(RangeError) as caught:
        SafetensorsSource({"m": remote_file(remote, "m", "store://m", delays=(0,))})
    assert remote.calls == 2
    said = rf"store://m: bytes 0 to {size:,} could not be read, tried 2 times in \d+\.\d s: connection reset by peer"
    assert re.match(said, str(caught.value))


def test_remote_ranges_through_fsspec(file):
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/model.safetensors", file.read_bytes())
    reader = remote_file(memory, "/bucket/model.safetensors", "memory://bucket/model.safetensors")
    source, oracle = SafetensorsSource({"m": reader}), load_file(file)
    rng = np.random.default_rng(3)
    for name in ["wide", "deep", "vector"] * 10:
        index = random_index(rng, oracle[name].shape)
        assert source.read(name, index).tobytes() == oracle[name][index].tobytes()
    missing = remote_file(memory, "/bucket/none", "memory://bucket/none")
    with pytest.raises(MissingCheckpointFileError) as caught:
        SafetensorsSource({"m": missing})
    assert str(caught.value) == "memory://bucket/none: there is no such file"


def test_a_file_that_is_replaced_behind_a_library_is_found_out_at_the_end(file, tmp_path):
    """Answers to ranges that a library gives do not say which file they are of."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/replaced.safetensors", file.read_bytes())
    reader = remote_file(memory, "/bucket/replaced.safetensors", "memory://bucket/replaced.safetensors")
    source = SafetensorsSource({"m": reader})
    assert source.remote is not None
    source.remote.settle()
    memory.pipe("/bucket/replaced.safetensors", file.read_bytes() + b"more")
    with pytest.raises(
        ReplacedError, match=r"replaced\.safetensors: it was replaced while it was read: it had [\d,]+ "
    ):
        source.remote.settle()
    memory.rm("/bucket/replaced.safetensors")
    with pytest.raises(ReplacedError, match="no longer exists"):
        source.remote.settle()
