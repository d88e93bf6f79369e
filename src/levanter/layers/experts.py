"""A mixture of experts: a router sends each token to a few of many gated MLPs (Shazeer et al., arXiv:1701.06538).

No token is dropped: each is computed by the experts that the router chose, however many other tokens chose the same
(Gale et al., MegaBlocks, arXiv:2211.15841). Two implementations compute the same function:

- *grouped*: tokens are sorted by expert, and one product with a matrix per group of rows (`jax.lax.ragged_dot`) costs
  as many operations as there are choices. The group sizes are data, which the partitioner cannot shard, so
  `jax.shard_map` gives each device its own tokens and experts.
- *dense*: every expert computes every token, and choices that were not made have weight zero. It costs
  `experts / experts per token` times the operations. It is plain named arithmetic, and tests compare the other with it.

During generation (`context.new`), few tokens are not sorted: the experts of a device compute all of them, in plain
products. With so few rows, reading the matrices takes longer than multiplying, nearly every expert is chosen by some
row, and a plain product reads the matrices in place in the stack of layers. The grouped product is a kernel on TPUs
whose operands are first copied out of the stack and into the kernel's layout, which is three times the bytes.

The compute mapping places the experts. `mlp → model` shards each expert. `expert → model` gives each device some of the
experts (expert parallelism); tokens that are replicated over `model` need no communication before the experts. If
`expert` is mapped to a mesh axis that also shards the tokens, the tokens are all-gathered over it, and the results are
reduce-scattered.
"""

import math
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from haliax_ext.errors import IndivisibleError, named_shape
from haliax_ext.mapping import AxisMapping, compute_mapping_in_scope
from haliax_ext.shard_map_args import ShardMapArgs
from levanter.layers.activation import ACTIVATIONS
from levanter.layers.context import ForwardContext
from levanter.layers.linear import Linear, Operand
from levanter.layers.outputs import Outputs, Sums
from levanter.layers.protocols import Shapes
from levanter.layers.remat_names import saved

Dispatch = Literal["grouped", "dense"]

FEW_TOKENS = 512
"""Tokens on a device up to which generation does not sort. Multiplying this many by all experts takes 2.1 times as long
as reading the experts on v5e, 0.9 times on v6e and 3.1 times on v5p; sorted, they read three times the bytes, and the
kernels take time as well."""

LOAD_BALANCING_LOSS = "load_balancing_loss"
"""The auxiliary sum that keeps the experts balanced: `experts / chosen · Σ_e f_e · P_e`, where `f_e` is the number of a
token's choices that are expert e and `P_e` its probability, both averaged over the tokens; 1 if all experts are used
equally (Fedus et al., Switch Transformers, arXiv:2101.03961, equation 4). The gradient flows through `P_e`."""
ROUTER_Z_LOSS = "router_z_loss"
"""The auxiliary sum that keeps a router's logits small: the mean over tokens of their squared log-sum-exp (Zoph et al.,
ST-MoE, arXiv:2202.08906, equation 5)."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose experts.

    Attributes:
        chosen: experts per token.
        normalized: whether the weights of a token's experts are divided by their sum.
    """

    chosen: int
    normalized: bool

    def __call__(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights (float32) and ids of the chosen experts, best first: `[token, expert]` → `[token, chosen]` each."""
        # The softmax is over all experts; unless `normalized`, the weights of the chosen ones add up to less than 1.
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), self.chosen)
        if self.normalized:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, ids


class _Tally(eqx.Module):
    """Sums over tokens: choices and probabilities of each expert, squared log-sum-exps, and the number of tokens."""

    choices: jax.Array
    probabilities: jax.Array
    squares: jax.Array
    tokens: jax.Array

    @staticmethod
    def of(logits: jax.Array, ids: jax.Array) -> "_Tally":
        logits = logits.astype(jnp.float32)
        normalizers = jax.nn.logsumexp(logits, axis=-1)
        # Sums instead of means, so that those of several devices add up; a bincount has no gradient.
        return _Tally(
            choices=jnp.bincount(ids.reshape(-1), length=logits.shape[-1]).astype(jnp.float32),
            probabilities=jnp.sum(jnp.exp(logits - normalizers[:, None]), axis=0),
            squares=jnp.sum(normalizers * normalizers),
            tokens=jnp.float32(logits.shape[0]),
        )

    def sums(self, chosen: int) -> Sums:
        shares, likely = self.choices / self.tokens, self.probabilities / self.tokens
        balance = jnp.sum(shares * likely) * (self.choices.shape[0] / chosen)
        return Sums({LOAD_BALANCING_LOSS: balance, ROUTER_Z_LOSS: self.squares / self.tokens})


class RoutedMlp(eqx.Module):
    """Router and experts. Constraint points of the dense implementation: the gate and up activations.

    Attributes:
        router: `[expert, embed]`.
        gate_proj: `[expert, mlp, embed]`.
        up_proj: `[expert, mlp, embed]`.
        down_proj: `[expert, embed, mlp]`.
    """

    router: Linear
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    routing: Routing = eqx.field(static=True)
    activation: str = eqx.field(static=True)
    dispatch: Dispatch = eqx.field(static=True)

    def __call__(self, x: NamedArray, context: ForwardContext | None = None) -> Outputs:
        """Maps `[…, embed]` to itself, with the sums `LOAD_BALANCING_LOSS` and `ROUTER_Z_LOSS`."""
        # Tokens that continue cached sequences are few, and few are not sorted.
        few = 0 if context is None or context.new is None else FEW_TOKENS
        activations, tally = self._dense(x) if self.dispatch == "dense" else self._grouped(x, few=few)
        return Outputs(activations=activations, auxiliary=tally.sums(self.routing.chosen))

    def _dense(self, x: NamedArray) -> tuple[NamedArray, _Tally]:
        (Expert,) = self.router.Out
        with jax.named_scope("router"):
            logits = self.router(x).rearrange((*(a for a in x.axes if a.name != "embed"), Expert))
            weights, ids = self.routing(logits.array)
            tally = _Tally.of(logits.array.reshape(-1, Expert.size), ids)
            # `[…, chosen, expert]`, summed over the choices: the weight of each expert, 0 if it was not chosen.
            hits = jax.nn.one_hot(ids, Expert.size, dtype=weights.dtype)
            shares = hax.named((hits * weights[..., None]).sum(-2).astype(x.dtype), logits.axes)
        with jax.named_scope("gate_proj"):
            gate = saved(hax.auto_sharded(self.gate_proj(x)), "gate")
        with jax.named_scope("up_proj"):
            up = saved(hax.auto_sharded(self.up_proj(x)), "up")
        # The weights multiply the hidden features, so that one product contracts experts and features together.
        hidden = ACTIVATIONS[self.activation](gate) * up * shares
        with jax.named_scope("down_proj"):
            return self.down_proj.operand.dot(hidden, ("expert", "mlp")), tally

    def _grouped(self, x: NamedArray, *, few: int) -> tuple[NamedArray, _Tally]:
        x = x.rearrange((..., "embed"))
        operands = tuple(p.operand for p in (self.router, self.gate_proj, self.up_proj, self.down_proj))
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            activations, tally = _experts_of_device(x.array, *operands, layer=self, layout=_Layout(), few=few)
            return hax.named(activations, x.axes), tally
        mapping = compute_mapping_in_scope()
        layout = _Layout.of(x, operands[1].axes, mapping, mesh)
        # The router keeps all experts on each device: a token's choice compares the logits of all of them.
        sharded_axes = (("embed",), *3 * (("expert", "mlp", "embed"),))
        shard_args = [
            ShardMapArgs.of(operand, mapping, axes) for operand, axes in zip(operands, sharded_axes, strict=True)
        ]
        of_tokens = mapping.spec(axis.name for axis in x.axes)

        def of_device(x: jax.Array, *arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, _Tally]:
            device_operands = [args.join(shards) for args, shards in zip(shard_args, arrays, strict=True)]
            return _experts_of_device(x, *device_operands, layer=self, layout=layout, few=few)

        # check_vma=False: the checker cannot prove that sums over mesh axes are equal on all of their devices.
        run = jax.shard_map(
            of_device,
            in_specs=(of_tokens, *(args.specs for args in shard_args)),
            out_specs=(of_tokens, PartitionSpec()),
            check_vma=False,
        )
        activations, tally = run(x.array, *(args.arrays for args in shard_args))
        return hax.named(activations, x.axes), tally


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The mesh axes that shard each kind of axis.

    Attributes:
        experts: mesh axes that shard `expert`.
        features: mesh axes that shard `mlp`.
        embed: mesh axes that shard `embed`.
        tokens: mesh axes that shard tokens.
        shared: mesh axes that shard both `expert` and tokens.
    """

    experts: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @staticmethod
    def of(x: NamedArray, experts: tuple[Axis, ...], mapping: AxisMapping, mesh: jax.sharding.AbstractMesh):
        """The layout of tokens and experts under a mapping.

        Args:
            x: the activations, `[…, embed]`.
            experts: the axes of a weight of the experts.
            mapping: from logical axes to mesh axes.
            mesh: sizes of the mesh axes.

        Raises:
            IndivisibleError: an axis size is not a multiple of its number of shards.
        """
        for axes, what in ((x.axes, "tokens"), (experts, "experts")):
            for axis in axes:
                over = mapping.mesh_axes(axis.name)
                ways = math.prod(mesh.shape[name] for name in over)
                if axis.size % ways:
                    shape = named_shape((a.name, a.size) for a in axes)
                    raise IndivisibleError(
                        f"{what} {shape}: the compute mapping has {axis.name} → {', '.join(over)} ({ways} ways), and "
                        f"{axis.name} {axis.size} is not a multiple of that",
                        suggestion="change the mapping",
                    )
        over = mapping.mesh_axes("expert")
        of_tokens = tuple(name for axis in x.axes[:-1] for name in mapping.mesh_axes(axis.name))
        return _Layout(
            experts=over,
            features=mapping.mesh_axes("mlp"),
            embed=mapping.mesh_axes("embed"),
            tokens=of_tokens,
            shared=tuple(name for name in over if name in of_tokens),
        )

    @property
    def summed(self) -> tuple[str, ...]:
        """Mesh axes over which partial results are summed in place."""
        # The sum over shared axes is part of the reduce-scatter that returns the tokens to their devices.
        return tuple(name for name in self.experts + self.features if name not in self.shared)


def _experts_of_device(
    x: jax.Array,
    router: Operand,
    gate: Operand,
    up: Operand,
    down: Operand,
    *,
    layer: RoutedMlp,
    layout: _Layout,
    few: int,
) -> tuple[jax.Array, _Tally]:
    """One device's shard of the result for its tokens `[…, embed]`, and the tally of the tokens of all devices.

    Up to `few` tokens are not sorted.
    """
    tokens = x.reshape(-1, x.shape[-1])
    if layout.shared:
        # The devices of these axes have different tokens and different experts: each computes all of their tokens.
        tokens = jax.lax.all_gather(tokens, layout.shared, axis=0, tiled=True)
    with jax.named_scope("router"):
        logits = router.dot(hax.named(tokens, ("token", "embed")), ("embed",)).rearrange(("token", "expert"))
        # Where `embed` is sharded, a device has contracted its features only; routing needs the complete logits.
        logits = _summed(logits.array, layout.embed)
        weights, ids = layer.routing(logits)
        # Over the shared axes the tokens have been gathered, so their tally is complete there already.
        others = tuple(name for name in layout.tokens if name not in layout.shared)
        tally = jax.tree.map(lambda x: _summed(x, others), _Tally.of(logits, ids))
    # The global id of the device's first expert: ids relative to it are in [0, count) for its own experts.
    first = jax.lax.axis_index(layout.experts) * _count(gate) if layout.experts else 0
    through = _few if tokens.shape[0] <= few else _sorted
    of_token = through(tokens, weights, ids - first, (gate, up, down), layer=layer, layout=layout)
    # Rounded before the sum over devices, which then moves half the bytes.
    partial_sum = _summed(of_token.astype(x.dtype), layout.summed)
    if layout.shared:
        partial_sum = jax.lax.psum_scatter(partial_sum, layout.shared, scatter_dimension=0, tiled=True)
    return partial_sum.reshape(x.shape), tally


def _sorted(
    tokens: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    matrices: tuple[Operand, Operand, Operand],
    *,
    layer: RoutedMlp,
    layout: _Layout,
) -> jax.Array:
    """The weighted sum of the device's experts for tokens `[token, embed]`, float32; one row of a product per choice.

    Args:
        tokens: all tokens that may have chosen an expert of the device.
        weights: of each token's choices, `[token, chosen]`.
        ids: the experts of these choices, counted from the device's first; ids out of range are other devices' experts.
        matrices: gate, up and down of the device's experts.
        layer: the layer that they belong to.
        layout: the mesh axes that shard tokens and experts.
    """
    gate, up, down = matrices
    chosen, local_experts = layer.routing.chosen, _count(gate)
    # Choices of other devices' experts get the id `local_experts`: they sort behind all groups.
    local_ids = ids.reshape(-1)
    local_ids = jnp.where((local_ids >= 0) & (local_ids < local_experts), local_ids, local_experts)
    order = jnp.argsort(local_ids, stable=True)
    sizes = jnp.bincount(local_ids, length=local_experts + 1)[:local_experts].astype(jnp.int32)
    # Choice i is that of token i // chosen; a token has one row for each of its choices.
    rows = tokens[order // chosen]
    # Rows behind the last group belong to no expert of this device.
    reached = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]

    def product(rows: jax.Array, axis: str, operand: Operand) -> jax.Array:
        products = operand.ragged_dot(hax.named(rows, ("token", axis)), axis, hax.named(sizes, ("expert",))).array
        # The contents of rows behind the last group depend on the platform, and may be NaN.
        return jnp.where(reached, products, jnp.zeros((), rows.dtype))

    with jax.named_scope("gate_proj"):
        gated = saved(_summed(product(rows, "embed", gate), layout.embed), "gate")
    with jax.named_scope("up_proj"):
        upped = saved(_summed(product(rows, "embed", up), layout.embed), "up")
    hidden = ACTIVATIONS[layer.activation](hax.named(gated, ("token", "mlp"))).array * upped
    with jax.named_scope("down_proj"):
        weighted = product(hidden, "mlp", down).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    # The argsort of a permutation is its inverse: the rows return to the order `[token, chosen]`.
    return weighted[jnp.argsort(order)].reshape(-1, chosen, weighted.shape[-1]).sum(axis=1)


def _few(
    tokens: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    matrices: tuple[Operand, Operand, Operand],
    *,
    layer: RoutedMlp,
    layout: _Layout,
) -> jax.Array:
    """As `_sorted`, for few tokens: each of the device's experts computes all of them, in plain products."""
    gate, up, down = matrices
    named_tokens = hax.named(tokens, ("token", "embed"))

    def product(operand: Operand) -> NamedArray:
        # A sharded `embed` leaves partial sums; the activation is not linear, so they are completed here.
        return jax.tree.map(lambda x: _summed(x, layout.embed), operand.dot(named_tokens, ("embed",)))

    with jax.named_scope("gate_proj"):
        gated = product(gate)
    with jax.named_scope("up_proj"):
        upped = product(up)
    hidden = ACTIVATIONS[layer.activation](gated) * upped
    with jax.named_scope("down_proj"):
        outputs = down.dot(hidden, ("mlp",)).rearrange(("token", "expert", "embed")).array.astype(jnp.float32)
    # `[token, expert, chosen]`. A token's choices are distinct, so each expert has at most one of its weights.
    is_choice = ids[:, None, :] == jnp.arange(_count(gate))[None, :, None]
    share = jnp.where(is_choice, weights[:, None, :], 0.0).sum(axis=-1, keepdims=True)
    # The output of an expert that a token did not choose may be infinite, and 0 · ∞ is NaN: select, then multiply.
    return (jnp.where(is_choice.any(axis=-1, keepdims=True), outputs, 0.0) * share).sum(axis=1)


def _count(operand: Operand) -> int:
    (count,) = (axis.size for axis in operand.axes if axis.name == "expert")
    return count


def _summed(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, over) if over else x


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The configuration of a mixture of experts.

    Attributes:
        Embed: axis of the residual stream.
        Mlp: axis of the features inside an expert.
        Expert: axis of the experts.
        routing: how tokens choose experts.
        activation: of the gate, a name in `ACTIVATIONS`.
        dispatch: the implementation.
        scale: initial standard deviation of the weights.
    """

    Embed: Axis
    Mlp: Axis
    Expert: Axis
    routing: Routing
    activation: str = "silu"
    dispatch: Dispatch = "grouped"
    scale: float = 0.02

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token: the router's, and those of the experts it chooses."""
        return self.Embed.size * (self.Expert.size + 3 * self.routing.chosen * self.Mlp.size)

    def sequence_flops(self, length: int, *, attention: Literal["causal", "full"]) -> int:  # noqa: ARG002
        """None beyond the products with its weights."""
        return 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of its weights."""
        return (self.Embed, self.Mlp, self.Expert)

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        """The features inside each expert."""
        # `expert` is not among them: expert parallelism is a mapping of its own.
        return ((self.Mlp.name,),)

    @property
    def activations(self) -> Shapes:
        """The activations it constrains: the features inside an expert."""
        return {"mlp hidden": (self.Mlp,)}

    @property
    def rows_per_token(self) -> int:
        """The number of rows that the experts compute for a token: one a choice; those of all experts if dense."""
        return self.Expert.size if self.dispatch == "dense" else self.routing.chosen

    @property
    def saved(self) -> Shapes:
        """The activations it names for gradient checkpointing; see `layers.remat_names`."""
        return dict.fromkeys(("gate", "up"), (self.Mlp,))

    def init(self, *, key: jax.Array) -> RoutedMlp:
        """Freshly initialized experts."""
        router, gate, up, down = jax.random.split(key, 4)
        embed, features = (self.Embed,), (self.Expert, self.Mlp)

        def linear(In: tuple[Axis, ...], Out: tuple[Axis, ...], key: jax.Array) -> Linear:
            return Linear.init(In, Out, scale=self.scale, use_bias=False, key=key)

        return RoutedMlp(
            router=linear(embed, (self.Expert,), router),
            gate_proj=linear(embed, features, gate),
            up_proj=linear(embed, features, up),
            down_proj=linear((self.Mlp,), (self.Expert, self.Embed), down),
            routing=self.routing,
            activation=self.activation,
            dispatch=self.dispatch,
        )
