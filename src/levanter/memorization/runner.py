"""The runner: scores windows in batches, with host work overlapping device work.

One Program scores one batch. Batches are dispatched in order and their scores are fetched a few batches later, so that
the devices never wait for the host; a thread stores them as parts. The last batch is padded with copies of its last
row, and the padding rows are dropped before anything else sees them.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.prefetch import results
from haliax_ext.program import Input, Placement, Program
from levanter.distributed.compile_barrier import jit_together
from levanter.distributed.process_group import process_group
from levanter.memorization.partial_results import PartStore
from levanter.memorization.results import Scheme, Scores
from levanter.models.base import LmHeadModel
from levanter.models.suffix_scores import TOP_40, Law, SuffixScores, suffix_scores
from levanter.runplan import NonFiniteResultError

FETCH_BEHIND = 4
"""Batches in flight before the first result is fetched."""
AGREED_SECONDS = 3600.0
"""How long processes wait for process 0 to check existing results; if process 0 is lost, they notice within seconds."""
WINDOWS_A_PART = 8192
"""Windows after which a part is written even if little time has passed."""


class WindowSource(Protocol):
    """N windows, in order: `Windows` of a book, or the `Examples` of a prepared set."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of some windows, int32 `[rows, positions]`."""
        ...

    def left_padding(self, rows: np.ndarray) -> np.ndarray | None:
        """The number of padding positions on the left of each; None if there is never any padding."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The shape of one batch.

    Attributes:
        rows: windows of a global batch.
        positions: tokens of a window.
        suffix: tokens at its end that are scored.
        padded: whether some windows are shorter and padded on the left.
    """

    rows: int
    positions: int
    suffix: int
    padded: bool = False

    def batches(self, windows: int) -> int:
        """How many executions it takes to score a number of windows."""
        return -(-windows // self.rows)


def sampling_laws(schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
    """The laws among `schemes` that need a normalizer of their own."""
    return tuple(dict.fromkeys(scheme.law for scheme in schemes if not scheme.law.stored))


def score_program(
    model: LmHeadModel,
    shape: BatchShape,
    *,
    mappings: Mappings,
    placement: Placement = None,
    batch_axis: str = "batch",
    laws: Sequence[Scheme] = (),
    name: str = "score",
    **options: Any,
) -> Program:
    """The Program that scores one batch: model, tokens and the suffixes → `SuffixScores`, replicated.

    Args:
        model: abstract, its weights in the compute dtype.
        shape: the shape of the batch.
        mappings: the axis mappings in scope.
        placement: the placement of the parameters; default `mappings`.
        batch_axis: the name of the batch's axis.
        laws: the laws whose normalizers are computed, besides that of the 40 most likely.
        name: the name of the Program.
        options: further fields of `Program`.
    """
    Batch, Pos = hax.Axis(batch_axis, shape.rows), hax.Axis("position", shape.positions)
    Suffix = hax.Axis("suffix", shape.suffix)
    wanted: tuple[Law, ...] = (TOP_40, *((law.top_k, law.temperature) for law in laws))

    def score(
        model: LmHeadModel, tokens: hax.NamedArray, targets: hax.NamedArray, padding: hax.NamedArray | None = None
    ) -> SuffixScores:
        if padding is None:
            return suffix_scores(model, tokens, targets, laws=wanted)
        index = hax.arange(Pos).broadcast_to(tokens.axes)
        # Position 0 is the first real token, as in an unpadded row; positions before it are negative.
        positions = index - padding.broadcast_to(tokens.axes)
        is_token = (positions >= 0).astype(np.int32)
        # Padding gets segment 0 and tokens segment 1, so that no token sees the padding. Padding has position 0, so
        # that no position is negative.
        return suffix_scores(model, tokens, targets, laws=wanted, segment_ids=is_token, positions=positions * is_token)

    def declared(*axes: hax.Axis) -> hax.NamedArray:
        return hax.NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], np.int32), axes)  # pyright: ignore

    inputs = [
        Input(name="model", value=model, placement=mappings if placement is None else placement),
        Input(name="tokens", value=declared(Batch, Pos), placement=mappings.compute),
        Input(name="targets", value=declared(Batch, Suffix), placement=mappings.compute),
    ]
    if shape.padded:
        inputs.append(Input(name="padding", value=declared(Batch), placement=mappings.compute))
    # A few hundred kilobytes that the host reads: replicated.
    return Program(
        name=name, function=score, inputs=tuple(inputs), mappings=mappings, out_placement=AxisMapping(), **options
    )


def score_batches(
    program: Program,
    model: LmHeadModel,
    mesh: Mesh,
    source: WindowSource,
    shape: BatchShape,
    *,
    laws: Sequence[Scheme] = (),
    first: int = 0,
    fetch_behind: int = FETCH_BEHIND,
) -> Iterator[Scores]:
    """Scores of the windows from `first` on, one batch at a time, in order, without padding rows.

    Args:
        program: from `score_program`, for this shape and these laws.
        model: the weights, sharded as the Program expects.
        mesh: the devices.
        source: the windows.
        shape: the shape of the batch.
        laws: the laws of the Program.
        first: where to begin, a multiple of the batch, so that every batch is the same as in an uninterrupted run.
        fetch_behind: batches in flight before the first result is fetched.
    """
    # All batches were scored already, and no Program needs to be compiled.
    if first == len(source):
        return  # a run that ended between its last part and its results
    assert first % shape.rows == 0, f"window {first} does not begin a batch of {shape.rows}"
    # A generator: batches are assembled one by one, while the devices work on the earlier ones.
    batches = (_batch(source, begin, shape) for begin in range(first, len(source), shape.rows))
    for real, outputs in results(program, mesh, model, batches, behind=fetch_behind, jit=jit_together):
        yield _scores(real, outputs, laws)


def _batch(source: WindowSource, begin: int, shape: BatchShape) -> tuple[int, list[np.ndarray]]:
    """The number of a batch's rows that are not padding, and the Program's inputs besides the model."""
    # Rows beyond the last window repeat it, so that every batch has the same shape and is compiled once.
    rows = np.minimum(np.arange(begin, begin + shape.rows), len(source) - 1)
    tokens = source.take(rows)
    # `targets` are the last `suffix` tokens, because windows are aligned at their ends.
    inputs = [tokens, tokens[:, -shape.suffix :]]
    if shape.padded:
        padding = source.left_padding(rows)
        inputs.append(np.zeros(len(rows), np.int32) if padding is None else padding)
    return min(shape.rows, len(source) - begin), inputs


def _scores(real: int, outputs: SuffixScores, laws: Sequence[Scheme]) -> Scores:
    """The first rows of a batch's scores, on the host."""

    def host(named: hax.NamedArray) -> np.ndarray:
        # Batches are padded only at their end, so the first `real` rows are the windows.
        return np.asarray(named.array)[:real]

    # `suffix_scores` returns the normalizer of the 40 most likely tokens first, then those of `laws`.
    top, *others = (host(named) for named in outputs.normalizers)
    return Scores(
        logprobs=host(outputs.logprobs),
        ranks=host(outputs.ranks),
        top_lse=top,
        normalizers={law.name: array for law, array in zip(laws, others, strict=True)},
    )


def score_and_store(
    batches: Callable[[int], Iterator[Scores]],
    store: PartStore,
    *,
    save_seconds: float,
    on_windows: Callable[[int], None] = lambda _: None,
) -> Scores | None:
    """Scores the remaining windows of a book, and stores them as parts.

    Args:
        batches: the scores from a window on, batch by batch.
        store: the book's parts. Only process 0 reads and writes them; the others compute along.
        save_seconds: seconds between two saves of partial results: the most work that is lost if the process is killed.
        on_windows: called with the number of windows scored so far, those of earlier runs included.

    Returns:
        The scores of all windows; None in all processes but the first.
    """
    writes = jax.process_index() == 0
    pieces = store.read() if writes else []
    # All processes must begin with the same window, because they execute the same batches together.
    done = int(agreed(np.int32(sum(map(len, pieces)))))
    if writes:
        store.begin()
    on_windows(done)
    unsaved: list[Scores] = []
    first, since = done, time.monotonic()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="parts") as writer:
        pending: deque[Future[None]] = deque()
        for scores in batches(done):
            # Before the part is written: a part with NaN would be accepted when the run is resumed.
            _refuse_nan(scores, done)
            done += len(scores)
            on_windows(done)
            if not writes:
                continue
            unsaved.append(scores)
            # Also after the last window, so that nothing is left in `fresh`.
            full = done - first >= WINDOWS_A_PART or done == store.windows
            if full or time.monotonic() - since >= save_seconds:
                part = Scores.joined(unsaved)
                pending.append(writer.submit(store.write, first, part))
                pieces.append(part)
                unsaved, first, since = [], done, time.monotonic()
            # Await writes that have finished, to raise their errors early; more than two pending writes would pile up
            # memory.
            while pending and (len(pending) > 2 or pending[0].done()):
                pending.popleft().result()
        for future in pending:
            future.result()
    assert done == store.windows, f"{done} of {store.windows} windows scored"
    return Scores.joined(pieces) if writes else None


def _refuse_nan(scores: Scores, first: int) -> None:
    """Refuses scores that are not logarithms of probabilities; parts of earlier windows are kept.

    Raises:
        NonFiniteResultError: names the first such token and its window.
    """
    # −inf is a valid log-probability (a token whose probability underflows), NaN and +inf are not.
    bad = np.argwhere(np.isnan(scores.logprobs) | (scores.logprobs == np.inf))
    if len(bad):
        window, token = bad[0]
        raise NonFiniteResultError(
            f"log-probabilities are not finite: the first is token {token + 1:,} of the suffix of window "
            f"{first + window + 1:,} (log p = {scores.logprobs[window, token]}), one of {len(bad):,} of "
            f"{scores.logprobs.size:,} in its batch"
        )


def agreed(value: ArrayLike) -> np.ndarray:
    """Broadcasts a value of process 0; all processes must call it. Folders change, so only one process reads them."""
    texts = json.dumps(np.asarray(value).tolist())
    return np.asarray(json.loads(process_group().follow("existing results", lambda: texts, seconds=AGREED_SECONDS)))


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows:
    """Windows that are rows of one matrix."""

    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of these rows, `[rows, positions]`."""
        return self.tokens[rows]

    def left_padding(self, rows: np.ndarray) -> None:
        """None: rows of a matrix have no padding."""
        del rows


def score_windows(
    model: LmHeadModel,
    windows: np.ndarray,
    *,
    prefix_tokens: int,
    mesh: Mesh,
    mappings: Mappings | None = None,
    batch_size: int = 32,
    schemes: Sequence[Scheme] = (),
    matmul_precision: str | None = "highest",
) -> Scores:
    """Scores windows with a given model; p_z under any scheme follows (`BookResult.log_pz`).

    log p_z = Σ_t log q(z_t | z_<t) over the suffix, one teacher-forced pass (Hayes et al., arXiv:2410.19482).

    Args:
        model: on the devices of `mesh`, sharded by `mappings`.
        windows: token ids, int `[N, positions]`.
        prefix_tokens: how many tokens of each are the prompt; the others are scored.
        mesh: the devices.
        mappings: named axes to mesh axes; default: everything replicated.
        batch_size: windows at a time; a multiple of the batch shards.
        schemes: decoding schemes besides full, K = 40 and greedy, which are always included.
        matmul_precision: the precision of JAX's matrix products; None for the default of the dtype.

    Raises:
        ValueError: `windows` is not a matrix, or leaves no suffix.
    """
    if windows.ndim != 2 or not 0 < prefix_tokens < windows.shape[1]:
        raise ValueError(
            f"windows must be [N, positions] with a prefix and a suffix; got shape {windows.shape}, prefix "
            f"{prefix_tokens}"
        )
    laws = sampling_laws(schemes)
    shape = BatchShape(rows=batch_size, positions=windows.shape[1], suffix=windows.shape[1] - prefix_tokens)
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    program = score_program(
        template, shape, mappings=mappings or Mappings(), laws=laws, matmul_precision=matmul_precision
    )
    source = TokenRows(tokens=windows.astype(np.int32))
    pieces = list(score_batches(program, model, mesh, source, shape, laws=laws))
    if pieces:
        return Scores.joined(pieces)
    # No windows: arrays of the right shapes and dtypes without a row.
    nothing = np.zeros((0, shape.suffix), np.float32)
    return Scores(
        logprobs=nothing,
        ranks=nothing.astype(np.int32),
        top_lse=nothing,
        normalizers={law.name: nothing for law in laws},
    )
