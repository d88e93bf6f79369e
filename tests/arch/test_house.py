"""Rules of the source that `measure.py` measures: what holds, and the ceilings of what does not hold yet.

Ceilings only fall: `python tests/arch/measure.py --lower` writes the present values. A rule without a ceiling has no
exceptions.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path, PurePath

import pytest
from arch import files, measure, source, words

from levanter.commands.catalog import ENTRY_POINTS

MOST_ANY = 60
"""Lines that still annotate with a bare `Any`."""

MOST_LINES_OF_DOORS = 1200
"""Lines of `main/`: the module of a command has 16."""


@pytest.fixture(scope="module")
def known():
    return source.modules()


@pytest.fixture(scope="module")
def graph(known):
    return {name: source.imports(module, known) for name, module in known.items()}


def test_no_circle_of_files(graph):
    assert not source.circles(graph)


def test_no_function_is_too_long(known):
    long = {
        name for module in known.values() for name, lines in source.functions(module) if lines > source.LONGEST_FUNCTION
    }
    assert not long


def test_no_file_is_too_long(known):
    assert not files.long_files(known)


def test_single_importer_files_only_get_fewer(known, graph):
    allowed = measure.ceilings()["single"]
    single = files.single_importers(known, graph)
    new = {name: importer for name, importer in single.items() if name not in allowed}
    assert len(single) <= len(allowed), f"merge into their only importers: {new}"


def test_comments_do_not_get_fewer(known):
    floor = measure.ceilings()["comments"]
    assert files.comment_density(known.values()) >= floor, files.comments_by_package(known.values())


def test_comment_lines_are_those_of_the_tokenizer():
    text = (
        Path(__file__).read_text()
        + """
x = "# no"  # yes
y = '# no \\' # no'  # type: ignore
# pyright: strict
# yes
"""
    )
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [t.string for t in tokens if t.type == tokenize.COMMENT and not files.FOR_TOOLS.match(t.string)]
    assert files.comment_lines(text) == len(comments) > 1


def test_public_names_have_docstrings(known):
    missing, _ = source.undocumented(known)
    assert not missing


def test_any_is_rare(known):
    lines = source.any_lines(known)
    assert len(lines) <= MOST_ANY, lines


def test_a_name_is_one_class(known):
    names = Counter(
        node.name
        for module in known.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in names.items() if count > 1}


def test_modules_of_main_are_thin(known):
    assert sum(m.text.count("\n") for m in known.values() if m.package == "main") <= MOST_LINES_OF_DOORS


def test_forbidden_names_only_get_fewer(known):
    """In sum over all packages, so that a file that moves takes its names along."""
    counts = words.by_package(measure.forbidden_names(known))
    allowed = measure.ceilings()["words"]
    more = {package: (n, allowed.get(package, 0)) for package, n in counts.items() if n > allowed.get(package, 0)}
    assert counts.total() <= sum(allowed.values()), (
        f"new forbidden names; packages with more than before: {more} (python tests/arch/measure.py --list words)"
    )


def test_forbidden_names_of_every_kind_of_binding():
    text = """
import os as each
class Told:
    room: int
    def size_of(self, asked, *, left_padding, own_path):
        self.said = left = 1
        for given, (made, fine) in asked:
            made = [found for found in fine]
        with asked as not_found:
            (there := 1)
        match asked:
            case [held, *parts]: pass
        try: pass
        except ValueError as beside: pass
        return lambda exchange: self.told.fine
"""
    names = words.forbidden_names(PurePath("src/levanter/io/places.py"), ast.parse(text))
    assert [(n.line, n.name, n.scope) for n in names if n.scope == ""] == [
        (1, "places.py", ""),
        (2, "each", ""),
        (3, "Told", ""),
    ]
    assert {n.package for n in names} == {"io"}
    expected = "room *_of asked own said left given made found there held parts beside exchange"
    assert Counter(n.word for n in names if n.scope) == dict.fromkeys(expected.split(), 1)


def test_modules_that_are_named_in_strings_exist(known):
    named = {module for entry in ENTRY_POINTS.values() for module in (entry.module, entry.config_module)}
    assert named <= known.keys()


def test_every_package_has_quick_tests():
    """But `main`, whose tests run whole commands."""
    tests = source.ROOT / "tests" / "levanter"
    packages = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py") if path.parent != tests}
    quick = {
        path.relative_to(tests).parts[0]
        for path in tests.rglob("test_*.py")
        if "pytest.mark.quick" in path.read_text(encoding="utf-8")
    }
    assert packages - quick == {"main"}


def test_what_measures_sees_a_circle_an_arrow_and_a_long_function(tmp_path):
    package = tmp_path / "src" / "levanter"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Root."""\n')
    (package / "a.py").write_text('"""A."""\n\ndef f():\n    from levanter import b\n    return b\n')
    (package / "b.py").write_text(
        '"""B."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a\n\n'
        'def g():\n    """A sentence\n    of two lines."""\n' + "    g()\n" * 81
    )
    known = source.modules(tmp_path)
    graph = {name: source.imports(module, known) for name, module in known.items()}
    assert source.circles(graph) == [["levanter.a", "levanter.b"]]
    assert source.package_arrows(known, graph) == {("a", "b"), ("b", "a")}
    lengths = dict(pair for module in known.values() for pair in source.functions(module))
    assert lengths == {"levanter.a.f": 3, "levanter.b.g": 82}
    assert files.single_importers(known, graph) == {"levanter.a": "levanter.b", "levanter.b": "levanter.a"}
    missing, public = source.undocumented(known)
    assert (missing, public) == (["levanter.a.f"], 5)
