"""Layers that remember different things in one model: what is generated is what the forward pass predicts."""

import functools
import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.llama_on_mesh import VOCAB, abstract_model
from helpers.recurrent import RecurrenceSpec, RecurrentEngine, mappings_of, recurrent_config
from helpers.tiny_engine import observed
from helpers.two_kinds import TwoKindsConfig, installed

from haliax_ext.abstract import abstract
from haliax_ext.meshspec import MeshSpec
from levanter.commands.generate import generate
from levanter.commands.generate.config import GenerateConfig
from levanter.config import load_written
from levanter.inference.kv_cache import plan_cache
from levanter.inference.requests import Request, SamplingParams
from levanter.layers.attention.cache_positions import NewPositions
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.context import ForwardContext
from levanter.layers.decode_state import StateSizes
from levanter.models.decoder import DecoderLmHeadModel
from levanter.runplan import Target

MESHES = {"1": MeshSpec.of(data=1, model=1), "8": MeshSpec.of(data=4, model=2)}


@functools.cache
def built(mesh: str) -> RecurrentEngine:
    """On one device three kinds of layers, unrolled; on eight a scan over two kinds, and two steps in a decode call."""
    if mesh == "1":
        config = recurrent_config(scan_layers=False, num_layers=3, layer_types=None, pattern="WRF")
        return RecurrentEngine(spec=MESHES[mesh], config=config, rows=3, pages=20)
    config = recurrent_config(num_layers=4, layer_types=None, pattern="RF")
    return RecurrentEngine(spec=MESHES[mesh], config=config, rows=8, pages=4 * 12, steps=2)


def requests(seed: int, count: int, *, n: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=14, logprobs=1, n=n)
    lengths = [int(length) for length in rng.integers(1, 31, count)]
    return [
        Request(id=str(number), tokens=tuple(rng.integers(0, VOCAB, length).tolist()), params=params, seed=number)
        for number, length in enumerate(lengths)
    ]


def in_order(seen) -> list[list[int]]:
    return [text for _, text in sorted(seen.texts.items(), key=lambda item: (int(item[0].request), item[0].choice))]


@pytest.mark.parametrize("mesh", MESHES)
def test_texts_are_those_of_the_forward_pass_in_parts_evicted_and_resumed(mesh):
    """More sequences than rows, prompts of up to four parts, fewer pages than the rows would take."""
    engine, batch = built(mesh), requests(2, 10 if mesh == "1" else 20)
    seen = observed(engine.engine(), batch)
    assert seen.comebacks > 0 and not seen.failed and not seen.hits
    decided = sum(engine.check(list(one.tokens), text) for one, text in zip(batch, in_order(seen), strict=True))
    assert decided > 0.95 * sum(map(len, seen.texts.values()))
    # Alone, in whichever row, a sequence gets the same text.
    assert in_order(observed(engine.engine(), batch[-1:])) == in_order(seen)[-1:]


def test_choices_of_a_request_are_sequences_of_their_own():
    engine = built("1")
    (request,) = requests(3, 1, n=3)
    texts = in_order(observed(engine.engine(), [request]))
    assert len(texts) == 3 and texts[0] == texts[1] == texts[2]
    assert engine.check(list(request.tokens), texts[0]) > 10


def test_bytes_of_a_row_by_kind_and_by_length():
    """Four heads of 6 × 10 float32 a recurrent layer whatever the length; two attention layers of 4 × 4 and one of
    2 × 8 keys and values a position; two ids."""
    config, spec = recurrent_config(), MESHES["8"]
    plans = {
        length: plan_cache(
            abstract_model(config),
            mappings_of(config, spec),
            spec,
            batch_axis="batch",
            rows=8,
            max_seq_len=length,
            dtype=np.dtype(np.float32),
            allocation="paged",
            page_size=8,
        )
        for length in (32, 64)
    }
    memory, vectors, shards = 2 * 4 * 6 * 10 * 4, (2 * 4 * 4 + 2 * 8) * 2 * 4, 4
    for length, plan in plans.items():
        # Heads are in two shards, rows in four.
        assert plan.bytes_by_kind == {
            "paged": length * vectors * 8 // shards // 2,
            "slot": memory * 8 // shards // 2,
            "token_ids": 2 * 4 * 8 // shards,
        }
        assert plan.bytes_per_row == length * vectors // 2 + memory // 2 + 8
        assert not plan.shares_prefixes
        assert "of them whatever its length" in str(plan)


def test_the_plan_of_generate_lists_kinds_and_says_that_prefixes_are_not_shared(tmp_path):
    model = {"type": "two_kinds", "hidden_dim": 32, "intermediate_dim": 32, "num_layers": 4, "num_heads": 4}
    model |= {"num_kv_heads": 4, "channels": 16, "pattern": "FC", "vocab_size": 320, "max_seq_len": 64}
    document = {
        "model": model,
        "tokenizer": "passthrough",
        "inference": {"max_rows": 2, "allocation": "paged", "page_size": 16, "cache_dtype": "bfloat16"},
        "trainer": {"mp": "f32", "mesh": {"axes": {"data": 1, "model": 1}}},
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with installed(tmp_path / "site"):
        loaded = load_written(GenerateConfig, ["--config_path", str(path)])
        target = Target(name="local", platform="cpu", kind="cpu", devices=1)
        plan = generate.describe(loaded.config, target, written=loaded.written)
    latest = 2 * 2 * 2 * 16 * 4
    assert plan.resident_bytes["state of fixed size"] == latest
    assert plan.resident_bytes["cache"] == 2 * 2 * 64 * 2 * 32 * 2
    (note,) = [check.message for check in plan.checks if "share_prefixes" in check.message]
    assert "not shared" in note
    cost = plan.work.serving
    assert [cost.bytes_per_row(length) for length in (0, 10)] == [latest // 2, latest // 2 + 10 * 2 * 2 * 32 * 2]
    assert cost.row_bytes == {"slot": latest}


def test_a_mixer_that_does_not_say_what_it_remembers_is_refused(monkeypatch):
    monkeypatch.delattr(RecurrenceSpec, "decode_state")
    model = abstract_model(recurrent_config(reads_earlier=False))
    sizes = StateSizes(rows=1, pages=1, page_size=4, dtype=np.dtype(np.float32))
    with pytest.raises(ValueError, match=r"(?s)layer 0 \(a RecurrenceSpec\).*RecurrenceSpec\.decode_state"):
        abstract(lambda: model.start(sizes))


@pytest.mark.parametrize("taps", [4])
def test_a_convolution_continues_from_its_last_inputs(taps):
    """Parts of any length, one token among them, and rows of different length in one call."""
    config = TwoKindsConfig(
        hidden_dim=16, intermediate_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, channels=8, taps=taps,
        max_seq_len=16, initializer_range=0.5, pattern="CF", attn_backend="reference",
    )  # fmt: skip
    model = eqx.filter_jit(DecoderLmHeadModel.init)(Axis("vocab", 50), config, key=jax.random.key(0))
    Batch = Axis("batch", 2)
    ids = hax.random.randint(jax.random.key(1), (Batch, Axis("position", 12)), 0, 50)

    @eqx.filter_jit
    def step(model, tokens, state, first, count):
        at = NewPositions.consecutive(first, count, tokens.resolve_axis("position"))
        activations, state = model.advance(tokens, state, at, length=12)
        return activations.rearrange(("batch", "position", "embed")).array, state

    whole = eqx.filter_jit(lambda model, ids: model(ids).activations.array)(model, ids)
    state = model.start(StateSizes(rows=2, pages=2, page_size=12, dtype=np.dtype(np.float32)))
    done = np.zeros(2, np.int32)
    for counts in ((3, 1), (1, 0), (2, 3), (3, 3), (1, 3), (2, 2)):
        count = np.asarray(counts, np.int32)
        tokens = np.stack([ids.array[row, np.minimum(done[row] + np.arange(3), 11)] for row in range(2)])
        named = (
            hax.named(jnp.asarray(x), axes)
            for x, axes in ((tokens, (Batch, "position")), (done, Batch), (count, Batch))
        )
        tokens, first, number = named
        activations, state = step(model, tokens, state, first, number)
        for row in range(2):
            at = slice(done[row], done[row] + count[row])
            np.testing.assert_allclose(activations[row, : count[row]], whole[row, at], atol=1e-4)
        done = done + count
    assert done.tolist() == [12, 12]


@pytest.mark.parametrize("packed", [False, True])
def test_ids_before_stay_within_a_sequence(packed):
    rng = np.random.default_rng(5)
    ids, segments = rng.integers(0, 9, (3, 11)), np.sort(rng.integers(0, 4, (3, 11)), axis=1)
    axes = (Axis("batch", 3), Axis("position", 11))
    mask = AttentionMask.causal()
    if packed:
        mask = mask.with_segment_ids(hax.named(jnp.asarray(segments), axes))
    context = ForwardContext(mask=mask, tables={}, token_ids=hax.named(jnp.asarray(ids), axes))
    for distance in (1, 2, 5):
        expected = np.full_like(ids, -1)
        for row, at in np.ndindex(*ids.shape):
            before = at - distance
            if before >= 0 and (not packed or segments[row, before] == segments[row, at]):
                expected[row, at] = ids[row, before]
        np.testing.assert_array_equal(context.ids_before(distance).rearrange(axes).array, expected)
