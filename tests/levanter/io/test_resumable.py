"""A folder of parts: whose it is, what is in it, and that folders of earlier versions are still gone on with."""

import json

import pytest

from levanter.io import OtherRunError, PartFolder, atomic_write

pytestmark = pytest.mark.quick

IDENTITY = {"model": "m", "seed": 1, "tasks": ["a", "b"], "rate": 0.1, "none": None}


def parts(folder, **changes):
    return PartFolder(
        path=f"{folder}/parts",
        identity={**IDENTITY, **changes},
        digits=6,
        ending=".json",
        writer="a test",
        advice="another folder",
    )


def test_a_run_that_has_begun_is_known_again(tmp_path):
    made = parts(tmp_path)
    assert not made.has_begun("x holds a part of") and made.numbered() == {}
    made.begin()
    assert parts(tmp_path).has_begun("x holds a part of")
    assert json.loads((tmp_path / "parts" / "run.json").read_bytes()) == IDENTITY


def test_another_run_is_told_what_differs_and_what_helps(tmp_path):
    parts(tmp_path).begin()
    other = parts(tmp_path, seed=2, more=[1])
    with pytest.raises(OtherRunError) as caught:
        other.has_begun("output_path: /x holds a part of")
    assert str(caught.value) == (
        "output_path: /x holds a part of another run, which this one cannot continue:\n"
        "  more: there None, now [1]\n  seed: there 1, now 2\n  → another folder"
    )


@pytest.mark.parametrize(("content", "said"), [("{", "not written by a test"), ("[1]", "seed: there None, now 1")])
def test_an_identity_that_is_none_is_another_runs(tmp_path, content, said):
    made = parts(tmp_path)
    made.begin()
    (tmp_path / "parts" / "run.json").write_text(content)
    with pytest.raises(OtherRunError, match=said):
        made.has_begun("it holds a part of")


@pytest.mark.parametrize("place", ["local", "memory"])
def test_parts_are_found_by_their_numbers(tmp_path, place):
    made = parts(tmp_path if place == "local" else "memory://io-parts")
    made.begin()
    for number in (0, 12, 1_000_000):
        with atomic_write(made.at(number)) as file:
            file.write(b"?")
    # Whatever else is there is no part: other endings, other numbers of digits, what a killed writer left.
    for name in (
        "part-1.json",
        "part-000002.jsonl",
        "part-.json",
        "part-000003.json.bak",
        ".part-000004.json.7-00.tmp",
    ):
        with atomic_write(f"{made.path}/{name}") as file:
            file.write(b"?")
    assert made.numbered() == {n: f"{made.path}/part-{n:06}.json" for n in (0, 12, 1_000_000)}
    made.remove()
    made.remove()
    assert made.numbered() == {} and not made.has_begun("")


def test_what_killed_writers_left_behind_goes_and_parts_stay(tmp_path):
    made = parts(tmp_path)
    made.begin()
    (tmp_path / "parts" / "part-000000.json").write_text("?")
    left = tmp_path / "parts" / ".part-000001.json.77-0a1b2c3d.tmp"
    left.write_text("?")
    made.begin()
    assert not left.exists() and list(made.numbered()) == [0]


def test_paths_that_are_no_text_are_identities_too(tmp_path):
    strange = {"input": b"/x/\xff".decode("utf-8", "surrogateescape"), "title": "Über"}
    parts(tmp_path, **strange).begin()
    assert parts(tmp_path, **strange).has_begun("")
    with pytest.raises(OtherRunError, match="title: there 'Über', now None"):
        parts(tmp_path, **{**strange, "title": None}).has_begun("")
