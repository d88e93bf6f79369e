"""HTML from values: everything that is not markup is escaped, here and nowhere else.

`Html` is text that is markup already. `tag` takes plain text or `Html` and returns `Html`; plain text is escaped, and
so are attributes, whatever a path or a YAML file had in it.
"""

import html
from collections.abc import Iterable, Sequence

from levanter.plan.report.format import visible


class Html(str):
    """Text that is markup."""


Content = str | Html | Iterable["Content"]
_VOID = frozenset(("br", "hr", "meta", "link"))


def escaped(content: Content) -> Html:
    """The content as markup."""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(html.escape(visible(content), quote=True))
    return Html("".join(escaped(part) for part in content))


def tag(name: str, /, *content: Content, **attributes: str | int | None) -> Html:
    """An element. `class_` and `for_` lose the underscore, other underscores become hyphens; `None` leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{escaped(content)}</{name}>")


def table(
    header: Sequence[str], rows: Iterable[Sequence[Content]], *, numbers: Sequence[int] = (), caption: str | None = None
) -> Html:
    """A table; the columns in `numbers` are set right, the first column heads its row."""

    def kind(column: int) -> str | None:
        return "n" if column in numbers else None

    head = tag("tr", [tag("th", text, scope="col", class_=kind(n)) for n, text in enumerate(header)])
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", class_=kind(0)),
            [tag("td", cell, class_=kind(n)) for n, cell in enumerate(row[1:], 1)],
        )
        for row in rows
    ]
    shown = tag("caption", caption) if caption else Html("")
    return tag("div", tag("table", shown, tag("thead", head), tag("tbody", body)), class_="scroll", tabindex=0)


def listed(entries: Sequence[str]) -> Html:
    """A list of sentences; line breaks in them stay, since they may hold YAML."""
    return tag("ul", [tag("li", entry) for entry in entries], class_="said")


def section(title: str, *content: Content, note: str | None = None) -> Html:
    """A part of a panel under a heading."""
    aside = tag("span", note, class_="aside") if note else Html("")
    return tag("section", tag("h3", title, " " if note else "", aside), *content)
