"""The page's charts as markup: a bar of bytes against a chip's memory, a treemap of arrays, bars of time.

They are plain boxes placed by percentages, so that they need no script, print well, and keep their text readable on a
narrow screen. Every chart is accompanied by a table of its numbers.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from haliax_ext.errors import named_shape
from levanter.html.charts import BarPiece, css_percent, stacked_bar
from levanter.html.format import gib, seconds_text
from levanter.html.markup import Content, Html, tag
from levanter.html.treemap import Rectangle, squarify
from levanter.plan.hbm_budget import Resident
from levanter.plan.report import view

MODULE_COLORS = 5
_GROUP_OF = {"embeddings": "embedding", "self_attn": "attention", "mlp": "mlp", "lm_head": "head", "norm": "norm"}
LETTER = 7.7
"""Approximate width of a letter in pixels: decides how much of a name fits in a box."""
# The treemap's size in pixels on a desktop screen; boxes are placed by percentages of it, so they scale with the page.
_MAP = Rectangle(0.0, 0.0, 1060.0, 400.0)


def group_class(name: str) -> str:
    """The CSS class that colors a group: `g-kv-cache`. Frozen parameters have the color of their group."""
    name = name.removeprefix("frozen ")
    return "g-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def module_classes(names: Sequence[str]) -> dict[str, str]:
    """A color for each module: that of its parameters' group where it is known, else the next unused one."""
    classes = {name: group_class(_GROUP_OF[name]) for name in names if name in _GROUP_OF}
    others = [name for name in names if name not in classes]
    # The style sheet has `MODULE_COLORS` colors for modules; the rest shares one,
    # so that no two share a color by chance.
    classes |= {name: f"g-m{n}" if n < MODULE_COLORS else "g-rest" for n, name in enumerate(others)}
    return classes | {name: "g-rest" for name in names if name.endswith(" smaller modules")}


def swatch(name: str) -> Html:
    """A small box in the color of a group."""
    return tag("i", class_=f"swatch {group_class(name)}", aria_hidden="true")


def memory_bar(occupancy: view.Occupancy, *, holder: str) -> Html:
    """The bytes on a chip, stacked, against its memory."""
    pieces = [
        BarPiece(
            css_class=group_class(segment.name),
            share=segment.nbytes / occupancy.scale,
            title=f"{segment.name}: {gib(segment.nbytes)}",
        )
        for segment in occupancy.segments
    ]
    label = f"{gib(occupancy.used)} on a {holder}"
    if occupancy.limit is None:
        return tag("div", stacked_bar(pieces, label=label))
    at = occupancy.limit / occupancy.scale
    # The label goes to the side of the limit's line that has more space.
    side = f"left:{css_percent(at)}" if at < 0.5 else f"right:{css_percent(1 - at)}"
    under = tag("div", tag("span", f"{gib(occupancy.limit)} of a {holder}", style=side), class_="under")
    return tag("div", stacked_bar(pieces, label=f"{label} of {gib(occupancy.limit)}", marker=at), under)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One array, or arrays that differ only in the number of their layer."""

    resident: Resident
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays on one device."""
        return self.count * self.resident.nbytes

    @property
    def name(self) -> str:
        """The path, and the number of arrays that share it."""
        return self.resident.path + (f" ({self.count} of them)" if self.count > 1 else "")

    def about(self, *, holder: str) -> str:
        """The description of the cell, as lines: path, axes, sharding and bytes on a `holder`."""
        resident = self.resident
        lines = [self.name, f"{resident.group}: {resident.dtype} {named_shape(resident.axes)}"]
        lines += [] if resident.replicated else [resident.spec]
        single = f" ({gib(resident.nbytes)} each)" if self.count > 1 else ""
        lines.append(f"{gib(self.nbytes)} on a {holder}{single} of {gib(self.count * resident.whole_bytes)} in all")
        if resident.replicated:
            lines.append(f"replicated: every {holder} holds a copy")
        elif resident.replicated_over:
            lines.append(f"the same on all {holder}s along {' × '.join(resident.replicated_over)}")
        return "\n".join(line for line in lines if line)


def cells(residents: Sequence[Resident], *, most: int) -> list[Cell]:
    """Every array, largest first; equal arrays of numbered layers are merged, and so are the smallest beyond `most`."""

    def folded(resident: Resident) -> str:
        # `layers.3.mlp.w` becomes `layers.*.mlp.w`.
        return re.sub(r"\.\d+(?=\.)", ".*", resident.path)

    def kind(resident: Resident) -> tuple[object, ...]:
        # Layers of one pattern but another shape or sharding stay apart: their bytes differ.
        return folded(resident), resident.axes, resident.dtype, resident.spec

    counts = Counter(kind(resident) for resident in residents)
    by_kind: dict[tuple[object, ...], Cell] = {}
    for resident in residents:
        count = counts[kind(resident)]
        shown = replace(resident, path=folded(resident)) if count > 1 else resident
        by_kind.setdefault(kind(resident), Cell(resident=shown, count=count))
    ordered = sorted(by_kind.values(), key=lambda cell: -cell.nbytes)
    if len(ordered) <= most:
        return ordered
    rest = ordered[most - 1 :]
    # One more box for the rest, so that the areas still add up to all bytes.
    summary = Resident(
        path=f"{sum(cell.count for cell in rest)} smaller arrays",
        group="other weights",
        axes=(),
        dtype="",
        spec="",
        nbytes=sum(cell.nbytes for cell in rest),
        whole_bytes=sum(cell.count * cell.resident.whole_bytes for cell in rest),
    )
    return [*ordered[: most - 1], Cell(resident=summary)]


def treemap(shown: Sequence[Cell], *, holder: str) -> Html:
    """Every array as a box with an area of its bytes on a `holder`, by group; replicated arrays are hatched."""
    groups: dict[str, list[Cell]] = {}
    for cell in shown:
        groups.setdefault(cell.resident.group, []).append(cell)
    # Two levels: each group gets a rectangle, which its arrays then fill.
    areas = squarify([sum(cell.nbytes for cell in members) for members in groups.values()], _MAP)
    apart = _short_names(shown)
    boxes: list[Content] = []
    for members, area in zip(groups.values(), areas, strict=True):
        for cell, at in zip(members, squarify([cell.nbytes for cell in members], area), strict=True):
            boxes.append(_box(cell, at, apart[cell.name], holder=holder))
    return tag("div", boxes, class_="map", role="group", aria_label=f"arrays by their bytes on a {holder}")


def _short_names(shown: Sequence[Cell]) -> dict[str, str]:
    """The short name of each array: the end of its path, and a distinguishing part where several share that."""
    alike: dict[tuple[str, str], list[Cell]] = {}
    for cell in shown:
        # `.weight`, and `.q` of integer weights, are the same for almost every array.
        short = ".".join(cell.resident.path.removesuffix(".q").removesuffix(".weight").split(".")[-2:])
        alike.setdefault((cell.resident.group, short), []).append(cell)
    names = {}
    for (_, short), members in alike.items():
        for cell in members:
            path = cell.resident.path.split(".")
            others = [set(other.resident.path.split(".")) for other in members if other is not cell]
            # A part of the path that no other array of this short name has, such as the layer's number.
            unique = [part for part in path if others and not any(part in other for other in others)]
            names[cell.name] = f"{unique[0]} {short}" if unique and unique[0] not in short else short
    return names


def _box(cell: Cell, at: Rectangle, name: str, *, holder: str) -> Html:
    resident = cell.resident
    style = (
        f"left:{css_percent(at.x / _MAP.width)};top:{css_percent(at.y / _MAP.height)};"
        f"width:{css_percent(at.width / _MAP.width)};height:{css_percent(at.height / _MAP.height)}"
    )
    classes = f"cell {group_class(resident.group)}" + (" whole" if resident.replicated else "")
    # Text only where it fits; if the name is too long its last part, which differs between arrays.
    text: Content = ""
    if at.width > 40 and at.height > 18:
        name = name if LETTER * len(name) < at.width else name.split(".")[-1]
        text = [tag("b", name), tag("small", gib(cell.nbytes)) if at.height > 34 else ""]
    return tag(
        "button",
        text,
        type="button",
        class_=classes,
        style=style,
        title=cell.about(holder=holder),
        aria_label=cell.name,
        tabindex=-1,
    )


@dataclass(frozen=True, kw_only=True)
class TimeBar:
    """One line of the chart of time.

    Attributes:
        name: the label before the bar.
        pieces: name, seconds and class of each piece.
        total: the seconds written after it.
    """

    name: str
    pieces: tuple[tuple[str, float, str], ...]
    total: float


def time_bars(bars: Sequence[TimeBar]) -> Html:
    """Bars on one scale of seconds."""
    # One scale for all bars makes their lengths comparable.
    scale = max((sum(s for _, s, _ in bar.pieces) for bar in bars), default=0.0) or 1.0
    lines = [
        tag(
            "div",
            tag("span", bar.name, class_="name"),
            stacked_bar(
                [
                    BarPiece(css_class=classes, share=seconds / scale, title=f"{name}: {seconds_text(seconds)}")
                    for name, seconds, classes in bar.pieces
                ],
                label=f"{bar.name}: {seconds_text(bar.total)}",
                thin=True,
            ),
            tag("span", seconds_text(bar.total), class_="total"),
            class_="line",
        )
        for bar in bars
    ]
    return tag("div", lines, class_="times")
