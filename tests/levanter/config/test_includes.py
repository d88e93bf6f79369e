"""Files: `extends`, `!include`, circles, URLs, and what cannot be read."""

from pathlib import Path

import fsspec
import pytest

from levanter.config.errors import Problem
from levanter.config.includes import read_documents
from levanter.config.yaml_nodes import to_plain

pytestmark = pytest.mark.quick


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_suffix(".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def read(*paths: object) -> tuple[dict, list[str]]:
    problems: list[Problem] = []
    node = read_documents([str(path) for path in paths], problems)
    return to_plain(node), [str(p) for p in problems]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_extends_merges_bases_in_order_relative_to_the_file(here: Path):
    written(
        here,
        base__one="a: {x: 1, y: 1}\nl: [1]\n",
        base__two="extends: one.yaml\na: {y: 2}\n",
        other="a: {z: 9}\nl: [2]\n",
        top="extends: [base/two.yaml, other.yaml]\na: {x: 3}\n",
    )
    assert read("top.yaml") == ({"a": {"x": 3, "y": 2, "z": 9}, "l": [2]}, [])


def test_include_stands_for_the_file_and_keeps_its_marks(here: Path):
    written(here, data__web="tokenizer: t\nurls: [a]\nurls: [b]\n", top="data: !include data/web.yaml\nn: 1\n")
    assert read("top.yaml") == (
        {"data": {"tokenizer": "t", "urls": ["a"]}, "n": 1},
        ["data/web.yaml:3: key `urls` occurs twice, first at line 2"],
    )


def test_include_in_lists_and_merge_keys(here: Path):
    written(
        here, part="x: 1\n", names="[a, b]\n", top="names: !include names.yaml\nm:\n  <<: !include part.yaml\n  y: 2\n"
    )
    assert read("top.yaml") == ({"names": ["a", "b"], "m": {"x": 1, "y": 2}}, [])


def test_the_suffix_may_be_left_out(here: Path):
    written(here, base="a: 1\n", top="extends: base\nb: 2\n")
    assert read("top") == ({"a": 1, "b": 2}, [])


def test_several_files_merge_later_ones_win(here: Path):
    written(here, one="a: {x: 1, y: 1}\n", two="a: {y: 2}\n")
    assert read("one.yaml", "two.yaml")[0] == {"a": {"x": 1, "y": 2}}


def test_circles_are_shown_whole(here: Path):
    written(here, a="x: 1\nextends: b.yaml\n", b="extends: c.yaml\n", c="y: !include a.yaml\n")
    assert read("a.yaml")[1] == ["c.yaml:1: circular !include: a.yaml → b.yaml → c.yaml → a.yaml"]


def test_every_file_that_cannot_be_read_is_named_at_its_place(here: Path):
    written(here, top="extends: [nope.yaml, 5]\na: !include gone/data.yaml\n", words="just words\n")
    (here / "latin.yaml").write_bytes("a: é\n".encode("latin-1"))
    assert read("top.yaml", "missing.yaml", "words.yaml", "latin.yaml")[1] == [
        "top.yaml:2: no such file: gone/data.yaml; nor is there a folder gone (paths are relative to the file that "
        "names them)",
        "top.yaml:1: no such file: nope.yaml (paths are relative to the file that names them)",
        "top.yaml:1: extends: expected a file name or a list of file names",
        "no such file: missing.yaml",
        "words.yaml:1: words.yaml must contain a mapping (`key: value` lines)",
        "latin.yaml is not UTF-8 text: invalid continuation byte at byte 3",
    ]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("nanno.yaml", "; did you mean nano.yaml?"),
        ("nanno", "; did you mean nano.yaml?"),
        ("llama_7b.yml", "; did you mean llama2_7b.yaml?"),
        # A suffix that all of them have makes no name alike.
        ("xy.yaml", ""),
        ("trian/nano.yaml", "; nor is there a folder trian"),
    ],
)
def test_a_file_that_is_not_there_is_answered_with_the_nearest_name(here: Path, asked, meant):
    written(here, nano="a: 1\n", llama2_7b="a: 1\n")
    (here / "nanno.txt").write_text("no document")
    assert read(asked)[1] == [f"no such file: {asked}{meant}"]


def test_an_empty_file_is_an_empty_document(here: Path):
    written(here, empty="# nothing yet\n")
    assert read("empty.yaml") == ({}, [])


def test_urls_and_paths_relative_to_them():
    memory = fsspec.filesystem("memory")
    memory.pipe("/cfg/run/top.yaml", b"extends: ../base.yaml\nd: !include data.yaml\n")
    memory.pipe("/cfg/base.yaml", b"a: 1\n")
    memory.pipe("/cfg/run/data.yaml", b"urls: []\n")
    assert read("memory://cfg/run/top.yaml") == ({"a": 1, "d": {"urls": []}}, [])
    assert read("memory://cfg/none.yaml")[1] == ["no such file: memory://cfg/none.yaml"]
    assert read("nosuch://x/y.yaml")[1] == ["cannot read nosuch://x/y.yaml: Protocol not known: nosuch"]
