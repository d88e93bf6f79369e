"""`plan_loading`: a sharding plan, rules and a source's index → a `LoadPlan`, without reading a weight.

Direct reading is chosen where the hosts together read at most 1.25 times a leaf's bytes, as long as the whole job
stays below 1.02 times the checkpoint; every other leaf is read once and exchanged.
"""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from haliax_ext.exchange import TRANSIENT_LIMIT, plan_exchange
from haliax_ext.load_plan import LeafLoad, LoadPlan
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import LeafPlan, ShardingPlan
from haliax_ext.reading import distinct
from haliax_ext.rules import Match, WeightRules
from haliax_ext.slices import Box, Span
from haliax_ext.sources import TensorSource

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
        source: what to read from; only its index is looked at.
        hosts: the host of each device, of the mesh's shape; None: one host.
        dtype: what floating-point leaves are loaded in; None: as in `plan`.
        memory_bytes: the host-memory budget, which also bounds the pieces of an exchange.
        transient_limit: what an exchange may hold on a device.

    Raises:
        WeightMismatchError: the source is not what the model needs; everything is listed.
        ShardingError: `plan` has errors.
    """
    plan.check()
    mesh = plan.mesh
    of_device = np.zeros(mesh.size, dtype=np.int64) if hosts is None else np.asarray(hosts).reshape(-1)
    if len(of_device) != mesh.size or set(of_device.tolist()) != set(range(int(of_device.max()) + 1)):
        raise ValueError(
            f"hosts names {sorted(set(of_device.tolist()))} for {len(of_device)} devices; mesh {mesh} has {mesh.size}, "
            "and hosts are numbered from 0 without gaps"
        )
    matches = rules.match([leaf_plan.leaf for leaf_plan in plan.leaves], source.tensors)
    limit = transient_limit
    if memory_bytes is not None:
        # Slabs of two pieces are on a host at a time, one of them being read.
        per_host = max(np.bincount(of_device).tolist())
        limit = min(limit, max(memory_bytes // (2 * per_host), 1))
    loads: list[LeafLoad] = []
    for match in matches:
        leaf_plan = plan.by_path[match.leaf.path]
        load = _direct(match, leaf_plan, source, of_device, mesh, dtype)
        if load.direct_amplification > DIRECT_AMPLIFICATION and load.layout.part_shape:
            load = _exchanged(load, leaf_plan, of_device, mesh, limit)
        loads.append(load)
    total = sum(load.source_bytes for load in loads)
    # The worst first, until the job as a whole reads little enough.
    for number in sorted(range(len(loads)), key=lambda n: loads[n].source_bytes - sum(loads[n].bytes_by_host)):
        if sum(sum(load.bytes_by_host) for load in loads) <= JOB_AMPLIFICATION * total:
            break
        load = loads[number]
        if load.exchange is None and load.layout.part_shape and load.amplification > 1:
            loads[number] = _exchanged(load, plan.by_path[load.path], of_device, mesh, limit)
    matched = {match.leaf.path for match in matches}
    return LoadPlan(
        sharding=plan,
        loads=tuple(loads),
        hosts=tuple(of_device.tolist()),
        skipped=tuple(leaf_plan.leaf.path for leaf_plan in plan.leaves if leaf_plan.leaf.path not in matched),
    )


def _direct(
    match: Match,
    leaf_plan: LeafPlan,
    source: TensorSource,
    hosts: np.ndarray,
    mesh: MeshSpec,
    dtype: np.dtype | None,
) -> LeafLoad:
    info = source.tensors[match.names[0]]
    leaf = match.leaf
    if dtype is not None and jnp.issubdtype(leaf.dtype, np.floating):
        leaf = replace(leaf, dtype=np.dtype(dtype))
    per_element = info.nbytes / max(info.size, 1)
    load = LeafLoad(
        leaf=leaf,
        rule=match.rule,
        layout=match.layout,
        sources=match.names,
        source_dtype=info.dtype,
        bytes_per_element=per_element,
        strategy="direct",
        spec=leaf_plan.spec,
        exchange=None,
        bytes_by_host=(),
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
        reason="one host reads all of it once" if len(by_host) == 1 else f"hosts read {amplification:.2f}× of it",
    )


def _exchanged(load: LeafLoad, leaf_plan: LeafPlan, hosts: np.ndarray, mesh: MeshSpec, limit: int) -> LeafLoad:
    layout = load.layout
    exchange = plan_exchange(
        load.leaf,
        leaf_plan.mesh_axes,
        mesh,
        order=[position for positions in layout.group_positions for position in positions],
        stacked=layout.stack_positions,
        limit=limit,
    )
    changed = replace(
        load,
        strategy="exchange",
        exchange=exchange,
        transient_device_bytes=exchange.transient_device_bytes,
        reason=f"direct reading would read {load.direct_amplification:.2f}× of it; {exchange}",
    )
    by_host, largest = _host_bytes(changed, hosts, mesh)
    return replace(
        changed,
        bytes_by_host=by_host,
        amplification=sum(by_host) / max(load.source_bytes, 1),
        transient_host_bytes=largest,
    )


def _host_bytes(load: LeafLoad, hosts: np.ndarray, mesh: MeshSpec) -> tuple[tuple[int, ...], int]:
    """What each host reads, and the most that one of them holds at a time."""
    num_hosts = int(hosts.max()) + 1
    elements = np.zeros(num_hosts)
    largest = 0
    known: dict[tuple[Box, ...], tuple[int, int]] = {}
    lengths: dict[int, list[Span]] = {}
    for piece in load.pieces:
        lengths.setdefault(piece[1] - piece[0], []).append(piece)
    for pieces in lengths.values():
        # Pieces of one length read alike, and so do hosts with the same blocks.
        device_boxes = load.device_boxes(mesh, pieces[0])
        for host in range(num_hosts):
            boxes, _ = distinct(device_boxes[hosts == host])
            key = tuple(boxes)
            if key not in known:
                found = load.units(boxes)
                held = [sum(math.prod(b - a for a, b in boxes[n]) for n in unit.members) for unit in found]
                together = sum(held) if load.exchange is not None else max(held, default=0)
                known[key] = (sum(unit.elements for unit in found), together)
            elements[host] += known[key][0] * len(pieces)
            largest = max(largest, known[key][1] * load.leaf.dtype.itemsize)
    return tuple(round(count * load.bytes_per_element) for count in elements.tolist()), largest
