"""Of tiny models that have learned something, the likeliest token as float32 and as int8, on text not seen before.

Each family of Qwen and Gemma is trained here. Of random weights the two best logits of many positions are nearly the
same, so that any rounding decides them; of trained ones 97 % of positions must keep their likeliest token.
"""

import gc
import sys
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from helpers.family_models import describe_folder
from helpers.trained_models import POSITIONS, rows, train, unigram_nats

from haliax_ext.abstract import with_arrays
from haliax_ext.mapping import AxisMapping
from haliax_ext.program import Input, Program
from levanter.commands.model.pretrained import load_pretrained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
KEPT = 0.97
"""The share of positions whose likeliest token stays."""
FAMILIES = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 24},
    "gemma3": {"sliding_window": 32, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
}


def likeliest(folder, tokens: np.ndarray, **how: Any) -> np.ndarray:
    """Of every position, by the model as our own loader makes it of the folder."""
    described = describe_folder(folder, positions=POSITIONS, **how)
    assert not described.sharding.errors, described.sharding.errors
    mesh = described.resolved.spec.build(jax.devices()[: described.resolved.spec.size])
    model = with_arrays(described.abstract, load_pretrained(described, mesh, show=False).arrays)
    at = (hax.Axis("batch", len(tokens)), hax.Axis("position", POSITIONS))
    ids = hax.NamedArray(jax.ShapeDtypeStruct(tokens.shape, np.int32), at)  # pyright: ignore
    compute = described.resolved.mappings.compute
    program = Program(
        name="likeliest",
        function=lambda net, ids: hax.argmax(net.logits(net(ids).activations), "vocab"),
        inputs=(
            Input(name="model", value=described.abstract, placement=described.sharding),
            Input(name="tokens", value=ids, placement=compute),
        ),
        mappings=described.resolved.mappings,
        out_placement=AxisMapping(),
        matmul_precision=described.precision.matmul,
    )
    placed = jax.device_put(tokens, jax.NamedSharding(mesh, compute.spec(("batch", "position"))))
    return np.asarray(program.jit(mesh)(model, hax.NamedArray(placed, at)).rearrange(("batch", "position")).array)


@pytest.mark.parametrize("family", FAMILIES)
def test_integers_keep_the_likeliest_token_of_a_trained_model(family, tmp_path):
    import torch

    model = train(family, tmp_path, FAMILIES[family])
    gc.collect()
    held_out = rows("validation")
    tokens = held_out[: len(held_out) // 8 * 8]
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logits = model(ids).logits
    nats = -float(logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean())
    exact = likeliest(tmp_path, tokens)
    found = likeliest(tmp_path, tokens, quantize="int8")
    halves = likeliest(tmp_path, tokens, mp="bfloat16")
    kept, different, chance = float((found == exact).mean()), len(np.unique(exact)), unigram_nats()
    sys.stdout.write(
        f"{family}: {nats:.2f} nats a token (by frequencies {chance:.2f}), {different} different ones of "
        f"{exact.size}, as int8 {kept:.2%} stay, in bfloat16 {(halves == exact).mean():.2%}\n"
    )
    # It is the model that was trained, it has learned, and it says many different things.
    assert (exact == logits.argmax(-1).numpy()).mean() >= 0.999
    assert nats <= chance - 1
    assert tokens.size >= 4000 and different >= 200
    assert KEPT <= kept < 1, "integers must differ from weights for this to say anything"
