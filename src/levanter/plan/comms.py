"""Cost model of collectives on the interconnect of a pod. Arithmetic only; nothing is measured.

The chips of a slice sit in a torus, whose links carry `ici_link_bandwidth` each way. A mesh axis is laid over one or
more torus axes; a *ring* is one torus axis as a mesh axis uses it. On a closed ring a device receives over two links;
on an open one the device at the end has a single link, and the slowest device counts. A group that covers several rings
uses the links of all of them at once.

With `V` the bytes of the whole array, `n` devices, and `W` the bytes/s that each device can receive:

    all-gather, reduce-scatter    V · (n−1)/n / W
    all-reduce                    twice that
    all-to-all                    V · side / (8 · link), or / (4 · link) on an open ring, for the longest side;
                                  V is one device's bytes here
    collective-permute            V / link

and a microsecond for every hop on the way. These are the models of "How to Scale Your Model" (chapter "Sharded
matrices") and of the collective literature before it. Between slices the same formulas hold with the share of the
host's network that each device has; where that is not published the result is `None`. In a group that covers several
devices of several slices, each device receives its share from other slices and exchanges it inside its slice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from haliax_ext.hlo import AxisSpan, Collective
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import Accelerator
from levanter.plan.device_order import pod_coordinates

HOP_SECONDS = 1e-6
_BY_LEVELS = ("all-gather", "reduce-scatter", "all-reduce")


@dataclass(frozen=True)
class Ring:
    """One torus axis as a mesh axis uses it.

    Attributes:
        extent: the number of positions.
        closed: whether a link joins the last position to the first.
        stretch: the most hops between two consecutive positions; more than 1 where a mesh axis does not run straight
            along a torus axis. It is then modelled as an open ring, which is the slower reading.
    """

    extent: int
    closed: bool
    stretch: int = 1

    @property
    def links(self) -> float:
        """The number of links over which the device with the fewest receives."""
        # Neighbours that are `stretch` hops apart share each link with as many other pairs.
        return (2 if self.closed else 1) / self.stretch

    @property
    def hops(self) -> int:
        """Hops between the two devices that are farthest apart."""
        return (self.extent // 2 if self.closed else self.extent - 1) * self.stretch


@dataclass(frozen=True, kw_only=True)
class Network:
    """A mesh laid over a pod.

    Attributes:
        accelerator: the pod.
        mesh: its mesh.
        rings: for each mesh axis that is not a DCN axis the rings it covers, or `None` if it leaves the slice anyway.
    """

    accelerator: Accelerator
    mesh: MeshSpec
    rings: Mapping[str, tuple[Ring, ...] | None]

    @classmethod
    def of(
        cls, mesh: MeshSpec, accelerator: Accelerator, coordinates: Sequence[Sequence[int]] | None = None
    ) -> "Network":
        """Finds the rings under each mesh axis.

        Args:
            mesh: what is laid over the pod.
            accelerator: the pod.
            coordinates: of each device in row-major mesh order (slice, torus coordinates, core), as the compiler's
                devices state them; where JAX's own mesh utilities would put them if `None`.
        """
        if accelerator.generation.topology_axes == 0:
            # GPUs of a host are joined by a switch: one link in and one out at full speed, as on an open ring.
            inside = {name: (Ring(size, closed=False),) for name, size in mesh.axes if name not in mesh.dcn}
            return cls(accelerator=accelerator, mesh=mesh, rings=inside)
        placed = pod_coordinates(mesh, accelerator) if coordinates is None else coordinates
        # [*mesh axes, coordinates], where coordinates are slice, torus coordinates and core.
        grid = np.asarray(placed).reshape([size for _, size in mesh.axes] + [-1])
        rings = {
            name: _rings_along(grid, position, accelerator)
            for position, (name, _) in enumerate(mesh.axes)
            if name not in mesh.dcn
        }
        return cls(accelerator=accelerator, mesh=mesh, rings=rings)

    @cached_property
    def link(self) -> float:
        """Bytes/s of one link in one direction."""
        return self.accelerator.generation.ici_link_bandwidth

    def covered(self, spans: Sequence[AxisSpan]) -> tuple[Ring, ...] | None:
        """The rings of a group inside a slice."""
        group_rings: list[Ring] = []
        for span in spans:
            rings = self.rings.get(span.axis)
            if rings is None:
                return None
            group_rings += rings if span.extent == span.size else _part(rings, span.extent)
        return tuple(group_rings)

    def intake(self, spans: Sequence[AxisSpan]) -> float | None:
        """Bytes/s that each device of a group can receive."""
        if any(span.axis in self.mesh.dcn for span in spans):
            return self.accelerator.dcn_device_bandwidth
        rings = self.covered(spans)
        return None if rings is None else self.link * sum(ring.links for ring in rings)

    def seconds(self, kind: str, nbytes: int, spans: Sequence[AxisSpan]) -> float | None:
        """Seconds of one collective; `None` if the layout or the bandwidth is not known.

        Args:
            kind: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all` or `collective-permute`.
            nbytes: of the whole array (all-to-all, permute: of one device's).
            spans: the mesh axes of a group.
        """
        members = math.prod(span.extent for span in spans)
        if members <= 1:
            return 0.0
        crosses = any(span.axis in self.mesh.dcn for span in spans)
        inside = [span for span in spans if span.axis not in self.mesh.dcn]
        # Only collectives that can be split into a part inside slices and a part between them go by levels; an
        # all-to-all sends different bytes to every device, so all of them cross.
        if crosses and math.prod(span.extent for span in inside) > 1 and kind in _BY_LEVELS:
            return self._by_levels(kind, nbytes, spans, inside)
        rings = () if crosses else self.covered(spans)
        intake = self.intake(spans)
        if intake is None or rings is None or intake == 0:
            return None
        # The data-center network is modelled as one hop between any two hosts.
        latency = HOP_SECONDS * (1 if crosses else sum(ring.hops for ring in rings))
        once = nbytes * (members - 1) / members / intake
        if kind in ("all-gather", "reduce-scatter"):
            return once + latency
        if kind == "all-reduce":
            return 2 * (once + latency)
        if kind in ("all-to-all", "ragged-all-to-all"):
            if crosses:
                return once + latency
            # The cut through the middle of the longest side bounds it: of a line's bytes a quarter crosses in each
            # direction, over one link, or over two on a closed ring.
            per_side = [r.extent * r.stretch * nbytes / (8 if r.closed else 4) / self.link for r in rings]
            return max(per_side) + latency
        if kind == "collective-permute":
            return nbytes / (intake if crosses else self.link) + HOP_SECONDS
        return None

    def _by_levels(self, kind: str, nbytes: int, spans: Sequence[AxisSpan], within: Sequence[AxisSpan]) -> float | None:
        """A collective inside slices and between them: each device brings its share across, inside they exchange it.

        Both go on at the same time, so the longer of the two counts.
        """
        members = math.prod(span.extent for span in within)
        across = [span for span in spans if span not in within]
        # Each of the `members` devices of a slice carries its part of the array
        # over its own share of the network.
        between = self.seconds(kind, -(-nbytes // members), across)
        exchanged = self.seconds(kind, nbytes, within)
        return None if between is None or exchanged is None else max(between, exchanged)

    def collective_seconds(self, collective: Collective) -> float | None:
        """Seconds of one execution of a compiled collective."""
        if collective.spans is None or not collective.bytes:
            return None if collective.spans is None else 0.0
        return self.seconds(collective.kind, collective.bytes, collective.spans)


def axis_spans(mesh: MeshSpec, *axes: str) -> tuple[AxisSpan, ...]:
    """Whole mesh axes as the spans of a group."""
    return tuple(AxisSpan(axis, mesh.shape[axis], mesh.shape[axis]) for axis in axes)


def _rings_along(grid: np.ndarray, position: int, accelerator: Accelerator) -> tuple[Ring, ...] | None:
    """The rings under one mesh axis, from one line of devices along it."""
    size = grid.shape[position]
    # A mesh axis runs in the same way at every index of the other axes, so the line at index 0 stands for all.
    line = np.moveaxis(grid, position, 0).reshape(size, -1, grid.shape[-1])[:, 0]
    slices, torus, cores = line[:, 0], line[:, 1:-1], line[:, -1]
    # An axis that is not declared as DCN but spans slices has no torus links end to end.
    if len(np.unique(slices)) > 1:
        return None
    extents = [len(np.unique(torus[:, k])) for k in range(torus.shape[1])]
    if len(np.unique(cores)) > 1 or math.prod(extents) != size:
        # The axis covers both cores of a chip, or a diagonal: no box of the torus. Model it as a path with its
        # longest step.
        return (Ring(size, closed=False, stretch=max(1, _longest_step(torus, accelerator))),)
    return tuple(
        # A wraparound link closes a ring only where the axis covers the whole side; with
        # two positions it is the same neighbour.
        Ring(extent, closed=wraps and extent == side and extent > 2)
        for extent, side, wraps in zip(extents, accelerator.topology, accelerator.wrap, strict=False)
        if extent > 1
    )


def _longest_step(torus: np.ndarray, accelerator: Accelerator) -> int:
    steps = np.abs(np.diff(torus, axis=0))
    for axis, (side, wraps) in enumerate(zip(accelerator.topology, accelerator.wrap, strict=False)):
        if wraps:
            # On a side that wraps the way around the end may be shorter.
            steps[:, axis] = np.minimum(steps[:, axis], side - steps[:, axis])
    return int(steps.sum(axis=1).max(initial=0))


def _part(rings: tuple[Ring, ...], extent: int) -> tuple[Ring, ...]:
    """The rings of a part of a mesh axis: one whole ring if the sizes agree, else an open stretch."""
    for ring in rings:
        if ring.extent == extent:
            return (ring,)
    return (Ring(extent, closed=False),)
