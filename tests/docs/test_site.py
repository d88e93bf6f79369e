"""The site: every page is in the navigation, every link leads somewhere, also on the site."""

import importlib.util
import re
from pathlib import Path, PurePosixPath

import pytest
import yaml
from helpers.documents import ROOT

DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def load_site():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = load_site()
MKDOCS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
SOURCES = {page: DOCS / page for page in PAGES} | {page: ROOT / path for page, path in SITE.ELSEWHERE.items()}


def in_nav(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in in_nav(child)]


def headings(path: Path) -> set[str]:
    """The anchors of a page, as both GitHub and mkdocs make them of plain headings."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in found}


def test_every_page_is_in_the_navigation_once():
    listed = in_nav(MKDOCS["nav"])
    assert sorted(listed) == sorted(SOURCES)
    assert MKDOCS["hooks"] == ["docs/site.py"]


@pytest.mark.parametrize("page", sorted(SOURCES))
def test_links_lead_somewhere(page):
    path = SOURCES[page]
    for link in LINK.findall(re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path}: {link}"
        assert not anchor or anchor in headings(target), f"{path}: {link}: no such heading in {target}"


@pytest.mark.parametrize("page", sorted(SOURCES))
def test_links_lead_to_pages_of_the_site(page):
    """What `docs/site.py` makes of them, relative to the page."""
    for link in LINK.findall(re.sub(r"```.*?```", "", SITE.linked(SOURCES[page].read_text(), page), flags=re.S)):
        name = link.partition("#")[0]
        if "://" in link or not name:
            continue
        parts: list[str] = []
        for part in (PurePosixPath(page).parent / name).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        at = "/".join(parts)
        assert at in SOURCES or (DOCS / at).exists() or (at.endswith(".yaml") and (ROOT / at).exists()), (
            f"{page}: {link}"
        )
        assert not at.startswith(".."), f"{page}: {link}"


NAME = re.compile(r"`((?:levanter|haliax_ext)(?:\.\w+)+)(?:\(.*?\))?`")
FILE = re.compile(r"`((?:src|tests|docs|config|benchmarks|haliax_ext)/[\w./-]+\.\w+)(?:::\w+)?`")
OF_THEIR_TIME = {"changelog.md", "migrating.md", *(page for page in PAGES if page.startswith("log/"))}
"""Pages that speak of what was, or of names of earlier generations."""


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something that one defines or imports."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = (ROOT if parts[0] == "haliax_ext" else ROOT / "src").joinpath(*parts[:length])
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if path.exists():
            text = path.read_text(encoding="utf-8")
            return all(re.search(rf"\b{part}\b", text) for part in parts[length:][:1])
    return False


@pytest.mark.parametrize("page", sorted(SOURCES.keys() - OF_THEIR_TIME))
def test_names_and_files_that_pages_name_are_there(page):
    text = SOURCES[page].read_text(encoding="utf-8")
    absent = [name for name in NAME.findall(text) if not is_there(name) and not name.endswith("__")]
    absent += [file for file in FILE.findall(text) if not (ROOT / file).exists() and "<" not in file]
    assert not absent
