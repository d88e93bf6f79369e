"""`plan_loading`: a sharding plan, rules and a source's index → a `LoadPlan`, without reading a weight.

Direct reading is chosen where the hosts together read at most 1.25 times a leaf's bytes, as long as the whole job
stays below 1.02 times the checkpoint; every other leaf is read once and exchanged.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.initializers import LeafInit
from haliax_ext.leaf_layout import Box, Span, box_size, distinct_boxes
from haliax_ext.load_plan import LeafLoad, LoadPlan, default_memory_bytes, plan_steps
from haliax_ext.load_transforms import LoadTransform
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import LeafPlan, ShardingPlan
from haliax_ext.read_plan import Block, plan_reads
from haliax_ext.reshard import TRANSIENT_LIMIT, plan_reshard
from haliax_ext.rules import Match, WeightRules
from haliax_ext.sources import RemoteReads, TensorSource, remote_access

DIRECT_AMPLIFICATION = 1.25
"""A leaf that direct reading would read more often than this is exchanged."""
JOB_AMPLIFICATION = 1.02
"""All hosts together read at most this many times the checkpoint."""


def plan_loading(
    plan: ShardingPlan,
    rules: WeightRules,
    source: TensorSource,
    *,
    hosts: np.ndarray | None = None,
    dtype: np.dtype | None = None,
    memory_bytes: int | None = None,
    transient_limit: int = TRANSIENT_LIMIT,
) -> LoadPlan:
    """Plans how every leaf of `plan` is loaded from `source`.

    Args:
        plan: where everything goes; it must have no errors.
        rules: the model family's table.
        source: what to read from; only its index is used.
        hosts: the host of each device, of the mesh's shape; None: one host.
        dtype: what floating-point leaves are loaded in; None: as in `plan`.
        memory_bytes: the host-memory budget, which also bounds the pieces of a reshard; None: of a source on another
            machine, the one that `load` chooses, so that a piece is read while another one is exchanged.
        transient_limit: what a reshard may hold on a device.

    Raises:
        WeightMismatchError: the source is not what the model needs; everything is listed.
        ShardingError: `plan` has errors.
    """
    plan.check()
    mesh = plan.mesh
    device_hosts = np.zeros(mesh.size, dtype=np.int64) if hosts is None else np.asarray(hosts).reshape(-1)
    # Hosts index arrays later on, so gaps in their numbers would be hosts that read nothing.
    if len(device_hosts) != mesh.size or set(device_hosts.tolist()) != set(range(int(device_hosts.max()) + 1)):
        raise ValueError(
            f"hosts names {sorted(set(device_hosts.tolist()))} for {len(device_hosts)} devices; mesh {mesh} has "
            f"{mesh.size}, and hosts must be numbered from 0 without gaps"
        )
    matches = rules.match([leaf_plan.leaf for leaf_plan in plan.leaves], source.tensors)
    limit = transient_limit
    per_host = max(np.bincount(device_hosts).tolist())
    remote = remote_access(source)
    if memory_bytes is None and remote is not None:
        memory_bytes = default_memory_bytes(plan.bytes_per_device * per_host)
    if memory_bytes is not None:
        # Slabs of two pieces are on a host at a time, one of them being read.
        limit = min(limit, max(memory_bytes // (2 * per_host), 1))
    derived = {rule.path: rule for rule in rules.derived}
    loads: list[LeafLoad] = []
    for match in matches:
        rule = derived.get(match.leaf.path)
        # A leaf that is read and not kept has no plan of its own: it is sharded like the result that the rule names.
        leaf_plan = plan.by_path[match.leaf.path if rule is None else rule.like]
        load = _direct(match, leaf_plan, source, device_hosts, mesh, dtype)
        if rule is not None:
            load = _with_transform(
                load, LoadTransform(rule=rule, results=tuple(plan.by_path[path] for path in rule.targets))
            )
        # A leaf whose source has no axes (a scalar) cannot be cut into slabs; it is read directly by every host.
        if load.direct_amplification > DIRECT_AMPLIFICATION and load.layout.part_shape:
            load = _resharded(load, leaf_plan, device_hosts, mesh, limit)
        elif rule is not None:
            load = _read_in_pieces(load, leaf_plan, device_hosts, mesh, limit)
        loads.append(load)
    total = sum(load.source_bytes for load in loads)
    # The worst first, until the job as a whole reads little enough.
    # The key is minus the bytes read in excess.
    for number in sorted(range(len(loads)), key=lambda n: loads[n].source_bytes - sum(loads[n].bytes_by_host)):
        if sum(sum(load.bytes_by_host) for load in loads) <= JOB_AMPLIFICATION * total:
            break
        load = loads[number]
        if load.strategy == "direct" and load.layout.part_shape and load.amplification > 1:
            path = load.path if load.derived is None else load.derived.rule.like
            loads[number] = _resharded(load, plan.by_path[path], device_hosts, mesh, limit)
    loaded = {leaf.path for load in loads for leaf, _ in load.results}
    initial = {rule.target: rule for rule in rules.initial}
    absent = [leaf_plan.leaf for leaf_plan in plan.leaves if leaf_plan.leaf.path not in loaded]
    return LoadPlan(
        sharding=plan,
        loads=tuple(loads),
        steps=plan_steps(loads),
        hosts=tuple(device_hosts.tolist()),
        skipped=tuple(leaf.path for leaf in absent if leaf.path not in initial),
        initial=tuple(
            LeafInit(leaf=_in_dtype(leaf, dtype), rule=initial[leaf.path]) for leaf in absent if leaf.path in initial
        ),
        remote=None
        if remote is None
        else RemoteReads(
            reads_at_once=remote.reads_at_once, read_bytes=remote.read_bytes, hedge_bytes=remote.hedge_bytes
        ),
    )


def _in_dtype(leaf: Leaf, dtype: np.dtype | None) -> Leaf:
    if dtype is None or not jnp.issubdtype(leaf.dtype, np.floating):
        return leaf
    return replace(leaf, dtype=np.dtype(dtype))


def _common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    """A floating dtype that represents the numbers of all of these."""
    first, *others = dict.fromkeys(dtypes)
    if not others:
        return first
    # Neither of float16 and bfloat16 represents the other; float32 represents both.
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


def _with_transform(load: LeafLoad, derived: LoadTransform) -> LeafLoad:
    """A leaf that is read and not kept arrives as it is stored; its results have the dtypes of the plan."""
    # JAX has no numbers of 64 bits here.
    dtype = np.dtype(np.float32) if load.source_dtype == np.float64 else load.source_dtype
    return replace(load, leaf=replace(load.leaf, dtype=dtype), derived=derived)


def _direct(
    match: Match,
    leaf_plan: LeafPlan,
    source: TensorSource,
    hosts: np.ndarray,
    mesh: MeshSpec,
    dtype: np.dtype | None,
) -> LeafLoad:
    infos = [source.tensors[name] for name in match.names]
    leaf = _in_dtype(match.leaf, dtype)
    per_element = sum(info.nbytes for info in infos) / max(sum(info.size for info in infos), 1)
    dtypes = tuple(info.dtype for info in infos)
    load = LeafLoad(
        leaf=leaf,
        rule=match.rule,
        layout=match.layout,
        sources=match.names,
        source_dtype=_common_dtype(dtypes),
        source_dtypes=dtypes if len(set(dtypes)) > 1 else (),
        bytes_per_element=per_element,
        strategy="direct",
        spec=leaf_plan.spec,
        reshard=None,
        bytes_by_host=(),
        # Padding of the leaf beyond the source is in no file.
        source_bytes=round(math.prod(match.layout.extents) * per_element),
        direct_amplification=1.0,
        amplification=1.0,
        transient_device_bytes=0,
        transient_host_bytes=0,
        reason="",
    )
    by_host, largest = _host_bytes(load, hosts, mesh)
    amplification = sum(by_host) / max(load.source_bytes, 1)
    return replace(
        load,
        bytes_by_host=by_host,
        direct_amplification=amplification,
        amplification=amplification,
        transient_host_bytes=largest,
        reason="a single host reads it once" if len(by_host) == 1 else f"the hosts read it {amplification:.2f}×",
    )


def _with_reshard(load: LeafLoad, leaf_plan: LeafPlan, mesh: MeshSpec, limit: int, *, still: bool) -> LeafLoad:
    layout, derived = load.layout, load.derived
    # What a function holds of a piece is at most one and a half times what the piece itself takes.
    reshard = plan_reshard(
        load.leaf,
        leaf_plan.mesh_axes,
        mesh,
        order=[position for positions in layout.group_positions for position in positions],
        stacked=layout.stack_positions,
        # Piece and function together hold 2.5 times a piece, hence two fifths of the limit for the piece.
        limit=limit if derived is None else 2 * limit // 5,
        along=None if derived is None else derived.along(load.leaf),
        still=still,
    )
    working = 0 if derived is None else derived.working_bytes(reshard, mesh.ways(sum(leaf_plan.mesh_axes, ())))
    return replace(load, reshard=reshard, transient_device_bytes=reshard.transient_device_bytes + working)


def _read_in_pieces(load: LeafLoad, leaf_plan: LeafPlan, hosts: np.ndarray, mesh: MeshSpec, limit: int) -> LeafLoad:
    """Read directly, but so that no more than a piece of it is there at a time."""
    changed = _with_reshard(load, leaf_plan, mesh, limit, still=True)
    by_host, largest = _host_bytes(changed, hosts, mesh)
    amplification = sum(by_host) / max(load.source_bytes, 1)
    return replace(changed, bytes_by_host=by_host, amplification=amplification, transient_host_bytes=largest)


def _resharded(load: LeafLoad, leaf_plan: LeafPlan, hosts: np.ndarray, mesh: MeshSpec, limit: int) -> LeafLoad:
    arrives = _with_reshard(load, leaf_plan, mesh, limit, still=False)
    changed = replace(
        arrives,
        strategy="exchange",
        reason=f"reading it directly would read it {load.direct_amplification:.2f}×; {arrives.reshard}",
    )
    by_host, largest = _host_bytes(changed, hosts, mesh)
    return replace(
        changed,
        bytes_by_host=by_host,
        amplification=sum(by_host) / max(load.source_bytes, 1),
        transient_host_bytes=largest,
    )


def _host_bytes(load: LeafLoad, hosts: np.ndarray, mesh: MeshSpec) -> tuple[tuple[int, ...], int]:
    """Bytes that each host reads, and the most that one of them holds at a time."""
    num_hosts = int(hosts.max()) + 1
    elements = np.zeros(num_hosts)
    largest = 0
    known: dict[tuple[Box, ...], tuple[int, int]] = {}
    # Pieces of one length read alike, and so do hosts with the same blocks. Parts of shards do not, where the axis is
    # padded.
    by_length = load.reshard is None or load.reshard.shards == 1
    alike: dict[Hashable, list[Span]] = {}
    for piece in load.pieces:
        alike.setdefault(piece[1] - piece[0] if by_length else piece, []).append(piece)
    for pieces in alike.values():
        device_boxes = load.device_boxes(mesh, pieces[0])
        for host in range(num_hosts):
            boxes, _ = distinct_boxes(device_boxes[hosts == host])
            key = tuple(boxes)
            if key not in known:
                plans = plan_reads(load, [Block(box=box) for box in boxes])
                filled = [sum(box_size(block.box) for block in plan.blocks) for plan in plans]
                # All slabs of a piece are in memory at once; of a leaf that is read directly, one plan's blocks.
                held_elements = sum(filled) if load.reshard is not None else max(filled, default=0)
                known[key] = (sum(plan.elements for plan in plans), held_elements)
            # All pieces of the group read as much as the first one.
            elements[host] += known[key][0] * len(pieces)
            largest = max(largest, known[key][1] * load.leaf.dtype.itemsize)
    return tuple(round(count * load.bytes_per_element) for count in elements.tolist()), largest
