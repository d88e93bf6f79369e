"""A mixture of experts against a loop over tokens in NumPy, and both ways of computing on every kind of mesh."""

import dataclasses
from functools import cache

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_ext.errors import IndivisibleError
from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from levanter.layers.attention import AttentionMask
from levanter.layers.attention.kv_cache import NewPositions
from levanter.layers.context import ForwardContext
from levanter.layers.experts import FEW_TOKENS, LOAD_BALANCING_LOSS, ROUTER_Z_LOSS, ExpertsSpec, Routing

Batch, Pos = Axis("batch", 4), Axis("position", 6)
SPEC = ExpertsSpec(
    Embed=Axis("embed", 8),
    Mlp=Axis("mlp", 12),
    Expert=Axis("expert", 4),
    routing=Routing(chosen=2, normalized=True),
    scale=0.5,
)
X = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)

MESHES = {
    "features cut": (MeshSpec.of(data=2, model=4), {"batch": "data", "mlp": "model"}),
    "an expert each": (MeshSpec.of(data=2, model=4), {"batch": "data", "expert": "model"}),
    "both": (MeshSpec.of(data=2, model=2, group=2), {"batch": "data", "expert": "model", "mlp": "group"}),
    "experts where tokens are cut": (MeshSpec.of(data=4, model=2), {"batch": "data", "expert": "data", "mlp": "model"}),
    "tokens cut twice": (MeshSpec.of(data=2, context=2), {"batch": "data", "position": "context", "expert": "context"}),
    "experts over two axes": (MeshSpec.of(data=2, model=2), {"batch": "data", "expert": ("data", "model")}),
    "residual stream cut": (MeshSpec.of(data=2, model=2), {"batch": "data", "embed": "model"}),
}


@cache
def experts():
    """Computed when a test asks: whoever collects tests should not compile."""
    return SPEC.init(key=jax.random.key(0))


def generating():
    """The context of a call whose tokens continue cached sequences."""
    none = hax.zeros((Batch, Pos), dtype=np.int32)
    new = NewPositions(positions=none, valid=none == 0)
    return ForwardContext(mask=AttentionMask.causal(), tables={}, positions=none, new=new)


@pytest.fixture(params=["whole sequences", "generating"])
def context(request):
    """As in training, and as where text is generated, which has few tokens here: those are not sorted."""
    return None if request.param == "whole sequences" else generating()


def dispatched(layer, dispatch):
    return dataclasses.replace(layer, dispatch=dispatch)


def by_numpy(layer, x):
    """One token after the other, one expert after the other, in float64."""
    table, gate, up, down = (
        np.asarray(p.weight.array, np.float64) for p in (layer.router, layer.gate_proj, layer.up_proj, layer.down_proj)
    )
    flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
    out = np.zeros_like(flat)
    for n, token in enumerate(flat):
        logits = table @ token
        p = np.exp(logits - logits.max())
        p /= p.sum()
        best = np.argsort(-p, kind="stable")[: layer.routing.chosen]
        total = p[best].sum() if layer.routing.normalized else 1.0
        for e in best:
            a = gate[e] @ token
            out[n] += p[e] / total * (down[e] @ (a / (1 + np.exp(-a)) * (up[e] @ token)))
    return out.reshape(x.shape)


def outputs(layer, x, context=None):
    """What one jitted call gives."""
    call = jax.jit(lambda layer, x: layer(hax.named(x, (Batch, Pos, SPEC.Embed)), context).activations)
    return call(layer, x).rearrange((Batch, Pos, SPEC.Embed)).array


def run(layer, x, spec=None, mapping=None, context=None):
    """The output, and the gradients of a weighted sum of it with respect to weights and input."""
    weigh = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)

    def loss(layer, x):
        output = layer(hax.named(x, (Batch, Pos, SPEC.Embed)), context)
        y = output.activations.rearrange((Batch, Pos, SPEC.Embed)).array
        balance, z = output.auxiliary[LOAD_BALANCING_LOSS], output.auxiliary[ROUTER_Z_LOSS]
        return jnp.sum(y * weigh) + 3 * balance + 2 * z, (y, balance, z)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    if spec is None:
        (_, seen), gradients = step(layer, x)
    else:
        mesh = spec.build(jax.devices()[: spec.size])
        with jax.set_mesh(mesh), hax.axis_mapping(AxisMapping(mapping)):
            (_, seen), gradients = step(layer, x)
    return jax.tree.map(np.asarray, (*seen, *jax.tree.leaves(gradients)))


def assert_same(outputs, expected):
    for one, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def dense():
    return run(dispatched(experts(), "dense"), X)


@pytest.mark.parametrize("dispatch", ["dense", "grouped"])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("chosen", [1, 3])
def test_each_token_meets_its_experts(dispatch, normalized, chosen, context):
    layer = dataclasses.replace(dispatched(experts(), dispatch), routing=Routing(chosen=chosen, normalized=normalized))
    np.testing.assert_allclose(outputs(layer, X, context), by_numpy(layer, X), atol=1e-5)


def test_all_ways_have_the_same_gradients(dense, context):
    assert_same(run(experts(), X, context=context), dense)


QUICK = ("both", "experts where tokens are cut", "residual stream cut")


@pytest.mark.parametrize(
    "mesh", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]
)
def test_every_mesh_gives_the_same(mesh, dense, context):
    assert_same(run(experts(), X, *MESHES[mesh], context=context), dense)


@pytest.mark.parametrize("mesh", [pytest.param("an expert each", marks=pytest.mark.slow), "both"])
def test_the_judge_is_the_same_on_a_mesh(mesh, dense):
    assert_same(run(dispatched(experts(), "dense"), X, *MESHES[mesh]), dense)


@pytest.mark.parametrize("mesh", [None, "an expert each", "experts where tokens are cut"])
def test_nothing_is_dropped_when_all_choose_the_same(mesh, context):
    table = np.zeros((4, 8), np.float32)
    table[2] = 3.0  # every token with a positive sum chooses expert 2 first
    layer = dataclasses.replace(
        experts(),
        routing=Routing(chosen=1, normalized=False),
        router=dataclasses.replace(experts().router, weight=hax.named(jnp.asarray(table), ("expert", "embed"))),
    )
    x = np.abs(X)
    outputs = run(layer, x, *(MESHES[mesh] if mesh else ()), context=context)
    np.testing.assert_allclose(outputs[0], by_numpy(layer, x), atol=1e-5)


def test_what_experts_make_of_tokens_of_others_does_not_count(context):
    """Expert 1 makes infinities of all tokens, and none of them chose it."""

    def having(linear, changed):
        return dataclasses.replace(linear, weight=hax.named(jnp.asarray(changed), linear.weight.axes))

    table, huge = np.zeros((4, 8), np.float32), np.array(experts().down_proj.weight.array)
    table[1] = -3.0
    huge[1] = 3e38
    layer = dataclasses.replace(
        experts(),
        routing=Routing(chosen=1, normalized=True),
        router=having(experts().router, table),
        down_proj=having(experts().down_proj, huge),
    )
    x = 100 * np.abs(X)
    output = huge[1].astype(np.float64) @ np.asarray(layer.up_proj.weight.array[1], np.float64) @ x[..., None]
    assert np.abs(output).max() > np.finfo(np.float32).max
    np.testing.assert_allclose(outputs(layer, x, context), by_numpy(layer, x), rtol=1e-4)


def test_few_tokens_are_not_sorted_where_text_is_generated():
    def sorts(tokens: int, call) -> bool:
        x = jax.ShapeDtypeStruct((tokens, 8), jnp.float32)
        return "ragged_dot" in str(jax.make_jaxpr(lambda x: call(hax.named(x, ("token", "embed"))).activations)(x))

    layer = experts()
    assert not sorts(FEW_TOKENS, lambda x: layer(x, generating()))
    assert sorts(FEW_TOKENS + 1, lambda x: layer(x, generating())) and sorts(1, layer)


def test_losses_of_the_router_are_their_formulas(dense):
    logits = X.reshape(-1, 8).astype(np.float64) @ np.asarray(experts().router.weight.array, np.float64).T
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.zeros_like(p)
    np.put_along_axis(chosen, np.argsort(-p, axis=-1)[:, :2], 1.0, axis=-1)
    np.testing.assert_allclose(dense[1], 4 / 2 * (chosen.mean(0) * p.mean(0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(dense[2], (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rtol=1e-5)


def test_balance_equals_transformers_own(dense):
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.from_numpy(X.reshape(-1, 8)) @ torch.from_numpy(np.array(experts().router.weight.array)).T
    # Theirs does not divide by the number of choices.
    assert dense[1] == pytest.approx(load_balancing_loss_func((logits,), num_experts=4, top_k=2).item() / 2, rel=1e-5)


def test_experts_that_do_not_divide_are_named():
    spec, mapping = MeshSpec.of(data=1, model=8), {"expert": "model"}
    with pytest.raises(IndivisibleError, match=r"expert → model \(8 ways\), and expert 4 is not a multiple"):
        run(experts(), X, spec, mapping)


def test_sixteen_bit_tokens_are_weighted_and_summed_in_float32(context):
    layer = jax.tree.map(lambda w: w.astype(jnp.bfloat16), experts())
    x = hax.named(jnp.asarray(X, jnp.bfloat16), (Batch, Pos, SPEC.Embed))
    y = jax.jit(lambda layer, x: layer(x, context).activations)(layer, x)
    assert y.dtype == jnp.bfloat16
    exact = by_numpy(jax.tree.map(lambda w: np.asarray(w, np.float64), layer), np.asarray(x.array, np.float64))
    error = np.abs(np.asarray(y.array, np.float64) - exact).max() / np.abs(exact).max()
    assert error < 2e-2


def test_it_costs_what_the_chosen_experts_cost():
    assert SPEC.matmul_parameters == 8 * 4 + 2 * 3 * 8 * 12
