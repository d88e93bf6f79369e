"""Copies arrays from devices to the hosts, piece by piece, so that no device needs memory for more than a piece.

`HostGather` plans how a box of one array is copied: which part of its shard each device contributes at a time, and
which Programs do that. The memory it takes on a device beside the array is bounded, whatever the array's size. Each
element is copied once. There are two ways:

- *cut*: this process holds all of the box, so each device contributes what it has, and nothing moves between devices;
- *gather*: other processes hold some of it, so every device contributes the same part of its shard and all parts are
  gathered to every process. The parts of a piece are as far apart as shards are: a piece is no range of rows.

Along an axis where the box is inside one shard (a single layer, an expert) only that shard's owner contributes, and the
others add zeros. Elements move between devices as integers, so that every bit arrives unchanged.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_ext.leaf_layout import Box, intersect, to_slices
from haliax_ext.mapping import AxisMapping
from haliax_ext.program import Input, Jit, Program
from haliax_ext.reshard import TRANSIENT_LIMIT, Cuts, all_gather, even_piece, psum

MeshSizes = tuple[tuple[str, int], ...]
"""Mesh axes, major first, with their sizes."""
# A TPU's tile: 128 lanes, and as many sublanes as 32 bytes of an element type fill.
_LANES, _SUBLANE_BYTES = 128, 32


@dataclass(frozen=True, kw_only=True)
class HostGather:
    """The plan by which a box of one array is copied to the hosts.

    Attributes:
        shape: of the array.
        dtype: of the array.
        cuts: the mesh axes that cut it; none of size 1.
        sizes: of the mesh axes.
        owned: for each axis, whether the box is inside one shard of several.
        local: elements of its shard that a device contributes along each axis, over all pieces.
        part: elements of these at a time.
        gathered: whether other processes hold some of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    cuts: Cuts
    sizes: MeshSizes
    owned: tuple[bool, ...]
    local: tuple[int, ...]
    part: tuple[int, ...]
    gathered: bool

    @functools.cached_property
    def ways(self) -> tuple[int, ...]:
        """The number of shards along each axis."""
        return tuple(math.prod(n for name, n in self.sizes if name in axes) for axes in self.cuts)

    @functools.cached_property
    def shard(self) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(n // ways for n, ways in zip(self.shape, self.ways, strict=True))

    def pieces(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each piece its offset in `local` and its length, along each axis."""
        axes = [
            [(at, min(part, whole - at)) for at in range(0, whole, part)]
            for whole, part in zip(self.local, self.part, strict=True)
        ]
        for spans in itertools.product(*axes):
            yield tuple(at for at, _ in spans), tuple(n for _, n in spans)

    @functools.cached_property
    def programs(self) -> tuple[Program, ...]:
        """The Programs that take the pieces: one for each size of a piece."""
        sizes = dict.fromkeys(n for _, n in self.pieces())
        return tuple(self.program(size) for size in sizes)

    def program(self, part: tuple[int, ...]) -> Program:
        """The Program that takes a piece of a size."""
        return _program(self.shape, self.dtype, self.cuts, self.owned, part, gathered=self.gathered)

    @property
    def transient_bytes(self) -> int:
        """The most bytes on a device beside the array while a piece is read."""
        return _piece_bytes(self, self.part)


def plan_host_gather(
    box: Box,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype,
    cuts: Cuts,
    sizes: MeshSizes,
    gathered: bool,
    limit: int = TRANSIENT_LIMIT,
) -> tuple[HostGather, tuple[int, ...], tuple[int, ...]]:
    """Plans how a box is copied to the hosts.

    Args:
        box: which elements.
        shape: of the array.
        dtype: of the array.
        cuts: the mesh axes that cut it.
        sizes: of the mesh axes.
        gathered: whether other processes hold some of it.
        limit: bytes on a device that a piece may take, beside the array.

    Returns:
        The plan; where in a shard the box begins; along axes that are `owned`, the number of the shard.
    """
    large = {name for name, n in sizes if n > 1}
    cuts = tuple(tuple(axis for axis in axes if axis in large) for axes in cuts)
    starts: list[int] = []
    owners: list[int] = []
    owned: list[bool] = []
    local: list[int] = []
    for (begin, end), size, axes in zip(box, shape, cuts, strict=True):
        ways = math.prod(n for name, n in sizes if name in axes)
        shard = size // ways
        # Numbers of the first and the last shard that the box touches along this axis.
        first, last = begin // shard, (end - 1) // shard
        within = first == last
        # With one shard there is no owner: every device along the other mesh axes holds the axis whole.
        owned.append(within and ways > 1)
        owners.append(first if within else 0)
        starts.append(begin - first * shard if within else 0)
        # A box over several shards takes all of each shard; what lies outside the box is dropped on the host.
        local.append(end - begin if within else shard)
    gather = _choose_pieces(
        shape, np.dtype(dtype), cuts, sizes, tuple(owned), tuple(local), gathered=gathered, limit=limit
    )
    return gather, tuple(starts), tuple(owners)


@functools.lru_cache(maxsize=4096)
def _choose_pieces(
    shape: tuple[int, ...],
    dtype: np.dtype,
    cuts: Cuts,
    sizes: MeshSizes,
    owned: tuple[bool, ...],
    local: tuple[int, ...],
    *,
    gathered: bool,
    limit: int,
) -> HostGather:
    """Chooses the pieces: the outermost axes are cut first, so that each is contiguous in a device's memory."""
    uncut = HostGather(
        shape=shape, dtype=dtype, cuts=cuts, sizes=sizes, owned=owned, local=local, part=local, gathered=gathered
    )
    part = list(local)

    def takes(axis: int, size: int) -> int:
        return _piece_bytes(uncut, (*part[:axis], size, *part[axis + 1 :]))

    for axis, size in enumerate(local):
        # It fits: inner axes stay whole, so that a piece is one contiguous range.
        if takes(axis, size) <= limit:
            break
        # Less than a tile saves nothing.
        least = takes(axis, 1)
        allowed = max(limit, least)
        # Bisection for the longest part along this axis that the limit allows; `low` always fits.
        low, high = 1, size + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if takes(axis, middle) <= allowed else (low, middle)
        # Pieces of equal length share one Program.
        part[axis] = even_piece(size, 1, low)
    return HostGather(
        shape=shape, dtype=dtype, cuts=cuts, sizes=sizes, owned=owned, local=local, part=tuple(part), gathered=gathered
    )


def _piece_bytes(gather: HostGather, part: tuple[int, ...]) -> int:
    """Bytes on a device that a piece takes beside the array, with the padding of a TPU's tiles.

    The sum of: the part that the device gives and a copy of it in the order of sending; what it receives, once as
    integers in the order of arrival, once in the result's order, once in the array's dtype. The TPU compiler makes
    that many copies.
    """
    sent = _padded(part, gather.dtype.itemsize)
    if not gather.gathered:
        # What the device cuts out, and the copy of it that is sent to the host.
        return 2 * sent
    ways = (1 if is_owned else n for n, is_owned in zip(gather.ways, gather.owned, strict=True))
    # Only axes without an owner grow when the parts of all shards are gathered.
    received = _padded(tuple(n * way for n, way in zip(part, ways, strict=True)), gather.dtype.itemsize)
    # Integers of four bytes are what is added.
    added = 3 * _padded(part, 4) if any(gather.owned) else 0
    return 2 * sent + added + 3 * received


def _padded(shape: tuple[int, ...], itemsize: int) -> int:
    # Scalars and vectors occupy a whole tile too: shapes are extended to at least two axes.
    *outer, second, minor = (1, 1, *shape)
    sublanes = max(_SUBLANE_BYTES // itemsize, 1)
    tiled = -(-second // sublanes) * sublanes * -(-minor // _LANES) * _LANES
    return math.prod(outer) * tiled * itemsize


def gather_to_host(
    array: jax.Array,
    box: Box,
    *,
    jit: Jit = Program.jit,
    limit: int = TRANSIENT_LIMIT,
    gathered: bool | None = None,
) -> Iterator[tuple[Box, np.ndarray]]:
    """The elements of a box of an array on devices: parts of the box, with their elements on the host.

    Where other processes hold some of the array, all of them must go through all of it.

    Args:
        array: on devices.
        box: which elements.
        jit: makes the Programs callable.
        limit: bytes on a device that a piece may take, beside the array.
        gathered: whether the elements are gathered from other processes; None for where these hold some of it.
    """
    for gather, begin, part, owners, piece in _gathered_pieces(array, box, jit, limit, gathered):
        yield from _piece_boxes(gather, piece, begin, part, owners, box)


def contribute(array: jax.Array, box: Box, *, jit: Jit = Program.jit, limit: int = TRANSIENT_LIMIT) -> None:
    """Takes part in the collectives of `gather_to_host` on a process that does not need the elements.

    Args:
        array, box, jit, limit: as `gather_to_host` takes them.
    """
    for *_, piece in _gathered_pieces(array, box, jit, limit, None):
        # At most one piece may be on a device at a time: the limit counts one.
        piece.block_until_ready()


_GatheredPiece = tuple[HostGather, tuple[int, ...], tuple[int, ...], tuple[int, ...], jax.Array]


def _gathered_pieces(
    array: jax.Array, box: Box, jit: Jit, limit: int, gathered: bool | None
) -> Iterator[_GatheredPiece]:
    """Each piece as devices hold it, with where it begins, how long it is, and which shards own it."""
    mesh, cuts = _mesh_and_cuts(array)
    sizes = tuple((str(name), n) for name, n in mesh.shape.items())
    gather, starts, owners = plan_host_gather(
        box,
        shape=array.shape,
        dtype=np.dtype(array.dtype),
        cuts=cuts,
        sizes=sizes,
        gathered=not (array.is_fully_addressable or array.is_fully_replicated) if gathered is None else gathered,
        limit=limit,
    )
    for behind, part in gather.pieces():
        begin = tuple(start + at for start, at in zip(starts, behind, strict=True))
        where = np.asarray([begin, owners], np.int32)
        # The default binds this piece's value: the callback must not see the loop's next one.
        at = jax.make_array_from_callback(where.shape, NamedSharding(mesh, PartitionSpec()), lambda _, x=where: x)
        yield gather, begin, part, owners, jit(gather.program(part), mesh)(array, at)


def _piece_boxes(
    gather: HostGather,
    piece: jax.Array,
    begin: tuple[int, ...],
    part: tuple[int, ...],
    owners: tuple[int, ...],
    box: Box,
) -> Iterator[tuple[Box, np.ndarray]]:
    """The parts of the box that are in the result of one Program."""
    written: set[Box] = set()
    # The result is replicated: any local device has all of it.
    if gather.gathered:
        whole = np.asarray(piece.addressable_data(0))
        for shards, block in _blocks(gather, part, owners):
            yield from _new_box(gather, begin, part, shards, box, lambda block=block: whole[block], written)
        return
    for device_shard in piece.addressable_shards:
        # The parts of all shards lie one behind another in the result, `n` elements each: an index gives the shard's
        # number.
        shards = tuple((s.start or 0) // n for s, n in zip(device_shard.index, part, strict=True))
        spans = tuple((shard, shard + 1) for shard in shards)
        # Along an owned axis every device cut something out, but only the owner's elements belong to the box.
        if all(not is_owned or at == owner for is_owned, at, owner in zip(gather.owned, shards, owners, strict=True)):
            yield from _new_box(
                gather, begin, part, spans, box, lambda shard=device_shard: np.asarray(shard.data), written
            )


Shards = tuple[tuple[int, int], ...]
"""For each axis, from which shard to which, the last excluded."""


def _blocks(
    gather: HostGather, part: tuple[int, ...], owners: tuple[int, ...]
) -> Iterator[tuple[Shards, tuple[slice, ...]]]:
    """The blocks of a gathered piece whose elements are contiguous in the array."""
    choices: list[list[tuple[tuple[int, int], slice]]] = []
    for n, ways, shard, is_owned, owner in zip(part, gather.ways, gather.shard, gather.owned, owners, strict=True):
        if is_owned:
            choices.append([((owner, owner + 1), slice(0, n))])
        # Whole shards that follow one another are contiguous in the array.
        elif n == shard:
            choices.append([((0, ways), slice(0, n * ways))])
        else:
            # Parts of shards are not: between two of them lies the rest of a shard.
            choices.append([((way, way + 1), slice(way * n, (way + 1) * n)) for way in range(ways)])
    for chosen in itertools.product(*choices):
        yield tuple(shards for shards, _ in chosen), tuple(block for _, block in chosen)


def _new_box(
    gather: HostGather,
    begin: tuple[int, ...],
    part: tuple[int, ...],
    shards: Shards,
    box: Box,
    values: Callable[[], np.ndarray],
    written: set[Box],
) -> Iterator[tuple[Box, np.ndarray]]:
    """The part of a block that is in the box, unless another device gave it already."""
    block_box = tuple(
        (first * shard + at, (last - 1) * shard + at + n)
        for (first, last), shard, at, n in zip(shards, gather.shard, begin, part, strict=True)
    )
    common = intersect(block_box, box)
    # Replicas hold the same elements; the first one is enough.
    if common is None or common in written:
        return
    written.add(common)
    inside = tuple((a - at, b - at) for (a, b), (at, _) in zip(common, block_box, strict=True))
    yield common, values()[(*to_slices(inside), ...)]


def _mesh_and_cuts(array: jax.Array) -> tuple[Mesh, Cuts]:
    """The mesh of an array and the mesh axes that shard it; an array on one device has a mesh of that device."""
    if isinstance(array.sharding, NamedSharding):
        assert isinstance(array.sharding.mesh, Mesh)
        return array.sharding.mesh, sharded_axes(array.sharding.spec, array.ndim)
    holders = array.devices()
    assert len(holders) == 1, f"an array on several devices must have a NamedSharding, not {array.sharding}"
    devices = np.asarray(list(holders))
    return Mesh(devices, ("device",)), ((),) * array.ndim


def sharded_axes(spec: PartitionSpec, rank: int) -> Cuts:
    """The mesh axes that cut each axis of an array.

    >>> sharded_axes(PartitionSpec("data", ("model", "group")), 3)
    (('data',), ('model', 'group'), ())
    """
    entries = (*spec, *(None for _ in range(rank - len(spec))))
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)


_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _as_bits(x: jax.Array) -> jax.Array:
    """The elements as integers: a compiler may convert 16-bit floats to send them, which changes the bits of NaNs."""
    bits = _BITS[x.dtype.itemsize]
    return x.astype(bits) if x.dtype == np.bool_ else jax.lax.bitcast_convert_type(x, bits)


def _from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x.astype(dtype) if dtype == np.bool_ else jax.lax.bitcast_convert_type(x, dtype)


def _broadcast_bits(x: jax.Array, is_owner: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The integers of the device whose `is_owner` is true, on all devices along `axes`."""
    # All other devices add zeros, so the sum is the owner's bits exactly.
    bits = x.astype(np.uint32)
    wide = jax.lax.select(is_owner, bits, jax.lax.full_like(bits, 0))
    return psum(wide, axes).astype(x.dtype)


@functools.lru_cache(maxsize=1024)
def _program(
    shape: tuple[int, ...],
    dtype: np.dtype,
    cuts: Cuts,
    owned: tuple[bool, ...],
    part: tuple[int, ...],
    *,
    gathered: bool,
) -> Program:
    """The Program that takes a piece: its array; where in a shard the piece begins, and which shard has it."""
    spec = PartitionSpec(*(axes or None for axes in cuts))

    def local(x: jax.Array, where: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_slice(x, list(where[0]), part)
        if not gathered:
            return x
        x = _as_bits(x)
        for n, axes in enumerate(cuts):
            # Owned axes first: the broadcast moves one part, where a gather before it would move all of them.
            if axes and owned[n]:
                x = _broadcast_bits(x, jax.lax.axis_index(axes) == where[1, n], axes)
        for n, axes in enumerate(cuts):
            if axes and not owned[n]:
                x = all_gather(x, axes, axis=n, tiled=True)
        return _from_bits(x, dtype)

    def take(array: jax.Array, where: jax.Array) -> jax.Array:
        to = PartitionSpec() if gathered else spec
        # `check_vma` is off: JAX does not infer that gathered values are the same on all devices.
        return jax.shard_map(local, in_specs=(spec, PartitionSpec()), out_specs=to, check_vma=False)(array, where)

    placement = AxisMapping({f"_{n}": axes for n, axes in enumerate(cuts) if axes})
    # The name states everything that distinguishes the jit, since two Programs of a run must not share a name.
    at = "".join(f".{n}-{'-'.join(axes)}{'.one' * owned[n]}" for n, axes in enumerate(cuts) if axes)
    kind = "gather" if gathered else "cut"
    return Program(
        name=f"save.{kind}.{'x'.join(map(str, part))}.of.{'x'.join(map(str, shape))}.{dtype.name}{at}",
        function=take,
        inputs=(
            Input(name="array", value=jax.ShapeDtypeStruct(shape, dtype), placement=placement),
            Input(name="where", value=jax.ShapeDtypeStruct((2, len(shape)), np.int32), placement=AxisMapping()),
        ),
        out_placement=AxisMapping() if gathered else placement,
    )
