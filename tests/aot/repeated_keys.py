"""Attention of one new position to a static cache, two ways: keys and values repeated for each query head, as a
published decoder of 2023 writes it, and query heads grouped by what they read, as ours does. Of one chip."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_ext.meshspec import MeshSpec

Form = Literal["repeated", "grouped"]


@dataclass(frozen=True)
class Described:
    mesh: MeshSpec
    programs: tuple[Any, ...]


def attended(form: Form, query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """What each row's new position reads.

    Args:
        form: which way.
        query: `[rows, heads, head_size]`.
        keys: `[rows, slots, kv_heads, head_size]`.
        values: the same.
        mask: added to the scores, `[slots]`, float32.
    """
    rows, slots, kv_heads, size = keys.shape
    heads = query.shape[1]
    if form == "grouped":
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)
        scores = jnp.einsum("rkgd,rskd->rkgs", grouped, keys, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores / size**0.5 + mask[None, None, None], axis=-1).astype(query.dtype)
        return jnp.einsum("rkgs,rskd->rkgd", shares, values).reshape(rows, heads, size)

    def repeated(cached: jax.Array) -> jax.Array:
        each = jnp.broadcast_to(cached[:, :, :, None], (rows, slots, kv_heads, heads // kv_heads, size))
        # Rows and heads are one axis of a batched product.
        return each.reshape(rows, slots, heads, size).transpose(0, 2, 1, 3).reshape(rows * heads, slots, size)

    single = query.reshape(rows * heads, 1, size)
    scores = jnp.matmul(single, repeated(keys).transpose(0, 2, 1)) / size**0.5
    shares = jax.nn.softmax((scores + mask[None, None]).astype(jnp.float32), axis=-1).astype(query.dtype)
    return jnp.matmul(shares, repeated(values)).reshape(rows, heads, size)


@dataclass(frozen=True)
class Attention:
    """Layers of attention with a cache each, written at one position and read whole."""

    name: str
    form: Form
    layers: int
    rows: int
    slots: int
    kv_heads: int
    groups: int
    head_size: int
    embed: int = 1024

    def lower(self, mesh: Mesh) -> Any:
        heads = self.kv_heads * self.groups

        def step(w: Any, keys: Any, values: Any, x: jax.Array, position: jax.Array, mask: jax.Array) -> Any:
            keys, values = list(keys), list(values)
            for layer in range(self.layers):
                new = (self.rows, 1, self.kv_heads, self.head_size)
                keys[layer] = keys[layer].at[:, position].set((x @ w["k"]).reshape(new))
                values[layer] = values[layer].at[:, position].set((x @ w["v"]).reshape(new))
                query = (x @ w["q"]).reshape(self.rows, heads, self.head_size)
                read = attended(self.form, query, keys[layer], values[layer], mask)
                x = x + read.reshape(self.rows, -1) @ w["o"]
            return x, keys, values

        everywhere = NamedSharding(mesh, P())

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        kv, bf16 = self.kv_heads * self.head_size, jnp.bfloat16
        weights = {
            "q": array(bf16, self.embed, heads * self.head_size), "k": array(bf16, self.embed, kv),
            "v": array(bf16, self.embed, kv), "o": array(bf16, heads * self.head_size, self.embed),
        }  # fmt: skip
        cache = [array(bf16, self.rows, self.slots, self.kv_heads, self.head_size)] * self.layers
        one = (array(bf16, self.rows, self.embed), array(jnp.int32, 1), array(jnp.float32, self.slots))
        return jax.jit(step, donate_argnums=(1, 2)).lower(weights, cache, cache, *one)


def described(payload: dict[str, Any], target: Any) -> Described:
    """Both ways, of the sizes in `payload`."""
    forms: tuple[Form, ...] = ("repeated", "grouped")
    return Described(MeshSpec.of(data=1), tuple(Attention(name=form, form=form, **payload) for form in forms))
