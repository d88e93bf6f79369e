"""A mixture of experts: a router sends each token to a few of many gated MLPs (Shazeer et al., arXiv:1701.06538).

Nothing is dropped: a token gets the experts that the router chose, however many others chose the same (Gale et al.,
MegaBlocks, arXiv:2211.15841). Two ways compute the same:

- *grouped*: tokens are sorted by expert, and one product with a weight for each group of rows (`jax.lax.ragged_dot`)
  costs as many operations as there are choices. How many rows a group has is data, which the partitioner cannot shard,
  so every device is handed its own tokens and experts by `jax.shard_map`.
- *dense*: every expert sees every token, and what was not chosen is weighted by zero. It costs
  `experts / experts a token` times the operations; it is plain named arithmetic and the judge of the other.

Where text is generated (`advance`), few tokens are not sorted: a device's experts see all of them, in a plain product.
It takes matrices longer to be read than to be multiplied by so few rows, some row wants nearly every expert, and a
plain product reads them where they lie in the stack of layers. A grouped one is a kernel on TPUs, whose operands are
copied out of the stack and into the order that it likes, which is three times the bytes.

The compute mapping says where things are. `mlp → model` shards every expert. `expert → model` gives each device some
experts (expert parallelism); tokens that are replicated over it are there already. Where `expert` goes to a mesh axis
that shards the tokens too, those are gathered over it and the results summed and scattered back.
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
from levanter.layers.linear import Linear, Operand
from levanter.layers.outputs import Outputs, Sums
from levanter.layers.protocols import Shapes
from levanter.layers.remat_names import saved

Dispatch = Literal["grouped", "dense"]

FEW_TOKENS = 512
"""As many tokens on a device are few while text is generated. So many take 2.1 times as long to be multiplied by all
experts as these take to be read on v5e, 0.9 times on v6e and 3.1 times on v5p; sorted, they take three times in bytes
alone and the kernels beside them."""

LOAD_BALANCING_LOSS = "load_balancing_loss"
"""The auxiliary sum that keeps the experts balanced: `experts / chosen · Σ_e f_e · P_e`, where `f_e` is how many of a
token's choices are expert e and `P_e` its probability, both averaged over the tokens; 1 where all experts are used
alike (Fedus et al., Switch Transformers, arXiv:2101.03961, equation 4). The gradient comes from `P_e`."""
ROUTER_Z_LOSS = "router_z_loss"
"""The auxiliary sum that keeps a router's logits small: the mean over tokens of their squared log-sum-exp (Zoph et al.,
ST-MoE, arXiv:2202.08906, equation 5)."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose experts.

    Attributes:
        chosen: experts a token.
        normalized: whether the weights of a token's experts are divided by their sum.
    """

    chosen: int
    normalized: bool

    def __call__(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights (float32) and ids of the chosen experts, best first: `[token, expert]` → `[token, chosen]` each."""
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), self.chosen)
        if self.normalized:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, ids


class _Tally(eqx.Module):
    """Sums over tokens: choices of each expert, probabilities of each, squared log-sum-exps, and how many tokens."""

    choices: jax.Array
    probabilities: jax.Array
    squares: jax.Array
    tokens: jax.Array

    @staticmethod
    def of(logits: jax.Array, ids: jax.Array) -> "_Tally":
        logits = logits.astype(jnp.float32)
        normalizers = jax.nn.logsumexp(logits, axis=-1)
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
    """Router and experts. Constraint point of the dense way: the gate and up activations.

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

    def __call__(self, x: NamedArray) -> Outputs:
        """Maps `[…, embed]` to itself, with the sums `LOAD_BALANCING_LOSS` and `ROUTER_Z_LOSS`."""
        return self._outputs(*(self._dense(x) if self.dispatch == "dense" else self._grouped(x)))

    def advance(self, x: NamedArray) -> Outputs:
        """The same for tokens that continue what a cache holds: few of them are not sorted."""
        return self._outputs(*(self._dense(x) if self.dispatch == "dense" else self._grouped(x, few=FEW_TOKENS)))

    def _outputs(self, activations: NamedArray, tally: _Tally) -> Outputs:
        return Outputs(activations=activations, auxiliary=tally.sums(self.routing.chosen))

    def _dense(self, x: NamedArray) -> tuple[NamedArray, _Tally]:
        (Expert,) = self.router.Out
        with jax.named_scope("router"):
            logits = self.router(x).rearrange((*(a for a in x.axes if a.name != "embed"), Expert))
            weights, ids = self.routing(logits.array)
            tally = _Tally.of(logits.array.reshape(-1, Expert.size), ids)
            hits = jax.nn.one_hot(ids, Expert.size, dtype=weights.dtype)
            shares = hax.named((hits * weights[..., None]).sum(-2).astype(x.dtype), logits.axes)
        with jax.named_scope("gate_proj"):
            gate = saved(hax.auto_sharded(self.gate_proj(x)), "gate")
        with jax.named_scope("up_proj"):
            up = saved(hax.auto_sharded(self.up_proj(x)), "up")
        hidden = ACTIVATIONS[self.activation](gate) * up * shares
        with jax.named_scope("down_proj"):
            return self.down_proj.operand.dot(hidden, ("expert", "mlp")), tally

    def _grouped(self, x: NamedArray, *, few: int = 0) -> tuple[NamedArray, _Tally]:
        x = x.rearrange((..., "embed"))
        operands = tuple(p.operand for p in (self.router, self.gate_proj, self.up_proj, self.down_proj))
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            activations, tally = _experts_of_device(x.array, *operands, layer=self, layout=_Layout(), few=few)
            return hax.named(activations, x.axes), tally
        mapping = compute_mapping_in_scope()
        layout = _Layout.of(x, operands[1].axes, mapping, mesh)
        # Every device routes its own tokens by the full table.
        sharded_axes = (("embed",), *3 * (("expert", "mlp", "embed"),))
        shard_args = [
            ShardMapArgs.of(operand, mapping, axes) for operand, axes in zip(operands, sharded_axes, strict=True)
        ]
        of_tokens = mapping.spec(axis.name for axis in x.axes)

        def of_device(x: jax.Array, *arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, _Tally]:
            device_operands = [args.join(shards) for args, shards in zip(shard_args, arrays, strict=True)]
            return _experts_of_device(x, *device_operands, layer=self, layout=layout, few=few)

        # That sums over mesh axes are the same on all of their devices, the checker does not see.
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
    """What the mesh axes shard.

    Attributes:
        experts: mesh axes that shard `expert`.
        features: mesh axes that shard `mlp`.
        embed: mesh axes that shard `embed`.
        tokens: mesh axes that shard tokens.
        shared: those of `experts` that shard tokens as well.
    """

    experts: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @staticmethod
    def of(x: NamedArray, experts: tuple[Axis, ...], mapping: AxisMapping, mesh: jax.sharding.AbstractMesh):
        """The layout of tokens and experts, the axes of whose weights are given, under a mapping.

        Raises:
            IndivisibleError: an axis does not divide into what it is mapped to.
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
    """The part of the result that is one device's: its tokens `[…, embed]` through its experts; everybody's tally.

    Up to `few` tokens are not sorted.
    """
    tokens = x.reshape(-1, x.shape[-1])
    if layout.shared:
        tokens = jax.lax.all_gather(tokens, layout.shared, axis=0, tiled=True)
    with jax.named_scope("router"):
        logits = router.dot(hax.named(tokens, ("token", "embed")), ("embed",)).rearrange(("token", "expert"))
        logits = _summed(logits.array, layout.embed)
        weights, ids = layer.routing(logits)
        others = tuple(name for name in layout.tokens if name not in layout.shared)
        tally = jax.tree.map(lambda x: _summed(x, others), _Tally.of(logits, ids))
    first = jax.lax.axis_index(layout.experts) * _count(gate) if layout.experts else 0
    through = _few if tokens.shape[0] <= few else _sorted
    of_token = through(tokens, weights, ids - first, (gate, up, down), layer=layer, layout=layout)
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
    """What a device's experts give to tokens `[token, embed]`, in float32: each choice a row of a grouped product.

    Args:
        tokens: all that may have chosen them.
        weights: of each token's choices, `[token, chosen]`.
        ids: which experts those are, counted from the device's first; others are of other devices.
        matrices: gate, up and down of the device's experts.
        layer: what these are of.
        layout: what is cut.
    """
    gate, up, down = matrices
    chosen, local_experts = layer.routing.chosen, _count(gate)
    # Choices of other devices' experts are sorted behind all of ours, where no group reaches.
    local_ids = ids.reshape(-1)
    local_ids = jnp.where((local_ids >= 0) & (local_ids < local_experts), local_ids, local_experts)
    order = jnp.argsort(local_ids, stable=True)
    sizes = jnp.bincount(local_ids, length=local_experts + 1)[:local_experts].astype(jnp.int32)
    rows = tokens[order // chosen]
    reached = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]

    def product(rows: jax.Array, axis: str, operand: Operand) -> jax.Array:
        products = operand.ragged_dot(hax.named(rows, ("token", axis)), axis, hax.named(sizes, ("expert",))).array
        # What the rows behind the last group hold is up to the platform.
        return jnp.where(reached, products, jnp.zeros((), rows.dtype))

    with jax.named_scope("gate_proj"):
        gated = saved(_summed(product(rows, "embed", gate), layout.embed), "gate")
    with jax.named_scope("up_proj"):
        upped = saved(_summed(product(rows, "embed", up), layout.embed), "up")
    hidden = ACTIVATIONS[layer.activation](hax.named(gated, ("token", "mlp"))).array * upped
    with jax.named_scope("down_proj"):
        weighted = product(hidden, "mlp", down).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
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
    """The same as `_sorted` for few tokens: each of the device's experts sees all of them, in a plain product."""
    gate, up, down = matrices
    named_tokens = hax.named(tokens, ("token", "embed"))

    def product(operand: Operand) -> NamedArray:
        return jax.tree.map(lambda x: _summed(x, layout.embed), operand.dot(named_tokens, ("embed",)))

    with jax.named_scope("gate_proj"):
        gated = product(gate)
    with jax.named_scope("up_proj"):
        upped = product(up)
    hidden = ACTIVATIONS[layer.activation](gated) * upped
    with jax.named_scope("down_proj"):
        outputs = down.dot(hidden, ("mlp",)).rearrange(("token", "expert", "embed")).array.astype(jnp.float32)
    # A token's choices are distinct, so of each expert it has one share or none.
    is_choice = ids[:, None, :] == jnp.arange(_count(gate))[None, :, None]
    share = jnp.where(is_choice, weights[:, None, :], 0.0).sum(axis=-1, keepdims=True)
    # What an expert made of tokens of others may be infinite, and must not count.
    return (jnp.where(is_choice.any(axis=-1, keepdims=True), outputs, 0.0) * share).sum(axis=1)


def _count(operand: Operand) -> int:
    (count,) = (axis.size for axis in operand.axes if axis.name == "expert")
    return count


def _summed(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, over) if over else x


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """What a mixture of experts is, as a value.

    Attributes:
        Embed: axis of the residual stream.
        Mlp: axis of the features inside an expert.
        Expert: axis of the experts.
        routing: how tokens choose.
        activation: of the gate, a name in `ACTIVATIONS`.
        dispatch: the way of computing.
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

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of its weights."""
        return (self.Embed, self.Mlp, self.Expert)

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        """The features inside each expert."""
        return ((self.Mlp.name,),)

    @property
    def activations(self) -> Shapes:
        """What it constrains: the features inside an expert."""
        return {"mlp hidden": (self.Mlp,)}

    @property
    def saved(self) -> Shapes:
        """What it names: see `layers.saved`."""
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
