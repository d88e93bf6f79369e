"""Pages whose Python runs: each block with the names of those above it, each text block what the one above printed.

The scripts of `docs/python-api.md` know nothing of each other and have at most 25 lines.
"""

import contextlib
import io
import re
from pathlib import Path

import draccus
import pytest
from helpers.documents import ROOT
from helpers.golden import updating
from helpers.hf_folder import write_folder

from levanter.models.registry import LmConfig

SCRIPTS = ROOT / "docs" / "python-api.md"
LONGEST_SCRIPT = 25
PAGES = sorted((ROOT / "docs" / "extending").glob("*.md"))
BLOCK = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    """Choices that a page registers are gone afterwards: other tests look at all there are."""
    for name in LmConfig.choice_names():
        LmConfig.get_choice_class(name)  # imported now, so that what comes later is the page's own
    bases = [base for base in classes(draccus.ChoiceRegistry) if "_choice_registry" in vars(base)]
    before = {base: dict(base._choice_registry) for base in bases}
    yield
    for base, choices in before.items():
        base._choice_registry.clear()
        base._choice_registry.update(choices)


def classes(base: type) -> list[type]:
    """All classes derived from one."""
    return [each for child in base.__subclasses__() for each in (child, *classes(child))]


def run(page: Path, *, together: bool = True) -> str:
    """The page with what its code prints today.

    Args:
        page: the document.
        together: whether a block has the names of those above it.
    """
    text = page.read_text(encoding="utf-8")
    namespace: dict = {"__name__": f"page_{page.stem}"}
    pieces, end, printed = [], 0, None
    for block in BLOCK.finditer(text):
        kind, body = block.groups()
        pieces.append(text[end : block.start()])
        end = block.end()
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(body, page.name, "exec"), namespace if together else {"__name__": "script"})
            printed = out.getvalue().rstrip("\n") + "\n"
            pieces.append(block.group())
        else:
            assert printed is not None, f"a text block without code before it: {body[:80]}"
            pieces.append(f"```text\n{printed}```\n")
            printed = None
    return "".join(pieces) + text[end:]


@pytest.mark.golden
def test_scripts_of_twenty_five_lines(tmp_path, monkeypatch):
    """Plan, score, train with an objective of one's own."""
    scripts = [body for kind, body in BLOCK.findall(SCRIPTS.read_text(encoding="utf-8")) if kind == "python"]
    assert len(scripts) == 3
    assert max(len([line for line in body.splitlines() if line.strip()]) for body in scripts) <= LONGEST_SCRIPT
    (tmp_path / "config").symlink_to(ROOT / "config")
    write_folder(tmp_path / "my-llama")
    monkeypatch.chdir(tmp_path)
    same(SCRIPTS, run(SCRIPTS, together=False))


@pytest.mark.golden
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_shows_what_its_code_prints(page: Path):
    same(page, run(page))


def same(page: Path, rendered: str) -> None:
    """Compares a page with what it should be, or writes it."""
    if updating():
        page.write_text(rendered, encoding="utf-8")
    assert rendered == page.read_text(encoding="utf-8"), "`make golden` writes the page anew"
