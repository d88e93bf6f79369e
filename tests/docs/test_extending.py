"""Pages whose Python runs: each block with the names of those above it, each text block what the one above printed."""

import contextlib
import io
import re
from pathlib import Path

import draccus
import pytest
from helpers.documents import ROOT
from helpers.golden import updating

PAGES = sorted((ROOT / "docs" / "extending").glob("*.md"))
BLOCK = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    """Choices that a page registers are gone afterwards: other tests look at all there are."""
    bases = [base for base in classes(draccus.ChoiceRegistry) if "_choice_registry" in vars(base)]
    before = {base: dict(base._choice_registry) for base in bases}
    yield
    for base, choices in before.items():
        base._choice_registry.clear()
        base._choice_registry.update(choices)


def classes(base: type) -> list[type]:
    """All classes derived from one."""
    return [each for child in base.__subclasses__() for each in (child, *classes(child))]


def run(page: Path) -> str:
    """The page with what its code prints today."""
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
                exec(compile(body, page.name, "exec"), namespace)
            printed = out.getvalue().rstrip("\n") + "\n"
            pieces.append(block.group())
        else:
            assert printed is not None, f"a text block without code before it: {body[:80]}"
            pieces.append(f"```text\n{printed}```\n")
            printed = None
    return "".join(pieces) + text[end:]


@pytest.mark.golden
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_shows_what_its_code_prints(page: Path):
    rendered = run(page)
    if updating():
        page.write_text(rendered, encoding="utf-8")
    assert rendered == page.read_text(encoding="utf-8"), "`make golden` writes the page anew"
