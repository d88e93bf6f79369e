"""The HTML document around a page's content, its style sheets, and JSON data inside it.

`document` returns a complete page. `result_page` is the page of an evaluation's results: the caller supplies data and
a file with a `<style>`, a `<main>` and a `<script>`; the title, the facts of the run and the functions that create
elements are common to all of them (`elements.js`).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from levanter.html.markup import escaped

_FOLDER = Path(__file__).parent
_PIECES = re.compile(r"<style>\n(.*)</style>\n<main>\n(.*)</main>\n<script>\n(.*)</script>\n", re.DOTALL)


def style_sheet(*styles: str) -> str:
    """The palette and the base style, followed by a page's own style sheets.

    Args:
        styles: CSS text; later rules override earlier ones.
    """
    return "".join([_asset("palette.css"), _asset("base.css"), *styles])


def document(*, title: str, style: str, body: str, script: str = "", policy: str | None = None) -> str:
    """A complete HTML document.

    Args:
        title: plain text.
        style: the text of its one style sheet, see `style_sheet`.
        body: markup.
        script: JavaScript that runs after the body has been read.
        policy: its Content-Security-Policy; None to declare none in the document.
    """
    policy_tag = f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">\n' if policy else ""
    script_tag = f"<script>{script}</script>\n" if script else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{policy_tag}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="generator" content="levanter">\n'
        # Without an icon in the document, browsers request /favicon.ico.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}\n{script_tag}</body>\n</html>\n"
    )


def result_page(template: Path, data: Mapping[str, Any], *, title: str, facts: Mapping[str, str]) -> str:
    """The page of an evaluation's results, which its script fills from data.

    Args:
        template: a file with a `<style>`, a `<main>` and a `<script>`.
        data: JSON values, which the script reads as `data` together with `title` and `facts`; all numbers are finite.
        title: the page's heading.
        facts: facts of the run, listed below the title, in order.

    Raises:
        ValueError: a number in `data` is not finite.
    """
    # The template is a file of this package: a mismatch is an error of ours, not of a user.
    match = _PIECES.fullmatch(template.read_text(encoding="utf-8"))
    assert match is not None, f"{template.name} is not a <style>, a <main> and a <script>"
    style, main, script = match.groups()
    content = script_json({"title": title, "facts": dict(facts), **data})
    body = (
        f'<main>\n<h1 id="title"></h1>\n<dl id="facts"></dl>\n{main}</main>\n'
        f'<script type="application/json" id="data">{content}</script>'
    )
    return document(
        # The script sets the title: until then, and for readers without scripts, the page has a general one.
        title="Results",
        style="\n" + style_sheet(_asset("results.css"), style),
        body=body,
        script="\n" + _asset("elements.js") + script,
    )


def script_json(data: object) -> str:
    """JSON that is safe inside a `script` element, whatever its texts contain.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Characters that could end the element, that scripts take for line ends, and that UTF-8 cannot encode.
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
