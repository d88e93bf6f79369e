"""How a model's leaves come from a checkpoint's tensors, stated once for loading and for export.

A `WeightRule` names one leaf, its source tensors, and how its axes are laid out in them:

    WeightRule(
        target="transformer.layers.stacked.self_attn.q_proj.weight",
        source="model.layers.{layers}.self_attn.q_proj.weight",
        axes=(("kv_head", "q_heads_per_group", "head_size"), ("embed",)),
    )

`{layers}` is a *stacked* axis: one source tensor for each index; `{6*layers+2}` numbers them 2, 8, 14, … for a leaf
that holds every sixth layer of a checkpoint. Each entry of `axes` is an axis of the source tensor and names the leaf's
axes flattened into it, major first. Every axis of the leaf is named in exactly one of the two, `source` or `axes`.
Transpositions, splits and stacks need nothing else; a leaf that is a piece of a fused tensor has a `FusedPart`.

`WeightRules.match` compares a table with the leaves of a model and the tensors of a source, and reports everything that
does not fit in one error, before a weight is read.
"""

import fnmatch
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.errors import named_shape, nearest
from haliax_ext.initializers import InitialRule
from haliax_ext.leaf_layout import Box, LeafLayout, to_slices
from haliax_ext.load_transforms import LoadTransformRule
from haliax_ext.sources import TensorInfo

_BRACES = re.compile(r"\{(?:(\d+)\*)?([^{}*+]*)(?:\+(\d+))?\}")
"""`{axis}`, or `{step*axis+first}`."""


SHOWN = 20
"""How many problems of one kind a message lists before it only counts them."""


class WeightRuleError(ValueError):
    """A rule does not fit the leaf it names; the table is wrong, not the checkpoint."""


class WeightMismatchError(ValueError):
    """A checkpoint's tensors are not the ones a model needs.

    Attributes:
        missing: names of tensors the model needs and the source lacks.
        unexpected: names of tensors the source has and no rule mentions.
        misshaped: names of tensors whose shape or kind of number differs.
    """

    def __init__(self, message: str, *, missing: Sequence[str], unexpected: Sequence[str], misshaped: Sequence[str]):
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misshaped = tuple(misshaped)


@dataclass(frozen=True, kw_only=True)
class FusedPart:
    """The piece `[start, start + size)` of an axis of a fused source tensor that is `of` long.

    A piece may be repeated: with `repeats_over=("kv_head",)` the source axis has `of` elements for each index along
    `kv_head`, and the piece is in each of them. `kv_head` is then the first of the leaf's axes flattened there, and the
    axes after it make up the piece.

    >>> FusedPart(axis=0, start=64, size=64, of=192, repeats_over=("kv_head",)).length({"kv_head": 8})
    1536

    Attributes:
        axis: which axis of the source tensor.
        start: first element.
        size: how many elements.
        of: length of the whole axis, or of one repetition.
        repeats_over: the leaf's axes along which the piece is repeated, major first.
    """

    axis: int
    start: int
    size: int
    of: int
    repeats_over: tuple[str, ...] = ()

    def length(self, sizes: Mapping[str, int]) -> int:
        """How long the source axis is."""
        return self.of * math.prod(sizes[name] for name in self.repeats_over)


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """Where one leaf comes from, and where it goes on export.

    Attributes:
        target: the leaf's path.
        source: the source tensor's name; `{axis}` stands for an index along that axis of the leaf, and
            `{step*axis+first}` for that multiple of it.
        axes: for each axis of a source tensor, the leaf's axes flattened into it, major first.
        part: which piece of a fused source tensor the leaf is.
        padded: axes of the leaf that may be longer than in the source; zeros fill the rest.
        optional: a source may lack all of the rule's tensors; the leaf is then not loaded.
    """

    target: str
    source: str
    axes: tuple[tuple[str, ...], ...]
    part: FusedPart | None = None
    padded: tuple[str, ...] = ()
    optional: bool = False

    @property
    def stacked(self) -> tuple[str, ...]:
        """The leaf's axes along which each index is a source tensor of its own."""
        # Groups of the pattern are (step, name, first).
        return tuple(name for _, name, _ in _BRACES.findall(self.source))

    def check(self, leaf: Leaf) -> list[str]:
        """What is wrong with this rule for `leaf`, as sentences; empty if nothing."""
        named = [*self.stacked, *itertools.chain(*self.axes)]
        problems: list[str] = []
        for name in sorted(set(named) - set(leaf.names)):
            close = nearest(name, leaf.names)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            problems.append(f"the rule names {name!r}, which is not an axis of {leaf}{hint}")
        absent = [n for n in leaf.names if n not in named]
        problems += [f"axis {n!r} of {leaf} appears in neither {self.source!r} nor `axes`" for n in absent]
        problems += [f"the rule uses axis {n!r} more than once" for n in sorted(set(named)) if named.count(n) > 1]
        problems += [f"padded axis {n!r} is not an axis of {leaf}" for n in self.padded if n not in leaf.names]
        problems += [
            f"padded axis {n!r} must come first in its source axis"
            for n in self.padded
            if n in self.stacked or any(n in group[1:] for group in self.axes)
        ]
        if self.part is not None:
            part = self.part
            if not 0 <= part.axis < len(self.axes):
                problems.append(f"part is on source axis {part.axis}, but the rule has {len(self.axes)}")
            if not 0 <= part.start <= part.start + part.size <= part.of:
                problems.append(f"part [{part.start}, {part.start + part.size}) is not inside an axis of {part.of}")
            if any(n in group for n in self.padded for group in self.axes[part.axis : part.axis + 1]):
                problems.append("an axis that is part of a fused tensor cannot be padded")
            if not problems:
                problems += self._check_piece(part, leaf)
        return [f"rule for {self.target}: {problem}" for problem in problems]

    def _check_piece(self, part: FusedPart, leaf: Leaf) -> list[str]:
        group, repeated = self.axes[part.axis], len(part.repeats_over)
        # Repeated axes come first, and at least one axis must be left to make up the piece.
        if group[:repeated] != part.repeats_over or (part.repeats_over and group == part.repeats_over):
            return [
                f"the part repeats over {part.repeats_over}; source axis {group} must begin with them and have more"
            ]
        sizes = [leaf.axis_size(name) for name in group[repeated:]]
        if math.prod(sizes) != part.size:
            return [f"the part is {part.size} long, but {' × '.join(group[repeated:])} is {math.prod(sizes)}"]
        # The piece begins and repeats in whole indices of its first axis: its `LeafLayout` counts in those.
        unit = math.prod(sizes[1:])
        if part.repeats_over and (part.start % unit or part.of % unit):
            return [f"the part begins at {part.start} of {part.of}, and both must be multiples of {unit}"]
        return []

    def source_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape each source tensor has if nothing is padded."""
        shape = [math.prod(leaf.axis_size(name) for name in group) for group in self.axes]
        if self.part is not None:
            shape[self.part.axis] = self.part.length(dict(leaf.axes))
        return tuple(shape)

    def source_names(self, leaf: Leaf) -> list[str]:
        """The names of all source tensors, in the order of the stacked indices (row-major)."""
        ranges = [range(leaf.axis_size(name)) for name in self.stacked]
        return [self.source_name(index) for index in itertools.product(*ranges)]

    def source_name(self, index: Sequence[int]) -> str:
        """The name of the source tensor at these stacked indices, given in the order of `stacked`.

        >>> rule = WeightRule(target="w", source="model.layers.{6*layers+2}.weight", axes=(("embed",),))
        >>> rule.source_name((1,))
        'model.layers.8.weight'
        """
        numbers = iter(index)

        def number(match: re.Match[str]) -> str:
            step, _, first = match.groups()
            return str(next(numbers) * int(step or 1) + int(first or 0))

        return _BRACES.sub(number, self.source)

    def source_at(self, axis: str, index: int) -> str:
        """The source of a leaf that is one index along a stacked axis of this rule's: without that axis in it."""

        def number(match: re.Match[str]) -> str:
            step, name, first = match.groups()
            return str(index * int(step or 1) + int(first or 0)) if name == axis else match[0]

        return _BRACES.sub(number, self.source)

    def layout(self, leaf: Leaf, source_shape: tuple[int, ...] | None = None) -> LeafLayout:
        """The index algebra between `leaf` and source tensors of this shape."""
        shape = self.source_shape(leaf) if source_shape is None else source_shape
        sizes = dict(leaf.axes)
        extents = dict(sizes)
        for name in self.padded:
            for group, length in zip(self.axes, shape, strict=True):
                if name in group:
                    # The source's real length decides how much of a padded axis exists.
                    extents[name] = length // math.prod(sizes[other] for other in group if other != name)
        offsets = [0] * len(self.axes)
        wider: dict[str, tuple[int, int]] = {}
        if self.part is not None and self.part.repeats_over:
            # The first axis behind the repeated ones is a piece of a digit that is `of / unit` indices long.
            first, *inner = self.axes[self.part.axis][len(self.part.repeats_over) :]
            unit = math.prod(sizes[name] for name in inner)
            wider[first] = (self.part.start // unit, self.part.of // unit)
        elif self.part is not None:
            offsets[self.part.axis] = self.part.start
        return LeafLayout(
            axes=leaf.axes,
            stacked=self.stacked,
            groups=self.axes,
            source_shape=shape,
            offsets=tuple(offsets),
            extents=tuple(extents[name] for name in leaf.names),
            wider=wider,
        )

    def expects(self, leaf: Leaf, shape: tuple[int, ...]) -> str | None:
        """Says what shape was expected if `shape` is not it."""
        expected = self.source_shape(leaf)
        sizes = dict(leaf.axes)
        fits = len(shape) == len(expected)
        words: list[str] = []
        for axis, group in enumerate(self.axes):
            fused = self.part is not None and self.part.axis == axis
            inner = " × ".join(f"{name} {sizes[name]}" for name in group) or "1"
            words.append(f"{expected[axis]} fused" if fused else inner)
            if not fits:
                continue
            # Only the first axis of a source axis may be padded: shorter by whole indices of it.
            if self.padded and group and group[0] in self.padded and not fused:
                unit = math.prod(sizes[name] for name in group[1:])
                fits = 0 < shape[axis] <= expected[axis] and shape[axis] % unit == 0
                words[-1] = f"at most {inner}"
            else:
                fits = shape[axis] == expected[axis]
        return None if fits else f"expected {list(expected)} = [{', '.join(words)}]"


@dataclass(frozen=True, kw_only=True)
class SourcePiece:
    """One leaf's share of a source tensor, for export.

    Attributes:
        target: the leaf's path.
        box: which elements of the leaf.
        region: their box in the source tensor; other leaves may have elements in it.
        layout: how they are laid out there.
        stack: the source tensor's stacked indices.
    """

    target: str
    box: Box
    region: Box
    layout: LeafLayout
    stack: tuple[int, ...]

    def write(self, block: np.ndarray, tensor: np.ndarray, box: Box | None = None) -> None:
        """Copies the leaf's share, or a part of it, into the whole source tensor.

        Args:
            block: the elements.
            tensor: the source tensor.
            box: which elements of the leaf these are; None for all of `box`.
        """
        digits = [tuple((0, size) for size in sizes) for sizes in self.layout.group_sizes]
        copy = self.layout.copy(self.stack, digits, self.box if box is None else box)
        assert copy is not None
        piece = tensor[(*to_slices(self.region), ...)]
        # A contiguous region can be viewed in the leaf's digits and written in place; others need a copy and write it
        # back.
        if piece.flags.c_contiguous:
            copy.gather(block, piece)
            return
        buffer = piece.copy()
        copy.gather(block, buffer)
        piece[...] = buffer

    def read(self, tensor: np.ndarray, block: np.ndarray) -> None:
        """Copies the leaf's share out of the whole source tensor: the inverse of `write`.

        Args:
            tensor: the source tensor.
            block: the elements `box` of the leaf.
        """
        digits = [tuple((0, size) for size in sizes) for sizes in self.layout.group_sizes]
        copy = self.layout.copy(self.stack, digits, self.box)
        assert copy is not None
        copy.scatter(np.ascontiguousarray(tensor[(*to_slices(self.region), ...)]), block)


@dataclass(frozen=True, kw_only=True)
class Match:
    """A leaf, its rule, and the source tensors that were found for it (in stacked order)."""

    leaf: Leaf
    rule: WeightRule
    layout: LeafLayout
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WeightRules:
    """The table of one model family and configuration.

    Attributes:
        rules: one for each leaf that is read.
        aliases: pairs (name, other name) under which a source may hold a tensor instead; one `*` may stand for the
            same text in both (`("model.*", "*")`: a checkpoint of the bare transformer).
        ignored: patterns of source tensors that are known and not needed (`*.rotary_emb.inv_freq`).
        derived: leaves that are computed from others, which are read and not kept.
        initial: leaves that are made: they have no rule, or the source has none of their tensors.
    """

    rules: tuple[WeightRule, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    derived: tuple[LoadTransformRule, ...] = ()
    initial: tuple[InitialRule, ...] = ()

    def by_target(self) -> dict[str, WeightRule]:
        """The rules by leaf path."""
        return {rule.target: rule for rule in self.rules}

    def check(self, leaves: Iterable[Leaf]) -> None:
        """Raises a `WeightRuleError` that lists every leaf without a rule and every rule that misnames axes."""
        leaves, table = tuple(leaves), self.by_target()
        problems: list[str] = []
        # `table` keeps the last rule of a target, so the earlier ones are the duplicates.
        problems += [f"two rules for {r.target}" for r in self.rules if table[r.target] is not r]
        by_path = {leaf.path: leaf for leaf in leaves}
        wrong = [problem for rule in self.derived for problem in rule.check(by_path)]
        # With a wrong derived rule it is not known which leaves are read; its own problem is reported first.
        for leaf in () if wrong else self.read_leaves(leaves):
            if leaf.path in table:
                problems += table[leaf.path].check(leaf)
            else:
                close = nearest(leaf.path, table)
                problems.append(f"no rule for {leaf}" + (f" (nearest: {close[0]})" if close else ""))
        if problems := [*problems, *wrong]:
            raise WeightRuleError("\n".join(problems))

    def read_leaves(self, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
        """The leaves that are read for a model's: without those that are only made, and with what others come from."""
        by_path = {leaf.path: leaf for leaf in leaves}
        comes_from = {target: rule for rule in self.derived for target in rule.targets}
        read = {rule.target for rule in self.rules}
        initialized = {rule.target for rule in self.initial} - read
        needed: dict[str, Leaf] = {}
        for path, leaf in by_path.items():
            if path in comes_from:
                rule = comes_from[path]
                needed.setdefault(rule.path, rule.read_leaf(by_path))
            elif path not in initialized:
                needed[path] = leaf
        return tuple(needed.values())

    def spellings(self, name: str) -> Iterator[str]:
        """`name`, then its aliases.

        >>> list(WeightRules(rules=(), aliases=(("model.*", "*"),)).spellings("model.norm.weight"))
        ['model.norm.weight', 'norm.weight']
        """
        yield name
        for pattern, other in self.aliases:
            head, star, tail = pattern.partition("*")
            if not star:
                if pattern == name:
                    yield other
            elif len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
                # Only the first star of the alias stands for the matched text.
                yield other.replace("*", name[len(head) : len(name) - len(tail)], 1)

    def match(self, leaves: Iterable[Leaf], tensors: Mapping[str, TensorInfo]) -> tuple[Match, ...]:
        """Finds every leaf's source tensors by name and shape, reading nothing.

        Raises:
            WeightRuleError: the table does not fit the model.
            WeightMismatchError: the source does not fit the model; lists every difference with nearest names.
        """
        leaves = tuple(leaves)
        self.check(leaves)
        leaves, table = self.read_leaves(leaves), self.by_target()
        initialized = {rule.target for rule in self.initial}
        matches: list[Match] = []
        used: set[str] = set()
        missing: list[tuple[str, str]] = []
        misshaped: dict[str, str] = {}
        for leaf in leaves:
            rule = table[leaf.path]
            names: list[tuple[str, str | None]] = []
            for name in rule.source_names(leaf):
                stored = next((other for other in self.spellings(name) if other in tensors), None)
                names.append((name, stored))
            # A leaf that may be absent is absent as a whole: with one of its tensors missing the others are not
            # ignored.
            if (rule.optional or leaf.path in initialized) and all(stored is None for _, stored in names):
                continue
            missing += [(name, leaf.path) for name, stored in names if stored is None]
            present = [stored for _, stored in names if stored is not None]
            used.update(present)
            problems = {stored: _misfit(rule, leaf, tensors[stored]) for stored in present}
            misshaped |= {stored: problem for stored, problem in problems.items() if problem}
            # Padding may make shapes differ from the rule; along a stack they must still agree with each other.
            shapes = {tensors[stored].shape for stored in present if not problems[stored]}
            if len(shapes) > 1:
                misshaped |= {
                    stored: f"{stored}: shapes differ along the stack: {sorted(shapes)}" for stored in present
                }
            if len(present) == len(names) and len(shapes) == 1 and not any(problems.values()):
                layout = rule.layout(leaf, shapes.pop())
                matches.append(Match(leaf=leaf, rule=rule, layout=layout, names=tuple(present)))
        unexpected = [name for name in tensors if name not in used and not self._is_ignored(name)]
        if missing or unexpected or misshaped:
            raise mismatch(missing, unexpected, misshaped, tensors)
        return tuple(matches)

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)

    def sources(
        self, leaves: Iterable[Leaf], *, true_sizes: Mapping[str, int] | None = None
    ) -> dict[str, tuple[tuple[int, ...], tuple[SourcePiece, ...]]]:
        """The inverse direction: every source tensor's name, shape and the pieces of leaves it is made of.

        Args:
            leaves: the model's.
            true_sizes: of axes that are padded in the leaves; what is beyond is left out.

        Raises:
            WeightRuleError: the table does not fit the model, or leaves have no tensor to be written to.
        """
        leaves, true_sizes = tuple(leaves), true_sizes or {}
        self.check(leaves)
        table = self.by_target()
        if untargeted := [leaf.path for leaf in leaves if leaf.path not in table]:
            raise WeightRuleError(
                f"no tensor of a checkpoint contains {', '.join(untargeted)}: initialized or computed while loading"
            )
        tensors: dict[str, tuple[tuple[int, ...], tuple[SourcePiece, ...]]] = {}
        # Fused tensors get pieces from several leaves, so the table is filled leaf by leaf and read tensor by tensor.
        for leaf in leaves:
            rule = table[leaf.path]
            # Padded axes shrink to their true sizes in what is written; `layout` then clips the leaf's padding.
            cut = {name: true_sizes[name] for name in rule.padded if name in true_sizes}
            kept = Leaf(leaf.path, tuple((name, cut.get(name, size)) for name, size in leaf.axes), leaf.dtype)
            layout = rule.layout(leaf, rule.source_shape(kept))
            digits = [tuple((0, size) for size in sizes) for sizes in layout.group_sizes]
            for stack in itertools.product(*(range(leaf.axis_size(name)) for name in rule.stacked)):
                box = list(layout.whole)
                for position, index in zip(layout.stack_positions, stack, strict=True):
                    box[position] = (index, index + 1)
                piece = SourcePiece(
                    target=leaf.path,
                    box=tuple(box),
                    region=layout.source_box(digits),
                    layout=layout,
                    stack=stack,
                )
                shape, pieces = tensors.get(rule.source_name(stack), (layout.source_shape, ()))
                tensors[rule.source_name(stack)] = (shape, (*pieces, piece))
        return tensors


def _misfit(rule: WeightRule, leaf: Leaf, info: TensorInfo) -> str | None:
    expected = rule.expects(leaf, info.shape)
    if expected is not None:
        return f"{info.name} {list(info.shape)}: {expected} for {leaf.path} {named_shape(leaf.axes)}"
    if _kind(info.dtype) != _kind(leaf.dtype):
        return f"{info.name} is {info.dtype.name}, but {leaf.path} is {leaf.dtype.name}"
    return None


def _kind(dtype: np.dtype) -> str:
    # The ml_dtypes types (bfloat16, float8…) are of NumPy kind "V".
    return {"f": "floating", "V": "floating", "i": "integer", "u": "integer"}.get(dtype.kind, dtype.kind)


def mismatch(
    missing: Sequence[tuple[str, str]],
    unexpected: Sequence[str],
    misshaped: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
) -> WeightMismatchError:
    """The error of a checkpoint that does not fit, all of it with nearest names.

    Args:
        missing: pairs (tensor, path of the leaf that needs it).
        unexpected: tensors that no rule mentions.
        misshaped: tensor → what is wrong with it.
        tensors: all that the source has.
    """
    lines = [
        f"the checkpoint does not fit the model: {len(missing)} tensors missing, {len(unexpected)} unexpected, "
        f"{len(misshaped)} of the wrong shape or dtype"
    ]
    # A missing tensor is most often one of the unexpected ones under another name.
    candidates = unexpected or list(tensors)
    if missing:
        lines.append("missing:")
        shown: list[str] = []
        for name, path in missing[:SHOWN]:
            close = nearest(name, candidates)
            shown.append(f"  {name} (for {path})" + (f"; nearest: {', '.join(close)}" if close else ""))
        lines += [*shown, *_more(len(missing))]
    if unexpected:
        lines.append("unexpected:")
        names = [name for name, _ in missing]
        shown = []
        for name in unexpected[:SHOWN]:
            close = nearest(name, names)
            shown.append(f"  {name} {list(tensors[name].shape)}" + (f"; nearest: {', '.join(close)}" if close else ""))
        lines += [*shown, *_more(len(unexpected))]
    if misshaped:
        lines.append("wrong shape or dtype:")
        lines += [f"  {problem}" for problem in list(misshaped.values())[:SHOWN]]
        lines += _more(len(misshaped))
    return WeightMismatchError(
        "\n".join(lines), missing=[name for name, _ in missing], unexpected=unexpected, misshaped=list(misshaped)
    )


def _more(count: int) -> list[str]:
    return [f"  … and {count - SHOWN} more"] if count > SHOWN else []
