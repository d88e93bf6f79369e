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
from helpers.recurrent import (
    RecurrenceSpec,
    RecurrentEngine,
    greedy_requests,
    mappings_of,
    recurrent_config,
    recurrent_over_eight,
)
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
    """On one device three kinds of layers, unrolled, and no snapshots; on eight a scan over two kinds, two steps in a
    decode call, and two snapshots for each row."""
    if mesh == "1":
        config = recurrent_config(scan_layers=False, num_layers=3, layer_types=None, pattern="WRF")
        return RecurrentEngine(spec=MESHES[mesh], config=config, rows=3, pages=20, snapshots=0)
    return recurrent_over_eight(MESHES[mesh])


def in_order(seen) -> list[list[int]]:
    return [text for _, text in sorted(seen.texts.items(), key=lambda item: (int(item[0].request), item[0].choice))]


@pytest.mark.parametrize("mesh", MESHES)
def test_texts_are_those_of_the_forward_pass_in_parts_evicted_and_resumed(mesh):
    """More sequences than rows, prompts of up to four parts, fewer pages than the rows would take."""
    engine, batch = built(mesh), greedy_requests(2, 10 if mesh == "1" else 20)
    seen = observed(engine.engine(), batch)
    assert seen.comebacks > 0 and not seen.failed and (seen.hits > 0) == (mesh == "8")
    decided = sum(engine.check(list(one.tokens), text) for one, text in zip(batch, in_order(seen), strict=True))
    assert decided > 0.95 * sum(map(len, seen.texts.values()))
    # Alone, in whichever row, a sequence gets the same text.
    assert in_order(observed(engine.engine(), batch[-1:])) == in_order(seen)[-1:]


@pytest.mark.parametrize("mesh", MESHES)
def test_choices_of_a_request_are_alike_whether_or_not_they_share_its_prompt(mesh):
    engine = built(mesh)
    (request,) = greedy_requests(3, 1, n=2, new=6)
    seen = observed(engine.engine(), [request])
    texts, length = in_order(seen), len(request.tokens)
    assert len(texts) == 2 and texts[0] == texts[1]
    assert engine.check(list(request.tokens), texts[0]) > 4
    # The snapshot is at the end of the last page before the last token; the two rows of a shard share it.
    last = (length - 1) // engine.page_size * engine.page_size
    assert length > 8 and seen.computed == (2 * length if mesh == "1" else 2 * length - last)


def test_prompts_that_begin_alike_begin_with_a_snapshot():
    """Prompts behind 17 common tokens, of which two calls of 8 and four pages hold 16; one after another.

    A prompt has at most four ends of pages for snapshots, at 8, 16, 20 and 24.
    """
    engine, rng, params = built("8"), np.random.default_rng(7), SamplingParams(temperature=0.0, max_tokens=8)
    common, same = rng.integers(0, VOCAB, 17).tolist(), engine.engine()
    for number in range(4):
        tokens = (*common, *rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist())
        seen = observed(same, [Request(id=str(number), tokens=tokens, params=params, seed=0)])
        assert seen.hits == (number > 0) and seen.computed == len(tokens) - 16 * (number > 0)
        engine.check(list(tokens), *in_order(seen))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(6))
def test_drawn_models_caches_and_meshes(seed):
    """Layers, pages, calls, snapshots and meshes drawn by a seed; prompts of which many begin alike."""
    rng = np.random.default_rng(100 + seed)
    pattern = "".join(rng.permutation([*"RFW", *rng.choice([*"RFW"], int(rng.integers(0, 3)))]))
    shape = [(1, 1), (2, 2), (4, 1), (1, 2)][int(rng.integers(4))]
    rows, page_size = shape[0] * int(rng.integers(1, 4)), int(rng.choice([2, 3, 8]))
    pages = -(-40 // page_size) + int(rng.integers(0, 8))
    engine = RecurrentEngine(
        spec=MeshSpec.of(data=shape[0], model=shape[1]),
        config=recurrent_config(
            num_layers=len(pattern), layer_types=None, pattern=pattern, scan_layers=bool(rng.integers(2))
        ),
        rows=rows,
        max_seq_len=40,
        page_size=page_size,
        pages=shape[0] * pages,
        prefill=tuple((int(rng.integers(1, 3)), int(size)) for size in rng.choice([3, 5, 8, 16], 2, replace=False)),
        steps=int(rng.choice([1, 3])),
        snapshots=int(rng.integers(0, 3)),
        behind=int(rng.integers(0, 3)),
    )
    common = [rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist() for _ in range(3)]
    params = [SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 15)), n=n) for n in (1, 1, 2)]
    batch = [
        Request(
            id=str(number),
            tokens=(*common[int(rng.integers(3))], *rng.integers(0, VOCAB, int(rng.integers(1, 6))).tolist()),
            params=params[int(rng.integers(3))],
            seed=number,
        )
        for number in range(12)
    ]
    seen = observed(engine.engine(), batch)
    assert not seen.failed and len(seen.texts) == sum(one.params.n for one in batch)
    prompts = {one.id: list(one.tokens) for one in batch}
    decided = sum(engine.check(prompts[of.request], text) for of, text in seen.texts.items())
    assert decided > 0.95 * sum(map(len, seen.texts.values()))


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
            snapshots_per_row=1,
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
            "snapshot": memory * 8 // shards // 2,
        }
        assert plan.bytes_per_row == length * vectors // 2 + 2 * memory // 2 + 8
        assert plan.shares_prefixes and plan.snapshots == 8
        assert "of them whatever its length" in str(plan)


@pytest.mark.parametrize("shares", [True, False])
def test_the_plan_of_generate_lists_kinds_and_says_how_prefixes_are_shared(shares, tmp_path):
    model = {"type": "two_kinds", "hidden_dim": 32, "intermediate_dim": 32, "num_layers": 4, "num_heads": 4}
    model |= {"num_kv_heads": 4, "channels": 16, "pattern": "FC", "vocab_size": 320, "max_seq_len": 64}
    inference = {"max_rows": 2, "allocation": "paged", "page_size": 16, "cache_dtype": "bfloat16"}
    document = {
        "model": model,
        "tokenizer": "passthrough",
        "inference": inference | {"share_prefixes": shares},
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
    notes = [check.message for check in plan.checks if "share_prefixes" in check.message]
    assert ["the last of 2 snapshots" in note for note in notes] == [True] * shares
    assert plan.resident_bytes.get("snapshots", 0) == latest * shares
    cost, copies = plan.work.serving, 1 + shares
    assert [cost.bytes_per_row(length) for length in (0, 10)] == [
        copies * latest // 2,
        copies * latest // 2 + 10 * 2 * 2 * 32 * 2,
    ]
    assert cost.bytes_per_row(0, seen=True) == latest // 2
    assert cost.row_bytes == ({"slot": latest, "snapshot": latest} if shares else {"slot": latest})


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
