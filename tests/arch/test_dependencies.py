"""What is imported is declared, and what is declared is imported: `pyproject.toml` against every file."""

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"levanter", "haliax_ext"}
INSTALLED_FOR_A_TEST = {path.parent.name for path in (ROOT / "tests/fixtures").glob("*/*/__init__.py")}
OF_THE_TESTS = {"helpers", "aot", "soak", "arch", "build_version", *INSTALLED_FOR_A_TEST}
INSTALLED = importlib.metadata.packages_distributions()
BY_NAME_ONLY = {
    "gcsfs": "fsspec opens gs:// with it",
    "s3fs": "fsspec opens s3:// with it",
    "pytest-xdist": "pytest's option -n",
    "pytest-timeout": "pytest's option --timeout",
    "jax-cuda13-plugin": "JAX loads the GPU compiler from it",
    "compressed-tensors": "transformers reads int8 folders with it",
    "nvidia-cuda-nvcc": "the GPU compiler calls its assembler",
}
"""Declared and never imported by us, with the reason."""


def imported(folders: Iterable[str]) -> Mapping[str, set[str]]:
    """Top-level package → files that import it, in whatever way a name of it is written in the source."""
    importers: dict[str, set[str]] = defaultdict(set)
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for package in packages_of_file(path):
            importers[package].add(str(path.relative_to(ROOT)))
    return {name: files for name, files in importers.items() if name not in sys.stdlib_module_names}


@functools.cache
def packages_of_file(path: Path) -> frozenset[str]:
    """The top-level packages that one file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(name.partition(".")[0] for node in ast.walk(tree) for name in names(node))


def names(node: ast.AST) -> list[str]:
    """The modules that a statement or a call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "find_spec", "importorskip", "__import__"):
            return [str(node.args[0].value)]
    return []


def distribution(package: str) -> str:
    """What has to be installed for a package; its own name where it is not installed here."""
    return normal(INSTALLED.get(package, [package])[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Distributions of the core, or of extras; an extra that includes another of this project names nothing more."""
    lists = [PROJECT["optional-dependencies"][extra] for extra in extras] or [PROJECT["dependencies"]]
    return {normal(re.split(r"[\s<>=!~;\[]", text, maxsplit=1)[0]) for one in lists for text in one} - {PROJECT["name"]}


CORE, EXTRAS = declared(), tuple(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    ("folders", "may"),
    [
        # What an extra brings is imported where it is used, and missing with a clear error.
        (
            ("src", "haliax_ext"),
            CORE | declared("tensorboard", "trackio", "ray", "constraint", "serve", "harness") | {"libtpu"},
        ),
        (("tests",), CORE | declared("test", "test-core", "tensorboard", "clients", "judges") | {"libtpu"}),
        # llama.cpp, MaxText (and flax), peft and lm_eval run in environments of their own, which benchmarks are told.
        (("benchmarks",), CORE | declared("test", "test-core", "judges") | {"xllamacpp", "maxtext", "flax"}),
    ],
    ids=["sources", "tests", "benchmarks"],
)
def test_what_is_imported_is_declared(folders, may):
    benchmarks = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    known = OURS | OF_THE_TESTS | benchmarks
    found = {name: files for name, files in imported(folders).items() if name not in known}
    assert len(found) > 5
    missing = {name: sorted(files)[:3] for name, files in found.items() if distribution(name) not in may}
    assert not missing


def test_examples_need_the_core_only():
    assert {distribution(name) for name in imported(["examples"]) if name not in OURS} <= CORE


def test_what_is_declared_is_imported():
    sources = {distribution(name) for name in imported(["src", "haliax_ext"])}
    assert sorted(CORE - sources) == []
    tests = sources | {distribution(name) for name in imported(["tests"])}
    assert sorted(declared(*set(EXTRAS) - {"lint", "docs"}) - tests - BY_NAME_ONLY.keys()) == []
    assert not {package for package in BY_NAME_ONLY if package in tests}


def test_the_core_is_not_declared_twice():
    assert not CORE & declared("test", "lint", "docs", "tensorboard", "trackio", "remote", "ray")


def test_haliax_s_partitioning_is_reached_in_haliax_ext_only():
    """Import contracts know whole third parties alone; this one is about the inside of one."""
    folders = set()
    for path in (path for folder in ("src", "haliax_ext") for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "partitioning" not in text and "_src" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            reached = [*names(node), ast.unparse(node)] if isinstance(node, ast.Attribute) else names(node)
            if isinstance(node, ast.ImportFrom) and node.module == "haliax":
                reached += [f"haliax.{alias.name}" for alias in node.names]
            if any(re.match(r"(haliax|hax)\.(partitioning|_src)\b", name) for name in reached):
                folders.add(str(path.relative_to(ROOT).parts[0]))
    assert folders == {"haliax_ext"}
