"""Products of matrices in plain JAX: one large one, one for each group of rows, and the same as a batch; and a sort."""

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
class Computation:
    """A function of arrays that every device has whole."""

    name: str
    function: Any
    shapes: tuple[tuple[Any, ...], ...]

    def lower(self, mesh: Mesh) -> Any:
        everywhere = NamedSharding(mesh, P())
        arrays = [jax.ShapeDtypeStruct(shape[1:], shape[0], sharding=everywhere) for shape in self.shapes]
        with jax.set_mesh(mesh):
            return jax.jit(self.function).trace(*arrays).lower(lowering_platforms=("tpu",))


def products(payload: dict[str, Any], target: Any) -> Described:
    """`rows` rows through matrices [inner, outer]: `dense`, by groups of rows `grouped` and `batched`; and a `sort`."""
    rows, inner, outer, groups = (payload[name] for name in ("rows", "inner", "outer", "groups"))
    bf16 = jnp.bfloat16

    def batched(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("gri,gio->gro", x, w)

    def gradient(x: jax.Array, w: jax.Array, sizes: jax.Array, out: jax.Array) -> Any:
        return jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)[1](out)

    def sort(keys: jax.Array, values: jax.Array) -> Any:
        return jax.lax.sort((keys, values), num_keys=1)

    programs = (
        Computation("dense", jnp.matmul, ((bf16, rows, inner), (bf16, inner, outer))),
        Computation(
            "grouped", jax.lax.ragged_dot, ((bf16, rows, inner), (bf16, groups, inner, outer), (jnp.int32, groups))
        ),
        Computation(
            "gradient",
            gradient,
            ((bf16, rows, inner), (bf16, groups, inner, outer), (jnp.int32, groups), (bf16, rows, outer)),
        ),
        Computation("batched", batched, ((bf16, groups, rows // groups, inner), (bf16, groups, inner, outer))),
        Computation("sort", sort, ((jnp.int32, rows), (jnp.int32, rows))),
    )
    return Described(MeshSpec.of(data=target.devices), programs)
