"""cuDNN's attention: which masks reach its kernel, and with which lengths and offsets.

The kernel does not run on CPUs. In its place stands a function that is written from JAX's description of its arguments,
so what is tested is everything around it: documents, both branches, and their gradients.
"""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.attention import AttentionMask, BackendChoice, attend, choose_backend, dot_product
from levanter.layers.attention.reference import reference_attention

Batch, Pos, KeyPos = Axis("batch", 2), Axis("position", 24), Axis("key_position", 24)
KVHead, Group, Size = Axis("kv_head", 2), Axis("q_heads_per_group", 2), Axis("head_size", 8)
CUDNN = BackendChoice(name="cudnn", reason="")
PACKED = np.repeat([[0, 1, 2, -1], [7, 7, 3, 4]], 6, axis=-1).astype(np.int32)
MANY = np.stack([np.arange(24), np.arange(24) // 2]).astype(np.int32)  # 24 documents, more than 8
RETURNS = np.repeat([[0, 1, 0, 2], [1, 2, 3, 4]], 6, axis=-1).astype(np.int32)  # document 0 in two pieces
EXPLICIT = np.random.default_rng(5).random((2, 24, 24)) < 0.4
EXPLICIT[0, 6] = False


def packed_layout(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """The kernel, as JAX's docstring has it: `[rows, position, heads, size]`, a length and an offset a document."""
    rows, positions, heads, _ = q.shape
    assert q_seqlen.dtype == q_offsets.dtype == jnp.int32 and q_offsets.shape == (rows, q_seqlen.shape[1] + 1)
    index = jnp.arange(positions)[None, None]
    begins, lengths = q_offsets[:, :-1, None], q_seqlen[:, :, None]
    inside = (begins >= 0) & (index >= begins) & (index < begins + lengths)  # [rows, document, position]
    visible = jnp.any(inside[..., :, None] & inside[..., None, :], axis=1)
    if mask_type.name == "PADDING_CAUSAL":
        visible &= index[0, 0][None, :, None] >= index
    keys, values = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.where(visible[:, None], scale * jnp.einsum("bqnh,bknh->bnqk", q, keys), -1e30)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), values)


@pytest.fixture
def calls(monkeypatch):
    """The kernel's stand-in, on a card that can have it; the list has what reached it."""
    seen: list[str] = []

    def packed(*args, **options):
        seen.append("documents")
        return packed_layout(*args, **options)

    def simple(*args, implementation, **options):
        seen.append("simple")
        return native(*args, implementation="xla", **options)

    native = dot_product.jax_native_attention
    monkeypatch.setattr(dot_product, "device_obstacle", lambda *_, **__: None)
    monkeypatch.setattr(dot_product.cudnn, "dot_product_attention", packed)
    monkeypatch.setattr(dot_product, "jax_native_attention", simple)
    return seen


def of(segments):
    return hax.named(segments, (Batch, Pos))


MASKS = {
    "all": (AttentionMask(), "simple"),
    "causal": (AttentionMask.causal(), "simple"),
    "window": (AttentionMask.causal(sliding_window=5), "simple"),
    "array": (AttentionMask.of_array(hax.named(EXPLICIT, (Batch, Pos, KeyPos))), "simple"),
    "documents": (AttentionMask.causal().with_segment_ids(of(PACKED)), "documents"),
    "documents, not causal": (AttentionMask().with_segment_ids(of(PACKED)), "documents"),
    "many documents": (AttentionMask.causal().with_segment_ids(of(MANY)), "documents"),
    "a document in two pieces": (AttentionMask.causal().with_segment_ids(of(RETURNS)), "documents"),
    "a window and documents": (AttentionMask.causal(sliding_window=5).with_segment_ids(of(PACKED)), None),
    "an array and documents": (
        AttentionMask.of_array(hax.named(EXPLICIT, (Batch, Pos, KeyPos))).with_segment_ids(of(PACKED)),
        None,
    ),
    "window, not causal": (AttentionMask(sliding_window=5), None),
    "later queries": (AttentionMask.causal(offset=3), None),
    "trunks": (
        AttentionMask.causal().with_segment_ids(of(PACKED)).with_trunks(of(np.full((2, 24), 1, np.int32))),
        None,
    ),
}


def inputs():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 24, 2, 2, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 24, 2, 8)).astype(np.float32) for _ in range(2))
    return hax.named(q, (Batch, Pos, KVHead, Group, Size)), *(
        hax.named(x, (Batch, KeyPos, KVHead, Size)) for x in (k, v)
    )


def test_a_single_packed_row_does_not_reach_the_kernel(calls):
    """JAX's sharding rule of the packed layout takes two rows at least; the text of a Program would be refused."""
    q, k, v = (x["batch", 0:1] for x in inputs())
    mask = AttentionMask.causal().with_segment_ids(hax.named(PACKED[:1], (q.resolve_axis("batch"), Pos)))
    mine = attend(q, k, v, mask, softmax_scale=0.3, choice=CUDNN)
    assert not calls
    expected = reference_attention(q, k, v, mask, softmax_scale=0.3)
    np.testing.assert_allclose(mine.array, expected.array, atol=2e-6)
    # Without documents a single row does.
    attend(q, k, v, AttentionMask.causal(), softmax_scale=0.3, choice=CUDNN)
    assert calls == ["simple"]


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_equals_the_reference(name, calls):
    """Values and gradients, whichever path a mask takes; no path loses a segment."""
    mask, path = MASKS[name]

    def run(function):
        def loss(qkv):
            out = function(*qkv)
            assert out.axes == qkv[0].axes
            return jnp.sum(jnp.sin(out.array)), out.array

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs())
        return [out, *(x.array for x in gradients)]

    mine = run(lambda q, k, v: attend(q, k, v, mask, softmax_scale=0.3, choice=CUDNN))
    assert set(calls) == ({path} if path else set())
    expected = run(lambda q, k, v: reference_attention(q, k, v, mask, softmax_scale=0.3))
    for ours, theirs in zip(mine, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_documents_by_lengths_and_offsets():
    """Counted row by row in Python, for rows of 1 to 20 documents; ids may come back."""
    rng, limit = np.random.default_rng(1), 8
    rows = [
        np.repeat(rng.integers(0, 30, count), rng.multinomial(40 - count, [1 / count] * count) + 1)
        for count in range(1, 21)
    ]
    result = jax.jit(dot_product.packed_documents, static_argnums=1)(np.array(rows, np.int32), limit)
    for row, lengths, offsets, fits in zip(rows, *map(np.asarray, result), strict=True):
        begins = [0, *(np.flatnonzero(np.diff(row)) + 1)]
        whole = len(set(row[begins])) == len(begins)
        assert fits == (whole and len(begins) <= limit)
        if len(begins) <= limit:
            spare = [-1] * (limit - len(begins))
            assert offsets.tolist() == [*begins, *spare, -1]
            assert lengths.tolist() == [*np.diff([*begins, 40]), *spare]


def test_what_a_device_lacks(monkeypatch):
    """Without cuDNN, or on older cards, blockwise runs."""
    assert dot_product.max_documents(4096) == 32 and dot_product.max_documents(64) == 8
    monkeypatch.setattr(dot_product, "cuda_versions", None)
    assert dot_product.device_obstacle(128) == "cuDNN is not installed"
    monkeypatch.setattr(dot_product, "cuda_versions", object())
    for capability, head_size, packed, expected in (
        ((7, 5), 64, False, "8.0 (A100)"),
        ((8, 0), 128, False, None),
        ((8, 0), 256, False, "heads of more than 128"),
        ((8, 9), 128, True, "several documents"),
        ((9, 0), 256, True, None),
        ((10, 0), 128, True, None),
    ):
        monkeypatch.setattr(
            dot_product.cudnn,
            "check_compute_capability",
            lambda text, c=capability: c >= tuple(map(int, text.split("."))),
        )
        obstacle = dot_product.device_obstacle(head_size, packed=packed)
        assert (obstacle is None) == (expected is None) and (expected or "") in (obstacle or "")


@pytest.mark.parametrize(
    ("platform", "options", "name", "reason"),
    [
        ("gpu", {}, "cudnn", "cuDNN's fused kernel; scores stay on the chip"),
        ("gpu", {"dtype": "float16", "length": 512}, "cudnn", "cuDNN's fused kernel"),
        ("gpu", {"capability": (9, 0), "packed": True, "head_size": 256}, "cudnn", "cuDNN's fused kernel"),
        ("gpu", {"capability": (8, 0), "packed": False}, "cudnn", "cuDNN's fused kernel"),
        ("gpu", {"capability": (8, 0), "packed": True}, "blockwise", "not cudnn: rows of several documents need H100"),
        ("gpu", {"capability": (7, 5)}, "blockwise", "not cudnn: the card is older than A100"),
        ("gpu", {"capability": (8, 9), "packed": False, "head_size": 256}, "blockwise", "heads of 256 features need"),
        ("gpu", {"dtype": "float32"}, "blockwise", "not cudnn: cuDNN's kernel takes 16-bit floats, not float32"),
        ("gpu", {"head_size": 100}, "blockwise", "a multiple of 8 features"),
        ("gpu", {"soft_cap": 30.0}, "blockwise", "not cudnn: the model soft-caps its attention scores"),
        ("gpu", {"sinks": True}, "blockwise", "attention sinks"),
        ("gpu", {"sequence_shards": 4}, "blockwise", "not cudnn: several devices share a sequence"),
        ("gpu", {"length": 128}, "reference", "fewer than 256, where the kernel starts to pay off"),
        ("gpu", {"length": 1024, "dtype": "float32"}, "reference", "not cudnn: cuDNN's kernel takes 16-bit floats"),
        ("gpu", {"requested": "blockwise"}, "blockwise", "as configured"),
        ("gpu", {"requested": "cudnn", "capability": (8, 0)}, "cudnn", "as configured"),
        ("tpu", {}, "splash", "scores stay on the chip"),
        ("tpu", {"length": 128}, "reference", "fewer than 256"),
        ("tpu", {"dtype": "float16"}, "blockwise", "the kernel takes bfloat16 and float32, not float16"),
        ("tpu", {"soft_cap": 30.0, "sinks": True}, "splash", "scores stay on the chip"),
        ("cpu", {}, "blockwise", "4096 keys a sequence exceed 2048"),
        ("cpu", {"length": 2048}, "reference", "at most 2048, so the scores are materialized"),
        (None, {}, "blockwise", "4096 keys a sequence exceed 2048"),
    ],
)  # fmt: skip
def test_the_default_of_each_platform(platform, options, name, reason):
    asked = {"requested": None, "dtype": "bfloat16", "length": 4096} | options
    choice = choose_backend(asked.pop("requested"), platform=platform, **asked)
    assert choice.name == name and reason in choice.reason, str(choice)
