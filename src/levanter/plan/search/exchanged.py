"""What positions that are cut over chips exchange in attention: seconds on the links, by arithmetic.

With `n` chips along a sequence, and keys and values of one layer taking `V` bytes, all of them together:

    gather         an all-gather of V a pass, and a reduce-scatter of their gradients
    ring           n hops of V / n; backward they bring their gradients along, in float32, or queries travel, with the
                   gradients of the result and their own, if these are fewer bytes
    heads          an all-to-all of queries, keys, values and results; backward of their gradients
    ring × heads   both, each over its own mesh axes
"""

from collections.abc import Mapping

from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.mesh.exchange import exchange_of
from levanter.plan.comms import Network, spans_of


def exchange_seconds(
    sizes: Mapping[str, int],
    mappings: Mappings,
    network: Network,
    *,
    rows: int,
    forward: int,
    backward: bool,
    itemsize: int,
) -> float:
    """Seconds of one layer of attention over rows that a device has a part of; 0 where positions are whole.

    Args:
        sizes: of the model's axes.
        mappings: of the layout.
        network: of its mesh.
        rows: of the batch, on each of the ways it is cut.
        forward: how often a layer is gone through forward.
        backward: whether it is gone through backward too.
        itemsize: bytes of an activation's element.
    """
    mesh = network.mesh
    compute, inside = mappings.compute, mappings.inside_attention
    exchange = exchange_of(mappings.attention, compute, mesh)
    if exchange is None or "kv_head" not in sizes:
        return 0.0
    keys = 2 * rows * sizes["position"] * sizes["kv_head"] * sizes["head_size"] * itemsize
    keys //= mesh.ways(compute.mesh_axes("kv_head"))
    along = _cut(compute.mesh_axes("position"), mesh)
    if exchange == "gather":
        once = network.seconds("all-gather", keys, spans_of(mesh, *along)) or 0.0
        return once * (forward + 2 * backward)
    around = _cut(inside.mesh_axes("key_position"), mesh)
    to_heads = tuple(axis for axis in along if axis not in around)
    seconds = 0.0
    if around:
        hops = mesh.ways(around)
        hop = network.seconds("collective-permute", keys // mesh.ways(along), spans_of(mesh, *around)) or 0.0
        # Backward keys and values go around with gradients in float32, or queries with two kinds of gradients.
        with_keys = 1 + 4 / itemsize
        with_queries = sizes.get("q_heads_per_group", 1) * (2 * itemsize + 4) / (2 * itemsize)
        seconds += hops * hop * (forward + backward * min(with_keys, with_queries))
    if to_heads:
        everything = keys * (1 + sizes.get("q_heads_per_group", 1)) // mesh.ways(along)
        once = network.seconds("all-to-all", everything, spans_of(mesh, *to_heads)) or 0.0
        seconds += once * (forward + 2 * backward)
    return seconds


def _cut(axes: tuple[str, ...], mesh: MeshSpec) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
