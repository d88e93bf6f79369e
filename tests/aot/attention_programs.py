"""Attention alone for the compile worker: values and gradients, by the kernel, at positions that are arrays."""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from aot.llama_programs import Described

from haliax_ext.mapping import AxisMapping, Mappings, inside_attention, shard_attention
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.layers.attention import AttentionMask
from levanter.layers.attention.ring import ring_attention
from levanter.layers.attention.ring_splash import SplashRingStep
from levanter.layers.attention.splash import splash_attention
from levanter.mesh.context_parallel import method_mapping
from levanter.runplan import Target


def at_positions(payload: dict[str, Any], target: Target) -> Described:
    """The sum of squares of attention, with its gradients; the batch over `data`, the queries over `context`.

    Args:
        payload: `queries` and `keys` of a sequence, `window`.
        target: eight devices.
    """
    del target
    Batch, Pos = hax.Axis("batch", 4), hax.Axis("position", payload["queries"])
    KeyPos = hax.Axis("key_position", payload["keys"])
    KVHead, Group, Size = hax.Axis("kv_head", 2), hax.Axis("q_heads_per_group", 2), hax.Axis("head_size", 128)
    mappings = Mappings(compute=AxisMapping({"batch": "data", "position": "context"}))

    def given(name: str, dtype: Any, *axes: hax.Axis) -> Input:
        array: Any = jax.ShapeDtypeStruct([axis.size for axis in axes], jnp.dtype(dtype))
        return Input(name=name, value=hax.NamedArray(array, axes), placement=mappings.compute)

    def attended(q: Any, k: Any, v: Any, queries: Any, keys: Any, segments: Any, key_segments: Any) -> Any:
        mask = AttentionMask.causal(sliding_window=payload["window"]).with_positions(queries, keys)
        mask = mask.with_segment_ids(segments, key_segments)

        def loss(q: Any, k: Any, v: Any) -> jax.Array:
            out = splash_attention(q, k, v, mask, softmax_scale=0.1)
            return hax.sum(hax.square(out.astype(jnp.float32))).scalar()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    program = Program(
        name="attention",
        function=attended,
        inputs=(
            given("q", jnp.bfloat16, Batch, Pos, KVHead, Group, Size),
            given("k", jnp.bfloat16, Batch, KeyPos, KVHead, Size),
            given("v", jnp.bfloat16, Batch, KeyPos, KVHead, Size),
            given("queries", jnp.int32, Batch, Pos),
            given("keys", jnp.int32, Batch, KeyPos),
            given("segments", jnp.int32, Batch, Pos),
            given("key_segments", jnp.int32, Batch, KeyPos),
        ),
        mappings=mappings,
    )
    return Described(MeshSpec.of(data=4, context=2), (program,))


def over_eight(payload: dict[str, Any], target: Target) -> Described:
    """The sum of squares of attention, its positions over eight devices, zigzag, packed, with its gradients.

    Args:
        payload: `positions` of a sequence, `window`, `heads` with keys of their own, and the `exchange`.
        target: eight devices.
    """
    del target
    Batch, Pos = hax.Axis("batch", 1), hax.Axis("position", payload["positions"])
    KVHead, Group, Size = (
        hax.Axis("kv_head", payload["heads"]),
        hax.Axis("q_heads_per_group", 1),
        hax.Axis("head_size", 128),
    )
    exchange, compute = payload["exchange"], AxisMapping({"position": "context"})
    zigzag = () if exchange == "heads" else ("position",)
    mappings = Mappings(compute=compute, attention=method_mapping(exchange, compute), zigzag=zigzag)

    def given(name: str, dtype: Any, *axes: hax.Axis) -> Input:
        array: Any = jax.ShapeDtypeStruct([axis.size for axis in axes], jnp.dtype(dtype))
        return Input(name=name, value=hax.NamedArray(array, axes), placement=mappings.compute)

    def attended(q: Any, k: Any, v: Any, segments: Any) -> Any:
        mask = AttentionMask.causal(sliding_window=payload["window"]).with_segment_ids(segments)
        mask = mask.in_zigzag(8) if zigzag else mask

        def loss(q: Any, k: Any, v: Any) -> jax.Array:
            q, k, v = shard_attention(q), *(shard_attention(x.rename({"position": "key_position"})) for x in (k, v))
            with inside_attention():
                if exchange == "ring":
                    out = ring_attention(q, k, v, mask, softmax_scale=0.1, ring_step=SplashRingStep())
                else:
                    out = splash_attention(q, k, v, mask, softmax_scale=0.1)
            out = hax.auto_sharded(out)
            return hax.sum(hax.square(out.astype(jnp.float32))).scalar()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    program = Program(
        name="cut",
        function=attended,
        inputs=(
            given("q", jnp.bfloat16, Batch, Pos, KVHead, Group, Size),
            given("k", jnp.bfloat16, Batch, Pos, KVHead, Size),
            given("v", jnp.bfloat16, Batch, Pos, KVHead, Size),
            given("segments", jnp.int32, Batch, Pos),
        ),
        mappings=mappings,
    )
    return Described(MeshSpec.of(data=1, context=8), (program,))
