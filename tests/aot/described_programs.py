"""What the compile worker is asked to describe in tests: tiny programs, one that does not fit, ways to fail."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_ext.meshspec import MeshSpec


@dataclass(frozen=True)
class Described:
    mesh: MeshSpec
    programs: tuple[Any, ...]


@dataclass(frozen=True)
class TwoMatmuls:
    """A scan over gated matmuls and its gradient, weights cut over data × model, batch over data (and slices)."""

    name: str
    layers: int
    embed: int
    mlp: int
    batch: int

    def lower(self, mesh: Mesh) -> Any:
        rows = tuple(axis for axis in ("slices", "data") if axis in mesh.shape)

        def sharding(*spec: Any) -> NamedSharding:
            return NamedSharding(mesh, P(*spec))

        def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            with jax.named_scope("mlp"):
                hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w["up"]), sharding(rows, "model"))
                return jax.lax.with_sharding_constraint(x + hidden @ w["down"], sharding(rows, None)), None

        def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            with jax.named_scope("layers"):
                x, _ = jax.lax.scan(layer, x, w)
            return jnp.sum(x.astype(jnp.float32) ** 2)

        def step(w: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
            value, gradient = jax.value_and_grad(loss)(w, x)
            return jax.tree.map(lambda a, b: a - jnp.bfloat16(0.1) * b, w, gradient), value

        shardings = {"up": sharding(None, "data", "model"), "down": sharding(None, "model", "data")}
        shapes = {"up": (self.layers, self.embed, self.mlp), "down": (self.layers, self.mlp, self.embed)}
        weights = {
            name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=shardings[name]) for name, shape in shapes.items()
        }
        x = jax.ShapeDtypeStruct((self.batch, self.embed), jnp.bfloat16, sharding=sharding(rows, None))
        return jax.jit(step, out_shardings=(shardings, sharding()), donate_argnums=0).lower(weights, x)


@dataclass(frozen=True)
class Calls:
    """A program whose lowering does something else."""

    name: str
    action: Callable[[], None]

    def lower(self, mesh: Mesh) -> Any:
        self.action()


class Refused:
    """What `lower` returns for a program that the compiler refuses."""

    def compile(self, **_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory. Used 20.00G of 15.75G hbm.")


@dataclass(frozen=True)
class Refuses:
    name: str

    def lower(self, mesh: Mesh) -> Refused:
        return Refused()


def _mesh(payload: dict[str, Any]) -> MeshSpec:
    axes = tuple((name, size) for name, size in payload["mesh"].items())
    return MeshSpec(axes=axes, dcn=("slices",) if "slices" in payload["mesh"] else ())


def small(payload: dict[str, Any], target: Any) -> Described:
    program = TwoMatmuls("small", layers=3, embed=1024, mlp=2048, batch=64)
    return Described(_mesh(payload), (program,))


def wide(payload: dict[str, Any], target: Any) -> Described:
    """Large enough that compilers bother to overlap."""
    return Described(_mesh(payload), (TwoMatmuls("wide", layers=3, embed=4096, mlp=8192, batch=16384),))


def small_and_huge(payload: dict[str, Any], target: Any) -> Described:
    mesh = _mesh(payload)
    huge = TwoMatmuls("huge", layers=1000, embed=16384, mlp=65536, batch=64)
    return Described(mesh, (TwoMatmuls("small", layers=3, embed=1024, mlp=2048, batch=64), huge))


def bad_input(payload: dict[str, Any], target: Any) -> Described:
    raise ValueError(f"heads 12 do not divide by model 8 on {target.name}")


def aborts(payload: dict[str, Any], target: Any) -> Described:
    def abort() -> None:
        os.write(2, b"F0000 check failed: something inside the compiler\n")
        os.kill(os.getpid(), signal.SIGABRT)

    return Described(MeshSpec.of(data=np.array(target.devices).item()), (Calls("doomed", abort),))


def sleeps(payload: dict[str, Any], target: Any) -> Described:
    return Described(MeshSpec.of(data=target.devices), (Calls("slow", lambda: time.sleep(600)),))


def refused_and_slow(payload: dict[str, Any], target: Any) -> Described:
    return Described(_mesh(payload), (Refuses("refused"), Calls("slow", lambda: time.sleep(600))))
