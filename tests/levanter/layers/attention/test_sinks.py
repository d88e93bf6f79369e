"""Attention sinks: every backend that has them gives the formula's values and derivatives, and gpt-oss' own."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_ext.mapping import AxisMapping, Mappings, mappings_in_scope
from haliax_ext.meshspec import MeshSpec
from levanter.layers.attention import (
    AttentionMask,
    BackendChoice,
    GroupedQueryAttention,
    attend,
    splash,
)
from levanter.layers.attention.backends import choose_backend
from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.attention.splash import splash_attention
from levanter.layers.context import ForwardContext
from levanter.layers.rotary import DefaultRotaryConfig

LENGTH, SCALE, WINDOW = 150, 0.6, 40
Batch, Pos, KeyPos = Axis("batch", 2), Axis("position", LENGTH), Axis("key_position", LENGTH)
KVHead, Group, Size = Axis("kv_head", 2), Axis("q_heads_per_group", 2), Axis("head_size", 16)
Q_AXES, K_AXES = (Batch, Pos, KVHead, Group, Size), (Batch, KeyPos, KVHead, Size)
RNG = np.random.default_rng(3)
Q = RNG.standard_normal([a.size for a in Q_AXES]).astype(np.float32)
K, V = (RNG.standard_normal([a.size for a in K_AXES]).astype(np.float32) for _ in range(2))
# One that hardly counts, one that takes nearly all, and two between.
SINKS = np.array([[-60.0, 9.0], [0.5, 3.0]], np.float32)
SEGMENTS = np.sort(RNG.integers(0, 3, (2, LENGTH)), axis=-1).astype(np.int32)
CHOICES = {
    "reference": BackendChoice(name="reference", reason=""),
    "blockwise": BackendChoice(name="blockwise", reason="", block_size=64),
    "splash": BackendChoice(name="splash", reason="", block_size=128),
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """The TPU's kernel on any machine."""
    monkeypatch.setattr(splash, "splash_attention", functools.partial(splash_attention, interpret=True))


def formula(shown: np.ndarray, soft_cap: float | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
    """The result in float64, and the gradients of the sum of its squares to q, k, v and sinks by the chain rule."""
    q, k, v = (x.astype(np.float64) for x in (Q, K, V))
    scores = np.einsum("bqhgd,bkhd->bhgqk", q, k) * SCALE
    bounded = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    inner = np.ones_like(scores) if soft_cap is None else 1 - np.tanh(scores / soft_cap) ** 2
    sinks = np.broadcast_to(SINKS.astype(np.float64)[None, :, :, None, None], (*scores.shape[:-1], 1))
    exponentials = np.concatenate([np.exp(bounded) * shown[:, None, None], np.exp(sinks)], axis=-1)
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    # The sink's value is zero.
    values = np.concatenate([v, np.zeros_like(v[:, :1])], axis=1)
    out = np.einsum("bhgqk,bkhd->bqhgd", weights, values)
    of_weights = np.einsum("bqhgd,bkhd->bhgqk", 2 * out, values)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    of_sinks = of_scores[..., -1].sum(axis=(0, 3))
    of_scores = of_scores[..., :-1] * inner * SCALE
    of_q = np.einsum("bhgqk,bkhd->bqhgd", of_scores, k)
    of_k = np.einsum("bhgqk,bqhgd->bkhd", of_scores, q)
    of_v = np.einsum("bhgqk,bqhgd->bkhd", weights[..., :-1], 2 * out)
    return out, [of_q, of_k, of_v, of_sinks]


def visible(window: int | None) -> np.ndarray:
    """`[batch, query, key]` of a causal mask with segments, and a window."""
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
    shown = (distance >= 0) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    return shown if window is None else shown & (distance < window)


def values_and_gradients(choice: BackendChoice, mask, soft_cap: float | None = None, dtype=np.float32):
    def loss(q, k, v, sinks, given):
        q, k, v = hax.named(q, Q_AXES), hax.named(k, K_AXES), hax.named(v, K_AXES)
        sinks = hax.named(sinks, (KVHead, Group))
        out = attend(q, k, v, mask(given), softmax_scale=SCALE, choice=choice, soft_cap=soft_cap, sinks=sinks)
        assert out.axes == q.axes and out.dtype == q.dtype
        return jnp.sum(jnp.square(out.array.astype(jnp.float32))), out.array

    given = [x.astype(dtype) for x in (Q, K, V, SINKS)]
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, out), grads = run(*given, SEGMENTS)
    return [np.asarray(x, np.float32) for x in (out, *grads)]


def packed(window: int | None):
    return lambda given: AttentionMask.causal(sliding_window=window).with_segment_ids(hax.named(given, (Batch, Pos)))


def assert_equal(found, expected) -> None:
    out, grads = expected
    np.testing.assert_allclose(found[0], out, atol=5e-6)
    for mine, theirs in zip(found[1:], grads, strict=True):
        # Sums of float32 beside float64: what is lost is in proportion to the largest of them, here up to 13.
        np.testing.assert_allclose(mine, theirs, atol=max(3e-5, 5e-6 * float(np.abs(theirs).max())))


WINDOWS = [pytest.param(None, marks=pytest.mark.slow, id="whole"), pytest.param(WINDOW, id="window")]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", CHOICES)
def test_equals_the_formula_and_its_derivative(name, window):
    assert_equal(values_and_gradients(CHOICES[name], packed(window)), formula(visible(window)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_with_bounded_scores(name):
    """The sink itself is not bounded."""
    found = values_and_gradients(CHOICES[name], packed(WINDOW), soft_cap=3.0)
    assert_equal(found, formula(visible(WINDOW), soft_cap=3.0))


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_a_query_that_sees_its_sink_only_gets_zeros(name):
    shown = np.random.default_rng(5).random((2, LENGTH, LENGTH)) < 0.3
    shown[0, 7] = shown[1, 100] = False
    explicit = hax.named(shown, (Batch, Pos, KeyPos))
    found = values_and_gradients(CHOICES[name], lambda given: AttentionMask.of_array(explicit))
    assert (found[0][0, 7] == 0).all() and (found[0][1, 100] == 0).all()
    assert_equal(found, formula(shown))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_bfloat16_is_accumulated_in_float32(name):
    found = values_and_gradients(CHOICES[name], packed(WINDOW), dtype=jnp.bfloat16)
    out, grads = formula(visible(WINDOW))
    for mine, expected in zip(found, [out, *grads], strict=True):
        assert np.linalg.norm(mine - expected) < 0.015 * np.linalg.norm(expected)


MESHES = {
    "data 2 × model 2 × group 2": (
        MeshSpec.of(data=2, model=2, group=2),
        {"batch": "data", "kv_head": "model", "q_heads_per_group": "group"},
    ),
    "data 2 × context 4": (MeshSpec.of(data=2, context=4), {"batch": "data", "position": "context"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gives_the_same(name, mesh, devices):
    """Above all the sinks' gradients, which are sums over everything but heads."""
    spec, mapping = MESHES[mesh]
    with jax.set_mesh(spec.build(devices)), mappings_in_scope(Mappings(compute=AxisMapping(mapping))):
        found = values_and_gradients(CHOICES[name], packed(WINDOW))
    assert_equal(found, formula(visible(WINDOW)))


def gpt_oss_config():
    transformers = pytest.importorskip("transformers")
    return transformers.GptOssConfig(
        hidden_size=32, num_attention_heads=8, num_key_value_heads=2, head_dim=16, layer_types=["sliding_attention"],
        num_hidden_layers=1, sliding_window=9, rope_parameters=dict(rope_type="default", rope_theta=1e4),
        attn_implementation="eager",
    )  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param("splash", marks=pytest.mark.slow), "reference", "blockwise"])
def test_equals_the_attention_of_gpt_oss(name, monkeypatch):
    """A whole attention layer with biases, a window and sinks, by transformers and by ours."""
    torch = pytest.importorskip("torch")
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    config = gpt_oss_config()
    layer = theirs.GptOssAttention(config, layer_idx=0).eval()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32)) * 0.3)
        layer.sinks.mul_(8)
    x = rng.standard_normal((2, 40, 32)).astype(np.float32)
    distance = np.arange(40)[:, None] - np.arange(40)[None, :]
    hidden = np.where((distance >= 0) & (distance < 9), 0, -np.inf).astype(np.float32)
    with torch.no_grad():
        angles = theirs.GptOssRotaryEmbedding(config)(torch.from_numpy(x), torch.arange(40)[None])
        expected, _ = layer(torch.from_numpy(x), angles, torch.from_numpy(hidden)[None, None])

    Embed, KV, Queries, Head = (
        Axis("embed", 32),
        Axis("kv_head", 2),
        Axis("q_heads_per_group", 4),
        Axis("head_size", 16),
    )
    Place = Axis("position", 40)
    spec = AttentionSpec(
        Embed=Embed, KVHead=KV, QHeadsPerGroup=Queries, HeadSize=Head, qkv_bias=True, out_bias=True, sinks=True,
        window=9, backend=CHOICES[name],
    )  # fmt: skip
    held = {key: value.detach().numpy() for key, value in layer.state_dict().items()}

    @jax.jit
    def run(held, x):
        mine = GroupedQueryAttention.init(spec, key=jax.random.PRNGKey(0))
        assert mine.sinks is not None and mine.sinks.axes == (KV, Queries)

        def filled(leaf, array):
            return hax.named(array.reshape([axis.size for axis in leaf.axes]), leaf.axes)

        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for kind in ("weight", "bias"):
                leaf = getattr(getattr(mine, part), kind)
                mine = eqx.tree_at(
                    lambda m, part=part, kind=kind: getattr(getattr(m, part), kind),
                    mine,
                    filled(leaf, held[f"{part}.{kind}"]),
                )
        mine = eqx.tree_at(lambda m: m.sinks, mine, filled(mine.sinks, held["sinks"]))
        tables = {"rope": DefaultRotaryConfig(theta=1e4).tables(Head, hax.arange(Place), length=40)}
        context = ForwardContext(mask=AttentionMask.causal(), tables=tables)
        found, state = mine(hax.named(x, (Batch, Place, Embed)), context)
        assert state is None
        return found.array

    np.testing.assert_allclose(run(held, x), expected.numpy(), atol=2e-5)


def test_backends_without_sinks_refuse_them_and_are_not_chosen():
    q, k, v = hax.named(Q, Q_AXES), hax.named(K, K_AXES), hax.named(V, K_AXES)
    sinks = hax.named(SINKS, (KVHead, Group))
    for name in ("jax_native", "cudnn"):
        choice = BackendChoice(name=name, reason="")
        with pytest.raises(ValueError, match=f"attention by {name}: the model's heads have attention sinks"):
            attend(q, k, v, AttentionMask.causal(), softmax_scale=SCALE, choice=choice, sinks=sinks)
    ask = functools.partial(choose_backend, dtype="bfloat16", length=4096, sinks=True)
    for requested, platform in (("jax_native", "cpu"), ("cudnn", "gpu")):
        with pytest.raises(ValueError, match=f"model.attn_backend {requested}: the model's heads have attention sinks"):
            ask(requested, platform=platform)
    assert ask(None, platform="tpu").name == "splash"
    assert ask(None, platform="gpu").name == ask("nvte", platform="gpu").name == "blockwise"
    assert "nvte means cuDNN's kernel, but the model's heads have" in ask("nvte", platform="gpu").reason


def test_sinks_are_lowered_for_a_tpu():
    def function(q, k, v, sinks):
        q, k, v = hax.named(q, Q_AXES), hax.named(k, K_AXES), hax.named(v, K_AXES)
        named = hax.named(sinks, (KVHead, Group))
        out = splash_attention(q, k, v, AttentionMask.causal(), softmax_scale=SCALE, sinks=named)
        return jnp.sum(jnp.square(out.array))

    given = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (Q, K, V, SINKS)]
    text = jax.jit(jax.grad(function, argnums=(0, 3))).trace(*given).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
