"""The TPU kernel, emulated: it means what the formula says, on one device and on every mesh; its tables are JAX's."""

import functools
import logging

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.llama_on_mesh import abstract_model, llama_2d, mappings_for, place, random_arrays, tiny_config
from helpers.losses import mean_loss
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask, splash_attention_mask_info

from haliax_ext.errors import IndivisibleError
from haliax_ext.mapping import AxisMapping, Mappings, mappings_in_scope
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.layers.attention import AttentionMask, BackendChoice, attend, splash
from levanter.layers.attention.splash import splash_attention
from levanter.layers.attention.splash_blocks import BLOCKS, SplashBlocks, splash_blocks, splash_obstacle
from levanter.layers.attention.splash_tables import Rule, Settings, static_kernel
from levanter.layers.attention.zigzag import natural, zigzag
from levanter.models.scoring import next_tokens

LENGTH = 200  # no multiple of any block
Batch, Pos, KeyPos = Axis("batch", 2), Axis("position", LENGTH), Axis("key_position", LENGTH)
KVHead, Group, Size = Axis("kv_head", 4), Axis("q_heads_per_group", 2), Axis("head_size", 16)
Q_AXES, K_AXES = (Batch, Pos, KVHead, Group, Size), (Batch, KeyPos, KVHead, Size)
SCALE = 0.4
RNG = np.random.default_rng(3)
Q = RNG.standard_normal([a.size for a in Q_AXES]).astype(np.float32)
K, V = (RNG.standard_normal([a.size for a in K_AXES]).astype(np.float32) for _ in range(2))
SEGMENTS = np.sort(RNG.integers(-2, 3, (2, LENGTH)), axis=-1).astype(np.int32)
RULES = ["all", "causal", "window", "ahead", "segments", "everything"]
emulated = functools.partial(splash_attention, interpret=True)


def mask_of(rule: str, segments) -> AttentionMask:
    with_segments = AttentionMask().with_segment_ids(hax.named(segments, (Batch, Pos)))
    return {
        "all": AttentionMask(),
        "causal": AttentionMask.causal(),
        "window": AttentionMask.causal(sliding_window=30),
        "ahead": AttentionMask(sliding_window=150),
        "segments": AttentionMask.causal() & with_segments,
        "everything": AttentionMask.causal(sliding_window=70) & with_segments,
    }[rule]


def formula(rule: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """The result in float64, and the gradients of the sum of its squares by the chain rule."""
    q, k, v = (x.astype(np.float64) for x in (Q, K, V))
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
    shown = np.ones((2, LENGTH, LENGTH), bool)
    if rule in ("causal", "window", "segments", "everything"):
        shown &= distance >= 0
    if rule in ("window", "ahead", "everything"):
        shown &= distance < {"window": 30, "ahead": 150, "everything": 70}[rule]
    if rule in ("segments", "everything"):
        shown &= SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    scores = np.einsum("bqhgd,bkhd->bhgqk", q, k) * SCALE
    weights = np.exp(scores) * shown[:, None, None]
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhgqk,bkhd->bqhgd", weights, v)
    of_out = 2 * out
    of_weights = np.einsum("bqhgd,bkhd->bhgqk", of_out, v)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * SCALE
    of_q = np.einsum("bhgqk,bkhd->bqhgd", of_scores, k)
    of_k = np.einsum("bhgqk,bqhgd->bkhd", of_scores, q)
    of_v = np.einsum("bhgqk,bqhgd->bkhd", weights, of_out)
    return out, [of_q, of_k, of_v]


def values_and_gradients(rule: str, dtype=np.float32, parts: int = 1, **options):
    """Over so many parts in zigzag order, laid out and put back here."""

    def loss(q, k, v, segments):
        q, k, v = hax.named(q, Q_AXES), hax.named(k, K_AXES), hax.named(v, K_AXES)
        q, k, v = zigzag(q, parts), zigzag(k, parts, "key_position"), zigzag(v, parts, "key_position")
        mask = mask_of(rule, zigzag(hax.named(segments, (Batch, Pos)), parts).array).in_zigzag(parts)
        out = emulated(q, k, v, mask, softmax_scale=SCALE, **options)
        assert out.axes == q.axes and out.dtype == q.dtype
        out = natural(out, parts)
        return jnp.sum(jnp.square(out.array.astype(jnp.float32))), out.array

    given = [x.astype(dtype) for x in (Q, K, V)]
    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*given, SEGMENTS)
    return np.asarray(out, np.float32), [np.asarray(g, np.float32) for g in grads]


def assert_formula(rule: str, found, *, atol: float) -> None:
    out, grads = formula(rule)
    np.testing.assert_allclose(found[0], out, atol=atol)
    for mine, expected in zip(found[1], grads, strict=True):
        np.testing.assert_allclose(mine, expected, atol=4 * atol)


@pytest.mark.parametrize("rule", RULES)
def test_equals_the_formula_and_its_derivative(rule):
    assert_formula(rule, values_and_gradients(rule), atol=5e-6)


def test_small_blocks_mean_the_same():
    assert_formula("everything", values_and_gradients("everything", block_size=128), atol=5e-6)


def test_blocks_of_the_queries_gradient_may_be_smaller(monkeypatch):
    """As float32 has them from 768 on; here 256 and 128."""
    blocks = SplashBlocks(block=256, compute=256, dq=128, padded=256)
    monkeypatch.setattr("levanter.layers.attention.splash.splash_blocks", lambda *_, **__: blocks)
    assert_formula("everything", values_and_gradients("everything"), atol=5e-6)


def test_bfloat16_is_accumulated_in_float32():
    out, grads = values_and_gradients("segments", dtype=jnp.bfloat16)
    expected_out, expected_grads = formula("segments")
    for mine, expected in zip([out, *grads], [expected_out, *expected_grads], strict=True):
        assert np.linalg.norm(mine - expected) < 0.01 * np.linalg.norm(expected)


MESHES = {
    "data 2 × model 4": (MeshSpec.of(data=2, model=4), {"batch": "data", "kv_head": "model"}),
    "data 2 × model 2 × group 2": (
        MeshSpec.of(data=2, model=2, group=2),
        {"batch": "data", "kv_head": "model", "q_heads_per_group": "group"},
    ),
    "model 4 × group 2": (MeshSpec.of(model=4, group=2), {"kv_head": "model", "q_heads_per_group": "group"}),
    "data 2 × context 4": (MeshSpec.of(data=2, context=4), {"batch": "data", "position": "context"}),
    "not mapped": (MeshSpec.of(data=4, model=2), {}),
}


SLOW = ("data 2 × model 4", "model 4 × group 2", "not mapped")
"""A mesh with less than another one has, or nothing."""


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MESHES),
        "data 2 × context 4, zigzag",
    ],
)
def test_every_mesh_gives_the_same(name, devices):
    spec, mapping = MESHES[name.removesuffix(", zigzag")]
    mappings = Mappings(compute=AxisMapping(mapping))
    parts = 4 if name.endswith("zigzag") else 1
    with jax.set_mesh(spec.build(devices)), mappings_in_scope(mappings):
        assert_formula("everything", values_and_gradients("everything", parts=parts), atol=5e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_gradients_of_gathered_keys_are_scattered(parts, devices):
    """Never a whole gradient summed on every device: keys and values are gathered where the kernel is called."""
    spec, mapping = MESHES["data 2 × context 4"]
    mappings = Mappings(compute=AxisMapping(mapping))

    def loss(q, k, v):
        mask = AttentionMask.causal().in_zigzag(parts)
        return hax.sum(hax.square(emulated(q, k, v, mask, softmax_scale=SCALE))).scalar()

    given = [hax.named(x, axes) for x, axes in ((Q, Q_AXES), (K, K_AXES), (V, K_AXES))]
    with jax.set_mesh(spec.build(devices)), mappings_in_scope(mappings):
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*given).as_text()
    # In zigzag order early and late runs are gathered apart.
    assert text.count('"stablehlo.all_gather"') == text.count('"stablehlo.reduce_scatter"') == (4 if parts > 1 else 2)
    assert "all_reduce" not in text


def test_an_axis_that_does_not_divide_is_refused(devices):
    mappings = Mappings(compute=AxisMapping({"kv_head": ("data", "model")}))
    with (
        jax.set_mesh(MeshSpec.of(data=4, model=2).build(devices)),
        mappings_in_scope(mappings),
        pytest.raises(IndivisibleError, match=r"kv_head → data, model \(8 ways\), and kv_head 4 is not a multiple"),
    ):
        values_and_gradients("causal")


@pytest.mark.parametrize("case", ["llama_2d", pytest.param("tensor_parallel", marks=pytest.mark.slow)])
def test_inside_a_scan_with_recomputation(case, devices, monkeypatch):
    """Loss and gradients of a whole model, blocks scanned and rematerialized, equal those with the plain formula."""
    spec = MeshSpec.of(data=4, model=2)
    monkeypatch.setattr(splash, "splash_attention", emulated)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 40)).astype(np.int32)

    def run(config, mappings, mesh):
        def loss(model, tokens):
            return jax.value_and_grad(lambda m: mean_loss(m, tokens, next_tokens(tokens)).scalar())(model)

        axes = (Axis("batch", 4), Axis("position", 40))
        ids = hax.NamedArray(jax.ShapeDtypeStruct((4, 40), np.dtype(np.int32)), axes)  # pyright: ignore
        program = Program(
            name="loss",
            function=loss,
            inputs=(
                Input(name="model", value=abstract_model(config), placement=mappings),
                Input(name="tokens", value=ids, placement=mappings.compute),
            ),
            mappings=mappings,
        )
        placed = jax.device_put(tokens, jax.NamedSharding(mesh, mappings.compute.spec(("batch", "position"))))
        value, grads = program.jit(mesh)(
            place(config, random_arrays(config), mappings, mesh), hax.NamedArray(placed, axes)
        )
        return float(value), [np.asarray(g) for g in jax.tree.leaves(grads)]

    kernel_config, plain = (tiny_config(num_layers=2, attn_backend=name) for name in ("splash", "reference"))
    mappings = llama_2d(kernel_config) if case == "llama_2d" else mappings_for(kernel_config, spec)
    expected = run(plain, Mappings(), MeshSpec.of(data=1).build(devices[:1]))
    found = run(kernel_config, mappings, spec.build(devices))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_lowers_for_a_tpu_on_an_abstract_mesh():
    """No device, and no JAX operation outside of the trace, is needed to plan the kernel."""
    spec = MeshSpec.of(data=2, model=4)
    mappings = Mappings(compute=AxisMapping({"batch": "data", "kv_head": "model"}))

    def function(q, k, v):
        return splash_attention(q, k, v, AttentionMask.causal(), softmax_scale=SCALE)

    def abstract_input(name, axes):
        value = hax.NamedArray(jax.ShapeDtypeStruct(tuple(a.size for a in axes), jnp.dtype(jnp.bfloat16)), axes)  # pyright: ignore
        return Input(name=name, value=value, placement=mappings.compute)

    inputs = tuple(abstract_input(n, axes) for n, axes in (("q", Q_AXES), ("k", K_AXES), ("v", K_AXES)))
    program = Program(name="attend", function=function, inputs=inputs, mappings=mappings)
    text = program.lower(spec.abstract(), platform="tpu").as_text()
    # Each device's rows and heads: 1 sequence, 1 of 4 key/value heads.
    assert "tpu_custom_call" in text and "tensor<1x1x256x16xbf16>" in text


@pytest.mark.parametrize(
    ("queries", "keys", "offset"),
    [(512, 512, 0), (768, 768, 0), (1024, 1024, 0), (512, 1024, 512), (512, 768, 77), (1024, 512, 0)],
)
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_table_of_blocks_is_that_of_the_whole_mask(queries, keys, offset, window, parts):
    """JAX's own masks look at every entry; ours at one for each distance."""
    whole = splash_attention_mask.CausalMask((queries, keys), offset, shard_count=parts)
    if window is not None:
        whole = splash_attention_mask.LocalMask((queries, keys), (window - 1, 0), offset, shard_count=parts)
    many = splash_attention_mask.MultiHeadMask([whole])
    blocks = SplashBlocks(block=128, compute=128, dq=128, padded=queries // parts)
    rule, settings = Rule(is_causal=True, window=window), Settings(blocks=blocks)
    kernel = static_kernel(rule, queries=queries, keys=keys, offset=offset, num_shards=parts, settings=settings)
    for made, theirs in (
        (kernel.fwd_mask_info, splash_attention_mask_info.process_mask(many, (128, 128), q_seq_shards=parts)),
        (kernel.dkv_mask_info, splash_attention_mask_info.process_mask_dkv(many, (128, 128), q_seq_shards=parts)),
    ):
        # JAX's masks add the offset inside of the kernel, ours before it.
        for mine, expected in zip(made._replace(q_sequence=made.q_sequence - offset), theirs[0], strict=True):
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize(
    ("length", "requested", "block", "padded"),
    [
        (100, None, 128, 128),
        (256, None, 256, 256),
        (700, None, 768, 768),
        (1024, None, 512, 1024),
        (1100, None, 384, 1152),
        (2048, None, 1024, 2048),
        (65536, None, 1024, 65536),
        (2048, 512, 512, 2048),
        (2048, 500, 512, 2048),
        (300, 4096, 384, 384),
    ],
)
def test_blocks_follow_the_length(length, requested, block, padded):
    found = splash_blocks(length, requested)
    assert (found.block, found.padded) == (block, padded)


def test_wide_heads_in_float32_take_smaller_blocks():
    for head_size, dtype, block, dq in [
        (256, "bfloat16", 1024, 1024),
        (128, "float32", 1024, 512),
        (256, "float32", 512, 512),
    ]:
        for requested in (None, 1024):
            found = splash_blocks(4096, requested, head_size=head_size, dtype=dtype)
            assert (found.block, found.dq) == (block, dq)


def test_blocks_are_always_legal():
    for length in range(1, 5000, 7):
        blocks = splash_blocks(length)
        assert blocks.block in BLOCKS and blocks.compute % 128 == 0 and blocks.block % blocks.compute == 0
        assert blocks.padded % blocks.block == 0 and 0 <= blocks.padded - length < blocks.block


def test_an_array_as_a_mask_goes_to_another_backend_and_says_so(caplog):
    explicit = hax.named(np.tril(np.ones((LENGTH, LENGTH), bool)), (Pos, KeyPos))
    q, k, v = hax.named(Q, Q_AXES), hax.named(K, K_AXES), hax.named(V, K_AXES)
    with pytest.raises(ValueError, match=r"set model\.attn_backend: blockwise"):
        emulated(q, k, v, AttentionMask.of_array(explicit), softmax_scale=SCALE)
    choice = BackendChoice(name="splash", reason="")
    with caplog.at_level(logging.WARNING):
        out = attend(q, k, v, AttentionMask.of_array(explicit), softmax_scale=SCALE, choice=choice)
    assert "blockwise instead of splash" in caplog.text
    np.testing.assert_allclose(out.array, formula("causal")[0], atol=5e-6)


def test_what_stands_in_the_way():
    assert splash_obstacle("tpu", "bfloat16") is None
    assert splash_obstacle("cpu", "bfloat16") == "the platform is cpu, not tpu"
    assert splash_obstacle("tpu", "float16") == "the kernel takes bfloat16 and float32, not float16"
