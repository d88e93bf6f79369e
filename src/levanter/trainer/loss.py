"""The language modeling objective: log-probabilities from `models.scoring`, summed with weights, in the compute dtype.

Weights are stored in one dtype and used in another. Each layer casts its weights inside the scan, so that no second
copy of a stack exists, and constrains the cast weights to their parameters' shards. So devices all-gather the narrow
copy, and the backward pass reduces gradients into the shards of the parameters, layer by layer. Of the embedding table,
only the looked-up rows are cast: the gradient of a row is summed over the positions of its token in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.nn.scan import Stacked
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from haliax_ext.abstract import Leaf, map_arrays
from haliax_ext.placement import LeafPlan
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import KeyPath, PyTree, path_string
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear
from levanter.layers.outputs import Outputs, Sums
from levanter.layers.quantized import Int8Matrix
from levanter.models.base import LmHeadModel
from levanter.models.scoring import has_target, loss_sums, token_logprobs, token_scores
from levanter.models.stack import Period
from levanter.models.zigzag import to_zigzag, zigzag_outputs, zigzag_shards
from levanter.trainer.objective import LOSS, AtStep, Objective, Term, Weight, weight_at

M = TypeVar("M")

Z_LOSS = "z_loss"
"""Name of the sum of the squared log-normalizers, a term that keeps log-normalizers near 0."""


class LmBatch(eqx.Module):
    """Sequences to learn from.

    Attributes:
        tokens: int32 ids, `[batch, position]`.
        targets: int32, `[batch, position]`: the id that each position predicts; negative for no target.
        loss_weights: float32 weight of each target; None for 1 everywhere.
        segment_ids: int32, `[batch, position]`; tokens see their own segment only. None for one segment.
    """

    tokens: hax.NamedArray
    targets: hax.NamedArray
    loss_weights: hax.NamedArray | None = None
    segment_ids: hax.NamedArray | None = None

    def counts(self) -> hax.NamedArray:
        """Float32 weight of each position in the loss: 0 without a target."""
        counts = has_target(self.targets).astype(jnp.float32)
        return counts if self.loss_weights is None else counts * self.loss_weights


@dataclass(frozen=True, kw_only=True)
class LmObjective(Objective[LmHeadModel, LmBatch]):
    """Next-token prediction: the weighted mean of −log p, in nats per token.

    Attributes:
        weights: whether positions of a batch have weights.
        segments: whether rows of a batch contain several segments.
        z_loss_weight: weight of the squared log-normalizer in the loss; 0 for none. With a schedule, JAX differentiates
            `sums`: the scoring loop needs a constant.
        auxiliary_weights: of the model's auxiliary sums, by name; see `LmConfig.auxiliary_weights`.
        chunk: positions scored at a time; None for the model's own.
    """

    weights: bool = True
    segments: bool = True
    z_loss_weight: Weight = 0.0
    auxiliary_weights: Mapping[str, Weight] = field(default_factory=dict)
    chunk: int | None = None

    def in_chunks(self, chunk: int | None) -> Self:
        return replace(self, chunk=chunk)

    @property
    def terms(self) -> tuple[Term, ...]:
        z = () if self.z_loss_weight == 0 else (Term(name=Z_LOSS, weight=self.z_loss_weight),)
        auxiliary = (Term(name=name, weight=weight) for name, weight in self.auxiliary_weights.items())
        return (Term(name=LOSS), *z, *auxiliary)

    def abstract_batch(self, Batch: hax.Axis, Pos: hax.Axis) -> LmBatch:
        def of(dtype: DTypeLike) -> hax.NamedArray:
            array = jax.ShapeDtypeStruct((Batch.size, Pos.size), np.dtype(dtype))
            return hax.NamedArray(array, (Batch, Pos))  # pyright: ignore

        return LmBatch(
            tokens=of(np.int32),
            targets=of(np.int32),
            loss_weights=of(np.float32) if self.weights else None,
            segment_ids=of(np.int32) if self.segments else None,
        )

    def rows(self, batch: LmBatch) -> hax.Axis:
        (Batch,) = [axis for axis in batch.tokens.axes if axis.name != "position"]
        return Batch

    def normalizer(self, batch: LmBatch) -> jax.Array:
        return hax.sum(batch.counts()).scalar()

    def sums(self, model: LmHeadModel, batch: LmBatch, at: AtStep) -> Sums:  # noqa: ARG002
        outputs, batch = self._forward(model, batch)
        normalizers = None
        if self.z_loss_weight == 0:
            logprobs = self.logprobs(model, batch, activations=outputs.activations)
        else:
            logprobs, normalizers = token_scores(
                model,
                batch.tokens,
                batch.targets,
                segment_ids=batch.segment_ids,
                chunk=self.chunk,
                activations=outputs.activations,
            )
        counts = batch.counts()

        # Positions without weight may have NaN or infinite scores (padding rows), and 0 · NaN is NaN: select first.
        def counted(values: hax.NamedArray) -> jax.Array:
            return hax.sum(hax.where(counts != 0, values, 0.0) * counts).scalar()

        with jax.named_scope("loss"):
            # The sum's names must be those of `terms`: the scan over microbatches has a fixed structure.
            z = {} if normalizers is None else {Z_LOSS: counted(normalizers * normalizers)}
            return Sums({LOSS: -counted(logprobs), **z, **_over_tokens(outputs.auxiliary, counts)})

    def total(self, model: LmHeadModel, batch: LmBatch, at: AtStep, scale: jax.Array) -> tuple[jax.Array, Sums]:
        """See `Objective.total`; the scoring loop computes the gradients of the head and the activations as well.

        If a subclass overrides the sums, terms or log-probabilities, `Objective.total` differentiates those instead.
        """
        if not self.gradient_in_loop:
            return super().total(model, batch, at, scale)
        # `gradient_in_loop` excludes a schedule, which this assertion tells the type checker.
        assert not callable(self.z_loss_weight)
        outputs, batch = self._forward(model, batch)
        # `loss_sums` computes its gradient with these weights, so they must contain the scale already.
        counts = batch.counts() * scale
        loss = loss_sums(
            model,
            batch.targets,
            counts,
            activations=outputs.activations,
            z_weight=self.z_loss_weight,
            chunk=self.chunk,
        )
        with jax.named_scope("loss"):
            z = {} if loss.squared_normalizers is None else {Z_LOSS: loss.squared_normalizers}
            auxiliary, minimized = _over_tokens(outputs.auxiliary, counts), loss.minimized
            for name, weight in self.auxiliary_weights.items():
                minimized = minimized + weight_at(weight, at) * auxiliary[name]
            return minimized, Sums({LOSS: loss.loss, **z, **auxiliary})

    def _forward(self, model: LmHeadModel, batch: LmBatch) -> tuple[Outputs, LmBatch]:
        """The activations and auxiliary sums, and the batch with its positions in the order of the activations."""
        # Permuting the targets (integers) is cheaper than permuting the activations or the scores back.
        num_shards, auxiliary = zigzag_shards(model), tuple(self.auxiliary_weights)
        outputs = zigzag_outputs(
            model, batch.tokens, segment_ids=batch.segment_ids, auxiliary=auxiliary, num_shards=num_shards
        )
        return outputs, to_zigzag(batch, num_shards)

    @property
    def gradient_in_loop(self) -> bool:
        """Whether the scoring loop computes the gradient.

        Only if no subclass overrides the minimized function, and the weight of the z-loss is a constant.
        """
        overridable = ("terms", "statistics", "sums", "minimized", "logprobs")
        plain = all(getattr(type(self), name) is getattr(LmObjective, name) for name in overridable)
        return plain and not callable(self.z_loss_weight)

    def logprobs(
        self, model: LmHeadModel, batch: LmBatch, *, activations: hax.NamedArray | None = None
    ) -> hax.NamedArray:
        """Log-probability of each target; the loss is their negative weighted mean, and evaluation sums them.

        Args:
            model: its weights in the compute dtype, or wrapped by `in_compute_dtype`.
            batch: the tokens and targets.
            activations: the model's activations for these tokens if they have been computed, in the order of the
                targets.
        """
        return token_logprobs(
            model,
            batch.tokens,
            batch.targets,
            segment_ids=batch.segment_ids,
            chunk=self.chunk,
            activations=activations,
        )


def _over_tokens(auxiliary: Sums, counts: hax.NamedArray) -> Sums:
    """Auxiliary sums, which are means over tokens, as terms of sums over tokens."""
    return auxiliary * hax.sum(counts).scalar() if auxiliary else auxiliary


@dataclass(frozen=True)
class _Placed:
    """PartitionSpecs of the leaves of one layer, by path below the layer. Hashable, for static fields."""

    specs: tuple[tuple[str, PartitionSpec], ...]

    @property
    def by_path(self) -> Mapping[str, PartitionSpec]:
        return dict(self.specs)


class _CastInside(eqx.Module):
    """A block that casts its own weights when it is called."""

    inner: Callable[..., Any]
    dtype: np.dtype = eqx.field(static=True)
    placed: _Placed = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        specs, exact = self.placed.by_path, _exact(self.inner)

        def cast(leaf: Leaf, x: jax.Array) -> jax.Array:
            # The all-gather of a projection's weights then appears under its name in profiles.
            with jax.named_scope("/".join(leaf.path.split(".")[:-1]) or leaf.path):
                dtype = leaf.dtype if leaf.path in exact else self.dtype
                return cast_leaf(leaf, x, dtype, specs.get(leaf.path))

        return map_arrays(cast, self.inner)(*args, **kwargs)


class _WideTable(eqx.Module):
    """An embedding table whose rows are cast after the lookup.

    The gradient of a row is a sum over all positions of its token; for a frequent token, 16 bits would round away most
    terms.
    """

    inner: Embedding
    dtype: np.dtype = eqx.field(static=True)
    placed: _Placed = eqx.field(static=True)

    def as_linear(self) -> Linear:
        """The table in the compute dtype, as the output head that shares it."""
        # As a head the table is the matrix of one product, and is cast like any other weight.
        specs = self.placed.by_path
        cast = map_arrays(lambda leaf, x: cast_leaf(leaf, x, self.dtype, specs.get(leaf.path)), self.inner)
        return cast.as_linear()

    def __call__(self, ids: hax.NamedArray) -> hax.NamedArray:
        return self.inner(ids).astype(self.dtype)


def _exact(module: PyTree) -> frozenset[str]:
    """Paths of arrays that are used in their storage dtype: the scales of int8 matrices."""
    flat = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda x: isinstance(x, Int8Matrix))[0]
    # If the module itself is an int8 matrix, its path is empty.
    return frozenset(f"{path_string(keys)}.scale".removeprefix(".") for keys, x in flat if isinstance(x, Int8Matrix))


def cast_leaf(leaf: Leaf, x: jax.Array, dtype: np.dtype, spec: PartitionSpec | None) -> jax.Array:
    """Casts a floating-point array to `dtype`, and constrains it and its cotangent to the shards of `spec`."""
    # The constraint comes after the cast, so that a gather of the weight moves the narrow copy.
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        x = x.astype(dtype)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def in_compute_dtype(model: M, dtype: np.dtype, plan: ShardingPlan | None) -> M:
    """Wraps a model so that its weights are cast to `dtype` where they are used; call it inside `jit`.

    Args:
        model: with parameters in their storage dtype.
        dtype: the compute dtype.
        plan: the placement of the parameters, by their paths in `model`; None applies no constraints.
    """

    exact = _exact(model)

    def visit(keys: KeyPath, x: PyTree) -> PyTree:
        path = path_string(keys)
        if isinstance(x, Stacked):

            def casting(inner: Callable[..., Any], below: str) -> _CastInside:
                placed = _layer_specs(plan, f"{path}.stacked.{below}", x.Block.name) if plan is not None else ()
                return _CastInside(inner=inner, dtype=np.dtype(dtype), placed=_Placed(tuple(placed)))

            if not isinstance(x.stacked, Period):
                return Stacked(casting(x.stacked, ""), x.Block, x.gradient_checkpointing)
            # Each layer of the period casts its own weights, so that narrow copies of one layer exist at a time.
            places = tuple(casting(place, f"places.{n}.") for n, place in enumerate(x.stacked.places))
            return Stacked(Period(places=places, policy=x.stacked.policy), x.Block, x.gradient_checkpointing)
        if isinstance(x, Embedding):
            placed = () if plan is None else _layer_specs(plan, f"{path}.", None)
            return _WideTable(x, np.dtype(dtype), _Placed(tuple(placed)))
        with jax.named_scope(path.split(".")[-2] if "." in path else path):
            # Random keys (dropout) are leaves of the bound model but not parameters, so the plan has no entry for them.
            spec = None if plan is None or path not in plan.by_path else plan.spec(path)
            return map_arrays(lambda leaf, a: cast_leaf(leaf, a, leaf.dtype if path in exact else dtype, spec), x)

    return jax.tree_util.tree_map_with_path(
        visit, model, is_leaf=lambda x: isinstance(x, Stacked | Embedding | hax.NamedArray)
    )


def _layer_specs(plan: ShardingPlan, prefix: str, block: str | None) -> list[tuple[str, PartitionSpec]]:
    """PartitionSpecs of the leaves below a path; for a layer of a stack, without the stack's axis `block`."""

    def spec(leaf_plan: LeafPlan) -> PartitionSpec:
        # Inside the scan a layer's arrays have lost the stack's axis, and so must their specs.
        entries = zip(leaf_plan.leaf.names, leaf_plan.mesh_axes, strict=True)
        return PartitionSpec(*(axes or None for name, axes in entries if name != block))

    return [
        (leaf_plan.leaf.path.removeprefix(prefix), spec(leaf_plan))
        for leaf_plan in plan.leaves
        if leaf_plan.leaf.path.startswith(prefix)
    ]
