"""Every backend means the same as the formula written in NumPy."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.attention import AttentionMask, BackendChoice, attend, choose_backend

Batch, Pos, KeyPos = Axis("batch", 2), Axis("position", 13), Axis("key_position", 13)
KVHead, Group, Size = Axis("kv_head", 2), Axis("q_heads_per_group", 3), Axis("head_size", 8)
CHOICES = {
    "reference": BackendChoice(name="reference", reason=""),
    "jax_native": BackendChoice(name="jax_native", reason=""),
    "cudnn": BackendChoice(name="cudnn", reason=""),  # Its kernel is not here: blockwise runs instead of it.
    "blocks_of_4": BackendChoice(name="blockwise", reason="", block_size=4),
    "blocks_of_13": BackendChoice(name="blockwise", reason="", block_size=13),
    "one_large_block": BackendChoice(name="blockwise", reason="", block_size=512),
}
SEGMENTS = np.array([[0] * 5 + [1] * 8, [0] * 2 + [3] * 3 + [0] * 8], np.int32)
EXPLICIT = np.random.default_rng(5).random((2, 13, 13)) < 0.4
EXPLICIT[0, 6] = False  # a query that sees nothing
RULES = ["all", "causal", "window", "segments", "explicit", "everything"]


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 13, 2, 3, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 13, 2, 8)).astype(np.float32) for _ in range(2))
    return tuple(x.astype(dtype) for x in (q, k, v))


def mask_of(rule: str, segments, explicit) -> AttentionMask:
    segments = hax.named(segments, (Batch, Pos))
    explicit = hax.named(explicit, (Batch, Pos, KeyPos))
    return {
        "all": AttentionMask(),
        "causal": AttentionMask.causal(),
        "window": AttentionMask.causal(sliding_window=4),
        "segments": AttentionMask.causal().with_segment_ids(segments),
        "explicit": AttentionMask.of_array(explicit),
        "everything": AttentionMask.of_array(explicit)
        & AttentionMask.causal(sliding_window=9)
        & AttentionMask(query_segments=segments),
    }[rule]


def visible(rule: str) -> np.ndarray:
    """`[batch, query, key]`, element by element."""
    shown = np.zeros((2, 13, 13), bool)
    for b in range(2):
        for i in range(13):
            for j in range(13):
                ok = True
                if rule in ("causal", "window", "segments", "everything"):
                    ok &= j <= i
                if rule == "window":
                    ok &= i - j < 4
                if rule == "everything":
                    ok &= i - j < 9
                if rule in ("segments", "everything"):
                    ok &= SEGMENTS[b, i] == SEGMENTS[b, j]
                if rule in ("explicit", "everything"):
                    ok &= bool(EXPLICIT[b, i, j])
                shown[b, i, j] = ok
    return shown


def brute_force(rule: str, scale: float) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in inputs())
    scores = np.einsum("bqhgd,bkhd->bhgqk", q, k) * scale
    weights = np.exp(scores) * visible(rule)[:, None, None]
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bhgqk,bkhd->bqhgd", weights, v)


def run(choice: BackendChoice, rule: str, q, k, v, scale=0.3):
    def function(q, k, v, segments, explicit):
        q = hax.named(q, (Batch, Pos, KVHead, Group, Size))
        k, v = (hax.named(x, (Batch, KeyPos, KVHead, Size)) for x in (k, v))
        out = attend(q, k, v, mask_of(rule, segments, explicit), softmax_scale=scale, choice=choice)
        assert out.axes == q.axes and out.dtype == q.dtype
        return out.array

    return function, (q, k, v, SEGMENTS, EXPLICIT)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("choice", CHOICES)
def test_equals_the_formula(choice, rule):
    function, arguments = run(CHOICES[choice], rule, *inputs())
    np.testing.assert_allclose(jax.jit(function)(*arguments), brute_force(rule, 0.3), atol=2e-6)


@pytest.mark.parametrize("choice", ["jax_native", "blocks_of_4"])
def test_gradients_equal_the_reference(choice):
    def gradients(name):
        function, arguments = run(CHOICES[name], "everything", *inputs())
        loss = lambda *qkv: jnp.sum(jnp.sin(function(*qkv, *arguments[3:])))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arguments[:3])

    for mine, expected in zip(gradients(choice), gradients("reference"), strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, expected, atol=2e-5)


@pytest.mark.parametrize("choice", CHOICES)
def test_bfloat16_is_accumulated_in_float32(choice):
    function, arguments = run(CHOICES[choice], "causal", *inputs(jnp.bfloat16))
    found = np.asarray(jax.jit(function)(*arguments), np.float32)
    np.testing.assert_allclose(found, brute_force("causal", 0.3), atol=0.04)


def test_blockwise_holds_no_score_matrix():
    Long, LongKey = Axis("position", 512), Axis("key_position", 512)

    def function(q, k, v):
        q = hax.named(q, (Long, KVHead, Group, Size))
        k, v = (hax.named(x, (LongKey, KVHead, Size)) for x in (k, v))
        choice = BackendChoice(name="blockwise", reason="", block_size=64)
        return jnp.sum(attend(q, k, v, AttentionMask.causal(), softmax_scale=1.0, choice=choice).array)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 2, 3, 8), (512, 2, 8), (512, 2, 8))]
    text = jax.jit(jax.grad(function, argnums=(0, 1, 2))).lower(*shapes).compile().as_text()
    assert "512,512" not in text and "64" in text


def test_two_segmentations_are_our_bug():
    rule = AttentionMask(query_segments=hax.zeros(Pos, dtype=jnp.int32))
    with pytest.raises(AssertionError, match="segments"):
        rule & rule
    with pytest.raises(ValueError, match="at least one key"):
        AttentionMask.causal(sliding_window=0)


@pytest.mark.parametrize(
    ("requested", "platform", "dtype", "length", "expected"),
    [
        (
            None,
            "cpu",
            "float32",
            1024,
            "reference: 1024 keys a sequence are at most 2048, so the scores are materialized",
        ),
        ("default", "tpu", "bfloat16", 8192, "splash: blocks of 1024 × 1024; scores stay on the chip"),
        (
            None,
            "tpu",
            "float32",
            1100,
            "splash: blocks of 384 × 384, 1100 positions padded to 1152; scores stay on the chip",
        ),
        (
            None,
            "tpu",
            "bfloat16",
            101,
            "reference: 101 keys a sequence are fewer than 256, where the kernel starts to pay off",
        ),
        (
            "splash",
            "tpu",
            "bfloat16",
            101,
            "splash: as configured; blocks of 128 × 128, 101 positions padded to 128; scores stay on the chip",
        ),
        (
            "splash",
            "cpu",
            "bfloat16",
            100,
            "reference: splash is a TPU kernel, but the platform is cpu, not tpu; "
            "100 keys a sequence are at most 2048, so the scores are materialized",
        ),
        (
            None,
            "tpu",
            "float16",
            4096,
            "blockwise (blocks of 512): the kernel takes bfloat16 and float32, not float16; "
            "4096 keys a sequence exceed 2048, the longest whose scores are materialized",
        ),
        (
            "nvte",
            "gpu",
            "bfloat16",
            8192,
            "cudnn: Transformer Engine is not a dependency; JAX calls the same cuDNN kernel",
        ),
        (
            None,
            "gpu",
            "bfloat16",
            4096,
            "cudnn: cuDNN's fused kernel; scores stay on the chip",
        ),
        (
            "nvte",
            "gpu",
            "float32",
            64,
            "reference: nvte means cuDNN's kernel, but cuDNN's kernel takes 16-bit floats, not float32; "
            "64 keys a sequence are at most 2048, so the scores are materialized",
        ),
        ("vanilla", None, "float32", 9999, "reference: upstream's vanilla is the plain formula"),
        (
            "jax_flash",
            None,
            "float32",
            64,
            "blockwise (blocks of 512): upstream's jax_flash is an online softmax over blocks of keys",
        ),
        ("jax_native", "cpu", "float32", 64, "jax_native: as configured"),
    ],
)
def test_a_choice_explains_itself(requested, platform, dtype, length, expected):
    assert str(choose_backend(requested, platform=platform, dtype=dtype, length=length)) == expected


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="did you mean blockwise"):
        choose_backend("blockwize", platform="cpu", dtype="float32", length=8)
    with pytest.raises(ValueError, match="the platform is cpu, not gpu; leave attn_backend out"):
        choose_backend("cudnn", platform="cpu", dtype="bfloat16", length=8)
