"""What 8-bit integers cost SmolLM2-135M, a real pretrained model: nats a token, and likeliest tokens that change.

The text is that of `make demo`. Weights, cache, and both: with a cache, every position attends to keys and values that
were rounded as they were written, those of its own row included, as in generating.
"""

from functools import cache
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from helpers.torch_smollm2 import MODEL

from haliax_ext.abstract import with_arrays
from haliax_ext.mapping import AxisMapping
from haliax_ext.program import Input, Program
from levanter.commands.cli.devices import local_target
from levanter.commands.evaluate.eval_lm import EvalLmConfig, describe
from levanter.commands.model.pretrained import PretrainedModel, load_pretrained
from levanter.compat.open import open_checkpoint
from levanter.config import parse
from levanter.data import python_docs_text
from levanter.layers.attention.kv_cache import NewPositions
from levanter.layers.decode_state import StateSizes
from levanter.mesh import describe_devices

ROWS, POSITIONS, AT_ONCE = 8, 512, 2
pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@cache
def tokens(rows: int = ROWS) -> np.ndarray:
    ids = open_checkpoint(MODEL).tokenizer().encode_batch([python_docs_text(120_000)])[0]
    rows = min(rows, len(ids) // POSITIONS)
    return np.asarray(ids[: rows * POSITIONS], np.int32).reshape(rows, POSITIONS)


@cache
def described(quantize: str | None) -> tuple[PretrainedModel, Any, Any]:
    """The model on one device."""
    overrides = {"hf_checkpoint": MODEL, "max_eval_length": str(POSITIONS), "trainer.mp": "f32"}
    overrides |= {"trainer.mesh.axes": "{data: 1, model: 1}", "quantize": quantize or "null"}
    overrides |= {"data.components": "{docs: {source: {type: python_docs, max_chars: 4000}}}"}
    config, devices = parse(EvalLmConfig, overrides=overrides), jax.devices()[:1]
    model = describe(config, local_target(describe_devices(devices, config.trainer.mesh))).work.pretrained
    mesh = model.resolved.spec.build(devices)
    return model, mesh, with_arrays(model.abstract, load_pretrained(model, mesh, show=False).arrays)


@cache
def measured(quantize: str | None, dtype: str | None, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Over `[row, position]`: log-probabilities of the next tokens, the likeliest ones, and by how much they are so."""
    model, mesh, module = described(quantize)
    Batch, Pos = hax.Axis("batch", AT_ONCE), hax.Axis("position", POSITIONS)

    def run(net, ids):
        if dtype is None:
            activations = net(ids).activations
        else:
            sizes = StateSizes(rows=AT_ONCE, pages=AT_ONCE, page_size=POSITIONS, dtype=jax.numpy.dtype(dtype))
            count = hax.full(Batch, POSITIONS, dtype=np.int32)
            at = NewPositions.consecutive(hax.zeros(Batch, dtype=np.int32), count, Pos)
            activations, _ = net.advance(ids, net.start(sizes), at, length=POSITIONS)
        logits = net.logits(activations).rearrange((Batch, Pos, "vocab"))
        logprobs = hax.nn.log_softmax(logits, "vocab")
        following = hax.roll(ids, -1, Pos)
        best, ids = (hax.named(x, (Batch, Pos, "best")) for x in jax.lax.top_k(logits.array, 2))
        return hax.take(logprobs, "vocab", following), ids["best", 0], best["best", 0] - best["best", 1]

    ids = hax.NamedArray(jax.ShapeDtypeStruct((AT_ONCE, POSITIONS), np.int32), (Batch, Pos))  # pyright: ignore
    program = Program(
        name="score",
        function=run,
        inputs=(
            Input(name="model", value=model.abstract, placement=model.sharding),
            Input(name="tokens", value=ids, placement=model.resolved.mappings.compute),
        ),
        mappings=model.resolved.mappings,
        out_placement=AxisMapping(),
        matmul_precision=model.precision.matmul,
    )
    call = program.jit(mesh)
    found = []
    for at in range(0, len(tokens(rows)) // AT_ONCE * AT_ONCE, AT_ONCE):
        part = hax.named(jax.numpy.asarray(tokens(rows)[at : at + AT_ONCE]), (Batch, Pos))
        found.append([np.asarray(x.array) for x in call(module, part)])
    logprobs, likeliest, ahead = (np.concatenate(each) for each in zip(*found, strict=True))
    return logprobs[:, :-1], likeliest, ahead


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("quantize", "dtype", "most", "least"),
    [("int8", None, 0.010, 0.95), (None, "int8", 0.005, 0.975), ("int8", "int8", 0.015, 0.945)],
)
def test_integers_cost_little(quantize, dtype, most, least):
    exact, first, ahead = measured(None, None)
    found, second, _ = measured(quantize, dtype)
    cost, same = float(exact.mean() - found.mean()), first == second
    assert np.abs(found - exact).max() > 0, "integers must differ for this to say anything"
    assert cost <= most, cost
    assert same.mean() >= least, same.mean()
    clear = ahead > 0.2
    assert clear.mean() > 0.85 and same[clear].mean() >= 0.97, (clear.mean(), same[clear].mean())


@pytest.mark.timeout(900)
def test_a_cache_in_float32_costs_nothing():
    exact, *_ = measured(None, None)
    found, *_ = measured(None, "float32")
    np.testing.assert_allclose(found, exact, atol=2e-4)
