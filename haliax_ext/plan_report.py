"""A `ShardingPlan` as text: by group, in axis names, with bytes on each device and everything that is wrong.

Plain text of at most 120 columns, a function of the plan alone, so that plans can be golden files and be reviewed as
diffs. An array's place is its named shape with arrows: `[layers 32, mlp 14336 → model, embed 4096 → data]`.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from haliax_ext.errors import gib
from haliax_ext.mapping import AxisMapping, path_matches
from haliax_ext.placement import LeafPlan
from haliax_ext.planner import ShardingPlan

WIDTH = 120
Groups = Mapping[str, Sequence[str]]
"""Title → path patterns of its leaves; a leaf belongs to the first group that matches."""


def plan_report(plan: ShardingPlan, *, groups: Groups | None = None, largest: int = 5) -> str:
    """The full plan: mesh, mappings, every array by group, totals, the largest, what is replicated, what is wrong.

    Args:
        plan: what to show.
        groups: how to group the arrays; by default the module that holds them.
        largest: how many of the arrays that take most bytes on a device are listed again.
    """
    sections = [_heading(plan), _table(plan, groups), _total(plan), _largest(plan, largest), *_findings(plan)]
    return "\n\n".join(section for section in sections if section)


def summarize(plan: ShardingPlan, *, groups: Groups | None = None) -> str:
    """The plan in a few lines: mesh, mappings, bytes on each device by group, and what is wrong."""
    rows = [
        (_clip(title, 92), gib(sum(row.bytes_per_device for row in rows)))
        for title, rows in _by_group(_rows(plan.leaves), groups).items()
    ]
    width = max([len(title) for title, _ in rows], default=0)
    size = max([len(text) for _, text in rows], default=0)
    table = "\n".join(f"  {title:<{width}}  {text:>{size}}" for title, text in rows)
    sections = [_heading(plan), f"on each device\n{table}" if rows else "", _total(plan), *_findings(plan)]
    return "\n".join(section for section in sections if section)


def plan_diff(first: ShardingPlan, second: ShardingPlan, *, names: tuple[str, str] = ("first", "second")) -> str:
    """What differs between two plans of the same arrays (the default preset and another, say).

    Args:
        first: a plan.
        second: another one; arrays that only one of them has are listed too.
        names: what to call the plans.
    """
    plans = dict(zip(names, (first, second), strict=True))
    figures = [
        ("on each device", [gib(p.bytes_per_device) for p in plans.values()]),
        ("of it replicated", [gib(p.replicated_bytes) for p in plans.values()]),
        ("errors", [str(len(p.errors)) for p in plans.values()]),
        (
            "largest array on a device",
            [gib(max((r.bytes_per_device for r in p.leaves), default=0)) for p in plans.values()],
        ),
    ]
    width = max(14, *(len(name) + 2 for name in names))
    lines = [" " * 26 + "".join(f"{name:>{width}}" for name in names)]
    lines += [f"{title:<26}" + "".join(f"{text:>{width}}" for text in texts) for title, texts in figures]
    for name, plan in plans.items():
        lines += _wrapped(f"{name}: mesh {plan.mesh}; {'; '.join(_mapping_lines(plan))}", indent=2)

    rows = {name: {row.path: row for row in _rows(plan.leaves)} for name, plan in plans.items()}
    paths = list(dict.fromkeys([*rows[names[0]], *rows[names[1]]]))
    shapes = {name: {path: row.shape for path, row in rows[name].items()} for name in names}
    different = [path for path in paths if shapes[names[0]].get(path) != shapes[names[1]].get(path)]
    counts = {path: row.count for plan_rows in rows.values() for path, row in plan_rows.items()}
    num_different, total = (sum(counts[path] for path in some) for some in (different, paths))
    lines += ["", f"{num_different} of {total} arrays are placed differently" + (":" if different else "")]
    label = max(len(name) for name in names)
    for path in different:
        lines.append(f"  {_clip(path, WIDTH - 2)}")
        for name in names:
            row = rows[name].get(path)
            text = "absent" if row is None else f"{gib(row.bytes_per_device):>10}  {row.shape}"
            lines += _wrapped(f"    {name:<{label}} {text}", indent=label + 17)
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Leaves that differ in a layer number only, and go to the same place."""

    path: str
    count: int
    plan: LeafPlan

    @property
    def bytes_per_device(self) -> int:
        return self.count * self.plan.bytes_per_device

    @property
    def shape(self) -> str:
        """The named shape with arrows to mesh axes."""
        return placed_shape(self.plan)

    @property
    def group(self) -> str:
        segments = self.path.split(".")
        return ".".join(segments[:-2] or segments[:-1]) or self.path


def placed_shape(plan: LeafPlan) -> str:
    """`[mlp 14336 → model × group, embed 4096 → data]`."""
    axes = [
        f"{name} {size}" + (f" → {' × '.join(mesh_axes)}" if mesh_axes else "")
        for (name, size), mesh_axes in zip(plan.leaf.axes, plan.mesh_axes, strict=True)
    ]
    return f"[{', '.join(axes)}]"


def _rows(plans: Iterable[LeafPlan]) -> list[_Row]:
    """One row for each leaf, numbered layers folded into `*` where all of them are alike."""
    plans = tuple(plans)

    def folded(plan: LeafPlan) -> str:
        # `layers.3.mlp` and `layers.17.mlp` become one row, `layers.*.mlp`.
        return re.sub(r"\.\d+(?=\.)", ".*", plan.leaf.path)

    alike = {(folded(plan), plan.leaf.axes, plan.leaf.dtype, plan.spec) for plan in plans}
    # Layers are folded only if all of them have the same axes, dtype and sharding; otherwise each has a row of its own.
    kinds = Counter(path for path, *_ in alike)
    counts = Counter(folded(plan) for plan in plans)
    rows: dict[str, _Row] = {}
    for plan in plans:
        one_kind = kinds[folded(plan)] == 1
        path = folded(plan) if one_kind else plan.leaf.path
        rows.setdefault(path, _Row(path=path, count=counts[path] if one_kind else 1, plan=plan))
    return list(rows.values())


def _by_group(rows: Iterable[_Row], groups: Groups | None) -> dict[str, list[_Row]]:
    grouped: dict[str, list[_Row]] = {title: [] for title in groups or {}}
    for row in rows:
        matching = (
            title
            for title, patterns in (groups or {}).items()
            if any(path_matches(pattern, row.plan.leaf.path) for pattern in patterns)
        )
        title = next(matching, "other" if groups else row.group)
        grouped.setdefault(title, []).append(row)
    return {title: members for title, members in grouped.items() if members}


def _heading(plan: ShardingPlan) -> str:
    lines = _wrapped(f"mesh {plan.mesh}: {plan.mesh.size} devices", indent=2)
    for line in _mapping_lines(plan):
        lines += _wrapped(line, indent=2)
    return "\n".join(lines)


def _mapping_lines(plan: ShardingPlan) -> list[str]:
    def shown(title: str, mapping: AxisMapping) -> list[str]:
        return [f"{title} {mapping}"] if mapping or mapping.unmapped else []

    mappings = plan.mappings
    return [
        f"parameters {mappings.params}",
        *(line for pattern, rule in mappings.overrides for line in shown(f"parameters at {pattern}", rule)),
        *shown("compute", mappings.compute),
        *shown("residual", mappings.residual),
        *shown("inside attention", mappings.attention),
        *(f"{name} in zigzag order" for name in mappings.zigzag),
    ]


def _table(plan: ShardingPlan, groups: Groups | None) -> str:
    grouped = _by_group(_rows(plan.leaves), groups)
    if not grouped:
        return ""
    lines = [f"{'':<82}{'shards':>10}{'on each device':>18}"]
    for title, rows in grouped.items():
        lines.append(f"{_clip(title, 92):<92}{gib(sum(row.bytes_per_device for row in rows)):>18}")
        for row in rows:
            name = row.path.removeprefix(title + ".") if groups is None else row.path
            # The count is of layers with the same path apart from their number.
            if row.count > 1:
                name += f" ({row.count} of them)"
            name = f"{_clip(name, 68)} {row.plan.leaf.dtype.name}"
            pieces = _pieces(row.plan, plan)
            lines.append(f"  {name:<80}{pieces:>10}{gib(row.bytes_per_device):>18}")
            lines += _wrapped(f"    {row.shape}", indent=5)
    return "\n".join(lines)


def _pieces(row: LeafPlan, plan: ShardingPlan) -> int:
    return plan.mesh.ways(tuple(axis for axes in row.mesh_axes for axis in axes))


def _total(plan: ShardingPlan) -> str:
    text = (
        f"total {gib(plan.total_bytes)} in {len(plan.leaves)} arrays; {gib(plan.bytes_per_device)} on each device, "
        f"{gib(plan.replicated_bytes)} of it replicated"
    )
    lines = _wrapped(text, indent=2)
    if plan.hbm_bytes is not None:
        lines.append(f"  that is {plan.bytes_per_device / plan.hbm_bytes:.1%} of a device's {gib(plan.hbm_bytes)}")
    return "\n".join(lines)


def _largest(plan: ShardingPlan, count: int) -> str:
    rows = sorted(_rows(plan.leaves), key=lambda row: -row.bytes_per_device)[:count]
    if not rows:
        return ""
    lines = ["largest arrays on a device"]
    lines += [f"  {gib(row.bytes_per_device):>12}  {_clip(row.path, 102)}" for row in rows]
    return "\n".join(lines)


def _findings(plan: ShardingPlan) -> list[str]:
    """The sections on replicated arrays, other notes, and errors."""
    whole = [f for f in plan.findings if f.kind == "replicated" and f.severity == "note"]
    whole.sort(key=lambda f: -f.nbytes)
    wasted = gib(sum(f.nbytes for f in whole))
    notes = [f.message for f in plan.notes if f.kind != "replicated"]
    sections: list[str] = []
    for title, messages in (
        (f"replicated ({wasted} redundant on each device)", [f.message for f in whole]),
        ("notes", notes),
        (f"errors ({len(plan.errors)})", [str(error) for error in plan.errors]),
    ):
        if messages:
            lines = [title]
            for message in messages:
                for n, line in enumerate(message.split("\n")):
                    # The first line of each starts it; the rest is a suggestion and may be YAML.
                    lines += _wrapped(f"  {line}", indent=6 if n == 0 else 4 + len(line) - len(line.lstrip()))
            sections.append("\n".join(lines))
    return sections


def _clip(text: str, width: int) -> str:
    # The end of a path distinguishes it better than its beginning.
    return text if len(text) <= width else "…" + text[-(width - 1) :]


def _wrapped(text: str, *, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    ) or [""]
