"""What the reference says of pairs, made once and stored: before the first step, or before the first evaluation.

With `reference: {type: precomputed}` that is all that steps need of it: the reference is loaded, scores every pair of
the training and the validation sets, and goes. With `reference_eval_cache` it is what evaluations need, and steps score
with the reference that they have. A store that is complete is read; then nothing is scored, and what only scoring needs
is not loaded.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.mapping import AxisMapping
from haliax_ext.planner import ShardingPlan
from haliax_ext.prefetch import results
from haliax_ext.program import Input, Program
from haliax_ext.pytree import PyTree
from haliax_ext.sources import TensorSource
from levanter.commands.train.dpo.evaluation import FETCH_BEHIND, PairSet, pair_inputs
from levanter.commands.train.dpo.setup import SCORE, Preferences
from levanter.data import DataError, PairRows
from levanter.data.reference_store import ReferenceStore, pairs_digest
from levanter.distributed.barrier import ONE_FOR_ALL_SECONDS, agreed, barrier, is_process_0
from levanter.distributed.compile_barrier import jit_together
from levanter.io import Progress, join, leased
from levanter.mesh import ResolvedMesh
from levanter.models.precision import Precision
from levanter.trainer.dpo import PairBatch, pair_logprobs
from levanter.trainer.loss import in_compute_dtype
from levanter.trainer.train_state import REFERENCE

logger = logging.getLogger(__name__)

_ELEMENTS = 256


def reference_program(
    pairs: Preferences,
    module: PyTree,
    plan: ShardingPlan,
    *,
    rows: int,
    positions: int,
    chunk: int,
    precision: Precision,
    resolved: ResolvedMesh,
    compiler_options: Mapping[str, str],
) -> Program:
    """The Program that scores a batch of pairs with the reference alone: (reference, tokens, targets) → `[pairs, 2]`.

    Args:
        pairs: what is compared with.
        module: the reference, abstract.
        plan: where it lies.
        rows, positions, chunk, precision, resolved, compiler_options: see `evaluate_pairs_program`.
    """
    Batch, Pos = hax.Axis(resolved.batch_axis, rows), hax.Axis("position", positions)
    batch = pairs.objective.abstract_batch(Batch, Pos)

    def score(reference: PyTree, tokens: hax.NamedArray, targets: hax.NamedArray) -> jax.Array:
        usable = in_compute_dtype(reference, precision.compute, plan)
        return pair_logprobs(usable, PairBatch(tokens=tokens, targets=targets), chunk=chunk)

    return Program(
        name=SCORE,
        function=score,
        inputs=(
            Input(name=REFERENCE, value=module, placement=plan),
            Input(name="tokens", value=batch.tokens, placement=resolved.mappings.compute),
            Input(name="targets", value=batch.targets, placement=resolved.mappings.compute),
        ),
        mappings=resolved.mappings,
        out_placement=AxisMapping(),
        matmul_precision=precision.matmul,
        compiler_options=compiler_options,
    )


def digest_of_source(source: TensorSource) -> str:
    """Hex SHA-256 that tells references apart: names, shapes, dtypes, and the beginnings of two rows of each tensor.

    A fine-tuning that leaves norms alone (adapters that were merged) still changes rows of matrices.
    """
    digest = hashlib.sha256()
    for name, info in sorted(source.tensors.items()):
        digest.update(repr((name, tuple(info.shape), info.dtype.name)).encode())
        if not info.size:
            continue
        for row in {0, info.shape[0] // 2} if info.shape else ():
            index = (slice(row, row + 1), *(slice(0, min(size, _ELEMENTS)) for size in info.shape[1:]))
            digest.update(np.ascontiguousarray(source.read(name, index)).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ReferenceRequest:
    """A set whose log-probabilities by the reference are wanted.

    Attributes:
        name: of the set, and of its folder.
        rows: its pairs.
        template: what its texts were made with.
    """

    name: str
    rows: PairRows
    template: str


def reference_stores(
    wanted: Sequence[ReferenceRequest], root: str, *, reference: str, digest: str, precision: Precision
) -> list[ReferenceStore]:
    """Where the log-probabilities of each set are, whether they are there or not.

    Raises:
        ReferenceStoreError: a folder has those of another reference, or of other pairs; lists all.
    """
    stores, problems = [], []
    for one in wanted:
        identity = {
            "reference": reference,
            "reference_digest": digest,
            "set": one.name,
            "pairs": len(one.rows),
            "pairs_digest": pairs_digest(one.rows),
            "positions": one.rows.half,
            "template": one.template,
            "compute_dtype": np.dtype(precision.compute).name,
        }
        store = ReferenceStore(folder=join(root, one.name), identity=identity, pairs=len(one.rows))
        try:
            store.check()
        except DataError as error:
            problems.append(error)
        stores.append(store)
    if problems:
        raise problems[0] if len(problems) == 1 else type(problems[0])("\n".join(map(str, problems)))
    return stores


def build_stores(
    stores: Sequence[ReferenceStore],
    wanted: Sequence[ReferenceRequest],
    program: Program,
    mesh: Mesh,
    reference: Callable[[], PyTree],
    *,
    show: bool,
) -> dict[str, np.ndarray]:
    """What the reference says of each set: read, where it is stored; else made by the Program, and stored.

    Args:
        stores, wanted: the sets.
        program: `reference_logprobs`.
        mesh: the devices.
        reference: gives the model; is not called where nothing is missing.
        show: whether this process prints.
    """
    missing = _missing(stores)
    if any(missing):
        model = reference()
        total = sum(len(store.chunks[n]) for store, chunks in zip(stores, missing, strict=True) for n in chunks)
        with Progress("scoring with the reference", total=total, unit="pairs", show=show) as progress:
            for store, one, chunks in zip(stores, wanted, missing, strict=True):
                if chunks:
                    _build(store, one, chunks, program, mesh, model, progress)
        del model
    else:
        folders = ", ".join(store.folder for store in stores)
        logger.info("the reference's log-probabilities are read from %s; it is not loaded for them", folders)
    barrier("reference log-probabilities", seconds=ONE_FOR_ALL_SECONDS)
    return {one.name: store.all() for store, one in zip(stores, wanted, strict=True)}


def _missing(stores: Sequence[ReferenceStore]) -> list[list[int]]:
    """The parts of each store that are to be made, the same on every process: process 0 looks."""
    local = [store.missing() for store in stores] if is_process_0() else []
    agreed_chunks = agreed("the missing log-probabilities", ";".join(",".join(map(str, chunks)) for chunks in local))
    return [[int(n) for n in chunks.split(",") if n] for chunks in agreed_chunks.split(";")]


def _build(
    store: ReferenceStore,
    one: ReferenceRequest,
    parts: Sequence[int],
    program: Program,
    mesh: Mesh,
    model: PyTree,
    progress: Progress,
) -> None:
    rows = program.inputs[1].value.axes[0].size
    if len(parts) < len(store.chunks):
        logger.info(
            "%s: %d of %d parts are there already", store.folder, len(store.chunks) - len(parts), len(store.chunks)
        )
    here = PairSet(name=one.name, rows=one.rows, numbers=np.arange(len(one.rows)))

    def batches() -> Iterator[tuple[tuple[int, int], tuple[np.ndarray, np.ndarray]]]:
        for number in parts:
            part = store.chunks[number]
            for start in range(part.start, part.stop, rows):
                numbers = np.arange(start, min(start + rows, part.stop))
                yield (number, start), pair_inputs(here, numbers, rows)

    def run() -> None:
        values: dict[int, np.ndarray] = {}
        scored = results(program, mesh, model, batches(), behind=FETCH_BEHIND, jit=jit_together)
        for (number, start), found in scored:
            part = store.chunks[number]
            into = values.setdefault(number, np.zeros((len(part), 2), np.float32))
            stop = min(start + rows, part.stop)
            into[start - part.start : stop - part.start] = found[: stop - start]
            progress.advance(stop - start)
            if stop == part.stop:
                if not np.isfinite(into).all():
                    raise DataError(f"{one.name}: the reference gives pairs that are not finite; nothing is stored")
                if is_process_0():
                    store.write(number, values.pop(number))

    if not is_process_0():
        run()
        return
    advice = "give another cache_dir"
    with leased(store.folder, what="storing log-probabilities of a reference", advice=advice, wait=True):
        store.begin()
        run()
