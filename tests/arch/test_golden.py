"""Golden files: how they are compared, and that each names what made it."""

import json
import re

import pytest
from helpers import golden
from helpers.golden import GOLDEN, assert_golden_compiled, assert_golden_json, figures, fragments, json_text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "GOLDEN", tmp_path)
    monkeypatch.delenv("UPDATE_GOLDEN", raising=False)
    return tmp_path


FACTS = {"bytes": {"mlp": 5, "head": 7}, "largest": [["a", 1], ["b", 2]], "fits": True, "note": None}


def test_a_difference_is_listed_by_its_path_and_nothing_else(folder):
    (folder / "a.json").write_text(json_text(FACTS))
    assert_golden_json("a.json", FACTS)
    now = {**FACTS, "bytes": {"mlp": 6, "norm": 1}, "largest": [["a", 1], ["b", 3]], "fits": 1}
    with pytest.raises(AssertionError) as caught:
        assert_golden_json("a.json", now)
    said = str(caught.value)
    assert re.findall(r"^  (\S.*)$", said, re.M) == [
        "bytes.mlp: 5 → 6",
        "bytes.head: no longer: 7",
        "bytes.norm: new: 1",
        "largest[1][1]: 2 → 3",
        "fits: true → 1",
    ]


def test_json_is_one_fact_a_line():
    wide = {"a": {"b": "x" * 70, "c": ["y" * 70, 1]}, "empty": {}, "d": [1, 2]}
    assert json.loads(json_text(wide)) == wide
    assert json_text(wide).splitlines()[-3:] == [' "empty": {},', ' "d": [1, 2]', "}"]
    assert max(map(len, json_text(wide).splitlines())) <= 120


def test_what_a_sentence_says_does_not_depend_on_its_words():
    one = "q [embed 16,384] is replicated over model 8: 7.83 GiB on each chip; 'token' is unknown\n  → e.g. {a: [b, c]}"
    other = "over model 8 nothing cuts q (embed 16,384), 7.83 GiB: there's no 'token'\n  → write {a: [b, c]}"
    assert sorted(figures(one)) == sorted(figures(other)) == ["'token'", "16,384", "7.83", "8"]
    assert fragments(one) == fragments(other) == ["{a: [b, c]}"]


def test_figures_of_another_compiler_are_skipped_by_name(folder, monkeypatch):
    monkeypatch.setattr(golden, "made_with", lambda compiler: {"libtpu": "0.1", "jax": "0.12"})
    (folder / "a.json").write_text(json_text({"made_with": {"libtpu": "0.0.42.1", "jax": "0.10.2"}, **FACTS}))
    with pytest.raises(
        pytest.skip.Exception, match=r"made with libtpu 0\.0\.42\.1, jax 0\.10\.2; installed: libtpu 0\.1"
    ):
        assert_golden_compiled("a.json", {**FACTS, "fits": False})
    monkeypatch.setattr(golden, "made_with", lambda compiler: {"libtpu": "0.0.42.1", "jax": "0.10.2"})
    assert_golden_compiled("a.json", FACTS)
    with pytest.raises(AssertionError, match="fits: true → false"):
        assert_golden_compiled("a.json", {**FACTS, "fits": False})


def test_every_compiled_file_names_its_compiler():
    makers = {path.name: json.loads(path.read_text())["made_with"] for path in (GOLDEN / "compiled").iterdir()}
    makers["hlo"] = json.loads((GOLDEN / "hlo" / "made_with.json").read_text())
    assert len(makers) > 10
    assert {tuple(maker) for maker in makers.values()} <= {("libtpu", "jax"), ("jax-cuda13-plugin", "jax")}
    # Figures of two releases of a compiler would not be comparable with each other.
    for compiler in ("libtpu", "jax-cuda13-plugin"):
        assert len({maker[compiler] for maker in makers.values() if compiler in maker}) == 1, makers
    kept = json.loads((GOLDEN / "published_step_times.json").read_text())
    assert all(figures["libtpu"] for figures in kept.values())


def test_prose_is_kept_in_a_few_samples():
    """At most two of each kind: what is compared word by word is what one change of wording rewrites."""
    assert sorted(path.name for path in (GOLDEN / "plans").glob("*.txt")) == [
        "405b_as_published.txt",
        "405b_v4-256.txt",
    ]
    assert len(list((GOLDEN / "sharding").glob("*.txt"))) == 3
    assert len(list((GOLDEN / "legacy" / "resolved").glob("*.txt"))) == 2
    assert not list((GOLDEN / "compiled").glob("*.txt"))
