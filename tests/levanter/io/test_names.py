"""Names that become parts of paths stay inside of their folder."""

import os

import pytest

from levanter.io.names import name_problem

pytestmark = pytest.mark.quick

GOOD = ["run", "run-1", "Run 1", "übung", ".hidden", "a..b", "...", "2026-11-22T10:00", "x" * 200, "-"]
BAD = ["", ".", "..", "../escape", "../../escape", "/absolute", "a/b", "a/", "a\\b", "a\nb", "a\0b", " a", "a ", "\x7f",
       "x" * 201, "é" * 101, "gs://bucket/x"]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_name_is_one_thing_in_its_folder(tmp_path, name):
    assert name_problem(name) is None
    (tmp_path / name).mkdir()
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_name(name):
    assert name_problem(name) is not None


def test_names_of_parts():
    assert name_problem("paloma/c4", max_components=0) is None and name_problem("org/set", max_components=2) is None
    assert "at most 2 parts" in str(name_problem("a/b/c", max_components=2))
    for bad in ("paloma/../../c4", "/etc", "a//b", "a/"):
        assert "would leave its folder" in str(name_problem(bad, max_components=0))
