"""What a checkpoint says of the frozen part of a model, which is not in it.

A run whose model is frozen in part saves what it trains. Its checkpoint names the rest: which parameters are frozen,
where they came from, and a *digest* of each. Resuming from it needs the same partition, which is known before
anything is read, and the same numbers, which are known once they are on the devices.

A digest does not depend on the mesh: it is a sum, modulo 2³², of every element's bits times an odd number that its
index gives. Zeros add nothing, so neither does the padding of an axis that a mesh rounds up.
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
"""2³² over the golden ratio, and odd: its multiples spread evenly over the 32-bit numbers."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class FrozenPart:
    """The frozen part of a run's model, as its checkpoints name it.

    Attributes:
        patterns: of what is trained instead (`trainer.trainable`); none where adapters are.
        origin: where the frozen parameters come from, in words.
        digests: of each frozen parameter, by path, in hexadecimal; empty text where it is not known yet.
        adapters: of the adapters that are trained instead, each target with its rank; None where parameters are.
        dtype: in what the frozen parameters were held, which their digests depend on; None if that is not known.
        whole: parameters of which copies are trained beside adapters.
    """

    patterns: tuple[str, ...]
    origin: str
    digests: Mapping[str, str] = field(repr=False)
    adapters: Mapping[str, int] | None = None
    dtype: str | None = None
    whole: tuple[str, ...] = ()

    @property
    def metadata(self) -> dict[str, Any]:
        """What is saved beside the arrays of a checkpoint."""
        adapters: dict[str, Any] = {} if self.adapters is None else {"adapters": dict(self.adapters)}
        if self.whole:
            adapters["whole"] = list(self.whole)
        described = {"trainable": list(self.patterns), "from": self.origin, "digests": dict(self.digests)}
        return {FROZEN: {**described, **adapters, **({} if self.dtype is None else {"dtype": self.dtype})}}

    @staticmethod
    def of(ref: CheckpointRef) -> "FrozenPart | None":
        """What a checkpoint names; None where everything was trained."""
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
    """Refuses a checkpoint of a run that trained other parameters; nothing is read.

    Raises:
        CheckpointMismatchError: says what each of them trains.
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
    """Refuses to resume with frozen parameters other than those that a checkpoint was trained with.

    Raises:
        CheckpointMismatchError: says which differ, and where both come from.
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
    """The Program that makes the digests, uint32 by path."""

    def digests(frozen: PyTree) -> dict[str, jax.Array]:
        flat = jax.tree_util.tree_flatten_with_path(frozen, is_leaf=is_named)[0]
        named_leaves = ((array_leaf(path_string(keys), x), x.array if is_named(x) else x) for keys, x in flat)
        return {leaf.path: _digest(leaf, x) for leaf, x in named_leaves}

    return Program(
        name=DIGEST,
        function=digests,
        inputs=(Input(name=FROZEN, value=frozen, placement=plan.parameters),),
        mappings=Mappings(),
        out_placement=AxisMapping(),
    )


def _digest(leaf: Leaf, x: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    factor = jnp.ones((), jnp.uint32)
    for n in range(len(leaf.shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, n)
        factor = factor + index * np.uint32((2 * _GOLDEN * (2 * n + 1)) % 2**32)
    return jnp.sum(x.astype(jnp.uint32) * factor, dtype=jnp.uint32)


def digest_on_host(x: np.ndarray) -> str:
    """The digest of an array in memory, as it is saved."""
    bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32)
    factor = np.ones((), np.uint32)
    for n, size in enumerate(x.shape):
        step = np.uint32((2 * _GOLDEN * (2 * n + 1)) % 2**32)
        # Integers of 32 bits that wrap, as on a device.
        index = (np.arange(size, dtype=np.uint64) * np.uint64(step)).astype(np.uint32)
        factor = factor + index.reshape((size, *([1] * (x.ndim - n - 1))))
    return f"{int(np.sum(bits * factor, dtype=np.uint32)):08x}"


def on_host(digests: Mapping[str, jax.Array]) -> dict[str, str]:
    """Digests as they are saved: eight hexadecimal digits each."""
    return {path: f"{int(np.asarray(x.addressable_data(0))):08x}" for path, x in digests.items()}


def under_model(path: str) -> str:
    """The path of a parameter in a checkpoint."""
    return f"{MODEL}.{path}"
