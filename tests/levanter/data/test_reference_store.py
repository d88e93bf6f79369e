"""Stored log-probabilities of a reference: what counts, what is made again, what is refused."""

import numpy as np
import pytest

from levanter.data import reference_store
from levanter.data.reference_store import ReferenceStore, ReferenceStoreError

pytestmark = pytest.mark.quick

IDENTITY = {"reference": "acme/base", "reference_digest": "ab", "pairs_digest": "cd", "positions": 64}
VALUES = np.random.default_rng(0).standard_normal((11, 2)).astype(np.float32)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_store, "PART", 4)
    return ReferenceStore(folder=str(tmp_path / "said"), identity=IDENTITY, pairs=11)


def fill(store, numbers=(0, 1, 2)):
    store.check()
    store.begin()
    for number in numbers:
        part = store.chunks[number]
        store.write(number, VALUES[part.start : part.stop])


def test_what_is_written_is_read(store):
    assert store.missing() == [0, 1, 2]
    fill(store)
    assert store.missing() == []
    np.testing.assert_array_equal(store.all(), VALUES)


def test_a_build_goes_on_and_leaves_the_same_bytes(store, tmp_path):
    fill(store)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "said").iterdir()}
    (tmp_path / "said" / "part-00001.f32").unlink()
    cut = tmp_path / "said" / "part-00002.f32"
    cut.write_bytes(cut.read_bytes()[:-5])
    damaged = tmp_path / "said" / "part-00000.f32"
    damaged.write_bytes(b"\1" + damaged.read_bytes()[1:])
    assert store.missing() == [0, 1, 2]
    with pytest.raises(ReferenceStoreError, match=r"part-00000.f32: missing"):
        store.all()
    fill(store, store.missing())
    assert {path.name: path.read_bytes() for path in (tmp_path / "said").iterdir()} == whole


def test_another_reference_or_other_pairs_are_refused(store, tmp_path):
    fill(store)
    other = ReferenceStore(
        folder=store.folder, identity={**IDENTITY, "reference_digest": "xy", "pairs_digest": "zz"}, pairs=11
    )
    with pytest.raises(ReferenceStoreError) as error:
        other.check()
    assert str(error.value) == (
        f"{store.folder}: these log-probabilities are of another reference, or of other pairs (they were made with "
        "acme/base):\n  pairs_digest: made with 'cd', configured 'zz'\n  reference_digest: made with 'ab', configured "
        "'xy'\n  give another cache_dir, or delete this folder"
    )
    # Parts say themselves what they are of: a manifest that was replaced does not make them right.
    assert other.missing() == [0, 1, 2]


def test_the_same_weights_in_another_folder_are_the_same_reference(store):
    fill(store)
    moved = ReferenceStore(folder=store.folder, identity={**IDENTITY, "reference": "/disk/base"}, pairs=11)
    moved.check()
    np.testing.assert_array_equal(moved.all(), VALUES)
