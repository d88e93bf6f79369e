"""Llama 3.1 70B with int8 weights and an int8 cache on eight chips of v5e, by hand: what a plan is held against."""

from haliax import Axis

from levanter.inference.capacity import DecodeCost, WeightBytes
from levanter.layers.attention.grouped import AttentionSpec

LAYERS, EMBED, MLP, HEADS, KV, HEAD, VOCAB = 80, 8192, 28672, 64, 8, 128, 128256
PROJECTIONS = LAYERS * (2 * EMBED * HEADS * HEAD + 2 * EMBED * KV * HEAD + 3 * EMBED * MLP) + VOCAB * EMBED
"""Elements of all projections, the head among them: 69.5e9."""
SCALES = LAYERS * (HEADS * HEAD + 2 * KV * HEAD + EMBED + 2 * MLP + EMBED) + VOCAB
"""Output channels."""
ATTENTION = AttentionSpec(
    Embed=Axis("embed", EMBED),
    KVHead=Axis("kv_head", KV),
    QHeadsPerGroup=Axis("q_heads_per_group", HEADS // KV),
    HeadSize=Axis("head_size", HEAD),
)
SEVENTY = DecodeCost(
    devices=8,
    rows=46,
    context=8192,
    shards=1,
    dtype="int8",
    page=8192,
    pages=46,
    cache_bytes=46 * LAYERS * 2 * 8192 * (HEAD + 2),
    state_bytes=0,
    steps=1,
    decode={46: "decode_46"},
    prefill={"prefill_1x512": (1, 512), "prefill_4x128": (4, 128)},
    weights=WeightBytes(
        integers=PROJECTIONS // 8,
        scales=4 * SCALES // 8,
        table=2 * VOCAB * EMBED // 8,
        others=2 * 161 * EMBED,
        keys_values=LAYERS * 2 * EMBED * KV * HEAD,
    ),
    kv_heads=KV,
    kv_ways=8,
    repeated=1,
    query_groups=HEADS // KV,
    embed=EMBED,
    mixers=((ATTENTION, LAYERS),),
    weight_flops=2.0 * PROJECTIONS,
    sequence_flops=lambda length: 2 * LAYERS * HEADS * HEAD * length * (length + 1),
)
