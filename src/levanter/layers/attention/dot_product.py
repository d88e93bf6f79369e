"""Attention by JAX's own functions: XLA's formulation, and cuDNN's fused kernel on NVIDIA GPUs.

cuDNN's kernel computes causal masks and windows from indices. Documents that are packed into a row reach it as a length
and an offset for each (*packed layout*), so no `position × key_position` array exists. That form has a fixed number of
documents a row, and wants each of them in one piece. Whether a batch is like that is known on the device only: a
batch that is not takes `blockwise`, in another branch of the Program. So do masks that the kernel does not take, and
cards that it does not run on.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # The packed layout has no public function.
from jax._src.lib import cuda_versions

from levanter.layers.attention.mask import AttentionMask

logger = logging.getLogger(__name__)

MIN_DOCUMENTS, MAX_DOCUMENTS = 8, 64
"""Bounds of the number of documents of a row that the kernel gets."""
MIN_PACKED_ROWS = 2
"""Rows of several documents for which the kernel is called at once: fewer take `blockwise`."""
MEAN_DOCUMENT = 128
"""Positions of a document on average, at the most documents that a row may have; the kernel's sums of a row exist once
for each of them."""

Streamed = Callable[[NamedArray, NamedArray, NamedArray, AttentionMask], NamedArray]
"""Attention for masks that cuDNN does not take: queries, keys, values, mask."""


class Documents(NamedTuple):
    """The documents of packed rows, as cuDNN wants them; −1 for those that a row lacks.

    Attributes:
        lengths: `[rows, documents]`, int32.
        offsets: `[rows, documents + 1]`, int32: the first position of a document in its row.
        fits: `[rows]`, whether this describes the row: it has no more documents, and each is in one piece.
    """

    lengths: jax.Array
    offsets: jax.Array
    fits: jax.Array


def max_documents(positions: int) -> int:
    """The most documents of a row for which cuDNN's kernel is called."""
    return min(max(positions // MEAN_DOCUMENT, MIN_DOCUMENTS), MAX_DOCUMENTS)


def packed_documents(segments: jax.Array, limit: int) -> Documents:
    """The documents of rows from the segment of each position.

    Args:
        segments: `[rows, position]`; positions of equal segments see each other. Padding is a document too.
        limit: the most documents of a row.
    """
    rows, positions = segments.shape
    changes = segments[:, 1:] != segments[:, :-1]
    # [rows, position]: the number of the document.
    number = jnp.pad(jnp.cumsum(changes, axis=-1, dtype=jnp.int32), ((0, 0), (1, 0)))
    count = number[:, -1:] + 1
    documents = jnp.arange(limit + 1, dtype=jnp.int32)[None]
    # [rows, limit + 1]: a document begins after all positions with smaller numbers.
    begins = jnp.sum(number[:, None] < documents[:, :, None], axis=-1, dtype=jnp.int32)
    exists = documents[:, :-1] < count
    # Documents that a row lacks begin at its end, where there is no id.
    ids = jnp.take_along_axis(segments, jnp.minimum(begins[:, :-1], positions - 1), axis=-1)
    # An id that comes back after another one joins two pieces, which lengths and offsets cannot say.
    alike = (ids[:, :, None] == ids[:, None]) & exists[:, :, None] & exists[:, None]
    in_one_piece = jnp.sum(alike, axis=(1, 2)) == jnp.sum(exists, axis=-1)
    offsets = jnp.where(exists, begins[:, :-1], -1)
    return Documents(
        lengths=jnp.where(exists, begins[:, 1:] - begins[:, :-1], -1),
        offsets=jnp.concatenate((offsets, jnp.full((rows, 1), -1, jnp.int32)), axis=-1),
        fits=in_one_piece & (count[:, 0] <= limit),
    )


def cudnn_attention(
    q: NamedArray, k: NamedArray, v: NamedArray, mask: AttentionMask, *, softmax_scale: float, streamed: Streamed
) -> NamedArray:
    """`reference_attention` by cuDNN's kernel where it takes the mask, else by `streamed`.

    Args:
        q, k, v, mask, softmax_scale: as in `reference_attention`.
        streamed: computes the same without an array of all scores.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    segmented = mask.query_segments is not None
    shapes = _JaxShapes(q, k)
    obstacle = device_obstacle(q.resolve_axis("head_size").size, packed=segmented) or _mask_obstacle(mask, Pos, KeyPos)
    # JAX's sharding rule of the packed layout has rows · documents as one dimension, and XLA refuses such a dimension
    # where a factor of it is 1.
    if segmented and shapes.rows < MIN_PACKED_ROWS:
        obstacle = obstacle or f"rows of several documents are taken {MIN_PACKED_ROWS} at once, not {shapes.rows}"
    if obstacle:
        logger.warning("attention: blockwise instead of cudnn: %s", obstacle)
        return streamed(q, k, v, mask)
    if not segmented:
        return jax_native_attention(q, k, v, mask, softmax_scale=softmax_scale, implementation="cudnn")
    assert mask.query_segments is not None
    segments = mask.query_segments.astype(jnp.int32).broadcast_to((*shapes.leading, Pos))
    documents = packed_documents(shapes.plain(segments, Pos), max_documents(Pos.size))

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents) -> jax.Array:
        out = cudnn.dot_product_attention(
            *(q, k, v),
            q_seqlen=documents.lengths,
            kv_seqlen=documents.lengths,
            q_offsets=documents.offsets,
            kv_offsets=documents.offsets,
            scale=softmax_scale,
            mask_type=cudnn.MaskType.PADDING_CAUSAL if mask.is_causal else cudnn.MaskType.PADDING,
        )
        assert isinstance(out, jax.Array)
        return out

    def by_blocks(q: jax.Array, k: jax.Array, v: jax.Array, segments: NamedArray) -> jax.Array:
        of_batch = dataclasses.replace(mask, query_segments=segments)
        return shapes.queries(streamed(*shapes.named_operands(q, k, v), of_batch))

    out = _either(kernel, by_blocks, shapes.sharded, *shapes.operands(q, k, v), documents, segments)
    assert isinstance(out, jax.Array)
    return shapes.named(out).rearrange(q.axes)


Arrays = tuple[jax.Array, ...]
_Kernel = Callable[[jax.Array, jax.Array, jax.Array, Documents], jax.Array]
_Sharded = Callable[[jax.Array], jax.Array]
_ByBlocks = Callable[[jax.Array, jax.Array, jax.Array, NamedArray], jax.Array]
_Residuals = tuple[jax.Array, jax.Array, jax.Array, Documents, NamedArray, jax.Array, Arrays]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _either(
    kernel: _Kernel,
    by_blocks: _ByBlocks,
    sharded: _Sharded,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    segments: NamedArray,
) -> jax.Array:
    """The result of `kernel` where the documents of all rows fit, else of `by_blocks`.

    The derivative is written here, since that of `lax.cond` keeps what either branch needs: several times as much.
    """
    return _forward(kernel, by_blocks, sharded, q, k, v, documents, segments)[0]


def _forward(
    kernel: _Kernel,
    by_blocks: _ByBlocks,
    sharded: _Sharded,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    segments: NamedArray,
) -> tuple[jax.Array, _Residuals]:
    kept = _KernelResiduals(kernel, sharded, (q, k, v), documents)

    def otherwise(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Arrays]:
        with _unlikely():
            return by_blocks(q, k, v, segments), tuple(sharded(jnp.zeros(x.shape, x.dtype)) for x in kept.shapes)

    # One branch for all rows of all devices: kernels are partitioned by XLA, and must agree on the branch.
    out, extra = jax.lax.cond(jnp.all(documents.fits), kept.forward, otherwise, q, k, v)
    return out, (q, k, v, documents, segments, out, extra)


def _backward(
    kernel: _Kernel, by_blocks: _ByBlocks, sharded: _Sharded, residuals: _Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    q, k, v, documents, segments, out, extra = residuals
    kept = _KernelResiduals(kernel, sharded, (q, k, v), documents)

    def by_kernel(q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, gradient: jax.Array) -> Arrays:
        return kept.backward((q, k, v), out, extra, gradient)

    def otherwise(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array, gradient: jax.Array) -> Arrays:
        with _unlikely():
            return jax.vjp(lambda q, k, v: by_blocks(q, k, v, segments), q, k, v)[1](gradient)

    # The same condition as in the forward pass, so `extra` is of the branch that runs.
    of_q, of_k, of_v = jax.lax.cond(jnp.all(documents.fits), by_kernel, otherwise, q, k, v, out, gradient)
    return of_q, of_k, of_v, None, None


def _unlikely() -> AbstractContextManager[object]:
    """The scope by which a plan knows the branch that few batches take."""
    from haliax_ext.hlo.op_metadata import UNLIKELY  # The readers of compiled text are no part of other runs.

    return jax.named_scope(UNLIKELY)


_either.defvjp(_forward, _backward)


class _KernelResiduals:
    """What the kernel's backward pass needs besides its inputs and its result.

    JAX has no public function for the two passes of the kernel. `jax.vjp` returns the backward pass as a tree whose
    leaves are these arrays.

    Attributes:
        shapes: of the arrays that are neither inputs nor the result.
    """

    def __init__(self, kernel: _Kernel, sharded: _Sharded, inputs: Arrays, documents: Documents):
        self._kernel, self._sharded, self._documents = kernel, sharded, documents
        self._sources: list[int | None] = []
        self.shapes: Arrays = jax.eval_shape(self.forward, *inputs)[1]

    def forward(self, *inputs: jax.Array) -> tuple[jax.Array, Arrays]:
        """The result of the kernel, and these arrays."""
        out, pull_back = jax.vjp(lambda q, k, v: self._kernel(q, k, v, self._documents), *inputs)
        leaves, self._structure = jax.tree.flatten(pull_back)
        known = self._known(inputs, out)
        # The same tracer is the same array: only the others are kept.
        self._sources = [next((n for n, array in enumerate(known) if array is leaf), None) for leaf in leaves]
        others = (leaf for leaf, source in zip(leaves, self._sources, strict=True) if source is None)
        return out, tuple(map(self._sharded, others))

    def backward(self, inputs: Arrays, out: jax.Array, extra: Arrays, gradient: jax.Array) -> Arrays:
        """The gradients of the inputs."""
        known, others = self._known(inputs, out), map(self._sharded, extra)
        leaves = [next(others) if source is None else known[source] for source in self._sources]
        return jax.tree.unflatten(self._structure, leaves)(gradient)

    def _known(self, inputs: Arrays, out: jax.Array) -> Arrays:
        return (*inputs, self._documents.lengths, self._documents.offsets, out)


def device_obstacle(head_size: int, *, packed: bool = False) -> str | None:
    """Why cuDNN's kernel does not run on the GPU that a Program is traced for; None if it does.

    Args:
        head_size: of one head.
        packed: whether rows hold several documents.
    """
    # JAX asks the first GPU; in a plan's compile worker the answers are those of the target.
    if cuda_versions is None:
        return "cuDNN is not installed"
    if not cudnn.check_compute_capability("8.0"):
        return "the kernel needs an NVIDIA card of compute capability 8.0 (A100) or newer"
    if cudnn.check_compute_capability("9.0"):
        return None
    if packed:
        return "rows of several documents need compute capability 9.0 (H100) or newer"
    return "heads of more than 128 features need compute capability 9.0 (H100) or newer" if head_size > 128 else None


def _mask_obstacle(mask: AttentionMask, Pos: Axis, KeyPos: Axis) -> str | None:
    """Why the kernel does not compute a mask by itself; None if it does, or if the mask is an array anyway."""
    if mask.explicit_mask is not None and mask.query_segments is None:
        return None
    if mask.explicit_mask is not None or mask.query_trunks is not None:
        return "the kernel takes documents by their lengths, not with an array or a trunk as well"
    if not mask.is_by_index(Pos, KeyPos):
        return "the kernel takes queries and keys that are the same tokens in the same order"
    if mask.sliding_window is not None and not mask.is_causal:
        return "the kernel's windows are causal"
    if mask.sliding_window is not None and mask.query_segments is not None:
        return "the kernel is not known to take a window in rows of several documents"
    return None


class _JaxShapes:
    """Between named arrays and those of JAX's functions, `[rows, position, heads, head_size]`.

    JAX has one axis of query heads: `kv_head` and `q_heads_per_group` are flattened into it, key/value head first.
    A mapping that shards `q_heads_per_group` but not `kv_head` does not survive the flattening: XLA gathers the array.
    """

    def __init__(self, q: NamedArray, k: NamedArray):
        self.Pos, self.KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
        names = ("kv_head", "q_heads_per_group", "head_size")
        self.KVHead, self.Group, self.HeadSize = (q.resolve_axis(name) for name in names)
        inner = (self.Pos, self.KVHead, self.Group, self.HeadSize)
        self.leading = tuple(axis for axis in q.axes if axis not in inner)
        self.rows = math.prod(axis.size for axis in self.leading)

    def plain(self, x: NamedArray, *axes: Axis) -> jax.Array:
        """The array `[leading (flattened), *axes]`."""
        array = x.rearrange((*self.leading, *axes)).array
        return array.reshape(-1, *array.shape[len(self.leading) :])

    def operands(self, q: NamedArray, k: NamedArray, v: NamedArray) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values; key/value head first, as JAX's function pairs them."""
        # XLA's and cuDNN's kernels pair several query heads with one key/value head by themselves.
        keys, values = (self.plain(x, self.KeyPos, self.KVHead, self.HeadSize) for x in (k, v))
        return self.queries(q), keys, values

    def queries(self, q: NamedArray) -> jax.Array:
        """Queries, or what has their axes."""
        queries = self.plain(q, self.Pos, self.KVHead, self.Group, self.HeadSize)
        return queries.reshape(*queries.shape[:2], self.KVHead.size * self.Group.size, self.HeadSize.size)

    def named_operands(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[NamedArray, NamedArray, NamedArray]:
        """The inverse of `operands`."""
        axes = (*self.leading, self.KeyPos, self.KVHead, self.HeadSize)
        keys, values = (hax.named(x.reshape([a.size for a in axes]), axes) for x in (k, v))
        return self.named(q), keys, values

    def sharded(self, x: jax.Array) -> jax.Array:
        """A kernel's sums over keys, `[rows · documents, heads, position]`, sharded like the queries; others as is.

        They are results of a branch, of which the compiler would make a copy on every device.
        """
        heads = self.KVHead.size * self.Group.size
        if x.ndim != 3 or x.shape[0] % self.rows or x.shape[1:] != (heads, self.Pos.size):
            return x
        of_row = Axis("documents_of_row", x.shape[0] // self.rows)
        axes = (*self.leading, of_row, self.KVHead, self.Group, self.Pos)
        return hax.auto_sharded(hax.named(x.reshape([a.size for a in axes]), axes)).array.reshape(x.shape)

    def named(self, out: jax.Array) -> NamedArray:
        """The result with its names."""
        axes = (*self.leading, self.Pos, self.KVHead, self.Group, self.HeadSize)
        return hax.named(out.reshape([a.size for a in axes]), axes)


def jax_native_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    implementation: Literal["xla", "cudnn"],
) -> NamedArray:
    """`reference_attention` through `jax.nn.dot_product_attention`: XLA's formulation, or cuDNN's fused kernel."""
    shapes = _JaxShapes(q, k)
    Pos, KeyPos, leading = shapes.Pos, shapes.KeyPos, shapes.leading
    by_index = mask.is_by_index(Pos, KeyPos) and mask.query_segments is None and mask.explicit_mask is None
    # `simple`: the kernel can compute the mask from indices, so no boolean array is passed to it.
    simple = by_index and (mask.is_causal or mask.sliding_window is None)
    visible = None if simple else mask.materialize(Pos, KeyPos)
    if visible is not None:
        visible = visible.broadcast_to((*leading, Pos, KeyPos)).rearrange((*leading, Pos, KeyPos))
    # JAX's function promotes 16-bit floats with float32, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            *shapes.operands(q, k, v),
            mask=None if visible is None else shapes.plain(visible, Pos, KeyPos)[:, None],
            scale=softmax_scale,
            is_causal=simple and mask.is_causal,
            # A window of w keys includes the query's own position: w − 1 keys before it, none after it.
            local_window_size=(mask.sliding_window - 1, 0) if simple and mask.sliding_window is not None else None,
            implementation=implementation,
        )
    result = shapes.named(out)
    if visible is not None:
        # JAX's softmax of a row without keys is uniform; the contract of every backend is zeros.
        result = hax.where(hax.any(visible, KeyPos), result, 0.0)
    return result.rearrange(q.axes)
