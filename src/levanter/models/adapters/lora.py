"""`Adapters`: the trained factors, and how they are bound to a model.

The factors are a tree of their own, so that gradients, optimizer state and checkpoints contain nothing else. Each pair
of factors is two projections: to the rank, and from it to each member of the group. Their axes have the names of the
matrix's own axes (`models/AXES.md`), so a mapping shards the factors as it shards the matrix.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from haliax_ext.placement import LeafPlan
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import KeyPath, PyTree, is_named, path_string
from levanter.layers.linear import Linear
from levanter.layers.low_rank import RANK, LowRank
from levanter.layers.quantized import COPIES, EXPERT
from levanter.models.adapters.config import LoraConfig
from levanter.models.adapters.lora_targets import TargetGroup
from levanter.models.adapters.whole import WHOLE, copy_path

M = TypeVar("M")
PAIRS = "pairs"


class Pair(eqx.Module):
    """The factors of one group.

    Attributes:
        a: the projection from the inputs to the rank.
        b: the projections from the rank to the outputs, by member.
        scale: the factor of their product.
        paths: the members' paths in the model, by their names in `b`.
    """

    a: Linear
    b: dict[str, Linear]
    scale: float = eqx.field(static=True)
    paths: tuple[tuple[str, str], ...] = eqx.field(static=True)

    @property
    def rank(self) -> int:
        """The number of features between the factors."""
        return self.a.operand.axes[[axis.name for axis in self.a.operand.axes].index(RANK)].size

    @staticmethod
    def init(group: TargetGroup, config: LoraConfig, *, key: jax.Array) -> "Pair":
        """Freshly initialized factors, one of which is 0."""
        Rank = Axis(RANK, group.rank)
        for_a, for_b = jax.random.split(key)
        keys = jax.random.split(for_b, len(group.members))
        # Truncated at two standard deviations, as in upstream.
        b = {
            member.name: _projection(
                # B: [layers?, expert?, out…, rank], with the output axes
                # of this member; A below: [layers?, expert?, rank, in…].
                (*group.copies, *member.Out, Rank),
                (Rank,),
                0.0 if config.zero_init_b else 1.0,
                "random",
                key=member_key,
            )
            for member, member_key in zip(group.members, keys, strict=True)
        }
        return Pair(
            a=_projection((*group.copies, Rank, *group.In), group.In, 1.0, config.a_init_mode, key=for_a),
            b=b,
            scale=config.scale(group.rank, group.alpha),
            paths=tuple((member.name, member.path) for member in group.members),
        )


def _projection(axes: tuple[Axis, ...], In: tuple[Axis, ...], scale: float, how: str, *, key: jax.Array) -> Linear:
    # 1/√fan_in: peft's kaiming_uniform with a = √5 is uniform in ±1/√fan_in.
    bound = scale / math.sqrt(math.prod(axis.size for axis in In))
    if how == "zero" or scale == 0:
        # Factors are float32 whatever the dtype of the base: in 16 bits, small updates would be rounded away.
        weight = hax.zeros(axes, dtype=jnp.float32)
    elif how == "peft":
        weight = hax.random.uniform(key, axes, minval=-bound, maxval=bound, dtype=jnp.float32)
    else:
        weight = hax.random.truncated_normal(key, axes, -2.0, 2.0, dtype=jnp.float32) * bound
    return Linear(weight=weight, bias=None, In=tuple(axis.name for axis in In))


class Adapters(eqx.Module):
    """All factors of a model's adapters, and the parameters that are trained in full.

    Attributes:
        pairs: by the path of their group.
        dropout: dropout rate of A's input while training.
        whole: float32 copies of some of the model's parameters, which replace them; see `models.adapters.whole`. None
            without copies.
    """

    pairs: dict[str, Pair]
    dropout: float = eqx.field(static=True, default=0.0)
    whole: PyTree = None

    @staticmethod
    def init(groups: Sequence[TargetGroup], config: LoraConfig, *, key: jax.Array, whole: PyTree = None) -> "Adapters":
        """Freshly initialized factors, with which a model computes the same as without them.

        Args:
            groups: the projections that get adapters.
            config: how to initialize the factors.
            key: PRNG key.
            whole: the part of the model to copy; None for nothing.
        """
        keys = jax.random.split(key, len(groups))
        return Adapters(
            pairs={
                group.path: Pair.init(group, config, key=group_key)
                for group, group_key in zip(groups, keys, strict=True)
            },
            dropout=config.dropout,
            # tree.map skips the Nones at parameters that are not copied.
            whole=jax.tree.map(lambda x: x.astype(jnp.float32), whole),
        )

    def bound_to(self, base: M, key: jax.Array | None = None) -> M:
        """The model with low-rank products in its targeted projections; computes nothing.

        Args:
            base: the model.
            key: PRNG key of dropout; None for no dropout.
        """
        if self.whole is not None:
            # Trees of equal structure; `_is_leaf` stops at None, which
            # tree.map would otherwise treat as an empty subtree.
            base = jax.tree.map(lambda a, b: b if a is None else a, self.whole, base, is_leaf=_is_leaf)
        pairs_by_path = {path: (pair, name) for pair in self.pairs.values() for name, path in pair.paths}
        bits = {} if key is None or not self.dropout else self._bits(key)

        def visit(keys: KeyPath, x: PyTree) -> PyTree:
            target = pairs_by_path.get(path_string(keys)) if isinstance(x, Linear) else None
            if target is None:
                return x
            pair, name = target
            factors = (_array(pair.a), _array(pair.b[name]))
            # Members of a group share the dropout of their input, as if they were one matrix: the bits are by group.
            return replace(x, weight=LowRank(x.weight, *factors, pair.scale, self.dropout, bits.get(pair.paths)))

        return jax.tree_util.tree_map_with_path(visit, base, is_leaf=lambda x: isinstance(x, Linear))

    def _bits(self, key: jax.Array) -> dict[tuple[tuple[str, str], ...], NamedArray]:
        """PRNG keys of dropout by group, a separate one for each layer.

        Experts get none: their rows are sorted by the router, so a mask would not follow tokens.
        """
        bits_by_paths = {}
        for n, pair in enumerate(self.pairs.values()):
            copies = [axis for axis in _array(pair.a).axes if axis.name in COPIES]
            if any(axis.name == EXPERT for axis in copies):
                continue
            # The group's index, not its path, so that keys depend only on the order of `pairs`.
            group_key = jax.random.fold_in(key, n)
            # Stacked along `layers` like the factors, so that a scan slices a key for each layer.
            bits = group_key if not copies else jax.random.split(group_key, copies[0].size)
            bits_by_paths[pair.paths] = hax.named(bits, (*copies, Axis("bits", bits.shape[-1])))
        return bits_by_paths


def _is_leaf(x: object) -> bool:
    return x is None or is_named(x)


def _array(linear: Linear) -> NamedArray:
    assert isinstance(linear.weight, NamedArray), "factors are arrays"
    return linear.weight


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A factor's paths in two trees.

    Attributes:
        adapter_path: its path among the adapters.
        bound_path: its path in the model that is bound.
    """

    adapter_path: str
    bound_path: str


def factors(adapters: Adapters) -> tuple[Factor, ...]:
    """Every factor of every member; a shared A occurs once for each member."""
    return tuple(
        factor
        for group, pair in adapters.pairs.items()
        for name, path in pair.paths
        for factor in (
            Factor(adapter_path=f"{PAIRS}.{group}.a.weight", bound_path=f"{path}.weight.a"),
            Factor(adapter_path=f"{PAIRS}.{group}.b.{name}.weight", bound_path=f"{path}.weight.b"),
        )
    )


def bound_plan(adapters: Adapters, plan: ShardingPlan) -> ShardingPlan:
    """The sharding plan of the bound model's leaves, by their paths in it.

    Args:
        adapters: they may be abstract.
        plan: of the adapters' leaves and the base's, each by its own path.
    """
    by_path: Mapping[str, LeafPlan] = plan.by_path
    adapted = {path for pair in adapters.pairs.values() for _, path in pair.paths}

    def moved(leaf_plan: LeafPlan, path: str) -> LeafPlan:
        return replace(leaf_plan, leaf=replace(leaf_plan.leaf, path=path))

    def below(path: str) -> str:
        """The path of a base's leaf in the bound model: of its matrix, or of a part of that."""
        whole = next((f"{m}.weight" for m in adapted if path == f"{m}.weight" or path.startswith(f"{m}.weight.")), None)
        # Binding wraps the base's weight: `m.weight` becomes `m.weight.base`, beside `m.weight.a` and `m.weight.b`.
        return path if whole is None else f"{whole}.base{path.removeprefix(whole)}"

    base = (x for x in plan.leaves if not x.leaf.path.startswith((f"{PAIRS}.", f"{WHOLE}.")))
    # A full copy replaces the base's leaf of that path.
    used = (by_path.get(copy_path(x.leaf.path), x) for x in base)
    base_plans = (moved(x, below(x.leaf.path.removeprefix(f"{WHOLE}."))) for x in used)
    factor_plans = (moved(by_path[factor.adapter_path], factor.bound_path) for factor in factors(adapters))
    return replace(plan, leaves=(*base_plans, *factor_plans), findings=())
