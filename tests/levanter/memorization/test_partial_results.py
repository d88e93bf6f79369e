"""Parts: atomic, checked, bound to one run; whatever is damaged is scored again and nothing else."""

import hashlib
import json
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from levanter.io import OtherRunError
from levanter.memorization.partial_results import PartStore
from levanter.memorization.results import Scores, score_columns

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
IDENTITY = {"text.sha256": "ab12", "model.num_layers": 2, "windows.bos": False, "schemes": ["k20"]}


def scores(n, k=3):
    return Scores(
        logprobs=-RNG.random((n, k)).astype(np.float32),
        ranks=RNG.integers(0, 9, (n, k)).astype(np.int32),
        top_lse=-RNG.random((n, k)).astype(np.float32),
        normalizers={"k20": RNG.random((n, k)).astype(np.float32)},
    )


def store(folder, windows=10, **changes):
    return PartStore(folder=str(folder), identity={**IDENTITY, **changes}, windows=windows, suffix_tokens=3)


@pytest.fixture
def begun(tmp_path):
    made = store(tmp_path / "book")
    made.begin()
    parts = [scores(4), scores(4), scores(2)]
    for first, part in zip((0, 4, 8), parts, strict=True):
        made.write(first, part)
    return made, parts


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name, array in other.arrays.items():
            np.testing.assert_array_equal(one.arrays[name], array)


def path_of(made, first):
    from pathlib import Path

    return Path(made.folder) / "parts" / f"part-{first:09}.parquet"


def test_parts_come_back_in_order(begun):
    made, parts = begun
    assert_same(made.read(), parts)


def test_reading_stops_at_the_first_gap(begun):
    made, parts = begun
    path_of(made, 4).unlink()
    assert_same(made.read(), parts[:1])
    made.write(4, parts[1])
    assert_same(made.read(), parts)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "swap"])
def test_a_damaged_part_is_not_believed(begun, damage, caplog):
    made, parts = begun
    path = path_of(made, 4)
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "swap":  # a whole part in the wrong place
        path.write_bytes(path_of(made, 0).read_bytes())
    else:
        content[20] ^= 0xFF
        path.write_bytes(content)
    assert_same(made.read(), parts[:1])
    assert "part-000000004.parquet is damaged" in caplog.text


def test_a_part_of_another_run_is_not_believed(begun):
    made, _ = begun
    assert store(made.folder, **{"model.num_layers": 3}).read() == []


def test_a_run_is_done_when_it_says_so(begun):
    made, _ = begun
    assert not made.is_done()
    made.finish()
    assert made.is_done() and not path_of(made, 0).parent.exists()
    made.start_over()
    assert not made.is_done()


@pytest.mark.parametrize("finished", [False, True])
def test_another_run_is_refused_and_what_differs_is_named(begun, finished):
    made, _ = begun
    if finished:
        made.finish()
    other = store(made.folder, **{"text.sha256": "cd34", "windows.bos": True})
    what = "the results" if finished else "a part"
    with pytest.raises(OtherRunError) as caught:
        other.is_done()
    message = str(caught.value)
    assert f"holds {what} of another run" in message and "if_exists: replace" in message
    assert "text.sha256: there 'ab12', now 'cd34'" in message and "windows.bos: there False, now True" in message
    assert "num_layers" not in message


def test_a_marker_of_something_else_is_refused(tmp_path):
    (tmp_path / ".success").write_text("yes")
    with pytest.raises(OtherRunError, match=r"\.success: not written by a memorization run"):
        store(tmp_path).is_done()


def test_what_killed_writers_left_behind_goes(begun):
    made, parts = begun
    from pathlib import Path

    left = [Path(made.folder) / ".windows.parquet.77-0a1b2c3d.tmp", path_of(made, 0).parent / ".x.1-00000000.tmp"]
    kept = Path(made.folder) / ".hidden"
    for path in (*left, kept):
        path.write_text("?")
    made.begin()
    assert not any(path.exists() for path in left) and kept.exists()
    assert_same(made.read(), parts)


def test_parts_may_be_remote():
    made = PartStore(folder="memory://parts-test/book", identity=IDENTITY, windows=4, suffix_tokens=3)
    made.begin()
    part = scores(4)
    made.write(0, part)
    assert_same(made.read(), [part])
    made.finish()
    assert made.is_done() and made.read() == []


def old_folder(folder, parts, identity=IDENTITY):
    """What earlier versions wrote: `run.json`, and each part with its own account of itself."""
    said = (json.dumps(identity, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "run.json").write_bytes(said)
    first = 0
    for part in parts:
        crc = 0
        for name, array in sorted(part.arrays.items()):
            crc = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), crc))
        meta = {"identity": hashlib.sha256(said).hexdigest(), "first": first, "rows": len(part), "crc32": crc}
        table = pa.table(score_columns(part)).replace_schema_metadata({b"part": json.dumps(meta).encode()})
        pq.write_table(table, folder / "parts" / f"part-{first:09}.parquet", compression="zstd")
        first += len(part)
    return said


def test_a_folder_of_an_earlier_version_is_gone_on_with(tmp_path):
    parts = [scores(4), scores(4)]
    identity = {**IDENTITY, "title": "Über"}
    old_folder(tmp_path, parts, identity)
    made = store(tmp_path, title="Über")
    assert not made.is_done()
    made.begin()
    assert_same(made.read(), parts)
    with pytest.raises(OtherRunError, match="title: there 'Über', now None"):
        store(tmp_path).is_done()


def test_a_finished_folder_of_an_earlier_version_is_done(tmp_path):
    said = old_folder(tmp_path, [])
    (tmp_path / "windows.parquet").write_bytes(b"?")
    record = {"windows.parquet": {"bytes": 1, "sha256": hashlib.sha256(b"?").hexdigest()}}
    (tmp_path / ".success").write_bytes(json.dumps({**json.loads(said), "results": record}, indent=2).encode())
    assert store(tmp_path).is_done() and store(tmp_path).missing_or_changed() == {}
