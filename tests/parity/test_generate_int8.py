"""Generated text where weights, or the keys and values that are remembered, are 8-bit integers.

Weights: its log-probabilities are those that `eval_lm` gives the same text with the same integers, on any mesh. The
cache: those of torch, whose keys and values NumPy's rounding has gone over before they are multiplied. What lies on the
edge between two integers may fall to either side, so that a few numbers differ by more than float32 would.
"""

import sys
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from helpers.family_models import ALL_MESHES, ESSENTIAL, describe_folder, layout, make_checkpoint, score, torch_logprobs
from helpers.generation import generate, on_devices, planned

LENGTHS, NEW, ROOM = (1, 30, 5, 17, 8, 26), 14, 64
PROMPTS = [np.random.default_rng(n).integers(3, 250, length).tolist() for n, length in enumerate(LENGTHS)]
ROWS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of checkpoints by variant, with the torch model; each is made once."""

    @cache
    def made(name: str):
        folder = tmp_path_factory.mktemp(name)
        return folder, make_checkpoint(name, folder)

    return made


def written_by(described, **options):
    programs = planned(described, **({"rows": ROWS, "max_seq_len": ROOM, "prefill": [(1, 16)]} | options))
    found = generate(programs, *on_devices(described), PROMPTS, new=NEW)
    assert [len(written.tokens) for written in found] == [NEW] * len(PROMPTS)
    assert len({tuple(written.tokens) for written in found}) > 3, "texts must differ for this to say anything"
    return found


def check_int8_weights(folders, name: str, mesh: str, **options):
    folder, theirs = folders(name)
    described = describe_folder(folder, mesh=layout(name, mesh), positions=ROOM, quantize="int8")
    found = written_by(described, **options)
    tokens = np.zeros((ROWS, ROOM), np.int32)
    for row, (prompt, written) in enumerate(zip(PROMPTS, found, strict=True)):
        whole = [*prompt, *written.tokens]
        tokens[row, : len(whole)] = whole
    # Scored on another mesh than the text was written on.
    scoring = describe_folder(folder, mesh="one", positions=ROOM, quantize="int8")
    _, expected = score(scoring, tokens, np.zeros_like(tokens))
    exact = torch_logprobs(theirs, tokens, np.zeros_like(tokens))
    for row, (prompt, written) in enumerate(zip(PROMPTS, found, strict=True)):
        at = slice(len(prompt) - 1, len(prompt) - 1 + NEW)
        np.testing.assert_allclose(written.logprobs, expected[row, at], atol=2e-4, rtol=0)
    assert np.abs(expected - exact).max() > 1e-2, "integers must differ from weights for this to say anything"


@pytest.mark.parametrize(("name", "mesh", "options"), [("gemma2", "group", {"steps": 4})])
def test_int8_weights_give_the_text_the_probability_that_eval_lm_gives_it(name, mesh, options, folders):
    check_int8_weights(folders, name, mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ALL_MESHES)
@pytest.mark.parametrize("name", ESSENTIAL)
def test_int8_weights_of_every_family_on_every_mesh(name, mesh, folders):
    check_int8_weights(folders, name, mesh, allocation="paged")


def rounded(x):
    """A torch tensor of keys or values as integers with bfloat16 scales hold it."""
    import torch

    exact = x.numpy()
    scale = (np.abs(exact).max(-1, keepdims=True) * np.float32(1 / 127)).astype(ml_dtypes.bfloat16).astype(np.float32)
    return torch.from_numpy(np.clip(np.rint(exact * (1 / scale)), -127, 127) * scale)


def torch_with_int8_keys_and_values(model, whole: list[int], monkeypatch) -> np.ndarray:
    """Log-probabilities `[position, vocab]`, where every layer's attention rounds its keys and values."""
    import torch

    modeling = sys.modules[type(model).__module__]
    eager = modeling.eager_attention_forward
    seen = []

    def with_rounding(module, query, key, value, *rest, **more):
        seen.append(module)
        return eager(module, query, rounded(key), rounded(value), *rest, **more)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(modeling, "eager_attention_forward", with_rounding)
        found = model(torch.tensor([whole])).logits[0].double().log_softmax(-1).numpy()
    assert len(seen) == model.config.num_hidden_layers
    return found


def check_int8_cache(folders, monkeypatch, name: str, mesh: str, **options):
    import torch

    folder, theirs = folders(name)
    described = describe_folder(folder, mesh=layout(name, mesh), positions=ROOM)
    off, without = [], []
    for prompt, written in zip(PROMPTS, written_by(described, dtype=np.int8, **options), strict=True):
        whole = [*prompt, *written.tokens]
        at = slice(len(prompt) - 1, len(whole) - 1)
        rows, ids = np.arange(NEW), np.asarray(written.tokens)
        expected = torch_with_int8_keys_and_values(theirs, whole, monkeypatch)[at]
        with torch.no_grad():
            exact = theirs(torch.tensor([whole])).logits[0].double().log_softmax(-1).numpy()[at]
        best = np.sort(expected, -1)[:, -2:]
        clear = best[:, 1] - best[:, 0] > 0.05
        np.testing.assert_array_equal(ids[clear], expected.argmax(-1)[clear])
        off.append(np.abs(written.logprobs - expected[rows, ids]))
        without.append(np.abs(exact - expected)[rows, ids])
    differences, effect = np.concatenate(off), np.concatenate(without)
    assert np.median(differences) <= 2e-4 and differences.max() <= 0.05, np.sort(differences)[-9:]
    assert np.median(effect) > 5 * np.median(differences), "the rounding must matter for this to say anything"


# Two runs of layers, windows, two rotary tables, heads on two mesh axes.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options"), [("gemma3", "group", {"allocation": "paged"})])
def test_an_int8_cache_is_torch_with_rounded_keys_and_values(name, mesh, options, folders, monkeypatch):
    check_int8_cache(folders, monkeypatch, name, mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"allocation": "fixed", "steps": 8}, {"allocation": "paged"}], ids=str)
@pytest.mark.parametrize("name", ESSENTIAL)
def test_an_int8_cache_of_every_family(name, options, folders, monkeypatch):
    check_int8_cache(folders, monkeypatch, name, "2x4", **options)
