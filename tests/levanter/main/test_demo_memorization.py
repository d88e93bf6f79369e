"""Real behaviour: what a model was trained on until it knew it is dark, and what it never saw is white."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from levanter.main.demo_memorization import DemoConfig, chapter, fitted_tokenizer
from levanter.memorization.results import FULL, TOP_40, BookResult

# A fifth of the demo's text and model, which is enough for the same picture.
SMALL = {
    "characters": 5_000,
    "vocab_size": 500,
    "steps": 160,
    "rows": 8,
    "hidden_dim": 96,
    "num_layers": 2,
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of a small demo that was run as a user runs it, on one device."""
    folder = tmp_path_factory.mktemp("demo")
    words = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "levanter.main.demo_memorization", "--output_path", str(folder), *words]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return folder


@pytest.mark.slow
def test_the_learned_half_is_covered_and_the_other_is_not(demo):
    book = BookResult.read(str(demo / "book"))
    text = book.text
    assert text == chapter(5_000)
    # Coverage as it is defined, by hand.
    inked = np.zeros(len(text), bool)
    for (start, stop), log_pz in zip(book.suffix_char_spans, book.log_pz(FULL), strict=True):
        inked[start:stop] |= log_pz >= np.log(0.001)
    half = len(text) // 2
    assert inked[:half].mean() > 0.9
    assert inked[half:].mean() < 0.02
    # Windows of the second half are not merely below the threshold: nobody would ever sample them.
    unseen = book.suffix_char_spans[:, 0] > half
    assert np.median(book.log_pz(FULL)[unseen]) < -50
    assert np.isneginf(book.log_pz(TOP_40)[unseen]).mean() > 0.9


@pytest.mark.slow
def test_everything_is_written(demo):
    summary = json.loads((demo / "book" / "summary.json").read_text())
    assert 0.4 < summary["coverage"] < 0.52 and summary["preset"] == "levanter"
    assert "Special method names" in (demo / "book" / "report.html").read_text()
    assert (demo / "book" / "heatmap.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_model_is_one_that_others_read(demo):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    book = BookResult.read(str(demo / "book"))
    model = AutoModelForCausalLM.from_pretrained(demo / "model", dtype=torch.float32).eval()
    assert set(load_file(demo / "model" / "model.safetensors")) == set(model.state_dict()) - {"lm_head.weight"}
    ids = fitted_tokenizer(chapter(5_000), 500).encode(chapter(5_000)).ids
    rows = [0, len(book) // 2, len(book) - 1]
    tokens = torch.tensor([ids[slice(*book.token_spans[row])] for row in rows])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits, -1)
    taken = logprobs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    expected = taken[:, -book.suffix_tokens :].double().sum(1).numpy()
    np.testing.assert_allclose(book.log_pz(FULL)[rows], expected, atol=2e-3, rtol=1e-5)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="at least 2000"):
        DemoConfig(characters=100)
    with pytest.raises(ValueError, match="multiple of 32"):
        DemoConfig(hidden_dim=100)
