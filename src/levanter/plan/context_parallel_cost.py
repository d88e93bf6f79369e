"""Cost model of context parallelism: the seconds of communication that attention exposes when positions are sharded.

With `n` chips along a sequence, and `V` the bytes of keys and values of one layer over all of them:

    gather         one all-gather of V for each pass and one reduce-scatter of their gradients. No computation overlaps
                   with them, and the gathered arrays are laid out again in HBM
    ring           n hops of V / n. In the backward pass keys and values travel with their gradients in float32, or
                   queries travel with their gradients and those of the result, whichever is fewer bytes. The kernels
                   hide a part of each hop, and each hop adds its partial result to a sum in HBM
    heads          one all-to-all of queries, keys, values and results (Ulysses); backward the same of their gradients
    ring × heads   both, each over its own mesh axes

The layout search uses it, and `attention_mapping: auto` chooses the strategy with the lowest cost
(`context_parallel_cost`). Compared with compiled steps: a Llama of 0.78 B parameters with 65,536 positions over 8 chips
of v6e takes 7.6 ms longer for a layer and row with gathers than with a ring, by this arithmetic 1.0 ms. Llama 3.1 8B
with 131,072 positions takes 3.9 ms longer with a ring than with heads, by this arithmetic 1.3 ms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import Accelerator, find_accelerator
from levanter.layers.attention import ring_splash
from levanter.layers.attention.splash_blocks import LANES
from levanter.mesh.context_parallel import method_from_mapping
from levanter.models.registry import LmConfig
from levanter.plan.calibration import kernel_efficiency
from levanter.plan.comms import Network, axis_spans
from levanter.runplan import Target

LAID_OUT = 5.0
"""How often gathered keys and values cross HBM for each gather: split, transposed and concatenated for the kernels in
zigzag order, and the inverse (compiled: 3.9 ms for three times 0.375 GiB on v6e)."""

ADDED_BYTES = 28
"""Bytes that cross HBM for an element of a ring's sums, each hop: float32 read twice and written once, and the layout
change of the kernels' results. Compiled: 28 with 256 MiB a sum (Llama 3.1 8B, 131,072 positions over 8 chips of v6e),
12 with 48 MiB, which stay in vector memory."""

HOP_SECONDS = 50e-6
"""Fixed cost of a hop in addition to products, links and sums: the rest of the time by which published rings of 64
chips (v5p, 1,024 and 4,096 positions a chip) are slower than gathers, for each hop."""

BACKWARD_PRODUCTS = 3.5
"""Products of attention's backward pass over those of its forward pass, in two kernels."""


def context_parallel_seconds(
    sizes: Mapping[str, int],
    mappings: Mappings,
    network: Network,
    *,
    rows: int,
    forward: int,
    backward: bool,
    itemsize: int,
    attended: float = 0.5,
) -> float:
    """Seconds that one layer of attention waits for communication; 0 where positions are not sharded.

    Args:
        sizes: of the model's axes.
        mappings: of the layout.
        network: of its mesh.
        rows: of the batch, on each of its shards.
        forward: the number of forward passes of a layer (two where it is recomputed).
        backward: whether there is a backward pass.
        itemsize: bytes of an activation's element.
        attended: the share of all pairs of positions that the mask leaves visible.
    """
    mesh, pod = network.mesh, network.accelerator
    compute, inside = mappings.compute, mappings.inside_attention
    strategy = method_from_mapping(mappings.attention, compute, mesh)
    if strategy is None or "kv_head" not in sizes:
        return 0.0
    positions = sizes["position"]
    # Elements of keys, and of queries, over all positions and on this shard of heads.
    keys = rows * positions * sizes["kv_head"] * sizes["head_size"] // mesh.ways(compute.mesh_axes("kv_head"))
    queries = keys * sizes.get("q_heads_per_group", 1) // mesh.ways(compute.mesh_axes("q_heads_per_group"))
    along = _cut(compute.mesh_axes("position"), mesh)
    ways = mesh.ways(along)
    if strategy == "gather":
        nbytes = 2 * keys * itemsize
        # The backward pass gathers again and reduce-scatters the gradients,
        # which takes as long as an all-gather.
        once = network.seconds("all-gather", nbytes, axis_spans(mesh, *along)) or 0.0
        return (once + LAID_OUT * nbytes / pod.hbm_bandwidth) * (forward + 2 * backward)
    # `attention_mapping` leaves keys sharded over the axes of the ring; the other position axes go to heads.
    around = _cut(inside.mesh_axes("key_position"), mesh)
    to_heads = tuple(axis for axis in along if axis not in around)
    seconds = 0.0
    if around:
        hops, key_part, query_part = mesh.ways(around), keys // ways, queries // ways
        speed = pod.peak_flops() * kernel_efficiency(sizes["head_size"])
        # Two products of 2 FLOPs an element (scores, and values weighted by them), spread over the hops.
        products = 4 * positions * attended * query_part / speed / hops

        def hop(nbytes: int, hidden: float, added: int) -> float:
            """Seconds of a hop, from bytes that travel, seconds of overlapping products and elements summed."""
            travel = network.seconds("collective-permute", nbytes, axis_spans(mesh, *around)) or 0.0
            return max(0.0, travel - hidden) + ADDED_BYTES * added / pod.hbm_bandwidth + HOP_SECONDS

        seconds += hops * forward * hop(2 * key_part * itemsize, products, query_part)
        if backward:
            # Either keys and values travel with their float32 gradients, or queries travel with the gradient of the
            # result in the compute dtype and their own in float32: whichever is fewer bytes.
            nbytes = min(2 * key_part * (itemsize + 4), query_part * (2 * itemsize + 4))
            seconds += hops * hop(nbytes, BACKWARD_PRODUCTS * products, query_part + 2 * key_part)
    if to_heads:
        # Queries and results have the size of `queries`, keys and values that of `keys`.
        everything = 2 * (keys + queries) * itemsize // ways
        once = network.seconds("all-to-all", everything, axis_spans(mesh, *to_heads)) or 0.0
        seconds += once * (forward + 2 * backward)
    return seconds


def causal_share(windows: Sequence[tuple[int | None, int]], positions: int) -> float:
    """The share of all pairs of positions that causal masks leave visible, over all layers.

    Args:
        windows: how far layers see, None for everything, and the features of their queries; none for no windows.
        positions: in a sequence.
    """

    def share(window: int | None) -> float:
        reach = min(window or positions, positions) / positions
        # A triangle of `reach` and a band behind it, over the square of all
        # pairs: reach²/2 + (1 − reach) · reach.
        return reach - reach**2 / 2

    layers = windows or [(None, 1)]
    return sum(share(window) * features for window, features in layers) / sum(features for _, features in layers)


@dataclass(frozen=True, kw_only=True)
class ContextParallelCost:
    """The cost function of context-parallel strategies on one accelerator; see `mesh.context_parallel.Prices`.

    It counts one forward pass of a layer: results of attention are saved for the backward pass, as they should be for
    sequences that are worth sharding.

    Attributes:
        accelerator: the pod.
        backward: whether there is a backward pass.
        itemsize: bytes of an activation's element.
        attended: see `context_parallel_seconds`.
        rings: whether kernels of this JAX and this model's backend can run in a ring.
    """

    accelerator: Accelerator
    backward: bool
    itemsize: int
    attended: float
    rings: bool = True

    def __call__(self, sizes: Mapping[str, int], mappings: Mappings, mesh: MeshSpec) -> float | None:
        """Seconds of one layer and sequence; None where the strategy cannot run or its cost is not known."""
        hops = mesh.ways(mappings.inside_attention.mesh_axes("key_position"))
        # In zigzag order a device has two runs, and the ring kernels need a whole number of blocks of `LANES` in each.
        lacking = hops > 1 and not (self.rings and sizes["position"] % (2 * hops * LANES) == 0)
        if lacking or mesh.size != self.accelerator.devices or "kv_head" not in sizes:
            return None
        return context_parallel_seconds(
            sizes,
            mappings,
            Network.of(mesh, self.accelerator),
            rows=1,
            forward=1,
            backward=self.backward,
            itemsize=self.itemsize,
            attended=self.attended,
        )


def context_parallel_cost(
    model: LmConfig, target: Target, *, positions: int, itemsize: int, backward: bool
) -> ContextParallelCost | None:
    """The cost function for a run's devices, from their kind and number alone, so that a plan and the run choose alike.

    Args:
        model: the model's configuration.
        target: the devices; the result is None where they are no TPUs, or not the number of a known pod.
        positions: in a sequence.
        itemsize: bytes of an activation's element.
        backward: whether there is a backward pass.
    """
    pod = find_accelerator(target.kind, target.devices, slices=target.granules) if target.platform == "tpu" else None
    if pod is None:
        return None
    backend = getattr(model, "attn_backend", None)
    return ContextParallelCost(
        accelerator=pod,
        backward=backward,
        itemsize=itemsize,
        attended=causal_share(model.windows, positions),
        rings=backend not in ("jax_native", "cudnn") and ring_splash.obstacle() is None,
    )


def _cut(axes: tuple[str, ...], mesh: MeshSpec) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
