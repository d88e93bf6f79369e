"""nanochat against a model in torch written from its formulas: loss and gradients on meshes, generation, counts."""

import dataclasses
import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.llama_on_mesh import abstract_model, mappings_for, named_arrays, run_on

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.meshspec import MeshSpec
from levanter.layers.attention.kv_cache import NewPositions
from levanter.layers.decode_state import StateSizes
from levanter.models.nanochat.config import VARIANTS, NanochatConfig, parameter_counts

torch = pytest.importorskip("torch")
from helpers import torch_nanochat  # noqa: E402

VOCAB, LENGTH = 264, 256
"""Ids, and tokens in a row."""
D4 = NanochatConfig(
    num_layers=4,
    hidden_dim=64,
    intermediate_dim=256,
    num_heads=8,
    num_kv_heads=8,
    max_seq_len=LENGTH,
    sliding_window=65,
    vocab_size=VOCAB,
    attn_backend="reference",
)
CONFIGS = {
    "today": D4,
    "grouped": dataclasses.replace(D4, num_layers=5, num_kv_heads=4),
    "october_2025": dataclasses.replace(D4, sliding_window=None, **VARIANTS["october_2025"]),
    "tpu_fork": dataclasses.replace(D4, **VARIANTS["tpu_fork"]),
}
IDS = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH)).astype(np.int32)
MESHES = {
    "8": MeshSpec.of(data=8, model=1),
    "2x4": MeshSpec.of(data=2, model=4),
    "1x8": MeshSpec.of(data=1, model=8),
}


@functools.cache
def drawn(name: str) -> dict[str, np.ndarray]:
    """Tensors with our checkpoint's names, of such sizes that every one of them matters."""
    config = CONFIGS[name]
    rules = config.weight_rules()
    rng = np.random.default_rng(1)
    tensors = {}
    for source, (shape, _) in rules.sources(leaves(abstract_model(config, VOCAB))).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        tensors[source] = np.asarray(0.7 + 0.2 * noise if not shape else 0.15 * noise, np.float32)
    return tensors


@functools.cache
def judged(name: str):
    config = CONFIGS[name]
    pattern = "L" if config.pattern == "L" else "SSSL"
    return torch_nanochat.loss_and_gradients(drawn(name), IDS, config, pattern=pattern)


def loss_of(model, ids):
    logits = model.logits(model(ids).activations).rearrange(("batch", "position", "vocab")).array
    targets = ids.rearrange(("batch", "position")).array[:, 1:, None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), targets, axis=-1).mean()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) == ("grouped", "2x4") else pytest.mark.slow)
        for name in CONFIGS
        for mesh in MESHES
        if name != "grouped" or mesh != "1x8"
    ],
)
def test_loss_and_gradients_are_those_of_torch(name, mesh, devices):
    config, spec = CONFIGS[name], MESHES[mesh]
    # As a run resolves it: the table's rows follow `embed`.
    mappings = mappings_for(config, spec, params={"table_row": "data"})
    arrays = named_arrays(config, drawn(name), VOCAB)
    expected_loss, expected = judged(name)
    loss, gradients = run_on(jax.value_and_grad(loss_of), config, arrays, IDS, spec, mappings, devices)
    assert abs(loss - expected_loss) < 2e-4
    by_path = {leaf.path: x for leaf, x in zip(leaves(gradients), jax.tree.leaves(gradients), strict=True)}
    for path, judge in named_arrays(config, expected, VOCAB).items():
        largest = np.abs(judge).max()
        assert largest > 0, path
        np.testing.assert_allclose(by_path[path], judge, atol=2e-4 * largest, rtol=0, err_msg=path)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_texts_in_parts_and_packed_have_the_same_activations(scan):
    """Smear reads the previous token: across calls, and not across the border of a packed segment."""
    config = dataclasses.replace(D4, scan_layers=scan, sliding_window=9)
    arrays = {path: jnp.asarray(x) for path, x in named_arrays(config, drawn("today"), VOCAB).items()}
    model = with_arrays(abstract_model(config, VOCAB), arrays)
    ids = hax.named(IDS[:2, :24], ("batch", "position"))

    def activations(model, ids, **more):
        return model(ids, **more).activations.rearrange(("batch", "position", "embed")).array

    def in_parts(model, ids):
        Batch = ids.resolve_axis("batch")
        state = model.start(StateSizes(rows=Batch.size, pages=Batch.size, page_size=24, dtype=np.dtype(np.float32)))
        parts = []
        for first, end in ((0, 9), (9, 10), (10, 24)):
            tokens = ids["position", first:end]
            counts = [hax.full(Batch, number, dtype=jnp.int32) for number in (first, end - first)]
            at = NewPositions.consecutive(*counts, tokens.resolve_axis("position"))
            new, state = model.advance(tokens, state, at, length=24)
            parts.append(new.rearrange(("batch", "position", "embed")).array)
        return jnp.concatenate(parts, axis=1)

    whole = jax.jit(activations)(model, ids)
    np.testing.assert_allclose(jax.jit(in_parts)(model, ids), whole, rtol=2e-4, atol=2e-5)
    segments = hax.named(np.repeat([[0, 1]], 12, axis=1).repeat(2, 0).astype(np.int32), ("batch", "position"))
    packed = jax.jit(lambda model, ids: activations(model, ids, segment_ids=segments))(model, ids)
    alone = jax.jit(activations)(model, ids["position", 12:24])
    np.testing.assert_allclose(packed[:, 12:], alone, rtol=2e-4, atol=2e-5)


PUBLISHED = {
    # block matrices, all parameters, operations a token (10⁹): the miniseries of nanochat
    12: (84_935_088, 286_261_730, 0.760),
    20: (393_217_200, 896_533_746, 2.886),
    24: (679_478_976, 1_384_122_122, 4.775),
    26: (863_897_580, 1_681_786_938, 5.991),
    32: (1_610_615_808, 2_818_575_450, 10.771),
}


def counted_by_hand(depth: int) -> int:
    """nanochat's parameters: attention 4D², MLP 8D², two tables, value tables and gates, scalars."""
    width = -(-depth * 64 // 128) * 128
    tables = -(-depth // 2)
    return (
        12 * depth * width**2
        + 2 * 32_768 * width
        + tables * (32_768 * width + 12 * (width // 128))
        + 2 * depth
        + 24
        + 2
    )


@pytest.mark.parametrize("depth", [4, 8, *PUBLISHED, 16, 28, 36, 40])
def test_counts_are_those_of_the_miniseries(depth):
    config = NanochatConfig.for_depth(depth)
    counts = parameter_counts(config)
    abstract = abstract_model(config, 32_768)
    held = sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in leaves(abstract))
    assert held == counts["total"] == counted_by_hand(depth)
    if depth in PUBLISHED:
        matrices, total, flops = PUBLISHED[depth]
        of_token = config.flops(vocab_size=32_768, context_length=2048, attention="full").training
        assert (counts["transformer_matrices"], counts["total"]) == (matrices, total)
        assert round(of_token / 1e9, 3) == flops


def test_operations_with_windows_of_half_are_those_of_the_leaderboard():
    half = NanochatConfig.for_depth(24, window_divisor=2)
    of_token = half.flops(vocab_size=32_768, context_length=2048, attention="full").training
    # Run 1: 4.3308e19 operations for 8.7577e9 tokens.
    assert of_token == pytest.approx(4.3308e19 / 8.7577e9, rel=2e-5)


def test_the_fork_has_48_scalars_at_24_layers():
    counts = parameter_counts(NanochatConfig.for_depth(24, **VARIANTS["tpu_fork"]))
    assert counts["scalars"] == 48 and counts["value_embeds"] == 0
    assert counts["transformer_matrices"] == 150_994_944 * 24 // 16 + 452_984_832
    assert counts["wte"] + counts["lm_head"] == 100_663_296


def test_initial_weights_are_those_of_nanochat_and_the_loss_is_the_logarithm_of_the_vocabulary():
    config = NanochatConfig.for_depth(4, max_seq_len=128, sliding_window=33, vocab_size=32_768)
    Vocab = hax.Axis("vocab", 32_768)
    ids = hax.named(np.random.default_rng(0).integers(0, 32_768, (2, 128)).astype(np.int32), ("batch", "position"))
    model = jax.jit(lambda key: config.build(Vocab, key=key))(jax.random.key(0))
    assert abs(float(jax.jit(loss_of)(model, ids)) - np.log(32_768)) < 0.01
    found = {leaf.path: np.asarray(x) for leaf, x in zip(leaves(model), jax.tree.leaves(model), strict=True)}
    rules = config.weight_rules().by_target()
    for name, first, last in (("stream_scale", 1.15, 1.05), ("x0_scale", 0.20, 0.05)):
        of_layers = {
            int(rules[leaf.path].source_name(index).split(".")[2]): float(x)
            for leaf in leaves(model)
            if leaf.path.endswith(name)
            for index, x in np.ndenumerate(found[leaf.path])
        }
        np.testing.assert_allclose([of_layers[n] for n in range(4)], np.linspace(first, last, 4), rtol=1e-6)
    queries = found["transformer.layers.stacked.self_attn.q_proj.weight"]
    assert queries.max() <= np.sqrt(3 / 256) and abs(queries.std() - 1 / 16) < 1e-3
    assert not found["transformer.layers.stacked.mlp.down_proj.weight"].any()
    assert abs(found["embeddings.token_embeddings.weight"].std() - 0.8) < 1e-2
    assert abs(found["lm_head.weight"].std() - 1e-3) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "SXL"}, r"model.pattern 'SXL' has 'X'; letters are L full_attention, S sliding_attention"),
        ({"max_seq_len": 128}, r"model.max_seq_len 128: .* is not shorter than all tokens; set model.sliding_window"),
        ({"sliding_window": 4096}, r"model.sliding_window 4096 for max_seq_len 2048, is not shorter"),
        ({"vocab_size": None}, r"model.vocab_size is null; the tables of value embeddings"),
        ({"hidden_dim": 16, "num_heads": 2, "num_kv_heads": 2}, r"smear's gate reads 24 features"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NanochatConfig(**changes)
