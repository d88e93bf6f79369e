"""Programs that need given shares of a chip's memory: as an argument, as a result, or beside temporaries."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_ext.meshspec import MeshSpec


def _argument(ballast: jax.Array, _: jax.Array) -> Any:
    return ballast + 1.0


def _temporaries(ballast: jax.Array, x: jax.Array) -> Any:
    """Two temporaries of the size of `x` at a time; barriers keep the compiler from fusing them away."""
    barrier = jax.lax.optimization_barrier
    first = barrier(jnp.sin(x))
    second = barrier(jnp.cos(first))
    return (first * second).sum() + ballast[0, 0]


KINDS = {"argument": (_argument, (0,)), "result": (_argument, ()), "temporaries": (_temporaries, ())}
"""Kind → function and donated arguments."""


@dataclass(frozen=True)
class Ballast:
    """A Program of one kind with an argument of so many MiB, and a second one of `others` MiB."""

    kind: str
    mebibytes: int
    others: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.mebibytes}"

    def lower(self, mesh: Mesh) -> Any:
        function, donated = KINDS[self.kind]
        everywhere = NamedSharding(mesh, P())
        # 256 rows of 1,024 float32 are a MiB, in tiles without padding.
        arrays = [
            jax.ShapeDtypeStruct((256 * mebibytes, 1024), jnp.float32, sharding=everywhere)
            for mebibytes in (self.mebibytes, self.others)
        ]
        with jax.set_mesh(mesh):
            return jax.jit(function, donate_argnums=donated).trace(*arrays).lower(lowering_platforms=("tpu",))


@dataclass(frozen=True)
class Described:
    mesh: MeshSpec
    programs: tuple[Ballast, ...]


def ballast(payload: dict[str, Any], target: Any) -> Described:
    """Programs of `payload["kind"]`, one for each number of MiB of `payload["mebibytes"]`."""
    programs = tuple(Ballast(payload["kind"], mebibytes, payload["others"]) for mebibytes in payload["mebibytes"])
    return Described(MeshSpec.of(data=target.devices), programs)
