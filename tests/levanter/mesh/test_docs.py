"""`docs/sharding.md` runs: every Python block prints the text block that follows it."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[3] / "docs" / "sharding.md"
BLOCK = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)


@pytest.mark.golden
def test_the_sharding_guide_shows_what_its_code_prints():
    """`make golden` writes the printed text into the page."""
    page = PAGE.read_text(encoding="utf-8")
    namespace: dict = {"__name__": "sharding_guide"}
    pieces, end, printed = [], 0, None
    for block in BLOCK.finditer(page):
        kind, body = block.groups()
        pieces.append(page[end : block.start()])
        end = block.end()
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(body, f"{PAGE.name}", "exec"), namespace)
            printed = out.getvalue().rstrip("\n") + "\n"
            pieces.append(block.group())
        else:
            assert printed is not None, f"a text block without code before it: {body[:80]}"
            pieces.append(f"```text\n{printed}```\n")
            printed = None
    rendered = "".join(pieces) + page[end:]
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(rendered, encoding="utf-8")
    assert rendered == PAGE.read_text(encoding="utf-8"), "`make golden` writes the page anew"
