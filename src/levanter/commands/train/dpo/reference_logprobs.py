"""The reference's log-probabilities of pairs, computed once and stored before the first step.

With `reference: {type: precomputed}` steps need nothing else of the reference: it is loaded, scores every pair of the
training and the validation sets, and is freed. With `reference_eval_cache` only the validation pairs are stored, and
steps score with the resident reference. A complete store is read; then nothing is scored, and a model that only scores
is not loaded.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.mapping import AxisMapping
from haliax_ext.prefetch import results
from haliax_ext.program import Input, Program
from haliax_ext.pytree import PyTree
from haliax_ext.sources import TensorSource
from levanter.commands.train.dpo.evaluation import FETCH_BEHIND, PairSet, pair_inputs
from levanter.commands.train.dpo.setup import SCORE, Preferences
from levanter.commands.train.trained_run import TrainedRun
from levanter.data import DataError, PairRows
from levanter.data.reference_store import ReferenceStore, pairs_digest
from levanter.distributed.agreement import ONE_FOR_ALL_SECONDS, agreed, barrier, is_process_0
from levanter.distributed.compile_barrier import jit_together
from levanter.io import Progress, join, leased
from levanter.models.precision import Precision
from levanter.trainer.dpo import PairBatch, pair_logprobs
from levanter.trainer.loss import in_compute_dtype
from levanter.trainer.train_state import REFERENCE

logger = logging.getLogger(__name__)

# Elements read along each axis but the first, for each row: a digest must not read a whole checkpoint.
_ELEMENTS = 256


def reference_program(run: TrainedRun, pairs: Preferences, rows: int) -> Program:
    """The Program that scores a batch of pairs with the reference alone: (reference, tokens, targets) → `[pairs, 2]`.

    Args:
        run: the training run.
        pairs: its reference.
        rows: pairs of a batch.
    """
    module, plan = pairs.scored_once(run.frozen, run.state_plan)
    precision, chunk = run.precision, run.head(rows).chunk
    batch = run.objective.abstract_batch(
        hax.Axis(run.resolved.batch_axis, rows), hax.Axis("position", run.config.positions)
    )

    def score(reference: PyTree, tokens: hax.NamedArray, targets: hax.NamedArray) -> jax.Array:
        usable = in_compute_dtype(reference, precision.compute, plan)
        return pair_logprobs(usable, PairBatch(tokens=tokens, targets=targets), chunk=chunk)

    return Program(
        name=SCORE,
        function=score,
        inputs=(
            Input(name=REFERENCE, value=module, placement=plan),
            Input(name="tokens", value=batch.tokens, placement=run.resolved.mappings.compute),
            Input(name="targets", value=batch.targets, placement=run.resolved.mappings.compute),
        ),
        mappings=run.resolved.mappings,
        out_placement=AxisMapping(),
        matmul_precision=precision.matmul,
        compiler_options=run.compiler.working["score"],
    )


def digest_of_source(source: TensorSource) -> str:
    """Hex SHA-256 that tells references apart: names, shapes, dtypes, and the beginnings of two rows of each tensor.

    A fine-tuning that leaves norms alone (adapters that were merged) still changes rows of matrices.
    """
    digest = hashlib.sha256()
    # Sorted: the order of tensors depends on how files are sharded.
    for name, info in sorted(source.tensors.items()):
        digest.update(repr((name, tuple(info.shape), info.dtype.name)).encode())
        if not info.size:
            continue
        # The first and the middle row; one row alone where both are the same. Scalars count by name and shape only.
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
        template: the chat template of its texts.
    """

    name: str
    rows: PairRows
    template: str


def reference_stores(
    wanted: Sequence[ReferenceRequest], root: str, *, reference: str, digest: str, precision: Precision
) -> list[ReferenceStore]:
    """The store of each set's log-probabilities, complete or not.

    Raises:
        ReferenceStoreError: a folder has those of another reference, or of other pairs; lists all.
    """
    stores, problems = [], []
    for request in wanted:
        # Everything that determines the numbers. A folder whose store has another identity is refused.
        identity = {
            "reference": reference,
            "reference_digest": digest,
            "set": request.name,
            "pairs": len(request.rows),
            "pairs_digest": pairs_digest(request.rows),
            "positions": request.rows.half,
            "template": request.template,
            # Log-probabilities in bfloat16 and float32 differ.
            "compute_dtype": np.dtype(precision.compute).name,
        }
        store = ReferenceStore(folder=join(root, request.name), identity=identity, pairs=len(request.rows))
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
    """The reference's log-probabilities of each set; missing chunks are computed by the Program and stored.

    Args:
        stores, wanted: the sets.
        program: `reference_logprobs`.
        mesh: the devices.
        reference: returns the model; not called if nothing is missing.
        show: whether this process prints.
    """
    missing = _missing(stores)
    if any(missing):
        model = reference()
        total = sum(len(store.chunks[n]) for store, chunks in zip(stores, missing, strict=True) for n in chunks)
        with Progress("scoring with the reference", total=total, unit="pairs", show=show) as progress:
            for store, request, chunks in zip(stores, wanted, missing, strict=True):
                if chunks:
                    _build(store, request, chunks, program, mesh, model, progress)
        # Drops the last reference to a model that was loaded for this only, before the training state is allocated.
        del model
    else:
        folders = ", ".join(store.folder for store in stores)
        logger.info("the reference's log-probabilities are read from %s; it is not loaded for them", folders)
    # All processes read the store below, so they wait for the writes of process 0.
    barrier("reference log-probabilities", seconds=ONE_FOR_ALL_SECONDS)
    return {request.name: store.all() for store, request in zip(stores, wanted, strict=True)}


def _missing(stores: Sequence[ReferenceStore]) -> list[list[int]]:
    """The numbers of the missing chunks of each store, as process 0 finds them; the same on every process."""
    # On other hosts the folder may look different (local disks, delayed listings), but scoring is a collective.
    local = [store.missing() for store in stores] if is_process_0() else []
    agreed_chunks = agreed("the missing log-probabilities", ";".join(",".join(map(str, chunks)) for chunks in local))
    return [[int(n) for n in chunks.split(",") if n] for chunks in agreed_chunks.split(";")]


def _build(
    store: ReferenceStore,
    request: ReferenceRequest,
    missing_chunks: Sequence[int],
    program: Program,
    mesh: Mesh,
    model: PyTree,
    progress: Progress,
) -> None:
    rows = program.inputs[1].value.axes[0].size
    if len(missing_chunks) < len(store.chunks):
        logger.info(
            "%s: %d of %d chunks are stored already",
            store.folder,
            len(store.chunks) - len(missing_chunks),
            len(store.chunks),
        )
    here = PairSet(name=request.name, rows=request.rows, numbers=np.arange(len(request.rows)))

    def batches() -> Iterator[tuple[tuple[int, int], tuple[np.ndarray, np.ndarray]]]:
        for number in missing_chunks:
            chunk = store.chunks[number]
            # Batches do not cross chunks, so that a chunk is complete with its last batch.
            for start in range(chunk.start, chunk.stop, rows):
                numbers = np.arange(start, min(start + rows, chunk.stop))
                yield (number, start), pair_inputs(here, numbers, rows)

    def run() -> None:
        values: dict[int, np.ndarray] = {}
        scored = results(program, mesh, model, batches(), behind=FETCH_BEHIND, jit=jit_together)
        for (number, start), logprobs in scored:
            chunk = store.chunks[number]
            # float32 `[pairs of the chunk, 2]`.
            into = values.setdefault(number, np.zeros((len(chunk), 2), np.float32))
            stop = min(start + rows, chunk.stop)
            # Rows beyond the chunk are padding.
            into[start - chunk.start : stop - chunk.start] = logprobs[: stop - start]
            progress.advance(stop - start)
            if stop == chunk.stop:
                # A stored NaN would spoil every later run that reads it.
                if not np.isfinite(into).all():
                    raise DataError(f"{request.name}: the reference gives pairs that are not finite; nothing is stored")
                if is_process_0():
                    store.write(number, values.pop(number))

    if not is_process_0():
        run()
        return
    # `wait`: another run may build the same store at this moment; its result is then read.
    advice = "give another cache_dir"
    with leased(store.folder, what="storing log-probabilities of a reference", advice=advice, wait=True):
        store.begin()
        run()
