"""Linked files exist in the repository, and so do the modules and files that documents name in code.

`make docs` checks the rest: every page is in the navigation, and the links of the site lead to pages and headings.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from helpers.documents import ROOT

DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
NAME = re.compile(r"`((?:levanter|haliax_ext)(?:\.\w+)+)(?:\(.*?\))?`")
FILE = re.compile(r"`((?:src|tests|docs|config|benchmarks|examples|haliax_ext)/[\w./-]+\.\w+)(?:::\w+)?`")
CODE = re.compile(r"```.*?```", re.DOTALL)
HISTORY = {"LOG.md", "changelog.md", "migrating.md"}
"""Pages about earlier versions, whose names and files may be gone; so are the pages of the log."""


def load_hook(name: str):
    """One of the modules that `mkdocs.yml` names as hooks."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


PAGES = {str(path.relative_to(DOCS)): path for path in DOCS.rglob("*.md")}
PAGES |= {page: ROOT / path for page, path in load_hook("site").ELSEWHERE.items()}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_linked_files_exist_in_the_repository(page: str):
    """On the site a link may lead to a page although the repository has no such file, and the other way round."""
    links = LINK.findall(CODE.sub("", PAGES[page].read_text(encoding="utf-8")))
    missing = [link for link in links if "://" not in link and not (PAGES[page].parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", sorted(page for page in PAGES.keys() - HISTORY if not page.startswith("log/")))
def test_names_in_code_exist(page: str):
    text = PAGES[page].read_text(encoding="utf-8")
    missing = [name for name in NAME.findall(text) if not is_defined(name) and not name.endswith("__")]
    missing += [file for file in FILE.findall(text) if not (ROOT / file).exists() and "<" not in file]
    assert not missing


def test_the_api_reference_documents_modules_that_exist():
    reference, documented = load_hook("api_reference"), set()
    for page in reference.PAGES.values():
        assert reference.markdown(page, documented).count("\n::: ") >= len(page.modules)
    assert len(documented) > 200
    assert not [name for name in documented if not is_defined(name)]


def is_defined(name: str) -> bool:
    """Whether a dotted name is a module, or something that a module defines or imports."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = (ROOT if parts[0] == "haliax_ext" else ROOT / "src").joinpath(*parts[:length])
        path: Path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if path.exists():
            text = path.read_text(encoding="utf-8")
            return all(re.search(rf"\b{part}\b", text) for part in parts[length:][:1])
    return False
