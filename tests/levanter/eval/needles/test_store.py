"""The store of needles: parts are bound to a run and checked; folders of earlier versions are gone on with."""

import json
import zlib

import pytest

from levanter.eval.needles.results import NeedleAnswer, NeedleStore
from levanter.io import OtherRunError

pytestmark = pytest.mark.quick

IDENTITY = {"tasks": ["niah_single_1", "vt"], "seed": 0, "model": "/modèle", "quantize": None}
ANSWERS = (NeedleAnswer(logprobs=(-0.25, -1.5), ranks=(0, 3)), NeedleAnswer(logprobs=(-2.0,), ranks=(7,)))
ROWS = [{"logprobs": [-0.25, -1.5], "ranks": [0, 3]}, {"logprobs": [-2.0], "ranks": [7]}]


def store(folder, **changes):
    return NeedleStore(folder=str(folder), identity={**IDENTITY, **changes})


def old_folder(folder, *, finished=False):
    """What the first version wrote, byte for byte."""
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "run.json").write_bytes(json.dumps(IDENTITY, ensure_ascii=False).encode())
    for number in (0, 2):
        crc = zlib.crc32(json.dumps([IDENTITY, number, ROWS], sort_keys=True).encode())
        (folder / "parts" / f"part-{number:06}.json").write_bytes(json.dumps({"rows": ROWS, "crc32": crc}).encode())
    if finished:
        written = {"identity": IDENTITY, "facts": {}, "questions": 4}
        (folder / "results.json").write_bytes(json.dumps(written, indent=2, ensure_ascii=False).encode())


def test_a_folder_of_the_first_version_is_gone_on_with(tmp_path):
    old_folder(tmp_path)
    made = store(tmp_path)
    assert not made.is_done()
    made.begin()
    assert made.read() == {0: ANSWERS, 2: ANSWERS}
    before = (tmp_path / "parts" / "part-000002.json").read_bytes()
    made.write(2, ANSWERS)
    assert (tmp_path / "parts" / "part-000002.json").read_bytes() == before


def test_a_finished_folder_of_the_first_version_is_done(tmp_path):
    old_folder(tmp_path, finished=True)
    assert store(tmp_path).is_done()
    with pytest.raises(OtherRunError, match=r"(?s)holds the results of another run.*seed: there 0, now 5"):
        store(tmp_path, seed=5).is_done()
    store(tmp_path).start_over()
    assert not list(tmp_path.iterdir()) and not store(tmp_path).is_done()


@pytest.mark.parametrize("damage", ["cut", "changed", "swapped", "empty", "list"])
def test_a_damaged_part_is_left_out(tmp_path, damage, caplog):
    made = store(tmp_path)
    made.begin()
    made.write(0, ANSWERS)
    made.write(1, ANSWERS[:1])
    path = tmp_path / "parts" / "part-000001.json"
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-3],
            "changed": content.replace(b"-0.25", b"-0.26"),
            "swapped": (tmp_path / "parts" / "part-000000.json").read_bytes(),
            "empty": b"",
            "list": b"[1]",
        }[damage]
    )
    assert made.read() == {0: ANSWERS} and "part-000001.json is damaged" in caplog.text
    assert store(tmp_path, seed=1).read() == {}
