"""How a checkpoint identifies the frozen part of a model, which it does not contain.

A run with frozen parameters saves only the trained ones. Its checkpoint describes the rest: the paths of the frozen
parameters, their origin, and a *digest* of each. Resuming requires the same partition, which is checked before anything
is read, and the same values, which are checked once they are on the devices.

A digest does not depend on the mesh: it is the sum, modulo 2³², of every element's bits times an odd number that
depends on its index. Zeros add nothing, so the padding of an axis that a mesh rounds up does not change it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haliax_ext.abstract import Leaf, array_leaf
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.program import Input, Program
from haliax_ext.pytree import PyTree, is_named, path_string
from levanter.checkpoint import CheckpointMismatchError, CheckpointRef
from levanter.trainer.state import StatePlan
from levanter.trainer.train_state import FROZEN, MODEL
from levanter.trainer.trainable import KEY

DIGEST = "digest_frozen"
_GOLDEN = 0x9E3779B1
"""2³² divided by the golden ratio, odd: its multiples are spread evenly over the 32-bit numbers (Knuth)."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class FrozenPart:
    """The frozen part of a run's model, as described in its checkpoints.

    Attributes:
        patterns: patterns of the trained parameters (`trainer.trainable`); empty for adapters.
        origin: where the frozen parameters come from, as text for messages.
        digests: of each frozen parameter, by path, in hexadecimal; an empty string if not computed yet.
        adapters: target → rank of the trained adapters; None if parameters of the model are trained.
        dtype: the dtype of the frozen parameters, on which their digests depend; None if unknown.
        whole: parameters of which full copies are trained together with adapters.
    """

    patterns: tuple[str, ...]
    origin: str
    digests: Mapping[str, str] = field(repr=False)
    adapters: Mapping[str, int] | None = None
    dtype: str | None = None
    whole: tuple[str, ...] = ()

    @property
    def metadata(self) -> dict[str, Any]:
        """The description as metadata of a checkpoint."""
        # Optional keys are left out, so that runs without adapters write what earlier versions wrote.
        adapters: dict[str, Any] = {} if self.adapters is None else {"adapters": dict(self.adapters)}
        if self.whole:
            adapters["whole"] = list(self.whole)
        described = {"trainable": list(self.patterns), "from": self.origin, "digests": dict(self.digests)}
        return {FROZEN: {**described, **adapters, **({} if self.dtype is None else {"dtype": self.dtype})}}

    @staticmethod
    def of(ref: CheckpointRef) -> "FrozenPart | None":
        """The description in a checkpoint; None if its run trained everything."""
        saved = ref.metadata.get(FROZEN)
        if saved is None:
            return None
        return FrozenPart(
            patterns=tuple(saved["trainable"]),
            origin=saved["from"],
            digests=saved["digests"],
            adapters=saved.get("adapters"),
            dtype=saved.get("dtype"),
            whole=tuple(saved.get("whole", ())),
        )


def check_partition(ref: CheckpointRef, ours: FrozenPart | None) -> None:
    """Refuses a checkpoint of a run that trained other parameters; no array is read.

    Raises:
        CheckpointMismatchError: with what each of the two runs trains.
    """
    theirs = FrozenPart.of(ref)
    _check_adapters(ref, theirs, ours)
    saved_paths, run_paths = (frozenset() if part is None else frozenset(part.digests) for part in (theirs, ours))
    if saved_paths == run_paths:
        return
    differences = [
        f"{len(paths)} {how} ({_some(paths)})"
        for paths, how in (
            (sorted(run_paths - saved_paths), "are trained there and frozen here"),
            (sorted(saved_paths - run_paths), "are frozen there and trained here"),
        )
        if paths
    ]
    key = "leave it out" if theirs is None else f"{KEY}: {list(theirs.patterns)}"
    raise CheckpointMismatchError(
        f"{ref.path}: this checkpoint is of a run that trained {_trained(theirs)}, and this run trains "
        f"{_trained(ours)}: of its parameters, {' and '.join(differences)}\n"
        f"  → {KEY}: {key.removeprefix(f'{KEY}: ')} resumes it; a new run can start from the parameters of a "
        "checkpoint that has all of them (initialize_model_from_checkpoint_path)"
    )


def _check_adapters(ref: CheckpointRef, theirs: FrozenPart | None, ours: FrozenPart | None) -> None:
    saved_adapters, run_adapters = (None if part is None else part.adapters for part in (theirs, ours))
    if saved_adapters == run_adapters:
        _check_whole(ref, theirs, ours)
        return
    if saved_adapters is None or run_adapters is None:
        clauses = (
            ("trained no adapters", "trains adapters")
            if saved_adapters is None
            else ("trained adapters", "trains none")
        )
        raise CheckpointMismatchError(
            f"{ref.path}: this checkpoint is of a run that {clauses[0]}, and this run {clauses[1]} (adapter)\n"
            "  → resume it with the adapter: block that it had, or give the new run its own trainer.id"
        )
    lines = [
        f"{path}: rank {_rank(saved_adapters.get(path))} when it was saved, {_rank(run_adapters.get(path))} now"
        for path in sorted(saved_adapters.keys() | run_adapters.keys())
        if saved_adapters.get(path) != run_adapters.get(path)
    ]
    raise CheckpointMismatchError(
        f"{ref.path}: this checkpoint is of a run with other adapters; {len(lines)} differ:\n  " + "\n  ".join(lines)
    )


def _check_whole(ref: CheckpointRef, theirs: FrozenPart | None, ours: FrozenPart | None) -> None:
    saved_paths, run_paths = (frozenset() if part is None else frozenset(part.whole) for part in (theirs, ours))
    if saved_paths != run_paths:
        lines = [
            f"{path}: {'trained whole' if path in saved_paths else 'frozen'} when it was saved, "
            f"{'trained whole' if path in run_paths else 'frozen'} now (adapter.modules_to_save)"
            for path in sorted(saved_paths ^ run_paths)
        ]
        raise CheckpointMismatchError(
            f"{ref.path}: this checkpoint is of a run with other adapters; {len(lines)} differ:\n  "
            + "\n  ".join(lines)
        )


def _rank(rank: int | None) -> str:
    return "none" if rank is None else str(rank)


def check_digests(ref: CheckpointRef, ours: FrozenPart) -> None:
    """Refuses to resume with frozen parameters other than those of the checkpoint's run.

    Raises:
        CheckpointMismatchError: with the parameters that differ, and the origin of both.
    """
    theirs = FrozenPart.of(ref)
    assert theirs is not None, "call check_partition first"
    others = sorted(path for path, digest in ours.digests.items() if theirs.digests[path] != digest)
    if others:
        raise CheckpointMismatchError(
            f"{ref.path}: its run was trained with other frozen parameters: {len(others)} of {len(ours.digests)} "
            f"differ ({_some(others)}); they came from {theirs.origin}, those of this run from {ours.origin}\n"
            "  → continue with the frozen parameters that the run started with"
        )


def _trained(part: FrozenPart | None) -> str:
    if part is not None and part.adapters is not None:
        return "adapters"
    return "everything" if part is None else f"{', '.join(part.patterns)} ({KEY})"


def _some(paths: Sequence[str]) -> str:
    more = f", … {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


def digest_program(frozen: PyTree, plan: StatePlan) -> Program:
    """The Program that computes the digests, uint32 by path."""

    def digests(frozen: PyTree) -> dict[str, jax.Array]:
        flat = jax.tree_util.tree_flatten_with_path(frozen, is_leaf=is_named)[0]
        named_leaves = ((array_leaf(path_string(keys), x), x.array if is_named(x) else x) for keys, x in flat)
        return {leaf.path: _digest(leaf, x) for leaf, x in named_leaves}

    return Program(
        name=DIGEST,
        function=digests,
        inputs=(Input(name=FROZEN, value=frozen, placement=plan.parameters),),
        mappings=Mappings(),
        # Replicated scalars: every process has all digests and compares them itself.
        out_placement=AxisMapping(),
    )


def _digest(leaf: Leaf, x: jax.Array) -> jax.Array:
    # The bits, not the values: −0.0 and 0.0 differ, and NaNs with equal bits are equal.
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    # 1 + Σ_n index_n · 2 · golden · (2n + 1): odd for every index, so multiplication by it is a bijection modulo 2³²,
    # and a change of any single element changes the sum. Axes have different multipliers: a transposed array differs.
    factor = jnp.ones((), jnp.uint32)
    for n in range(len(leaf.shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, n)
        factor = factor + index * np.uint32((2 * _GOLDEN * (2 * n + 1)) % 2**32)
    # Unsigned addition wraps and is associative, so any order of summation, on any mesh, gives the same digest.
    return jnp.sum(x.astype(jnp.uint32) * factor, dtype=jnp.uint32)


def digest_on_host(x: np.ndarray) -> str:
    """The digest of a NumPy array, as in a checkpoint."""
    bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32)
    factor = np.ones((), np.uint32)
    for n, size in enumerate(x.shape):
        step = np.uint32((2 * _GOLDEN * (2 * n + 1)) % 2**32)
        # Multiplied in 64 bits and truncated: the wraparound of 32-bit integers on a device, without NumPy's warning.
        index = (np.arange(size, dtype=np.uint64) * np.uint64(step)).astype(np.uint32)
        factor = factor + index.reshape((size, *([1] * (x.ndim - n - 1))))
    return f"{int(np.sum(bits * factor, dtype=np.uint32)):08x}"


def on_host(digests: Mapping[str, jax.Array]) -> dict[str, str]:
    """Digests as in a checkpoint: eight hexadecimal digits each."""
    return {path: f"{int(np.asarray(x.addressable_data(0))):08x}" for path, x in digests.items()}


def under_model(path: str) -> str:
    """The path of a parameter in a checkpoint."""
    return f"{MODEL}.{path}"
