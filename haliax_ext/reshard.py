"""Read once, then reshard: how a leaf gets from where it is cheap to read to where it belongs.

Some leaves cannot be read straight into their final shards without reading bytes again and again: every host would
need all of a replicated array, and a host whose shard is a range of an *inner* file axis needs a bit of every row.
Such a leaf is first read into *slabs*: all mesh axes shard its outermost file axes, so each device holds long
contiguous ranges and each byte is read by one host. Then the devices reshard. The moves are explicit collectives
under `shard_map`, one mesh axis after another, innermost first:

- `all_to_all`: the mesh axis stops sharding one axis of the leaf and starts sharding another;
- `all_gather`: it stops sharding (several at once where they shard the same axis);
- `trim`: padding that made the slabs even is dropped;
- `slice`: it starts sharding an unsharded axis (no communication).

The bytes on a device at every moment are therefore known in advance. Where they would exceed the limit, the leaf is cut
into *pieces* along `layers` (or another axis that is not sharded), which are exchanged one after another. A piece may
also be the same part of every shard of a sharded axis, where what is read are parts of those shards.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import haliax as hax
import jax
import numpy as np
from jax.sharding import PartitionSpec

from haliax_ext.abstract import Leaf
from haliax_ext.divisibility import divisors
from haliax_ext.leaf_layout import Span
from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import shard_boxes
from haliax_ext.program import Input, Placement, Program

Cuts = tuple[tuple[str, ...], ...]
"""For each axis of a leaf, the mesh axes that shard it, major first."""

TRANSIENT_LIMIT = 448 << 20
"""Bytes that one reshard may hold on a device: slab, result, and what is sent and received in between.

512 MiB are promised; an eighth of them is left for the tiles that a TPU pads.
"""


@dataclass(frozen=True)
class Move:
    """One step of a reshard.

    Attributes:
        kind: what happens.
        mesh_axes: the mesh axis that moves, or those that are gathered at once (major first); none for a trim.
        axis: position of the axis it leaves (of the padded axis, for a trim; of the axis it shards, for a slice).
        to: position of the axis it shards from now on, for an all_to_all.
    """

    kind: Literal["all_to_all", "all_gather", "trim", "slice"]
    mesh_axes: tuple[str, ...]
    axis: int
    to: int = -1


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """How one leaf is exchanged.

    Attributes:
        leaf: path, axes and dtype (the dtype it is loaded in).
        mesh: mesh axis names and sizes.
        read: which mesh axes shard which axis of the slabs.
        final: which shard the leaf.
        padded: sizes of a piece's axes in the slabs, at least the axes' own.
        moves: from `read` to `final`.
        cut: position of the axis along which pieces are cut; None: the entire leaf at once.
        piece: how long a piece is along it.
        shards: of that axis, from each of which a piece takes the same part; 1 where it is not sharded.
        transient_device_bytes: the most that is on one device at a time beyond the leaf's other pieces.
    """

    leaf: Leaf
    mesh: MeshSpec
    read: Cuts
    final: Cuts
    padded: tuple[int, ...]
    moves: tuple[Move, ...]
    cut: int | None
    piece: int
    transient_device_bytes: int
    shards: int = 1

    @property
    def pieces(self) -> tuple[Span, ...]:
        """Where the pieces begin and end along the cut axis, or in each of its shards."""
        if self.cut is None:
            return ((0, 0),)
        size = self.leaf.shape[self.cut] // self.shards
        return tuple((at, min(at + self.piece, size)) for at in range(0, size, self.piece))

    def slab_shape(self, piece: Span) -> tuple[int, ...]:
        """The (padded) shape of a piece's slabs, all devices together."""
        shape = list(self.padded)
        if self.cut is not None:
            shape[self.cut] = (piece[1] - piece[0]) * self.shards
        return tuple(shape)

    def slab_boxes(self, piece: Span) -> np.ndarray:
        """The boxes `[devices, axes, 2]` of the leaf that a piece's slabs hold."""
        # The boxes in a piece's own coordinates come first; along the cut axis they are then moved to where the leaf
        # has them.
        boxes = shard_boxes(self.slab_shape(piece), self.read_mapping.spec(self.leaf.names), self.mesh)
        if self.cut is not None:
            # A piece holds the same span of every shard. What belongs to shard `k` therefore lies `k` times the rest of
            # a shard further on in the leaf than in the piece.
            between = self.leaf.shape[self.cut] // self.shards - (piece[1] - piece[0])
            number = boxes[:, self.cut, :1] // (piece[1] - piece[0]) if self.shards > 1 else 0
            boxes[:, self.cut] += piece[0] + number * between
        return boxes

    def put(self, whole: jax.Array, part: jax.Array, axis: int, start: jax.Array) -> jax.Array:
        """Writes the result of a piece into its place in an array.

        Args:
            whole: the array over the whole cut axis, sharded along it as the leaf is.
            part: the result of the piece.
            axis: position of the cut axis in both.
            start: where the piece begins.
        """

        def by_shard(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:axis], self.shards, -1, *x.shape[axis + 1 :])

        # An axis of size shards × n is viewed as [shards, n]: one update then writes the part at the same offset of
        # every shard, and no element changes its device.
        if self.shards == 1:
            return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=axis)
        updated = jax.lax.dynamic_update_slice_in_dim(by_shard(whole), by_shard(part), start, axis=axis + 1)
        return updated.reshape(whole.shape)

    @property
    def read_mapping(self) -> AxisMapping:
        """`read` as a mapping from axis names."""
        return AxisMapping(dict(zip(self.leaf.names, self.read, strict=True)))

    def slab_value(self, piece: Span) -> hax.NamedArray:
        """A piece's slabs as an abstract named array."""
        sizes = zip(self.leaf.names, self.slab_shape(piece), strict=True)
        axes = tuple(hax.Axis(name, size) for name, size in sizes)
        return abstract_array(axes, self.leaf.dtype)

    @property
    def final_value(self) -> hax.NamedArray:
        """The leaf as an abstract named array."""
        axes = tuple(hax.Axis(name, size) for name, size in self.leaf.axes)
        return abstract_array(axes, self.leaf.dtype)

    def __str__(self) -> str:
        moves = ", ".join(" ".join((move.kind, "×".join(move.mesh_axes))).strip() for move in self.moves)
        pieces = f" in {len(self.pieces)} pieces along {self.leaf.names[self.cut]}" if self.cut is not None else ""
        return (moves or "nothing to move") + pieces


def abstract_array(axes: tuple[hax.Axis, ...], dtype: np.dtype) -> hax.NamedArray:
    """A named array without numbers."""
    array = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), dtype)
    return hax.NamedArray(cast(jax.Array, array), axes)


def choose_read(names: Sequence[str], shape: Sequence[int], final: Cuts, order: Sequence[int], mesh: MeshSpec) -> Cuts:
    """Chooses the mesh axes that shard each axis of the slabs: all of them, on the outermost file axes that divide.

    Each axis is sharded first by the mesh axes that also shard it in the end, then by those that shard nothing in the
    end, then by those that will shard another axis, so that the reshard can take them off one by one. Where a mesh axis
    divides none of the axes, all mesh axes go to one axis, which is padded.

    Args:
        names: the leaf's axes.
        shape: their sizes in a piece.
        final: the mesh axes that shard them in the end.
        order: positions of the leaf's axes from the outermost in the file inward; stacked axes left out.
        mesh: mesh axis names and sizes.
    """
    waiting = [axis for axis, size in mesh.axes if size > 1]
    cutting = [axis for axes in final for axis in axes]
    read: list[list[str]] = [[] for _ in names]
    for position in order:
        remaining = shape[position]
        final_axes = final[position]
        dropped = [axis for axis in waiting if axis not in cutting]
        moved = [axis for axis in reversed(cutting) if axis in waiting and axis not in final_axes]
        prefix = True
        for axis in (*final_axes, *dropped, *moved):
            # A mesh axis is taken only if it divides what remains of the axis, so that slabs stay even without padding.
            fits = axis in waiting and remaining % mesh.shape[axis] == 0
            if axis in final_axes:
                # Only a prefix may stay: what is inside another mesh axis cannot be left there when that one moves.
                fits = prefix = fits and prefix
            if fits:
                remaining //= mesh.shape[axis]
                waiting.remove(axis)
                read[position].append(axis)
    if not waiting:
        return tuple(tuple(axes) for axes in read)
    # The fallback: some mesh axis divides nothing. The outermost axis with at least one element for each device is
    # padded.
    large_axes = tuple(axis for axis, size in mesh.axes if size > 1)
    big = [position for position in order if shape[position] >= mesh.size]
    chosen = big[0] if big else max(order, key=lambda position: shape[position])
    return tuple(large_axes if position == chosen else () for position in range(len(names)))


def plan_moves(read: Cuts, final: Cuts, padded: Sequence[bool]) -> tuple[Move, ...]:
    """The moves from `read` to `final`."""
    current = [list(axes) for axes in read]
    target = [list(axes) for axes in final]
    moves: list[Move] = []

    # An axis is settled if the mesh axes on it are a prefix of the final ones: slices add the others without
    # communication. A padded axis must be gathered completely, since its padding can be trimmed only where all of it is
    # on one device.
    def is_settled(position: int) -> bool:
        is_prefix = current[position] == target[position][: len(current[position])]
        return is_prefix and not (padded[position] and current[position])

    # Only the innermost mesh axis of an axis can leave it: taking an outer one away would interleave elements.
    def innermost() -> list[tuple[int, str]]:
        return [(p, axes[-1]) for p, axes in enumerate(current) if axes and not is_settled(p)]

    while True:
        loose = innermost()
        if not loose:
            break
        for position, axis in loose:
            to = next((p for p, axes in enumerate(target) if axis in axes), None)
            # It can go where everything that stands outside it has arrived.
            if (
                to is not None
                and to != position
                and not padded[to]
                and current[to] == target[to][: target[to].index(axis)]
            ):
                moves.append(Move("all_to_all", (axis,), position, to))
                current[position].pop()
                current[to].append(axis)
                break
        else:
            # Prefer to gather mesh axes that shard nothing in the end.
            position, axis = min(loose, key=lambda pair: any(pair[1] in axes for axes in target))
            # Gathers of one axis that follow each other are one collective, with the outer mesh axis first.
            inner: tuple[str, ...] = ()
            if moves and moves[-1].kind == "all_gather" and moves[-1].axis == position:
                inner = moves.pop().mesh_axes
            moves.append(Move("all_gather", (axis, *inner), position))
            current[position].pop()
    # Padding is trimmed before anything is sliced, because slices need the axis's real size.
    moves += [Move("trim", (), position) for position, is_padded in enumerate(padded) if is_padded]
    for position, axes in enumerate(target):
        moves += [Move("slice", (axis,), position) for axis in axes[len(current[position]) :]]
    return tuple(moves)


def transient_elements(
    shape: Sequence[int], padded: Sequence[int], read: Cuts, moves: Sequence[Move], mesh: MeshSpec
) -> int:
    """The most elements on one device during a reshard.

    The slab is live to the end, and a move's operand is live beside its result. A collective is assumed to receive in
    another order than the result's, which takes a second buffer; an all_to_all also packs what it sends. Compilers
    allocate no more than that, apart from the padding of a TPU's tiles, and sometimes less.
    """
    local = [size // mesh.ways(axes) for size, axes in zip(padded, read, strict=True)]
    slab = math.prod(local)
    # Without any move the result is still a copy beside the slab.
    most, operand = 2 * slab, 0
    for move in moves:
        before = math.prod(local)
        ways = mesh.ways(move.mesh_axes)
        if move.kind == "all_to_all":
            local[move.axis] *= ways
            local[move.to] //= ways
        elif move.kind == "all_gather":
            local[move.axis] *= ways
        elif move.kind == "trim":
            local[move.axis] = shape[move.axis]
        else:
            local[move.axis] //= ways
        after = math.prod(local)
        # What a collective receives, in the order in which it arrives, and for an all_to_all also what it sends,
        # packed.
        packing = {"all_to_all": before + after, "all_gather": after}.get(move.kind, 0)
        most = max(most, slab + operand + packing + after)
        operand = after
    return most


def plan_reshard(
    leaf: Leaf,
    final: Cuts,
    mesh: MeshSpec,
    *,
    order: Sequence[int],
    stacked: Sequence[int],
    limit: int = TRANSIENT_LIMIT,
    along: Sequence[int] | None = None,
    still: bool = False,
) -> Reshard:
    """Plans the reshard of one leaf.

    Args:
        leaf: path, axes and dtype it is loaded in.
        final: the mesh axes that shard each axis in the end.
        mesh: mesh axis names and sizes.
        order: positions of its axes from the outermost in a source tensor inward.
        stacked: positions of its stacked axes, preferred for cutting into pieces.
        limit: bytes on one device that the reshard of a piece may take (`transient_elements`).
        along: positions of the axes that pieces may be cut along, also where they are sharded; None: any that is not.
        still: whether every device reads what it holds in the end, so that nothing moves: for a leaf that is read
            directly, but in pieces.
    """
    assert order, f"{leaf.path}: a reshard needs an axis that can be split into slabs"
    # A mesh axis of size 1 shards nothing.
    final = tuple(tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in final)

    def with_piece(cut: int | None, piece: int, shards: int = 1) -> Reshard:
        shape = [piece * shards if axis == cut else size for axis, size in enumerate(leaf.shape)]
        read = final if still else choose_read(leaf.names, shape, final, order, mesh)
        padded = [-(-size // mesh.ways(axes)) * mesh.ways(axes) for size, axes in zip(shape, read, strict=True)]
        moves = plan_moves(read, final, [p != s for p, s in zip(padded, shape, strict=True)])
        most = transient_elements(shape, padded, read, moves, mesh) * leaf.dtype.itemsize
        return Reshard(
            leaf=leaf,
            mesh=mesh,
            read=read,
            final=final,
            padded=tuple(padded),
            moves=moves,
            cut=cut,
            piece=piece,
            transient_device_bytes=most,
            shards=shards,
        )

    whole = with_piece(None, 0)
    best = whole
    for axis in (*stacked, *order):
        if best.transient_device_bytes <= limit:
            break
        shards = mesh.ways(final[axis])
        if (along is None and shards > 1) or (along is not None and axis not in along):
            continue
        # Of a sharded axis a piece is the same part of every shard, and what it is read in must be parts of those.
        if whole.read[axis][: len(final[axis])] != final[axis]:
            continue
        # A piece along an axis that also shards slabs must stay divisible, and so must its last one.
        unit = mesh.ways(whole.read[axis]) // shards
        size = leaf.shape[axis] // shards
        if leaf.shape[axis] % (unit * shards):
            continue
        smallest = with_piece(axis, unit, shards)
        # The transient grows with the length of a piece, so the smallest piece shows how many units the limit allows.
        times = max(limit // max(smallest.transient_device_bytes, 1), 1)
        candidate = with_piece(axis, even_piece(size, unit, times), shards)
        # A longer piece may be sharded on other axes while it is read. It is used only if no piece, the last one
        # included, needs padding along the cut.
        is_even = candidate.padded[axis] == candidate.piece * shards
        is_even = is_even and leaf.shape[axis] % mesh.ways(candidate.read[axis]) == 0
        is_even = is_even and candidate.read[axis][: len(final[axis])] == final[axis]
        if is_even and candidate.transient_device_bytes < best.transient_device_bytes:
            best = candidate
    return best


def even_piece(size: int, unit: int, most_units: int) -> int:
    """The longest piece of at most `most_units` units; equal pieces are preferred if not much shorter.

    >>> even_piece(48, 1, 30), even_piece(32, 4, 3)
    (24, 8)
    """
    units = size // unit
    most = min(most_units, units)
    divisor = max(n for n in divisors(units) if n <= most)
    # Equal pieces share one Program; a shorter last piece would need a second one.
    return (divisor if 2 * divisor > most else most) * unit


ByPath = Mapping[str, hax.NamedArray]
"""What a reshard's Program returns: leaves by path."""


def _reshard_local(reshard: Reshard, piece: Span, x: jax.Array) -> jax.Array:
    """The moves, as one device sees them."""
    for move in reshard.moves:
        if move.kind == "all_to_all":
            # The device sends a part of axis `to` to each peer and receives that peer's part of `axis`.
            x = jax.lax.all_to_all(x, move.mesh_axes, split_axis=move.to, concat_axis=move.axis, tiled=True)
        elif move.kind == "all_gather":
            x = all_gather(x, move.mesh_axes, axis=move.axis, tiled=True)
        elif move.kind == "trim":
            size = piece[1] - piece[0] if move.axis == reshard.cut else reshard.leaf.shape[move.axis]
            x = jax.lax.slice_in_dim(x, 0, size, axis=move.axis)
        else:
            size = x.shape[move.axis] // reshard.mesh.ways(move.mesh_axes)
            # The device's number along the mesh axes, major first, is the number of the part that it keeps.
            start = jax.lax.axis_index(move.mesh_axes) * np.int32(size)
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=move.axis)
    return x


all_gather = cast("Callable[..., jax.Array]", jax.lax.all_gather)
psum = cast("Callable[..., jax.Array]", jax.lax.psum)


def _spec(cuts: Cuts) -> PartitionSpec:
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in cuts))


def reshard_slabs(reshard: Reshard, piece: Span, slab: hax.NamedArray) -> hax.NamedArray:
    """A piece's slabs → the piece, cut as the leaf is in the end; call it inside `jit`, under the mesh."""

    def local(x: jax.Array) -> jax.Array:
        return _reshard_local(reshard, piece, x)

    # `check_vma` is off: JAX does not infer that gathered values are the same on all devices of a mesh axis.
    out = jax.shard_map(local, in_specs=_spec(reshard.read), out_specs=_spec(reshard.final), check_vma=False)(
        slab.array
    )
    return hax.NamedArray(out, tuple(hax.Axis(a.name, n) for a, n in zip(slab.axes, out.shape, strict=True)))


def whole_program(name: str, reshards: Sequence[Reshard], placement: Placement) -> Program:
    """The Program that reshards several leaves at once: one input of slabs for each, a dictionary by path out."""

    def run(*slabs: hax.NamedArray) -> ByPath:
        def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(_reshard_local(e, (0, 0), x) for e, x in zip(reshards, arrays, strict=True))

        out = jax.shard_map(
            local,
            in_specs=tuple(_spec(e.read) for e in reshards),
            out_specs=tuple(_spec(e.final) for e in reshards),
            check_vma=False,
        )(*(slab.array for slab in slabs))
        return {e.leaf.path: hax.NamedArray(x, e.final_value.axes) for e, x in zip(reshards, out, strict=True)}

    inputs = [Input(name=e.leaf.path, value=e.slab_value((0, 0)), placement=e.read_mapping) for e in reshards]
    return Program(name=name, function=run, inputs=tuple(inputs), out_placement=placement)


def begin_program(name: str, reshard: Reshard, placement: Placement) -> Program:
    """The Program that allocates a leaf that arrives in pieces."""

    def run() -> ByPath:
        return {reshard.leaf.path: hax.zeros(reshard.final_value.axes, dtype=reshard.leaf.dtype)}

    return Program(name=name, function=run, inputs=(), out_placement=placement)


def piece_program(name: str, reshard: Reshard, piece: Span, placement: Placement) -> Program:
    """The Program that reshards one piece and puts it into the leaf, in place.

    Its inputs: the leaf so far, the piece's slabs, and where the piece begins.
    """
    cut = reshard.cut
    assert cut is not None

    def run(so_far: Mapping[str, hax.NamedArray], slab: hax.NamedArray, start: jax.Array) -> ByPath:
        def local(whole: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
            # `at` counts within a shard: the same offset holds on every device.
            return jax.lax.dynamic_update_slice_in_dim(whole, _reshard_local(reshard, piece, x), at, axis=cut)

        leaf = so_far[reshard.leaf.path]
        out = jax.shard_map(
            local,
            in_specs=(_spec(reshard.final), _spec(reshard.read), PartitionSpec()),
            out_specs=_spec(reshard.final),
            check_vma=False,
        )(leaf.array, slab.array, start)
        return {reshard.leaf.path: hax.NamedArray(out, leaf.axes)}

    return Program(
        name=name,
        function=run,
        inputs=(
            Input(name="leaf", value={reshard.leaf.path: reshard.final_value}, placement=placement),
            Input(name="slab", value=reshard.slab_value(piece), placement=reshard.read_mapping),
            Input(name="start", value=jax.ShapeDtypeStruct((), np.int32), placement=AxisMapping()),
        ),
        out_placement=placement,
        # The leaf's buffer is donated, so that putting a piece in place allocates no second copy of the leaf.
        donate=("leaf",),
    )


def _identity(seconds: hax.NamedArray) -> hax.NamedArray:
    return seconds


@functools.lru_cache(maxsize=64)
def seconds_program(mesh: MeshSpec) -> Program:
    """The Program that gathers the seconds of each host to all hosts: one number for each device in, all out."""
    axis = hax.Axis("device", mesh.size)
    value = abstract_array((axis,), np.dtype(np.float32))
    return Program(
        name="load.seconds",
        function=_identity,
        inputs=(Input(name="seconds", value=value, placement=AxisMapping({"device": mesh.names})),),
        out_placement=AxisMapping(),
    )
