"""Small helpers that scripts of earlier generations import from `levanter.utils`."""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from levanter.distributed.agreement import barrier

AXES = ("data", "replica", "model")


def use_cpu_device() -> AbstractContextManager[Any]:
    """A context in which new arrays are created on the host's CPU."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


@contextmanager
def local_cpu_mesh() -> Iterator[Mesh]:
    """A context with a mesh of one CPU device of the host in scope."""
    # Upstream's axis names, each of size 1: mappings that name them stay valid.
    devices = np.array(jax.local_devices(backend="cpu")[:1]).reshape([1] * len(AXES))
    mesh = Mesh(devices, AXES)
    with use_cpu_device(), jax.set_mesh(mesh):
        yield mesh


def is_inexact_arrayish(value: object) -> bool:
    """Whether a value has a floating-point or complex dtype."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def key_iterator(key: jax.Array | int) -> Iterator[jax.Array]:
    """An endless stream of distinct random keys."""
    key = jax.random.PRNGKey(key) if isinstance(key, int) else key
    while True:
        key, subkey = jax.random.split(key)
        yield subkey


def non_caching_cycle(items: Iterable[Any]) -> Iterator[Any]:
    """Repeats the items endlessly; the iterable is iterated anew each time, and nothing is cached."""
    # Unlike itertools.cycle, which keeps a copy of every item.
    return itertools.chain.from_iterable(itertools.repeat(items))


def logical_cpu_core_count() -> int:
    """The number of CPUs that the operating system reports."""
    return os.cpu_count() or 1


def barrier_sync(timeout: float = 200) -> None:
    """Waits until every process of the run reaches this call."""
    barrier("a script's barrier", seconds=timeout)
