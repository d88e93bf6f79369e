"""A step that generates one token a row, in plain JAX: every weight once, every row's keys and values once."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_ext.meshspec import MeshSpec


@dataclass(frozen=True)
class Described:
    mesh: MeshSpec
    programs: tuple[Any, ...]


@dataclass(frozen=True)
class Decode:
    """Layers of attention over a cache and a plain MLP; the caches of all layers are carried and updated in place."""

    name: str
    layers: int
    embed: int
    mlp: int
    kv_heads: int
    head_size: int
    rows: int
    context: int

    def lower(self, mesh: Mesh) -> Any:
        groups = self.embed // (self.kv_heads * self.head_size)

        def layer(carried: Any, w: dict[str, jax.Array]) -> tuple[Any, None]:
            x, keys, values, index, position = carried
            query = (x @ w["q"]).reshape(self.rows, self.kv_heads, groups, self.head_size)

            def updated(cache: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
                new = new.reshape(1, self.rows, self.kv_heads, 1, self.head_size)
                cache = jax.lax.dynamic_update_slice(cache, new, (index, 0, 0, position, 0))
                return cache, jax.lax.dynamic_index_in_dim(cache, index, keepdims=False)

            keys, k = updated(keys, x @ w["k"])
            values, v = updated(values, x @ w["v"])
            scores = jnp.einsum("rkgd,rkcd->rkgc", query, k, preferred_element_type=jnp.float32)
            seen = jnp.arange(self.context) <= position
            shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(jnp.bfloat16)
            x = x + jnp.einsum("rkgc,rkcd->rkgd", shares, v).reshape(self.rows, self.embed) @ w["o"]
            x = x + jax.nn.silu(x @ w["up"]) @ w["down"]
            return (x, keys, values, index + 1, position), None

        def step(w: Any, keys: jax.Array, values: jax.Array, x: jax.Array, position: jax.Array) -> Any:
            (x, keys, values, *_), _ = jax.lax.scan(layer, (x, keys, values, jnp.int32(0), position), w)
            return x, keys, values

        everywhere = NamedSharding(mesh, P())

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        kv = self.kv_heads * self.head_size
        shapes = {
            "q": (self.embed, self.embed), "k": (self.embed, kv), "v": (self.embed, kv), "o": (self.embed, self.embed),
            "up": (self.embed, self.mlp), "down": (self.mlp, self.embed),
        }  # fmt: skip
        weights = {name: array(jnp.bfloat16, self.layers, *shape) for name, shape in shapes.items()}
        cache = array(jnp.bfloat16, self.layers, self.rows, self.kv_heads, self.context, self.head_size)
        return jax.jit(step, donate_argnums=(1, 2)).lower(
            weights, cache, cache, array(jnp.bfloat16, self.rows, self.embed), array(jnp.int32)
        )


def decode(payload: dict[str, Any], target: Any) -> Described:
    """A decode step of the sizes in `payload`, on one device."""
    return Described(MeshSpec.of(data=1), (Decode(name="decode", **payload),))
