"""`best_effort_sharding`: a place for an array whose axes have no names.

With names there is a mapping, and the planner decides. Without them there are only a shape and a mesh, and one duty:
a large array must not end up replicated on every device by accident. All mesh axes are considered, on one dimension or
on several. Among the placements that divide, the one with the most shards wins; among equals, large arrays prefer the
model axes, then data, then the rest, and each mesh axis takes the last dimension that it divides and that is not yet
sharded. Small arrays prefer data, then model; they are replicated over the rest, and wherever nothing divides. A large
array whose shard is still large and replicated is an error.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from haliax_ext.errors import ReplicationError, ShardingError, gib
from haliax_ext.meshspec import AnyMesh, Device, MeshSpec, mesh_in_scope

LARGE_BYTES = 32 << 20
"""Arrays of at least this many bytes must not be replicated."""
MODEL_AXES = ("model", "group")
DATA_AXES = ("data",)
DEVICES = "devices_"
"""Prefix of the axis names of a mesh that is made from a bare list of devices."""


def best_effort_sharding(
    shape: Sequence[int],
    *,
    devices: Sequence[Device] | None = None,
    mesh: AnyMesh | None = None,
    dtype: DTypeLike = np.float32,
    large_bytes: int = LARGE_BYTES,
) -> NamedSharding:
    """A sharding for an array without names, over as many devices as its shape allows.

    Args:
        shape: the array's shape.
        devices: devices to spread over where there is no mesh; their number is factored into primes, each of which may
            shard another dimension.
        mesh: a concrete or abstract mesh; default the mesh in scope.
        dtype: for the bytes.
        large_bytes: from this size on an array prefers the model axes and must not be replicated.

    Raises:
        ReplicationError: a large array that no mesh axis can cut into pieces below `large_bytes`.
        ShardingError: neither mesh nor devices are given, and no mesh is in scope.
    """
    return explain_best_effort(shape, devices=devices, mesh=mesh, dtype=dtype, large_bytes=large_bytes)[0]


def explain_best_effort(
    shape: Sequence[int],
    *,
    devices: Sequence[Device] | None = None,
    mesh: AnyMesh | None = None,
    dtype: DTypeLike = np.float32,
    large_bytes: int = LARGE_BYTES,
) -> tuple[NamedSharding, str]:
    """Like `best_effort_sharding`, with the reason in words."""
    where = _mesh(mesh, devices)
    spec = MeshSpec.from_mesh(where)
    shape = tuple(int(size) for size in shape)
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    large = nbytes >= large_bytes and bool(shape)
    order = [name for name in _preference(spec, large) if spec.shape[name] > 1]
    # An empty array costs nothing wherever it is.
    assigned = _assign(tuple(spec.shape[name] for name in order), shape) if nbytes else (None,) * len(order)

    cuts: list[list[str]] = [[] for _ in shape]
    for name, at in zip(order, assigned, strict=True):
        if at is not None:
            cuts[at].append(name)
    share = nbytes // spec.ways(tuple(name for axes in cuts for name in axes))
    replicated = [name for name, size in spec.axes if size > 1 and not any(name in axes for axes in cuts)]
    # `share` is what one device holds: a large array in large pieces is accepted if nothing is repeated.
    if large and share >= large_bytes and replicated:
        raise _refusal(shape, np.dtype(dtype), nbytes, share, replicated, spec, large_bytes)
    entries = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in cuts]
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(where, PartitionSpec(*entries)), _reason(shape, cuts, nbytes, share, replicated, spec, large)


def _mesh(mesh: AnyMesh | None, devices: Sequence[Device] | None) -> AnyMesh:
    if mesh is None and devices is None:
        mesh = mesh_in_scope()
        if mesh is None:
            raise ShardingError(
                "best_effort_sharding: there is no mesh in scope",
                suggestion="pass mesh=…, or devices=…, or call it under `with jax.set_mesh(mesh): …`",
            )
    if mesh is None:
        assert devices is not None
        return _mesh_of_primes(devices)
    if devices is not None and (isinstance(mesh, AbstractMesh) or set(mesh.devices.flat) != set(devices)):
        raise ShardingError(
            f"best_effort_sharding: mesh {MeshSpec.from_mesh(mesh)} is not made of the {len(devices)} devices given",
            suggestion="pass mesh=… alone",
        )
    return mesh


def _mesh_of_primes(devices: Sequence[Device]) -> Mesh:
    """A mesh whose axes are the prime factors of the number of devices, so that any divisor of it can shard."""
    primes: list[int] = []
    rest = len(devices)
    while rest > 1:
        prime = next(p for p in range(2, rest + 1) if rest % p == 0)
        primes.append(prime)
        rest //= prime
    sizes = tuple(primes) or (1,)
    names = tuple(f"{DEVICES}{n}" for n in range(len(sizes)))
    array = np.asarray(devices, dtype=object).reshape(sizes)
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(sizes))


def _preference(spec: MeshSpec, large: bool) -> list[str]:
    """Mesh axes in the order in which they choose a dimension; small arrays leave out what may cross DCN."""
    # Axes of a mesh made from bare devices have no role; they count as data axes.
    data = [name for name in spec.names if name in DATA_AXES or name.startswith(DEVICES)]
    model = [name for name in spec.names if name in MODEL_AXES]
    rest = [name for name in spec.names if name not in (*data, *model)]
    return [*model, *data, *rest] if large else [*data, *model]


def _assign(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int | None, ...]:
    """For each mesh axis the dimension it shards, or None.

    The most pieces win. Between equals the first mesh axis prefers to be used rather than not, a dimension that is
    unsharded rather than sharded, and later dimensions; then the second mesh axis, and so on.
    """

    # Exhaustive search over (mesh axis, dimension): meshes have few axes, and equal remainders are solved once.
    @functools.cache
    def best(n: int, remaining: tuple[int, ...]) -> tuple[int, tuple[int | None, ...]]:
        if n == len(sizes):
            return 1, ()
        choice: tuple[int, tuple[int | None, ...]] = (0, ())
        # In order of preference; a later choice must be better, not equal.
        whole_first = sorted(range(len(shape)), key=lambda d: (remaining[d] != shape[d], -d))
        for d in (*(d for d in whole_first if remaining[d] % sizes[n] == 0), None):
            # A dimension that was sharded can be sharded again, by what is left of its size.
            after = remaining if d is None else (*remaining[:d], remaining[d] // sizes[n], *remaining[d + 1 :])
            pieces, rest = best(n + 1, after)
            pieces *= 1 if d is None else sizes[n]
            if pieces > choice[0]:
                choice = (pieces, (d, *rest))
        return choice

    return best(0, shape)[1]


def _reason(
    shape: tuple[int, ...],
    cuts: list[list[str]],
    nbytes: int,
    share: int,
    whole: list[str],
    spec: MeshSpec,
    large: bool,
) -> str:
    shards = [
        f"dimension {n} ({size}) over {' × '.join(f'{name} {spec.shape[name]}' for name in axes)}"
        for n, (size, axes) in enumerate(zip(shape, cuts, strict=True))
        if axes
    ]
    text = f"{list(shape)}: {gib(nbytes)}, {'large' if large else 'small'}; " + (", ".join(shards) or "unsharded")
    text += f"; {gib(share)} on each device"
    return text + (f", replicated over {' and '.join(whole)}" if whole and nbytes else "")


def _refusal(
    shape: tuple[int, ...],
    dtype: np.dtype,
    nbytes: int,
    share: int,
    whole: list[str],
    spec: MeshSpec,
    large_bytes: int,
) -> ReplicationError:
    dimension = max(range(len(shape)), key=lambda d: shape[d])
    # Padded to a multiple of all devices, the largest dimension always divides, and grows by the least share.
    padded = -(-shape[dimension] // spec.size) * spec.size
    pad = f"pad dimension {dimension} from {shape[dimension]} to {padded}, " if padded != shape[dimension] else ""
    return ReplicationError(
        f"best_effort_sharding: {dtype.name}{list(shape)} of {gib(nbytes)} has no dimension that "
        f"{' or '.join(f'{name} {spec.shape[name]}' for name in whole)} divides on mesh {spec}; "
        f"each device would hold {gib(share)} of it, repeated",
        suggestion=f"{pad}give its axes names and a mapping, or accept the copies with large_bytes={share + 1} "
        f"(now {large_bytes})",
    )
