"""HTML elements from values, with the one escaping of every page.

`Html` is text that is already markup. `tag` takes plain text or `Html` and returns `Html`: plain text and attribute
values are escaped, so that no path, YAML file or document can add markup to a page.
"""

import html
from collections.abc import Iterable, Sequence

from levanter.html.format import visible


class Html(str):
    """Text that is markup already, and is not escaped again."""


Content = str | Html | Iterable["Content"]
_VOID = frozenset(("br", "hr", "meta", "link"))


def escaped(content: Content) -> Html:
    """The content as markup: plain text escaped, control characters spelled out, `Html` unchanged.

    Args:
        content: text, markup, or a (nested) sequence of them.
    """
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        # A carriage return before a line feed is a line end of its file, not a control character to spell out.
        return Html(html.escape(visible(content.replace("\r\n", "\n")), quote=True))
    return Html("".join(escaped(part) for part in content))


def tag(name: str, /, *content: Content, **attributes: str | int | None) -> Html:
    """An element.

    Args:
        name: name of the element.
        content: its content.
        attributes: `class_` and `for_` lose the underscore, other underscores become hyphens; None omits an attribute.
    """
    rendered = "".join(
        # Quotes are escaped too, so that a value cannot end its attribute.
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{rendered}>")
    return Html(f"<{name}{rendered}>{escaped(content)}</{name}>")


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Content]],
    *,
    numbers: Sequence[int] = (),
    caption: str | None = None,
    marked: int | None = None,
) -> Html:
    """A table whose first column contains row headings.

    Args:
        header: one heading per column.
        rows: the cells of each row.
        numbers: indices of right-aligned columns.
        caption: above the table.
        marked: index of a row to highlight.
    """

    def css_class(column: int) -> str | None:
        return "n" if column in numbers else None

    head = tag("tr", [tag("th", text, scope="col", class_=css_class(n)) for n, text in enumerate(header)])
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", class_=css_class(0)),
            [tag("td", cell, class_=css_class(n)) for n, cell in enumerate(row[1:], 1)],
            class_="marked" if index == marked else None,
        )
        for index, row in enumerate(rows)
    ]
    caption_tag = tag("caption", caption) if caption else Html("")
    # A wide table scrolls by itself; `tabindex` lets the keyboard reach it.
    return tag("div", tag("table", caption_tag, tag("thead", head), tag("tbody", body)), class_="scroll", tabindex=0)


def tiles(entries: Iterable[tuple[str, str, str]]) -> Html:
    """The main figures of a page: (name, value, remark) each."""
    return tag(
        "dl",
        [tag("div", tag("dt", name), tag("dd", value, tag("small", remark))) for name, value, remark in entries],
        class_="tiles",
    )


def bullet_list(entries: Sequence[str]) -> Html:
    """A list of sentences; line breaks in them are kept, since they may contain YAML."""
    return tag("ul", [tag("li", entry) for entry in entries], class_="sentences")


def section(title: str, *content: Content, note: str | None = None) -> Html:
    """A section with a heading and an optional remark next to it."""
    aside = tag("span", note, class_="aside") if note else Html("")
    return tag("section", tag("h3", title, " " if note else "", aside), *content)
