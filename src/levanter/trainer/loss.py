"""The training loss: `models.scoring`'s log-probabilities, summed with weights, in the compute dtype.

Weights are stored in one dtype and used in another. The cast happens where they are used: inside each layer of a scan,
so that no second copy of a stack exists, and there the cast weight is pinned to its parameter's own shards. What the
devices then gather is the narrow copy, and what they add up in the backward pass lands in the shards that hold the
parameter, layer by layer. The embedding table is not cast, its rows are: the sum over a token's places is float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.nn.scan import Stacked
from jax.sharding import PartitionSpec

from haliax_ext.abstract import Leaf, map_arrays
from haliax_ext.placement import LeafPlan
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import path_string
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear
from levanter.layers.outputs import Sums
from levanter.models.base import LmHeadModel
from levanter.models.scoring import has_next, token_logprobs, token_scores
from levanter.models.stack import Period

M = TypeVar("M")


class LmBatch(eqx.Module):
    """Sequences to learn from.

    Attributes:
        tokens: int32 ids, `[batch, position]`.
        loss_weights: float32 weight of predicting *from* each position; None for 1 everywhere.
        segment_ids: int32, `[batch, position]`; tokens see their own segment only. None for one segment.
    """

    tokens: hax.NamedArray
    loss_weights: hax.NamedArray | None = None
    segment_ids: hax.NamedArray | None = None

    def counts(self) -> hax.NamedArray:
        """Float32 weight of each position in the loss: 0 where nothing of the sequence follows."""
        counts = has_next(self.tokens.axes, self.segment_ids).astype(jnp.float32)
        return counts if self.loss_weights is None else counts * self.loss_weights


def abstract_batch(Batch: hax.Axis, Pos: hax.Axis, *, weights: bool, segments: bool) -> LmBatch:
    """A batch without data."""

    def of(dtype: Any) -> hax.NamedArray:
        return hax.NamedArray(jax.ShapeDtypeStruct((Batch.size, Pos.size), np.dtype(dtype)), (Batch, Pos))  # type: ignore

    return LmBatch(
        tokens=of(np.int32),
        loss_weights=of(np.float32) if weights else None,
        segment_ids=of(np.int32) if segments else None,
    )


def loss_sum(model: LmHeadModel, batch: LmBatch, *, chunk: int | None = None) -> jax.Array:
    """The weighted sum of −log p over a batch, a float32 scalar.

    Args:
        model: its weights in the compute dtype, or wrapped by `in_compute_dtype`.
        batch: what to predict.
        chunk: positions scored at a time; see `token_logprobs`.
    """
    return loss_sums(model, batch, chunk=chunk).loss


class LossSums(eqx.Module):
    """What the loss of some sequences is made of; float32 scalars.

    Attributes:
        loss: the weighted sum of −log p.
        z: the weighted sum of the squared log-normalizers, which z-loss keeps near 0; None where it is not wanted.
        auxiliary: the model's auxiliary sums that are wanted, times the sum of the weights.
    """

    loss: jax.Array
    z: jax.Array | None
    auxiliary: Sums = eqx.field(default_factory=Sums)


def loss_sums(
    model: LmHeadModel, batch: LmBatch, *, z: bool = False, auxiliary: Sequence[str] = (), chunk: int | None = None
) -> LossSums:
    """The sums of a batch.

    Args:
        model: as in `loss_sum`.
        batch: what to predict.
        z: whether z-loss is wanted.
        auxiliary: names of the auxiliary sums that are wanted.
        chunk: positions scored at a time; see `token_logprobs`.
    """
    tokens, segment_ids = batch.tokens, batch.segment_ids
    outputs = model(tokens, segment_ids=segment_ids, auxiliary=auxiliary)
    scores = token_scores if z else token_logprobs
    found = scores(model, tokens, segment_ids=segment_ids, chunk=chunk, activations=outputs.activations)
    logprobs, normalizers = found if isinstance(found, tuple) else (found, None)
    counts = batch.counts()

    def counted(values: hax.NamedArray) -> jax.Array:
        return hax.sum(hax.where(counts != 0, values, 0.0) * counts).scalar()

    with jax.named_scope("loss"):
        made = outputs.auxiliary
        if made:
            # Means over tokens that are added to sums over tokens.
            made = made * hax.sum(counts).scalar()
        z_sum = None if normalizers is None else counted(normalizers * normalizers)
        return LossSums(loss=-counted(logprobs), z=z_sum, auxiliary=made)


@dataclass(frozen=True)
class _Placed:
    """Where the leaves of one layer lie: path below the layer → PartitionSpec. Hashable, for static fields."""

    specs: tuple[tuple[str, PartitionSpec], ...]

    @property
    def by_path(self) -> Mapping[str, PartitionSpec]:
        return dict(self.specs)


class _CastInside(eqx.Module):
    """A block that casts its own weights when it is called."""

    inner: Any
    dtype: np.dtype = eqx.field(static=True)
    placed: _Placed = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        specs = self.placed.by_path

        def cast(leaf: Leaf, x: jax.Array) -> jax.Array:
            # What is gathered for a projection is found under its name.
            with jax.named_scope("/".join(leaf.path.split(".")[:-1]) or leaf.path):
                return cast_leaf(leaf, x, self.dtype, specs.get(leaf.path))

        return map_arrays(cast, self.inner)(*args, **kwargs)


class _WideTable(eqx.Module):
    """An embedding table whose rows are cast when they are looked up.

    The gradient of a row is the sum over all places where its token stands; a frequent token's is lost in 16 bits.
    """

    inner: Embedding
    dtype: np.dtype = eqx.field(static=True)
    placed: _Placed = eqx.field(static=True)

    def as_linear(self) -> Linear:
        """The table in the compute dtype, as the output head that shares it."""
        specs = self.placed.by_path
        cast = map_arrays(lambda leaf, x: cast_leaf(leaf, x, self.dtype, specs.get(leaf.path)), self.inner)
        return cast.as_linear()

    def __call__(self, ids: hax.NamedArray) -> hax.NamedArray:
        return self.inner(ids).astype(self.dtype)


def cast_leaf(leaf: Leaf, x: jax.Array, dtype: np.dtype, spec: PartitionSpec | None) -> jax.Array:
    """A floating-point array in `dtype`, kept (with its cotangent) in the shards of `spec`."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        x = x.astype(dtype)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def in_compute_dtype(model: M, dtype: np.dtype, plan: ShardingPlan | None) -> M:
    """`model` whose weights are in `dtype` when they are used; call it inside `jit`.

    Args:
        model: with the parameters as they are stored.
        dtype: the compute dtype.
        plan: where the parameters lie, by their paths in `model`; None pins nothing.
    """

    def visit(keys: tuple[Any, ...], x: Any) -> Any:
        path = path_string(keys)
        if isinstance(x, Stacked):

            def casting(inner: Any, below: str) -> _CastInside:
                placed = _layer_specs(plan, f"{path}.stacked.{below}", x.Block.name) if plan is not None else ()
                return _CastInside(inner=inner, dtype=np.dtype(dtype), placed=_Placed(tuple(placed)))

            if not isinstance(x.stacked, Period):
                return Stacked(casting(x.stacked, ""), x.Block, x.gradient_checkpointing)
            # Layer by layer, so that the narrow copy of one is not kept while the next one runs.
            places = tuple(casting(place, f"places.{n}.") for n, place in enumerate(x.stacked.places))
            return Stacked(Period(places=places, policy=x.stacked.policy), x.Block, x.gradient_checkpointing)
        if isinstance(x, Embedding):
            placed = () if plan is None else _layer_specs(plan, f"{path}.", None)
            return _WideTable(x, np.dtype(dtype), _Placed(tuple(placed)))
        with jax.named_scope(path.split(".")[-2] if "." in path else path):
            return map_arrays(lambda leaf, a: cast_leaf(leaf, a, dtype, None if plan is None else plan.spec(path)), x)

    return jax.tree_util.tree_map_with_path(
        visit, model, is_leaf=lambda x: isinstance(x, Stacked | Embedding | hax.NamedArray)
    )


def _layer_specs(plan: ShardingPlan, prefix: str, block: str | None) -> list[tuple[str, PartitionSpec]]:
    """The specs of what is below a path; of one layer of a stack, without the stack's own axis `block`."""

    def spec(leaf_plan: LeafPlan) -> PartitionSpec:
        entries = zip(leaf_plan.leaf.names, leaf_plan.mesh_axes, strict=True)
        return PartitionSpec(*(axes or None for name, axes in entries if name != block))

    return [
        (leaf_plan.leaf.path.removeprefix(prefix), spec(leaf_plan))
        for leaf_plan in plan.leaves
        if leaf_plan.leaf.path.startswith(prefix)
    ]
