"""The shell of a page of results: one self-contained file that shows data.

A page brings its own part in three pieces, `<style>`, `<main>` and `<script>`; colors, type, controls, the title with
the facts below it, and the functions that make elements and bars are here. What stands in a page is data that its
script puts in as text, so no text is taken for HTML, and none ends the script that it stands in.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_PIECES = re.compile(r"<style>\n(.*)</style>\n<main>\n(.*)</main>\n<script>\n(.*)</script>\n", re.DOTALL)


def result_page(own: Path, data: Mapping[str, Any], *, title: str, facts: Mapping[str, str]) -> str:
    """The page.

    Args:
        own: the file of its three pieces.
        data: what its script finds under `data`, beside `title` and `facts`. Every number in it is finite.
        title: above it.
        facts: of the run, below the title, in order.
    """
    found = _PIECES.fullmatch(own.read_text(encoding="utf-8"))
    assert found is not None, f"{own.name} is not a <style>, a <main> and a <script>"
    style, main, script = found.groups()
    shell = (_HERE / "page.html").read_text(encoding="utf-8")
    pieces = {
        "/*STYLE*/": (_HERE / "page.css").read_text(encoding="utf-8") + style,
        "<!--MAIN-->": main,
        "/*DATA*/": _in_a_script({"title": title, "facts": dict(facts), **data}),
        "/*SCRIPT*/": (_HERE / "page.js").read_text(encoding="utf-8") + script,
    }
    # In one pass: what a text says is not looked at for another piece's place.
    return re.sub("|".join(map(re.escape, pieces)), lambda place: pieces[place[0]], shell)


def _in_a_script(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
