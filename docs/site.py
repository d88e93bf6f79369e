"""What `mkdocs.yml` hooks in: pages that live elsewhere in the repository, and links as the repository has them."""

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "axes.md": "src/levanter/models/AXES.md",
    "haliax_ext.md": "haliax_ext/README.md",
    "golden.md": "tests/golden/README.md",
    "examples.md": "examples/README.md",
    "security.md": "SECURITY.md",
}
"""Page of the site → file of the repository."""
LINKED = {"config": "*.yaml", "examples": "*.py"}
"""Folder → files that pages link to; they are part of the site as they are."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the pages that live elsewhere."""
    from mkdocs.structure.files import File

    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for folder, pattern in LINKED.items():
        for file in sorted((ROOT / folder).rglob(pattern)):
            name = file.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, content=file.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Turns links between files of the repository into links between pages of the site."""
    del config, files
    return linked(markdown, page.file.src_uri)


def linked(markdown: str, page: str) -> str:
    """A page's text with its links as the site has them.

    Args:
        markdown: the text, whose links are relative to its file in the repository.
        page: its name in the site.
    """
    own = ELSEWHERE.get(page, f"docs/{page}")
    pages = {path: name for name, path in ELSEWHERE.items()}

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(own), found[2]))
        name = pages.get(target) or target.removeprefix("docs/")
        if target not in pages and not target.startswith(("docs/", *(f"{folder}/" for folder in LINKED))):
            return found[0]
        return f"{found[1]}{posixpath.relpath(name, posixpath.dirname(page) or '.')}{found[3] or ''}{found[4]}"

    return _LINK.sub(moved, markdown)
