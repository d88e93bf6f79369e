"""Memory and roofline of text generation, by arithmetic: how many rows fit a device, and the least time of a call.

The roofline of a decode step: every weight that multiplies a token is read once, every cache position that a query sees
is read once, and the products run at the chip's peak. The longest of these times *binds*. Bytes are those of the shards
that the plan places; the tiles of a TPU may pad small arrays.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from haliax_ext.placement import LeafPlan
from haliax_ext.planner import ShardingPlan
from levanter.inference.kv_cache import CachePlan
from levanter.layers.decode_state import StateLeaf, layer_leaves
from levanter.layers.protocols import Mixer, WindowedAttention
from levanter.models.param_groups import EMBEDDING, HEAD, parameter_group
from levanter.models.registry import LmConfig

CONTEXTS: Mapping[str, int] = {"2K": 2048, "8K": 8192, "32K": 32_768, "128K": 131_072}
"""Lengths of rows for which a plan shows how many rows fit."""
LOADS = (1, 8, 32)
"""Numbers of running rows for which a plan shows the speed, besides all rows."""
ASSUMED_TEMP_BYTES = 256 << 20
"""Assumed bytes of temporaries of a Program that was not compiled: more than any decode step has
(tests/aot/test_generation.py)."""
MAX_ROWS = 256
"""Largest number of rows that `max_rows: auto` chooses."""
MAX_CPU_ROWS = 32
"""The same on CPUs, where products bind from a few rows on: more rows hardly give more tokens per second, and each
row gets its tokens later (docs/log/2026-11.md, 2026-11-22)."""


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of a model's parameters on one device.

    Attributes:
        integers: int8 projections.
        scales: scales of the int8 projections.
        table: embeddings that are only looked up: a step multiplies nothing by them.
        others: all other parameters.
        width: bytes of an element of a projection.
        experts: the part of all of these that belongs to experts.
        replicated: the part of all of these that is replicated on every device.
        keys_values: projections to keys and values, on all devices together.
    """

    integers: int = 0
    scales: int = 0
    table: int = 0
    others: int = 0
    width: int = 2
    experts: int = 0
    replicated: int = 0
    keys_values: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        return self.integers + self.scales + self.table + self.others

    @staticmethod
    def of(sharding: ShardingPlan) -> "WeightBytes":
        """The bytes of a model with this sharding."""
        kinds: dict[str, int] = dict.fromkeys(("integers", "scales", "table", "others"), 0)
        # With a head of its own the embedding is only looked up; a tied embedding is the head too, and is read as a
        # whole.
        has_head = any(parameter_group(leaf_plan.leaf) == HEAD for leaf_plan in sharding.leaves)
        for leaf_plan in sharding.leaves:
            kinds[_kind(leaf_plan, has_head=has_head)] += leaf_plan.bytes_per_device
        return WeightBytes(
            **kinds,
            # Vectors (norms, biases, scales) may have another dtype than the matrices.
            width=max((x.leaf.dtype.itemsize for x in sharding.leaves if len(x.leaf.axes) > 1), default=1),
            experts=sum(x.bytes_per_device for x in sharding.leaves if "expert" in x.leaf.names),
            replicated=sum(x.bytes_per_device for x in sharding.leaves if _is_replicated(x, sharding.mesh.size)),
            keys_values=sum(x.leaf.nbytes for x in sharding.leaves if _is_key_or_value(x.leaf.names)),
        )


def _is_replicated(plan: LeafPlan, devices: int) -> bool:
    """Whether every device holds all of a parameter; on one device, whether no mesh axis is there to shard it."""
    return plan.bytes_per_device == plan.leaf.nbytes and not (devices == 1 and any(plan.mesh_axes))


def _is_key_or_value(names: Collection[str]) -> bool:
    """Whether a parameter projects to heads that a group of query heads shares."""
    return {"embed", "kv_head"} <= set(names) and "q_heads_per_group" not in names


def _kind(plan: LeafPlan, *, has_head: bool) -> str:
    leaf = plan.leaf
    if leaf.dtype == np.int8:
        return "integers"
    if leaf.path.rpartition(".")[2] == "scale":
        return "scales"
    return "table" if has_head and parameter_group(leaf) == EMBEDDING else "others"


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least seconds of a call on every device, by cause.

    Attributes:
        weights: reading parameters.
        cache: reading keys and values.
        flops: the products at peak.
        links: communication, where it is known.
    """

    weights: float
    cache: float
    flops: float
    links: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest of them; weights and cache count together."""
        # Weights and cache share the memory bandwidth and add up; products and communication may overlap with both.
        return max(self.weights + self.cache, self.flops, self.links)

    @property
    def binds(self) -> str:
        """The cause of the longest: `weights`, `cache`, `FLOPs` or `links`."""
        if self.weights + self.cache >= max(self.flops, self.links):
            return "weights" if self.weights >= self.cache else "cache"
        return "FLOPs" if self.flops >= self.links else "links"


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """A model, its rows and its calls: the numbers from which memory and rooflines are computed.

    Attributes:
        devices: devices of the mesh.
        rows: rows that run at once, over all devices.
        context: positions that a row may have.
        shards: shards of the rows.
        dtype: dtype of keys and values.
        automatic: whether the number of rows follows from memory.
        temp_bytes: bytes that are assumed for temporaries of Programs that were not compiled.
        page: positions in a page.
        pages: pages over all shards.
        cache_bytes: bytes of the pages on a device.
        row_bytes: bytes on a device of the decode state that is not in pages: kind → bytes of all rows.
        state_bytes: bytes of a row on a device besides its decode state.
        steps: maximum tokens of a row in a decode call.
        decode: number of rows → name of the decode Program for up to that many.
        prefill: name of each prefill Program → its rows and its tokens per row.
        weights: bytes of the parameters on a device.
        kv_heads: key and value heads of a layer, or a number that divides those of all layers.
        kv_ways: number of devices over which they are sharded.
        repeated: number of devices that hold the same keys and values.
        query_groups: query heads of each key head.
        embed: features of the residual stream.
        compute_bytes: bytes of an element in the compute dtype.
        mixers: pairs of a mixer's spec and the number of layers with it.
        state_ways: number of devices over which other axes of the decode state are sharded, by name.
        earlier: ids before a token that the model reads.
        snapshots: snapshots for each row.
        weight_flops: FLOPs of a token in products with weights, over all devices.
        sequence_flops: length of a sequence → FLOPs beyond those products, over all devices, under a causal mask.
        expert_count: experts of a layer, and experts of a token; None for a model without experts.
    """

    devices: int
    rows: int
    context: int
    shards: int
    dtype: str
    automatic: bool = False
    temp_bytes: int = ASSUMED_TEMP_BYTES
    page: int
    pages: int
    cache_bytes: int
    row_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    state_bytes: int
    steps: int
    decode: Mapping[int, str]
    prefill: Mapping[str, tuple[int, int]]
    weights: WeightBytes
    kv_heads: int
    kv_ways: int
    repeated: int
    query_groups: int
    embed: int
    compute_bytes: int = 2
    mixers: tuple[tuple[Mixer, int], ...]
    state_ways: Mapping[str, int] = field(default_factory=dict[str, int])
    earlier: int = 0
    snapshots: int = 0
    weight_flops: float
    sequence_flops: Callable[[int], int]
    expert_count: tuple[int, int] | None = None

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return sum(count for _, count in self.mixers)

    def bytes_per_row(self, context: int, dtype: str | None = None, *, seen: bool = False) -> int:
        """The bytes of a row's decode state on a device.

        Args:
            context: positions in it.
            dtype: of keys and values; the run's own by default.
            seen: counts only positions that a query at the end of the row sees, as a sliding window hides the others.
        """
        ways = {**self.state_ways, "kv_head": self.kv_ways}
        total = StateLeaf.ids(self.earlier).nbytes() if self.earlier else 0
        for mixer, count in self.mixers:
            window = mixer.window if isinstance(mixer, WindowedAttention) else None
            # The pages keep all positions of a layer with a window too, so the window bounds only what is read.
            positions = min(context, window or context) if seen else context
            for leaf in layer_leaves(mixer, jnp.dtype(dtype or self.dtype)).values():
                # Snapshots take memory, and a step does not read them.
                copies = positions if leaf.kind == "paged" else 1 if seen else 1 + self.snapshots
                total += count * leaf.nbytes(ways) * copies
        return total

    def fitting(self, limit: int, context: int, dtype: str | None = None, *, temp_bytes: int = 0) -> int:
        """How many rows of a length fit on the devices.

        Args:
            limit: memory of a device in bytes.
            context: positions in a row.
            dtype: of keys and values; the run's own by default.
            temp_bytes: bytes of a device for the temporaries of the Programs.
        """
        # What the weights and the Programs' temporaries leave is divided among the rows of a shard.
        free = limit - self.weights.total - temp_bytes
        return max(0, free // (self.bytes_per_row(context, dtype) + self.state_bytes)) * self.shards

    def laid_out(self, *, shards: int, kv_ways: int, group: int, dtype: str | None = None) -> "DecodeCost":
        """The same model with other shardings, on the same number of devices or more.

        Parameters that are sharded stay sharded, over all devices that share the rows of a shard.

        Args:
            shards: shards of the rows.
            kv_ways: number of devices over which heads of keys and values are sharded.
            group: number of devices over which the query heads of each of them are sharded further.
            dtype: of keys and values; the run's own by default.
        """
        weights, devices_per_shard, new_devices_per_shard = self.weights, self.devices // self.shards, kv_ways * group
        kinds = {name: getattr(weights, name) for name in ("integers", "scales", "table", "others", "experts")}
        # Bytes per device scale with the number of devices that share a shard's weights, rounded up.
        kinds = {name: -(-nbytes * devices_per_shard // new_devices_per_shard) for name, nbytes in kinds.items()}
        kinds["integers" if weights.integers else "others"] += self.repeated_weights(kv_ways=kv_ways, group=group)
        return replace(
            self,
            devices=shards * new_devices_per_shard,
            shards=shards,
            kv_ways=kv_ways,
            # Other axes of the state are those of tensor parallelism, which has all devices of a shard.
            state_ways=dict.fromkeys(self.state_ways, new_devices_per_shard),
            repeated=group,
            dtype=dtype or self.dtype,
            weights=replace(weights, **kinds),
            state_bytes=self.state_bytes * devices_per_shard * shards // self.shards // new_devices_per_shard,
        )

    def repeated_weights(self, *, kv_ways: int, group: int) -> int:
        """Bytes of key and value projections on a device that are there because `group` does not shard them.

        Args:
            kv_ways: number of devices over which heads of keys and values are sharded.
            group: number of devices over which the query heads of each of them are sharded further.
        """
        # Each device of a group has the same part of these projections.
        whole = self.weights.keys_values
        return whole // kv_ways - whole // (kv_ways * group)

    def decode_floor(self, rows: int, context: int, *, bandwidth: float, peak: float, links: float = 0.0) -> Roofline:
        """The roofline of one token for every row.

        Args:
            rows: rows that run, over all devices.
            context: positions before the token.
            bandwidth: memory bandwidth of a device in bytes/s.
            peak: peak of a device in FLOP/s.
            links: seconds of communication.
        """
        # The fullest shard determines the time.
        shard_rows = -(-rows // self.shards)
        return Roofline(
            weights=self._read(rows) / bandwidth,
            cache=shard_rows * self.bytes_per_row(context, seen=True) / bandwidth,
            flops=rows * (self.weight_flops + self._token_flops(context)) / self.devices / peak,
            links=links,
        )

    def prefill_floor(self, rows: int, tokens: int, *, bandwidth: float, peak: float, links: float = 0.0) -> Roofline:
        """The roofline of a prefill call for the first parts of prompts.

        Args:
            rows: prompts, over all devices.
            tokens: tokens of each.
            bandwidth, peak, links: see `decode_floor`.
        """
        # The first part of a prompt attends to nothing before it: token t sees t positions, (tokens + 1) / 2 on
        # average.
        flops = rows * tokens * (self.weight_flops + self._token_flops((tokens + 1) / 2))
        return Roofline(
            weights=self._read(rows * tokens) / bandwidth, cache=0.0, flops=flops / self.devices / peak, links=links
        )

    def calls_of_prompt(self, tokens: int) -> tuple[str, ...]:
        """The prefill Programs of one prompt, in order, cut as `Schedule.bucket_for` cuts it."""
        # The same rule as `Schedule.bucket_for`, for the Programs by name.
        names = {size: name for name, (_, size) in self.prefill.items()}
        calls = []
        # A prompt is also cut at the end of its last page, where a snapshot is taken.
        last = (tokens - 1) // self.page * self.page if self.snapshots else 0
        if last:
            return (*replace(self, snapshots=0).calls_of_prompt(last), *self.calls_of_prompt(tokens - last))
        while tokens > 0:
            below, above = ([s for s in names if s <= tokens], [s for s in names if s >= tokens])
            fills = above and (2 * tokens > min(above) or not below)
            size = min(above) if fills else max(below)
            calls.append(names[size])
            tokens -= size
        return tuple(calls)

    def decoding(self, rows: int) -> str:
        """The decode Program for this number of running rows."""
        return self.decode[min((max_rows for max_rows in self.decode if max_rows >= rows), default=max(self.decode))]

    def compute_bound_rows(self, *, bandwidth: float, peak: float) -> int:
        """Rows from which products take longer than reading the weights for them."""
        # With this many tokens practically every expert is read.
        return math.ceil(self._read(MAX_ROWS * 8) / bandwidth * peak * self.devices / self.weight_flops)

    def _read(self, tokens: int) -> float:
        """Bytes of parameters that a call reads; of experts the expected part, if tokens choose them uniformly."""
        # A table is looked up, not read as a whole.
        whole = self.weights.total - self.weights.table
        if self.expert_count is None:
            return whole
        count, chosen = self.expert_count
        # The power is the probability that no token of the call goes to an expert, if tokens chose at random: such an
        # expert is not read.
        return whole - self.weights.experts * (1 - chosen / count) ** tokens

    def _token_flops(self, context: float) -> float:
        """FLOPs beyond the products with weights of the last token of a text of `context` tokens."""
        # They are what the token adds to its sequence; halfway between two lengths, the mean of both.
        lengths = (math.floor(context), math.ceil(context))
        return sum(self.sequence_flops(n) - self.sequence_flops(n - 1) for n in lengths if n > 0) / 2


def decode_cost(
    config: LmConfig,
    sharding: ShardingPlan,
    cache: CachePlan,
    *,
    vocab_size: int,
    devices: int,
    steps: int,
    decode: Mapping[int, str],
    prefill: Mapping[str, tuple[int, int]],
    counts_tokens: bool,
    automatic: bool = False,
    temp_bytes: int = ASSUMED_TEMP_BYTES,
) -> DecodeCost:
    """The `DecodeCost` of a planned run.

    Args:
        config: the architecture.
        sharding: the shardings of its parameters.
        cache: the plan of the cache.
        vocab_size: entries of the head.
        devices, steps, decode, prefill, automatic, temp_bytes: see `DecodeCost`.
        counts_tokens: whether each row counts its tokens.
    """
    compute, mesh = cache.mappings.compute, sharding.mesh
    mixers = Counter(layer.mixer for layer in config.layers)
    state_axes = {
        axis.name
        for mixer in mixers
        for leaf in layer_leaves(mixer, cache.dtype).values()
        for axis in leaf.sized
        if any(axis.name in cut for cut in mixer.tensor_axes)
    } - {"kv_head"}
    # `flops.weights` does not depend on the context; attention is counted by `sequence_flops`.
    flops = config.flops(vocab_size=vocab_size, context_length=1, attention="full")
    vocab_ways = mesh.ways(compute.mesh_axes("vocab"))
    return DecodeCost(
        devices=devices,
        rows=cache.rows,
        context=cache.max_seq_len,
        shards=cache.shards,
        dtype=cache.dtype.name,
        automatic=automatic,
        temp_bytes=temp_bytes,
        page=cache.page_size,
        pages=cache.pages,
        cache_bytes=cache.bytes_by_kind.get("paged", 0),
        row_bytes={kind: nbytes for kind, nbytes in cache.bytes_by_kind.items() if kind != "paged"},
        # An int32 count for each id. The state is replicated over the batch shards, so a device has the counts of all
        # shards.
        state_bytes=4 * vocab_size // vocab_ways * cache.shards if counts_tokens else 0,
        steps=steps,
        decode=decode,
        prefill=prefill,
        weights=WeightBytes.of(sharding),
        # A model without attention has none: its layouts shard nothing but the rows.
        kv_heads=config.axes["kv_head"].size if "kv_head" in config.axes else 1,
        kv_ways=mesh.ways(compute.mesh_axes("kv_head")),
        repeated=cache.repeated,
        query_groups=config.axes["q_heads_per_group"].size if "q_heads_per_group" in config.axes else 1,
        embed=config.Embed.size,
        compute_bytes=max((x.leaf.dtype.itemsize for x in sharding.leaves if x.leaf.dtype != np.int8), default=2),
        mixers=tuple(mixers.items()),
        state_ways={name: mesh.ways(compute.mesh_axes(name)) for name in sorted(state_axes)},
        earlier=cache.earlier_token_ids,
        snapshots=cache.snapshots // cache.rows,
        weight_flops=flops.weights,
        # The search asks for the same few lengths again and again.
        sequence_flops=functools.cache(functools.partial(config.sequence_flops, attention="causal")),
        expert_count=_experts(config),
    )


def _experts(config: LmConfig) -> tuple[int, int] | None:
    count, chosen = getattr(config, "experts", None), getattr(config, "num_experts_per_tok", None)
    return (count, chosen) if count and chosen else None
