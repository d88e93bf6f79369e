"""A Llama train step in plain JAX: the smallest program whose published speed is known.

It shares nothing with the framework's model, so what the preflight reads out of its compilation (memory, cycles,
collectives) can be held against hand arithmetic and published tokens per second. Weights and both Adam moments are
f32; matmuls are bf16; every layer is rematerialized, except for what `offload` names; attention is JAX's Pallas splash
kernel under `shard_map`; the loss is computed in chunks of positions. Parameters are cut over `data` along `embed`
(FSDP) and over `model` along heads and `mlp`; the residual stream may be cut over `model` along one of its axes.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_ext.meshspec import MeshSpec


@dataclass(frozen=True, kw_only=True)
class PlainLlama:
    """Sizes of one run, and how its residual stream is cut over the mesh axis `model`.

    `offload` names activations kept in host memory for the backward pass: `layer_input`, `q`, `k`, `v`,
    `attention_out`.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    batch: int
    seq: int
    head_size: int = 128
    loss_chunk: int = 512
    block: int = 512
    fused_backward: bool = False
    offload: tuple[str, ...] = ()
    residual: Literal["whole", "embed", "position"] = "whole"

    @property
    def matmul_parameters(self) -> int:
        per_layer = self.embed * self.head_size * 2 * (self.heads + self.kv_heads) + 3 * self.embed * self.mlp
        return self.layers * per_layer + self.vocab * self.embed


LLAMA2_7B = PlainLlama(layers=32, embed=4096, heads=32, kv_heads=32, mlp=11008, vocab=32000, batch=256, seq=1024)
LLAMA2_70B = PlainLlama(layers=80, embed=8192, heads=64, kv_heads=8, mlp=28672, vocab=32000, batch=512, seq=1024)
LLAMA31_8B = PlainLlama(layers=32, embed=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256, batch=512, seq=8192)
LLAMA31_70B = PlainLlama(layers=80, embed=8192, heads=64, kv_heads=8, mlp=28672, vocab=128256, batch=512, seq=8192)
LLAMA31_405B = PlainLlama(layers=126, embed=16384, heads=128, kv_heads=8, mlp=53248, vocab=128256, batch=512, seq=8192)


def parameter_shapes(c: PlainLlama) -> dict[str, tuple[tuple[int, ...], P]]:
    """Every weight's shape and PartitionSpec."""
    q, kv = c.heads, c.kv_heads
    return {
        "embedding": ((c.vocab, c.embed), P("model", "data")),
        "head": ((c.embed, c.vocab), P("data", "model")),
        "norm": ((c.embed,), P()),
        "wq": ((c.layers, c.embed, q, c.head_size), P(None, "data", "model")),
        "wk": ((c.layers, c.embed, kv, c.head_size), P(None, "data", "model")),
        "wv": ((c.layers, c.embed, kv, c.head_size), P(None, "data", "model")),
        "wo": ((c.layers, q, c.head_size, c.embed), P(None, "model", None, "data")),
        "gate": ((c.layers, c.embed, c.mlp), P(None, "data", "model")),
        "up": ((c.layers, c.embed, c.mlp), P(None, "data", "model")),
        "down": ((c.layers, c.mlp, c.embed), P(None, "model", "data")),
        "norm1": ((c.layers, c.embed), P()),
        "norm2": ((c.layers, c.embed), P()),
    }


LAYER_NAMES = ("wq", "wk", "wv", "wo", "gate", "up", "down", "norm1", "norm2")


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (scaled * weight[None, None, :]).astype(x.dtype)


def _rotate(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _attention(c: PlainLlama, mesh: Mesh, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    local_heads = c.heads // mesh.shape["model"]
    block = min(c.block, c.seq)
    dq = None if c.fused_backward else block
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=dq, block_kv_dq=dq, use_fused_bwd_kernel=c.fused_backward,
    )  # fmt: skip
    mask = splash.MultiHeadMask([splash.CausalMask((c.seq, c.seq))] * local_heads)
    kernel = splash.make_splash_mha(mask=mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    spec = P("data", "model", None, None)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.vmap(kernel)(q * (c.head_size**-0.5), k, v)

    return attend(*(x.transpose(0, 2, 1, 3) for x in (q, k, v))).transpose(0, 2, 1, 3)


def train_step(c: PlainLlama, mesh: Mesh):
    """The function (params, mu, nu, tokens) → (params, mu, nu, loss), not yet jitted."""
    residual = {"whole": P("data"), "embed": P("data", None, "model"), "position": P("data", "model")}[c.residual]

    def shard(x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: value.astype(jnp.bfloat16) for name, value in w.items()}
        x = checkpoint_name(x, "layer_input")
        with jax.named_scope("self_attn"):
            h = _norm(x, w["norm1"].astype(jnp.float32))
            q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in ("wq", "wk", "wv"))
            q, k, v = (checkpoint_name(a, name) for a, name in ((_rotate(q), "q"), (_rotate(k), "k"), (v, "v")))
            out = jnp.einsum("bshd,hde->bse", _attention(c, mesh, q, k, v), w["wo"])
            x = shard(x + checkpoint_name(out, "attention_out"), residual)
        with jax.named_scope("mlp"):
            h = _norm(x, w["norm2"].astype(jnp.float32))
            gated = jax.nn.silu(jnp.einsum("bse,em->bsm", h, w["gate"])) * jnp.einsum("bse,em->bsm", h, w["up"])
            x = shard(x + jnp.einsum("bsm,me->bse", shard(gated, P("data", None, "model")), w["down"]), residual)
        return x, None

    def loss_fn(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        with jax.named_scope("embeddings"):
            x = shard(params["embedding"].astype(jnp.bfloat16)[tokens], residual)
        with jax.named_scope("layers"):
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(c.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
            body = jax.checkpoint(layer, policy=policy if c.offload else jax.checkpoint_policies.nothing_saveable)
            x, _ = jax.lax.scan(body, x, {name: params[name] for name in LAYER_NAMES})
        with jax.named_scope("lm_head"):
            x = shard(_norm(x, params["norm"]), P("data"))
            head = params["head"].astype(jnp.bfloat16)
            targets = jnp.roll(tokens, -1, axis=1)
            chunks = c.seq // min(c.loss_chunk, c.seq)

            @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
            def chunk(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                hidden, target = part
                logits = jnp.einsum("bse,ev->bsv", hidden, head, preferred_element_type=jnp.float32)
                logits = shard(logits, P("data", None, "model"))
                picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
                return total + jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked), None

            def split(a: jax.Array) -> jax.Array:
                return jnp.moveaxis(a.reshape(c.batch, chunks, c.seq // chunks, *a.shape[2:]), 1, 0)

            total, _ = jax.lax.scan(chunk, jnp.float32(0), (split(x), split(targets)))
        return total / (c.batch * c.seq)

    def step(params, mu, nu, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        with jax.named_scope("optimizer"):
            mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
            nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, nu, grads)
            params = jax.tree.map(lambda p, m, n: p - 3e-4 * m / (jnp.sqrt(n) + 1e-8), params, mu, nu)
        return params, mu, nu, loss

    return step


def lower(c: PlainLlama, mesh: Mesh) -> Any:
    """The lowered train step on `mesh`, whose axes are `data` and `model`."""
    shapes = parameter_shapes(c)
    shardings = {name: NamedSharding(mesh, spec) for name, (_, spec) in shapes.items()}
    params = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=shardings[name]) for name, (shape, _) in shapes.items()
    }
    tokens = jax.ShapeDtypeStruct((c.batch, c.seq), np.int32, sharding=NamedSharding(mesh, P("data")))
    outputs = (shardings, shardings, shardings, NamedSharding(mesh, P()))
    jitted = jax.jit(train_step(c, mesh), out_shardings=outputs, donate_argnums=(0, 1, 2))
    return jitted.lower(params, params, params, tokens)


@dataclass(frozen=True)
class TrainStep:
    """The train step as the compile worker wants it."""

    sizes: PlainLlama
    name: str = "train_step"

    def lower(self, mesh: Mesh) -> Any:
        return lower(self.sizes, mesh)


@dataclass(frozen=True)
class Described:
    mesh: MeshSpec
    programs: tuple[TrainStep, ...]


def sizes_of(payload: dict[str, Any]) -> PlainLlama:
    """`{"model": "LLAMA2_7B", "changes": {"batch": 128}}` as sizes."""
    return dataclasses.replace(globals()[payload["model"]], **payload["changes"])


def described(payload: dict[str, Any], target: Any) -> Described:
    """What the compile worker calls: payload `model`, `changes`, and `data` × `model_ways` of the mesh."""
    mesh = MeshSpec.of(data=payload["data"], model=payload["model_ways"])
    return Described(mesh, (TrainStep(sizes_of(payload)),))
