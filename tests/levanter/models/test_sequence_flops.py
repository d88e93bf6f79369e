"""FLOPs of a sequence as its layers state them: attention against counted pairs, and a mixed model against NumPy."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from haliax import Axis
from helpers.seventy_rows import SEVENTY
from helpers.two_kinds import TwoKindsConfig

from levanter.inference.capacity import DecodeCost
from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.experts import ExpertsSpec, Routing
from levanter.layers.protocols import WindowedAttention
from levanter.models.flops import flops_per_token

pytestmark = pytest.mark.quick

WINDOW, VOCAB = 6, 61
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW + 1)


def visible_pairs(length: int, window: int | None) -> int:
    """The pairs that a causal mask shows, counted in the mask itself."""
    queries, keys = np.arange(length)[:, None], np.arange(length)[None]
    return int(((keys <= queries) & (queries - keys < (window or length))).sum())


@dataclass(frozen=True, kw_only=True)
class MixedConfig(TwoKindsConfig):
    """A model of two kinds, whose third layer has attention with a window."""

    def window(self, layer: int) -> int | None:
        return WINDOW if layer == 2 else None


MIXED = MixedConfig(
    hidden_dim=32,
    intermediate_dim=48,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=64,
    channels=40,
    pattern="FC",
)
"""Layers: attention, convolution, attention with a window, convolution, attention."""


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, WINDOW])
def test_attention_counts_the_pairs_that_its_mask_shows(length, window):
    spec = AttentionSpec(
        Embed=Axis("embed", 32),
        KVHead=Axis("kv_head", 2),
        QHeadsPerGroup=Axis("q_heads_per_group", 3),
        HeadSize=Axis("head_size", 8),
        window=window,
    )
    # Scores and weighted values: a multiplication and an addition each, for each of 48 query features.
    assert spec.sequence_flops(length, attention="causal") == 4 * 48 * visible_pairs(length, window)
    assert spec.sequence_flops(length, attention="full") == 4 * 48 * length * min(length, window or length)
    # What a token adds is what it sees, which decoding counts.
    added = spec.sequence_flops(length, attention="causal") - spec.sequence_flops(length - 1, attention="causal")
    assert added == 4 * 48 * min(length, window or length)


def test_a_mixer_that_carries_a_state_is_linear_in_the_length():
    convolution = MIXED.layers[1].mixer
    assert not isinstance(convolution, WindowedAttention)
    for attention in ("causal", "full"):
        once = convolution.sequence_flops(1, attention=attention)
        assert once > 0
        assert [convolution.sequence_flops(n, attention=attention) for n in LENGTHS] == [n * once for n in LENGTHS]


def test_feed_forward_parts_have_nothing_beyond_their_weights():
    routing = Routing(chosen=2, normalized=True)
    experts = ExpertsSpec(Embed=Axis("embed", 8), Mlp=Axis("mlp", 12), Expert=Axis("expert", 4), routing=routing)
    for part in (MIXED.mlp, experts):
        assert part.sequence_flops(100, attention="full") == 0


@pytest.mark.parametrize("length", [4, WINDOW, 37])
def test_a_mixed_model_costs_what_a_count_by_hand_says(length):
    embed, mlp, features, kv_features, channels, taps = 32, 48, 32, 16, 40, 3
    attention_weights = embed * (2 * features + 2 * kv_features)
    convolution_weights = channels * (3 * embed + taps)
    weights = 3 * attention_weights + 2 * convolution_weights + 5 * 3 * embed * mlp + VOCAB * embed
    pairs = np.array([visible_pairs(length, window) for window in (None, WINDOW, None)])
    # Two convolutions multiply each channel of each token by its gate.
    beyond = int((4 * features * pairs).sum()) + 2 * length * channels
    flops = flops_per_token(MIXED, vocab_size=VOCAB, context_length=length, attention="causal")
    assert flops.weights == 2 * weights
    assert flops.attention == beyond / length
    assert flops.training == pytest.approx(3 * (2 * weights + beyond / length), rel=1e-15)
    assert MIXED.sequence_flops(length, attention="causal") == beyond
    # Costs of sharded sequences know the layers that have a mask, and no others.
    assert MIXED.windows == ((None, 2 * features), (WINDOW, features))


def test_generation_pays_for_a_state_by_the_token_and_for_keys_by_the_context():
    def cost(pattern: str) -> DecodeCost:
        count = functools.partial(replace(MIXED, pattern=pattern).sequence_flops, attention="causal")
        return replace(SEVENTY, devices=1, weight_flops=0.0, sequence_flops=count)

    convolutions, attention = cost("C"), cost("F")
    chip = {"bandwidth": 1.0, "peak": 1.0}
    assert [convolutions.decode_floor(1, n, **chip).flops for n in (1, 10, 50)] == [5 * 40] * 3
    assert convolutions.prefill_floor(1, 9, **chip).flops == 9 * 5 * 40
    # Five layers of 32 query features; the third sees WINDOW keys at most.
    assert attention.decode_floor(1, 50, **chip).flops == 4 * 32 * (4 * 50 + WINDOW)
