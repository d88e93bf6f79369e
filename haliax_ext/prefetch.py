"""Runs a Program over batches of host arrays, and fetches each result a few batches later.

`place` makes global arrays of host arrays, as an `Input` declares them. `results` is the loop: batches are dispatched
in order and their results fetched while later ones compute, so that the devices never wait for the host.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from haliax_ext.abstract import Leaf, leaves, map_arrays
from haliax_ext.program import Input, Jit, Program, partition_spec
from haliax_ext.pytree import Array, PyTree

K = TypeVar("K")


def shardings(declared: Input, mesh: Mesh) -> dict[str, NamedSharding]:
    """The shardings of an input's arrays on a mesh, by path (the empty one where the input is one array).

    Args:
        declared: the input; something must place it.
        mesh: the devices.
    """
    placement = declared.placement
    assert placement is not None, f"input {declared.name} has no placement"
    return {leaf.path: NamedSharding(mesh, partition_spec(leaf, placement)) for leaf in leaves(declared.value)}


def place(declared: Input, values: np.ndarray | Mapping[str, np.ndarray], mesh: Mesh, *, first_row: int = 0) -> PyTree:
    """Host arrays as an input of a Program; every process gives its own devices their part.

    Args:
        declared: the input, abstract.
        values: its arrays by path, or the one that it is.
        mesh: the devices.
        first_row: the index, along every array's first axis, of what `values` begin with: a process needs the rows
            that its own devices hold, and no others.

    Returns:
        The input's value with global arrays.
    """
    where = shardings(declared, mesh)

    def placed(leaf: Leaf, _: Array) -> jax.Array:
        local_values = values[leaf.path] if isinstance(values, Mapping) else values

        # JAX calls this for local devices only, with the global index of each one's part.
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            if not index:
                # A number has no rows: every process passes the same one.
                return np.asarray(local_values, leaf.dtype)
            begin, end, _ = index[0].indices(leaf.shape[0])
            return local_values[begin - first_row : end - first_row, *index[1:]]

        return jax.make_array_from_callback(leaf.shape, where[leaf.path], part)

    return map_arrays(placed, declared.value)


def results(
    program: Program,
    mesh: Mesh,
    first: PyTree,
    batches: Iterable[tuple[K, Sequence[np.ndarray]]],
    *,
    behind: int,
    jit: Jit = Program.jit,
) -> Iterator[tuple[K, Any]]:
    """Runs a Program for each batch, in order, and yields the results.

    Args:
        program: its outputs are replicated.
        mesh: the devices.
        first: its first input, the same for all batches, on the devices.
        batches: pairs (name of the batch, the other inputs, one array each).
        behind: batches in flight before the first result is fetched.
        jit: makes the Program callable.

    Returns:
        Pairs (name of the batch, the Program's outputs as NumPy arrays).
    """
    run = jit(program, mesh)
    waiting: deque[tuple[K, PyTree]] = deque()
    for name, arrays in batches:
        inputs = [place(declared, array, mesh) for declared, array in zip(program.inputs[1:], arrays, strict=True)]
        outputs = run(first, *inputs)
        # Copies start as soon as outputs are ready, while the next batches still compute.
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()
        waiting.append((name, outputs))
        # Fetching blocks, so it happens only when enough batches are in flight to keep the devices busy.
        if len(waiting) > behind:
            yield _fetched(*waiting.popleft())
    while waiting:
        yield _fetched(*waiting.popleft())


def _fetched(name: K, outputs: PyTree) -> tuple[K, Any]:
    def local(array: jax.Array) -> np.ndarray:
        # Outputs are replicated: any local device has all of it.
        return np.asarray(array.addressable_data(0))

    return name, cast("Callable[..., Any]", jax.tree.map)(local, outputs)
